"""How fast a snapshot goes into the cluster's memory and comes back, beside the best bare Redis client.

Question
    Does `MemoryTier` cost anything over what one can get out of redis-py and hiredis by hand? And what do copies on
    other servers and parity cost?

Method
    256 MiB in shared memory, as a stage has them, in chunks of the real length. In: `prepare`, `put` and `commit`,
    small things included. Out: `read_chunks_into` memory that is there, which is how a run recovers, and `read_chunks`,
    which makes it.
    Bare clients: 1, 2, 4 and 8 threads, each with a connection of its own to each server, in a pool that is there
    before. SET as `pipeline` of four, one at a time, and one at a time with redis-py's Python packer, which leaves a
    large value in its place where the packer of hiredis copies it. GET as `pipeline` of four and one at a time; the
    values stay as the library makes them, so a bare client that wants them in a buffer would copy once more.
    Every round does everything, in a new random order; the bare client is the one with the best median, and a ratio is
    of one round. Servers: one over a unix socket, one over TCP, three as a cluster over TCP, all on this machine: so
    client and servers share its cores, and a round is bound by them and not by a network.
    Code: parity alone, 2 × and 4 × 4 MiB, beside zfec where that is installed (``pip install zfec``).

Command
    python benchmarks/bench_checkpoint_store.py            (two minutes)

Reading
    Bars: in and out at 0.8 of the bare client at least. Out is above 1 because values go from the socket into the
    buffer, where redis-py makes an object of each. Figures: benchmarks/results/checkpoint-store.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import mmap
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
import numpy as np
import redis
from measures import commit
from redis.connection import PythonRespSerializer

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, ChunkEntry, Commit, Manifest, TensorEntry
from shade.checkpoint._tiers.erasure import ErasureCode
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.tier import Shard
from shade.store import open_store
from shade.store._servers.local_cluster import LocalCluster, free_ports
from shade.store._servers.server import LocalServer, find_server_binary

ROOT = Path(__file__).resolve().parent.parent
NUM_CHUNKS = 64
THREADS = (1, 2, 4, 8)
DEPTH = 4
BARS = {"in": 0.8, "out": 0.8}
TOTAL = NUM_CHUNKS * CHUNK_BYTES


def shared_memory() -> memoryview:
    """Bytes that are in memory, and not compressible by anybody."""
    memory = memoryview(mmap.mmap(-1, TOTAL))
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, TOTAL, np.uint8)
    return memory


class Bare:
    """Redis clients written by hand.

    Args:
        servers: How to connect to each.
        homes: Number of the server of each chunk.
        tags: A hash tag for each server.
    """

    def __init__(self, servers: Sequence[dict[str, Any]], homes: Sequence[int], tags: Sequence[str]) -> None:
        self._homes = homes
        self._keys = [f"bare:{{{tags[home]}}}{number}" for number, home in enumerate(homes)]
        self._pool = ThreadPoolExecutor(max(THREADS))
        most = range(max(THREADS))
        self._clients = [[self._client(server, False) for server in servers] for _ in most]
        self._in_place = [[self._client(server, True) for server in servers] for _ in most]

    @staticmethod
    def _client(server: dict[str, Any], in_place: bool) -> redis.Redis:
        client = redis.Redis(**server, single_connection_client=True)
        if in_place:
            client.connection._command_packer = PythonRespSerializer(6000, client.connection.encoder.encode)
        return client

    def _each(self, threads: int, work: Callable[[int, list[int]], None]) -> None:
        parts = [list(range(thread, NUM_CHUNKS, threads)) for thread in range(threads)]
        list(self._pool.map(work, range(threads), parts))

    def _pipelined(self, thread: int, numbers: list[int], add: Callable[[Any, int], None]) -> None:
        by_server: dict[int, list[int]] = {}
        for number in numbers:
            by_server.setdefault(self._homes[number], []).append(number)
        for server, mine in by_server.items():
            for first in range(0, len(mine), DEPTH):
                pipe = self._clients[thread][server].pipeline(transaction=False)
                for number in mine[first : first + DEPTH]:
                    add(pipe, number)
                pipe.execute()

    def actions(self, memory: memoryview) -> tuple[dict[str, Callable[[], None]], dict[str, Callable[[], None]]]:
        """Every way in, and every way out."""
        values = [memory[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES] for number in range(NUM_CHUNKS)]

        def set_pipelined(thread: int, numbers: list[int]) -> None:
            self._pipelined(thread, numbers, lambda pipe, number: pipe.set(self._keys[number], values[number]))

        def set_singly(clients: list[list[redis.Redis]]) -> Callable[[int, list[int]], None]:
            def work(thread: int, numbers: list[int]) -> None:
                for number in numbers:
                    clients[thread][self._homes[number]].set(self._keys[number], values[number])

            return work

        def get_pipelined(thread: int, numbers: list[int]) -> None:
            self._pipelined(thread, numbers, lambda pipe, number: pipe.get(self._keys[number]))

        def get_singly(thread: int, numbers: list[int]) -> None:
            for number in numbers:
                value = self._clients[thread][self._homes[number]].get(self._keys[number])
                assert len(value) == CHUNK_BYTES

        ways_in = {
            "pipeline": set_pipelined,
            "one by one": set_singly(self._clients),
            "one by one, Python packer": set_singly(self._in_place),
        }
        ways_out = {"pipeline": get_pipelined, "one by one": get_singly}

        def named(ways: dict[str, Callable[[int, list[int]], None]]) -> dict[str, Callable[[], None]]:
            return {
                f"bare, {name}, {threads} threads": lambda way=way, threads=threads: self._each(threads, way)
                for name, way in ways.items()
                for threads in THREADS
            }

        return named(ways_in), named(ways_out)

    def close(self) -> None:
        """Ends threads and connections."""
        self._pool.shutdown()
        for client in (each for clients in (*self._clients, *self._in_place) for each in clients):
            client.close()


class Saver:
    """Our side: one layout of one run.

    Args:
        tier: Ours to close.
        memory: The shard.
    """

    def __init__(self, tier: MemoryTier, memory: memoryview) -> None:
        self._tier = tier
        self._chunks = [memory[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES] for number in range(NUM_CHUNKS)]
        self._entries = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in self._chunks)
        target = memoryview(mmap.mmap(-1, TOTAL))
        np.frombuffer(target, np.uint8)[:] = 1
        self._buffers = [target[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES] for number in range(NUM_CHUNKS)]
        self._step = 0
        self._place = ""
        self._manifest: Manifest

    def save(self) -> None:
        """In."""
        self._step += 1
        tensors = {"x": TensorEntry("U8", (TOTAL,), 0, TOTAL)}
        manifest = Manifest(self._tier.run, self._step, 0, 1, "none", TOTAL, tensors, self._entries, None)
        self._place = self._tier.prepare(self._step, [TOTAL])
        self._tier.put(self._place, Shard(manifest, self._chunks))
        record = Commit(self._tier.run, self._step, self._step, 1, (manifest.digest,), TOTAL, 0.0)
        self._tier.commit(self._place, record)
        self._manifest = manifest

    def load(self, copy: int = 0) -> None:
        """Out, into memory that is there."""
        numbers = range(NUM_CHUNKS)
        assert all(self._tier.read_chunks_into(self._place, self._manifest, numbers, self._buffers, copy))

    def load_new(self) -> None:
        """Out, sixteen chunks at a time, as `shade.checkpoint._restore.reader` asks for them."""
        for first in range(0, NUM_CHUNKS, 16):
            found = self._tier.read_chunks(self._place, self._manifest, range(first, first + 16))
            assert None not in found

    def check(self) -> None:
        """What came out is what went in."""
        self.load()
        assert [digest_of(buffer) for buffer in self._buffers] == [entry.digest for entry in self._entries]

    def close(self) -> None:
        """Ends its threads, and frees its slots."""
        for place in list(self._tier.held()):
            self._tier.discard(place)
        self._tier.close()


@contextlib.contextmanager
def servers(kind: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Starts them; gives the store's URL, and how redis-py connects to each."""
    if kind == "cluster of 3, TCP":
        with LocalCluster(3) as cluster:
            yield cluster.url.reveal(), [{"host": "127.0.0.1", "port": port} for port in cluster.ports]
    elif kind == "one server, TCP":
        (port,) = free_ports(1)
        with LocalServer(settings={"port": str(port)}):
            yield f"redis://127.0.0.1:{port}", [{"host": "127.0.0.1", "port": port}]
    else:
        with LocalServer() as server:
            yield server.url.reveal(), [{"unix_socket_path": server.socket_path}]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartile_1": low, "quartile_3": high}


