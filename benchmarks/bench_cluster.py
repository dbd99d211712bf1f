"""A batch from a Redis Cluster on this machine, against the best loops one can write by hand with redis-py and hiredis.

Question
    Is `ClusterStore.get_many` as fast as what a careful person would write for exactly this batch and this cluster,
    who knows which key is where and has no node to fear?

Method
    64 values of 80 KB lie on three nodes, about 21 on each. The values are random bytes and every way is checked to
    bring the same ones before anything is timed. Each round times all ways once, in a new random order, so that what
    the machine does besides hits all alike. A figure is the median of the rounds with its quartiles; a ratio is the
    median of the rounds' own ratios. Every way keeps its connections open.

    The opponents are given for free what ours has to find out: the keys already grouped by node, the connection of each
    node at hand, no redirection, no timeout of their own making, and for MGET keys whose hash tags put all of a node's
    keys into one slot (which no real data set could afford: three slots cannot be spread over four nodes).

    GET, node after node        a pipeline of GETs to each node, `Pipeline.execute` one after the other
    GET, a thread a node        the same in three threads of a pool that lives on
    GET, all then all           `Connection`s: packed GETs to all three nodes, then all replies, node after node
    MGET, node after node       one MGET a node
    MGET, a thread a node       the same in three threads
    MGET, all then all          `Connection`s: an MGET to all three nodes, then all replies
    RedisCluster pipeline       what redis-py itself offers for a cluster (TCP only)
    RedisCluster mget           `mget_nonatomic`, the other thing that it offers (TCP only)

    Once over loopback TCP and once over the nodes' unix sockets, ours and theirs alike (`?sockets=DIR` in our URL). The
    bar compares ours with the best of *all* opponents in the same transport. CPU is what this process used for a batch,
    user and system: what a training process has to give up.

Command
    python benchmarks/bench_cluster.py                  (half a minute; leave the machine alone)

Figures: benchmarks/results/cluster.md, written by this command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hiredis
import redis
from measures import commit
from redis.connection import Connection, UnixDomainSocketConnection
from redis.crc import key_slot

from shade.store import SampleKeys, open_store
from shade.store._servers.local_cluster import LocalCluster
from shade.store.keys import placement_tags
from shade.store.link import socket_path

ROOT = Path(__file__).resolve().parent.parent
NODES, BATCH, VALUE_BYTES, ROUNDS, WARM_UP = 3, 64, 80_000, 150, 10
BAR = 1.3
TRANSPORTS = ("TCP", "unix")
OURS = "get_many"
Way = Callable[[], Sequence[bytes]]


def node_of(key: str) -> int:
    """Which of the three equal shares of the slots a key is in."""
    slot = key_slot(key.encode())
    return next(node for node in range(NODES) if slot < 16384 * (node + 1) // NODES)


def grouped(keys: Sequence[str]) -> list[list[str]]:
    """The keys of each node."""
    return [[key for key in keys if node_of(key) == node] for node in range(NODES)]


def tagged_keys() -> list[str]:
    """As many keys as a batch has, in one slot a node, as evenly spread as those of ours."""
    tags = [next(tag for tag in placement_tags() if node_of(tag) == node) for node in range(NODES)]
    return [f"bench:{{{tags[number % NODES]}}}{number}" for number in range(BATCH)]


def endpoint_of(cluster: LocalCluster, folder: str, port: int, transport: str) -> dict[str, Any]:
    """How redis-py is told where a node is."""
    if transport == "unix":
        return {"path": socket_path(folder, "127.0.0.1", port)}
    return {"host": "127.0.0.1", "port": port}


class ByHand:
    """Everything that one can write without a library of one's own, for one transport.

    Args:
        cluster: Running.
        transport: ``TCP`` or ``unix``.
        keys: Of the batch, for GETs.
        tagged: Of the batch, for MGETs.
    """

    def __init__(self, cluster: LocalCluster, transport: str, keys: Sequence[str], tagged: Sequence[str]) -> None:
        folder = cluster.sockets
        self._parts, self._tagged = grouped(keys), grouped(tagged)
        places = [endpoint_of(cluster, folder, port, transport) for port in cluster.ports]
        unix = transport == "unix"
        self._clients = [
            redis.Redis(unix_socket_path=place["path"], protocol=2) if unix else redis.Redis(**place, protocol=2)
            for place in places
        ]
        kind = UnixDomainSocketConnection if unix else Connection
        self._connections = [kind(**place, socket_timeout=5, socket_read_size=1 << 18, protocol=2) for place in places]
        for connection in self._connections:
            connection.connect()
        self._threads = ThreadPoolExecutor(NODES)
        first = cluster.ports[0]
        self._cluster = redis.RedisCluster(host="127.0.0.1", port=first, protocol=2) if transport == "TCP" else None
        self._keys = list(keys)

    def ways(self) -> dict[str, Way]:
        """By name; each brings the values of the batch, in an order of its own."""
        everywhere = range(NODES)

        def gets(node: int) -> list[bytes]:
            pipeline = self._clients[node].pipeline(transaction=False)
            for key in self._parts[node]:
                pipeline.get(key)
            return list(pipeline.execute())

        def mget(node: int) -> list[bytes]:
            return list(self._clients[node].mget(self._tagged[node]))

        def chained(parts: Any) -> list[bytes]:
            return [value for part in parts for value in part]

        def all_gets() -> list[bytes]:
            for node, connection in enumerate(self._connections):
                packed = connection.pack_commands([("GET", key) for key in self._parts[node]])
                connection.send_packed_command(packed, check_health=False)
            return [
                connection.read_response()
                for node, connection in enumerate(self._connections)
                for _ in self._parts[node]
            ]

        def all_mgets() -> list[bytes]:
            for node, connection in enumerate(self._connections):
                packed = connection.pack_command("MGET", *self._tagged[node])
                connection.send_packed_command(packed, check_health=False)
            return chained(connection.read_response() for connection in self._connections)

        ways: dict[str, Way] = {
            "GET, node after node": lambda: chained(map(gets, everywhere)),
            "GET, a thread a node": lambda: chained(self._threads.map(gets, everywhere)),
            "GET, all then all": all_gets,
            "MGET, node after node": lambda: chained(map(mget, everywhere)),
            "MGET, a thread a node": lambda: chained(self._threads.map(mget, everywhere)),
            "MGET, all then all": all_mgets,
        }
        if self._cluster is not None:
            ways["RedisCluster pipeline"] = self._pipelined
            ways["RedisCluster mget"] = lambda: self._cluster.mget_nonatomic(self._keys)
        return ways

    def _pipelined(self) -> list[bytes]:
        assert self._cluster is not None
        pipeline = self._cluster.pipeline()
        for key in self._keys:
            pipeline.get(key)
        return list(pipeline.execute())

    def close(self) -> None:
        """Ends threads and connections."""
        self._threads.shutdown()
        for client in self._clients:
            client.close()
        for connection in self._connections:
            connection.disconnect()
        if self._cluster is not None:
            self._cluster.close()


@contextlib.contextmanager
def contenders() -> Iterator[dict[str, dict[str, Way]]]:
    """Transport → name → way, ours among them; all known to bring the same values."""
    keys, tagged = SampleKeys("bench").many(range(BATCH)), tagged_keys()
    values = [random.randbytes(VALUE_BYTES) for _ in range(BATCH)]
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(NODES))
        urls = {"TCP": cluster.url, "unix": cluster.near_url}
        stores = {transport: stack.enter_context(open_store(urls[transport])) for transport in TRANSPORTS}
        assert all(stores["TCP"].set_many(dict(zip([*keys, *tagged], values * 2, strict=True))))
        found: dict[str, dict[str, Way]] = {}
        for transport in TRANSPORTS:
            by_hand = ByHand(cluster, transport, keys, tagged)
            stack.callback(by_hand.close)
            found[transport] = {OURS: lambda store=stores[transport]: store.get_many(keys)} | by_hand.ways()
            for name, way in found[transport].items():
                assert sorted(way()) == sorted(values), name
        yield found


def measure(rounds: int) -> dict[str, Any]:
    """Times all ways of all transports, interleaved."""
    with contenders() as found:
        places = [(transport, name) for transport, ways in found.items() for name in ways]
        seconds: dict[tuple[str, str], list[float]] = {place: [] for place in places}
        cpu: dict[tuple[str, str], list[float]] = {place: [] for place in places}
        for number in range(WARM_UP + rounds):
            for transport, name in random.sample(places, len(places)):
                way = found[transport][name]
                busy, begun = time.process_time(), time.perf_counter()
                way()
                took, used = time.perf_counter() - begun, time.process_time() - busy
                if number >= WARM_UP:
                    seconds[transport, name].append(took)
                    cpu[transport, name].append(used)
    rows = []
    for transport, ways in found.items():
        medians = {name: statistics.median(seconds[transport, name]) for name in ways if name != OURS}
        best = min(medians, key=lambda name: medians[name])
        for name in ways:
            mine = seconds[transport, OURS]
            ratios = [ours / theirs for ours, theirs in zip(mine, seconds[transport, name], strict=True)]
            rows.append(
                {
                    "transport": transport,
                    "way": name,
                    "is_best_opponent": name == best,
                    "milliseconds": quartiles([1e3 * t for t in seconds[transport, name]]),
                    "cpu_milliseconds": 1e3 * statistics.median(cpu[transport, name]),
                    "ours_over_it": quartiles(ratios),
                }
            )
    return {"rows": rows, "rounds": rounds}


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return list(statistics.quantiles(values, n=4))


def render(result: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["# A batch from a Redis Cluster", ""]
    for transport in TRANSPORTS:
        best = next(row for row in result["rows"] if row["transport"] == transport and row["is_best_opponent"])
        low, middle, high = best["ours_over_it"]
        verdict = "holds" if middle <= BAR else "MISSED"
        lines.append(
            f"* {transport}: `get_many` takes **{middle:.2f}** ({low:.2f}–{high:.2f}) × the best opponent, "
            f"*{best['way']}*; the bar of {BAR} × {verdict}"
        )
    lines += ["", "| transport | way | ms a batch | CPU ms | `get_many` over it |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        low, middle, high = row["milliseconds"]
        _, ratio, _ = row["ours_over_it"]
        name = f"**{row['way']}**" if row["way"] == OURS else row["way"]
        told = "–" if row["way"] == OURS else f"{ratio:.2f}"
        lines.append(
            f"| {row['transport']} | {name} | {middle:.2f} ({low:.2f}–{high:.2f}) | "
            f"{row['cpu_milliseconds']:.2f} | {told} |"
        )
    lines += [
        "",
        f"{BATCH} × {VALUE_BYTES // 1000} KB from {NODES} nodes on this machine; medians (quartiles) of "
        f"{result['rounds']} interleaved rounds.",
        "",
        f"`python benchmarks/bench_cluster.py`, {result['about']}. Method: the docstring of that file.",
        "",
    ]
    return "\n".join(lines)


def about() -> str:
    """Commit and machine."""
    server = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=False)
    return (
        f"commit {commit()}, {platform.machine()} with {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, redis-py {redis.__version__}, hiredis {hiredis.__version__}, "
        f"{' '.join(server.stdout.split()[:3])}"
    )


def main() -> None:
    """Measures, and writes cluster.json and cluster.md."""
    parser = argparse.ArgumentParser(description="A batch from a Redis Cluster, against loops written by hand.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where the results go")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed rounds ({ROUNDS})")
    args = parser.parse_args()
    result = measure(args.rounds) | {"about": about()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "cluster.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "cluster.md").write_text(render(result))
    print(render(result))


if __name__ == "__main__":
    main()
