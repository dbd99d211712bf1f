"""Runs Redis for the cache in the background: `up`, `heal`, `status`, `down` (``shade cache``).

These servers outlive the command that started them, so a file records them: one JSON object in a directory of mode
0700, rewritten after each server that starts. One node is a plain server, three or more are a cluster; all on loopback.
Invariant: after `down` none of the recorded servers runs, and no other process was sent a signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from shade.errors import ConfigError, StoreError, StoreUnavailableError, refused_as
from shade.process import is_running, replacing, start_detached, start_of
from shade.store._servers.local_cluster import (
    agrees,
    check_shape,
    form_cluster,
    free_ports,
    is_believed,
    node_settings,
    promote_replicas,
    read_members,
)
from shade.store._servers.server import (
    LOOPBACK,
    MAX_SOCKET_PATH,
    ask,
    cache_settings,
    find_server_binary,
    log_end,
    quoted,
    wait_until_serving,
    write_settings,
)
from shade.store.base import STORES, NodeStats
from shade.store.link import Endpoint, socket_path
from shade.store.url import Address, StoreURL, format_address

_STATE: Final = "servers.json"
_POLL_SECONDS: Final = 0.02
_REJOIN_SECONDS: Final = 30.0


@dataclass(frozen=True)
class ServerRecord:
    """One server that `up` started."""

    process_id: int
    port: int
    started: str
    """Start time of its process, as the system reports it."""


@dataclass(frozen=True)
class ServerStatus:
    """The present state of one recorded server."""

    port: int
    process_id: int
    running: bool
    stats: NodeStats | None
    """None if it does not answer."""


def up(
    directory: Path,
    *,
    nodes: int = 1,
    replicas: int = 0,
    memory_bytes: int = 0,
    ports: Sequence[int] = (),
    password: str | None = None,
) -> StoreURL:
    """Starts a server, or a cluster, on loopback and leaves it running.

    Args:
        directory: Holds the record, logs and settings; made if missing.
        nodes: 1, or the primaries of a cluster, ≥ 3.
        replicas: Replicas of each primary of a cluster.
        memory_bytes: ``maxmemory`` of each server; 0 for no limit.
        ports: One for each server, primaries first; by default free ones.
        password: Required of clients; None for none.

    Returns:
        Its address; ``reveal()`` has the password.

    Raises:
        ConfigError: Servers are recorded there already, an impossible shape, or no server binary.
        StoreUnavailableError: A server did not start; all were ended again.
    """
    if nodes != 1 or replicas:
        check_shape(nodes, replicas)
    num_servers = nodes * (1 + replicas)
    if ports and len(ports) != num_servers:
        raise ConfigError.of(f"{num_servers} ports", list(ports), "name one for each server, or none at all")
    _prepare(directory)
    binary = find_server_binary()
    ports = tuple(ports) or tuple(free_ports(num_servers))
    endpoints = [Endpoint(host=LOOPBACK, port=port, password=password) for port in ports]
    url = StoreURL("redis+cluster" if nodes > 1 else "redis", tuple((LOOPBACK, port) for port in ports))
    sockets = (("sockets", str(directory.resolve())),) if nodes > 1 else ()
    url = StoreURL(url.scheme, url.addresses, password=password, options=sockets)
    records: list[ServerRecord] = []
    try:
        for endpoint in endpoints:
            records.append(_launch(binary, directory.resolve(), endpoint, memory_bytes, clustered=nodes > 1))
            _write(directory, url, records)
            # Another server may listen at that port: the process id must be the one just started.
            _check_serving(records[-1], endpoint, directory)
        if nodes > 1:
            form_cluster(endpoints, nodes)
    except BaseException:
        _write(directory, url, records)
        down(directory)
        raise
    return url


def heal(
    directory: Path,
    *,
    num_servers: int | None = None,
    memory_bytes: int | None = None,
    ports: Sequence[int] = (),
) -> tuple[StoreURL, list[str]]:
    """Starts the recorded servers that have died, each with its settings; nodes of a cluster join it again. Returns the
    address, and one sentence for each server that came back, with what was lost. The other arguments say what the
    record should hold; None or empty: whatever it has.

    Raises ConfigError if no servers are recorded, or others than these, or the settings of one are gone, and
    StoreUnavailableError if one does not start or the nodes do not agree; those that started keep running.
    """
    url, records = _read(directory)
    settings = {record.port: _settings_of(directory, record.port) for record in records}
    _check_same(directory, settings, num_servers, memory_bytes, ports)
    nodes = {
        port: Endpoint(host=lines.get("cluster-announce-ip", LOOPBACK), port=port, password=url.password)
        for port, lines in settings.items()
    }
    gone = [record.port for record in records if not _is_ours(record)]
    clustered = url.scheme == "redis+cluster"
    if clustered:
        _promote(url, {(nodes[port].host, port) for port in gone})
    for port in gone:
        fresh = _run(find_server_binary(), directory.resolve(), port)
        records = [fresh if record.port == port else record for record in records]
        _write(directory, url, records)
        _check_serving(fresh, nodes[port], directory)
    for record in records:
        with _naming(f"port {record.port} runs but does not answer; wait, or end it (kill -9 {record.process_id})"):
            ask(nodes[record.port], "PING")
    if clustered:
        deadline = time.monotonic() + (_REJOIN_SECONDS if gone else 0.0)
        while not all(agrees(node) and is_believed(node) for node in nodes.values()):
            if time.monotonic() > deadline:
                cure = f"start anew: shade cache down --dir {directory}, then shade cache up"
                raise StoreUnavailableError(f"all servers run, but do not agree on a cluster; {cure}")
            time.sleep(_POLL_SECONDS)
    return url, [_came_back(nodes[port], clustered=clustered) for port in gone]


def is_recorded(directory: Path) -> bool:
    """Returns whether `up` has started servers in a directory that `down` has not ended."""
    return (directory / _STATE).exists()


def _settings_of(directory: Path, port: int) -> dict[str, str]:
    try:
        lines = (directory / f"{port}.conf").read_text().splitlines()
    except FileNotFoundError as error:
        cure = f"start anew: shade cache down --dir {directory}, then shade cache up"
        raise ConfigError.of("the settings of a server that was started here", str(error.filename), cure) from None
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def _check_same(
    directory: Path,
    settings: Mapping[int, Mapping[str, str]],
    num_servers: int | None,
    memory_bytes: int | None,
    ports: Sequence[int],
) -> None:
    """Raises ConfigError if other servers are asked for than those with these settings, by port."""
    limits = {lines.get("maxmemory") for lines in settings.values()}
    for flag, asked, there in (
        ("--nodes and --replicas", num_servers, len(settings)),
        ("--memory", memory_bytes and {str(memory_bytes)}, memory_bytes and limits),
        ("--ports", sorted(ports), sorted(settings)),
    ):
        if asked and asked != there:
            cure = f"leave them out, or end those servers first (shade cache down --dir {directory})"
            raise ConfigError.of(f"{flag} of the servers that {directory} has, {there}", asked, cure)


def _promote(url: StoreURL, dead: Set[Address]) -> None:
    promote_replicas([Endpoint.of(url, *address) for address in url.addresses if address not in dead], dead)


@contextlib.contextmanager
def _naming(message: str) -> Iterator[None]:
    try:
        yield
    except StoreUnavailableError as error:
        raise StoreUnavailableError(message) from error


def _came_back(node: Endpoint, *, clustered: bool) -> str:
    if clustered:
        members = read_members(node)
        primary = next(member.primary for member in members if "myself" in member.flags)
        for member in members:
            if member.name == primary:
                return f"{node} is back as a replica of {format_address(*member.address)}, which has its keys"
    lost = "its samples are read from the data set again, snapshots that it alone held are lost"
    return f"{node} is back, empty: {lost}"


def start_node(directory: Path, endpoint: Endpoint, memory_bytes: int) -> bool:
    """Starts one node of a cluster at an address that other machines can reach; see `cluster_bootstrap`. A node that
    died with its machine starts with its old identity. Arguments and errors as for `up`; returns whether the node knows
    its cluster already."""
    returns = (directory / f"nodes-{endpoint.port}.conf").exists()
    if returns and is_recorded(directory) and not any(map(_is_ours, _read(directory)[1])):
        _promote(_read(directory)[0], {(endpoint.host, endpoint.port)})
    else:
        _prepare(directory)
    url = StoreURL("redis+cluster", ((endpoint.host, endpoint.port),), password=endpoint.password)
    records: list[ServerRecord] = []
    try:
        records.append(_launch(find_server_binary(), directory.resolve(), endpoint, memory_bytes, clustered=True))
        _write(directory, url, records)
        _check_serving(records[-1], endpoint, directory)
    except BaseException:
        _write(directory, url, records)
        down(directory)
        raise
    return returns


def remember(directory: Path, url: StoreURL) -> None:
    """Records the address of the cluster that the recorded servers have joined."""
    _write(directory, url, _read(directory)[1])


def _prepare(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if is_recorded(directory):
        cure = f"end those first (shade cache down --dir {directory}), or name another --dir"
        raise ConfigError.of("a directory without servers", str(directory), cure)
    directory.chmod(0o700)


def status(directory: Path) -> tuple[StoreURL, list[ServerStatus]]:
    """Returns the recorded address, and the present state of each server that `up` started in a directory; raises
    ConfigError if none are recorded there."""
    url, records = _read(directory)
    found = []
    for record in records:
        single = StoreURL("redis", ((LOOPBACK, record.port),), password=url.password)
        stats = None
        with contextlib.suppress(StoreError), STORES.get("redis")(single, 1.0) as store:  # type: ignore[call-arg]
            stats = store.stats().nodes[0]
        found.append(ServerStatus(record.port, record.process_id, _is_ours(record), stats))
    return url, found


def down(directory: Path) -> int:
    """Ends the servers that `up` started in a directory, and forgets them; returns how many were still running. Raises
    ConfigError if none are recorded there."""
    _, records = _read(directory)
    ours = [record for record in records if _is_ours(record)]
    for record in ours:
        # Asked to shut down, Redis 7 waits up to 10 s for replicas that are ending too; a cache has nothing to save.
        os.kill(record.process_id, signal.SIGKILL)
    while any(map(_is_ours, ours)):
        time.sleep(_POLL_SECONDS)
    for record in records:
        for leftover in (
            *directory.glob(f"{record.port}.*"),
            *directory.glob(f"*:{record.port}.sock"),
            directory / f"nodes-{record.port}.conf",
        ):
            leftover.unlink(missing_ok=True)
    (directory / _STATE).unlink()
    return len(ours)


def _launch(binary: str, directory: Path, endpoint: Endpoint, memory_bytes: int, *, clustered: bool) -> ServerRecord:
    name = str(endpoint.port)
    settings, log = directory / f"{name}.conf", directory / f"{name}.log"
    lines = cache_settings(memory_bytes) | {
        "port": name,
        "dir": quoted(str(directory)),
        "logfile": quoted(str(log)),
        "requirepass": quoted(endpoint.password),
    }
    if clustered:
        lines |= node_settings(directory, endpoint.port, endpoint.password)
        near = socket_path(str(directory), endpoint.host, endpoint.port)
        if len(os.fsencode(near)) <= MAX_SOCKET_PATH:
            lines |= {"unixsocket": quoted(near), "unixsocketperm": "700"}
    if endpoint.host != LOOPBACK:
        lines |= {"bind": f"{LOOPBACK} {endpoint.host}", "cluster-announce-ip": endpoint.host}
    write_settings(settings, lines)
    return _run(binary, directory, endpoint.port)


def _run(binary: str, directory: Path, port: int) -> ServerRecord:
    with (directory / f"{port}.log").open("ab") as errors:
        process_id = start_detached([binary, str(directory / f"{port}.conf")], errors)
    return ServerRecord(process_id, port, _started(process_id))


def _check_serving(record: ServerRecord, endpoint: Endpoint, directory: Path) -> None:
    """Waits until the server at a port answers, and raises StoreUnavailableError, with the end of its log, if that is
    another server than the one that was started."""
    try:
        wait_until_serving(endpoint, lambda: not _is_ours(record))
        info = ask(endpoint, "INFO", "server")
    except StoreError as error:
        info = f"{error}".encode()
    if not isinstance(info, bytes) or f"process_id:{record.process_id}\r".encode() not in info:
        why = log_end(directory / f"{record.port}.log")
        if "already in use" in why:
            cure = "name others (--ports), or end the program that listens there"
            raise StoreUnavailableError(f"port {record.port} of this machine, or its bus port, is taken; {cure}")
        raise StoreUnavailableError(f"the server for port {record.port} did not start: {why}")


def _started(process_id: int) -> str:
    """Returns the start time of a process; empty if there is none."""
    if Path("/proc/self/stat").exists():
        return start_of(process_id) or ""
    listed = subprocess.run(["ps", "-o", "lstart=", "-p", str(process_id)], capture_output=True, text=True, check=False)
    return listed.stdout.strip()


def _is_ours(record: ServerRecord) -> bool:
    return is_running(record.process_id) and _started(record.process_id) == record.started


def _write(directory: Path, url: StoreURL, records: Sequence[ServerRecord]) -> None:
    with replacing(directory / _STATE) as beside:  # a killed `up` leaves a whole record
        beside.touch(mode=0o600)
        content = {"url": url.reveal(), "servers": [asdict(record) for record in records]}
        beside.write_text(json.dumps(content, indent=2))


def _read(directory: Path) -> tuple[StoreURL, list[ServerRecord]]:
    try:
        content = (directory / _STATE).read_bytes()
    except FileNotFoundError:
        raise ConfigError.of("a directory given to `up`", str(directory), "check the name, or start servers") from None
    cure = "remove it, after ending the servers that it was about"
    with refused_as(ConfigError, f"what `up` wrote in {directory / _STATE}", cure):
        state = json.loads(content)
        url_text, servers = msgspec.convert((state["url"], state["servers"]), tuple[str, list[ServerRecord]])
    url = StoreURL.parse(url_text)
    if "@" not in url_text:  # servers without a password; the environment may have one for others
        url = replace(url, username=None, password=None)
    return url, servers