def measure(kind: str, rounds: int, memory: memoryview) -> dict[str, Any]:
    """Rates in GB/s of payload, and ratios to the best bare client."""
    with contextlib.ExitStack() as stack:
        url, addresses = stack.enter_context(servers(kind))
        store = stack.enter_context(open_store(url, timeout_seconds=10))
        tags = store.placement()
        bare = Bare(addresses, [number % len(tags) for number in range(NUM_CHUNKS)], tags)
        stack.callback(bare.close)
        layouts: dict[str, dict[str, Any]] = {"shade": {}}
        if len(tags) > 1:
            layouts |= {"shade, 1 replica": {"replicas": 1}, "shade, parity 2 + 1": {"parity": (2, 1)}}
        ways_in, ways_out = bare.actions(memory)
        for name, options in layouts.items():
            run = f"bench-{len(ways_in)}"
            saver = Saver(MemoryTier(store, run, **options), memory)
            stack.callback(saver.close)
            for _ in range(2):
                saver.save()
            saver.check()
            ways_in[name] = saver.save
            if name == "shade":
                ways_out |= {"shade": saver.load, "shade, new memory": saver.load_new}
            elif "parity" in name:
                ways_out["shade, every chunk rebuilt"] = lambda saver=saver: saver.load(1)
        ways = {("in", name): way for name, way in ways_in.items()}
        ways |= {("out", name): way for name, way in ways_out.items()}
        rates: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way in random.sample(sorted(ways), len(ways)) if number else ways:
                begun = time.perf_counter()
                ways[way]()
                if number:  # the first fills the servers' memory
                    rates[way].append(TOTAL / (time.perf_counter() - begun) / 1e9)
    result: dict[str, Any] = {}
    for direction in ("in", "out"):
        mine = {name: values for (where, name), values in rates.items() if where == direction}
        best = max((name for name in mine if name.startswith("bare")), key=lambda name: statistics.median(mine[name]))
        result[direction] = {
            "best_bare": best,
            "gigabytes_per_second": {name: spread(values) for name, values in mine.items()},
            "ratio": {
                name: spread([ours / theirs for ours, theirs in zip(values, mine[best], strict=True)])
                for name, values in mine.items()
                if name.startswith("shade")
            },
        }
    return result


def measure_code() -> dict[str, Any]:
    """GB/s of data that parity is made of; the best of nine, which noise only lowers."""
    return {f"{k} + {r}": code_rates(k, r) for k, r in ((2, 1), (4, 1), (4, 2), (8, 3))}


def code_rates(k: int, r: int) -> dict[str, float]:
    """Of one pair."""
    data = [np.random.default_rng(number).integers(0, 256, CHUNK_BYTES, np.uint8) for number in range(k)]
    parity = [np.empty(CHUNK_BYTES, np.uint8) for _ in range(r)]
    code = ErasureCode(k, r)
    ways: dict[str, Callable[[], Any]] = {"shade": lambda: code.encode([each.data for each in data], parity)}
    if importlib.util.find_spec("zfec"):
        import zfec

        encoder, blocks = zfec.Encoder(k, k + r), [each.tobytes() for each in data]
        ways["zfec"] = lambda: encoder.encode(blocks, list(range(k, k + r)))
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(9):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - begun)
    return {name: k * CHUNK_BYTES / seconds / 1e9 for name, seconds in best.items()}


def render(result: dict[str, Any]) -> str:
    """The tables for people."""
    lines = ["# Snapshots in the cluster's memory", ""]
    lines += ["| servers | direction | what | GB/s | of the best bare client | bar |", "|---|---|---|---|---|---|"]
    for kind, both in result["servers"].items():
        for direction, found in both.items():
            rates = found["gigabytes_per_second"]
            best = found["best_bare"]
            lines.append(f"| {kind} | {direction} | {best} | {rates[best]['median']:.2f} | 1 | – |")
            for name, ratio in found["ratio"].items():
                share = f"{ratio['median']:.2f} ({ratio['quartile_1']:.2f}–{ratio['quartile_3']:.2f})"
                bar = f"≥ {BARS[direction]}" if name == "shade" else "–"
                lines.append(f"| {kind} | {direction} | {name} | {rates[name]['median']:.2f} | {share} | {bar} |")
    lines += ["", f"Medians of {result['rounds']} interleaved rounds of {TOTAL / 1e6:.0f} MB; in brackets quartiles."]
    lines += ["Rates are of payload: with a replica twice as much is sent, with parity 2 + 1 half as much again.", ""]
    lines += [
        "| parity | " + " | ".join(f"{name}, GB/s of data" for name in next(iter(result["code"].values()))) + " |"
    ]
    lines += ["|---|" + "---|" * len(next(iter(result["code"].values())))]
    for name, rates in result["code"].items():
        lines.append(f"| {name} | " + " | ".join(f"{rate:.1f}" for rate in rates.values()) + " |")
    command = "`python benchmarks/bench_checkpoint_store.py`"
    lines += ["", f"{command}, {result['about']}. Method: the docstring of that file.", ""]
    return "\n".join(lines)


def main() -> None:
    """Measures, and writes checkpoint-store.json and checkpoint-store.md."""
    parser = argparse.ArgumentParser(description="Snapshots in the cluster's memory, beside bare Redis clients.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where the results go")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds, at least 2")
    args = parser.parse_args()
    version = subprocess.run([find_server_binary(), "--version"], capture_output=True, text=True, check=True).stdout
    words = dict(word.split("=", 1) for word in version.split() if "=" in word)
    memory = shared_memory()
    kinds = ("one server, unix socket", "one server, TCP", "cluster of 3, TCP")
    load = os.getloadavg()[0]
    result = {
        "rounds": args.rounds,
        "servers": {kind: measure(kind, args.rounds, memory) for kind in kinds},
        "code": measure_code(),
        "about": (
            f"commit {commit()}, {platform.machine()} with {os.cpu_count()} cores (load "
            f"{load:.1f} before), Redis {words.get('v')} ({words.get('malloc')}), Python {platform.python_version()}, "
            f"redis-py {redis.__version__}, hiredis {hiredis.__version__}, numpy {np.__version__}"
        ),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "checkpoint-store.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "checkpoint-store.md").write_text(render(result))
    print(render(result))


if __name__ == "__main__":
    main()
