"""Which engine should keep entries on a local disk?

Question: for entries of 1 KB, 100 KB and 1 MB, what do a batch of writes, a batch of random reads, a restart and
several reading processes cost, in LMDB, in a log of segments with its index in memory, in one file an entry, in SQLite
alone, in segments with their index in SQLite, and in the store that came of it?

Method: batches of 64 entries, every entry checked (xxh3) as it is read, and a transaction a batch for the databases. No
fsync a batch: a cache may lose its last entries in a power failure. *Cold*: after fsync and ``POSIX_FADV_DONTNEED``.
*Restart*: from nothing to the first batch read, with the page cache warm. All engines take turns in one run.

    python benchmarks/bench_disk.py --folder /nvme/bench --rounds 3      # lmdb: pip install lmdb

Decision 0039 has the result and what follows from it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import xxhash
from measures import forget

from shade.store import open_store

BATCH = 64
SIZES = {"1 KB": (1000, 30_000), "100 KB": (100_000, 3000), "1 MB": (1_000_000, 300)}
"""Bytes of an entry, and how many are written."""
SEGMENT_BYTES = 64 * 2**20


class Engine(Protocol):
    """What is compared."""

    def __init__(self, folder: Path) -> None: ...
    def write(self, items: Mapping[str, bytes]) -> None:
        """Writes a batch."""

    def read(self, keys: Sequence[str]) -> list[Any]:
        """Reads a batch."""

    def close(self) -> None:
        """Closes all files."""


class Lmdb:
    """LMDB: a B+ tree in a mapped file."""

    def __init__(self, folder: Path) -> None:
        import lmdb

        self._env = lmdb.open(
            str(folder), map_size=4 << 30, sync=False, metasync=False, readahead=False, max_readers=64
        )

    def write(self, items: Mapping[str, bytes]) -> None:
        with self._env.begin(write=True) as transaction:
            for key, value in items.items():
                transaction.put(key.encode(), value)

    def read(self, keys: Sequence[str]) -> list[Any]:
        with self._env.begin() as transaction:
            return [transaction.get(key.encode()) for key in keys]

    def close(self) -> None:
        self._env.close()


class Log:
    """Segments of (key length, value length, key, value); the index is a dict, built from the headers."""

    _head = struct.Struct("<II")

    def __init__(self, folder: Path) -> None:
        self._folder, self._index, self._fds = folder, {}, []
        for path in sorted(folder.glob("*.seg")):
            self._open(path)
            fd, place, end = self._fds[-1], 0, path.stat().st_size
            while place < end:
                key_length, length = self._head.unpack(os.pread(fd, 8, place))
                key = os.pread(fd, key_length, place + 8).decode()
                self._index[key] = (len(self._fds) - 1, place + 8 + key_length, length)
                place += 8 + key_length + length
        self._end = SEGMENT_BYTES

    def _open(self, path: Path) -> None:
        self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))

    def write(self, items: Mapping[str, bytes]) -> None:
        if self._end >= SEGMENT_BYTES:
            self._open(self._folder / f"{len(self._fds):08d}.seg")
            self._end = 0
        parts: list[bytes] = []
        place, number = self._end, len(self._fds) - 1
        for key, value in items.items():
            name = key.encode()
            parts += [self._head.pack(len(name), len(value)), name, value]
            self._index[key] = (number, place + 8 + len(name), len(value))
            place += 8 + len(name) + len(value)
        os.pwritev(self._fds[-1], parts, self._end)
        self._end = place

    def read(self, keys: Sequence[str]) -> list[Any]:
        found = []
        for key in keys:
            number, place, length = self._index[key]
            found.append(os.pread(self._fds[number], length, place))
        return found

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


class Files:
    """One file an entry, in 256 folders; written under another name and renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        for number in range(256):
            os.makedirs(f"{folder}/{number:02x}", exist_ok=True)

    def _path(self, key: str) -> str:
        return f"{self._folder}/{xxhash.xxh32_intdigest(key.encode()) & 255:02x}/{key}"

    def write(self, items: Mapping[str, bytes]) -> None:
        for key, value in items.items():
            path = self._path(key)
            fd = os.open(path + "~", os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, value)
            os.close(fd)
            os.rename(path + "~", path)

    def read(self, keys: Sequence[str]) -> list[Any]:
        found = []
        for key in keys:
            fd = os.open(self._path(key), os.O_RDONLY)
            found.append(os.read(fd, 1 << 24 if os.fstat(fd).st_size > 1 << 20 else 1 << 20))
            os.close(fd)
        return found

    def close(self) -> None:
        pass


class Sqlite:
    """SQLite with the values in its pages of 64 KB."""

    def __init__(self, folder: Path) -> None:
        self._base = sqlite3.connect(folder / "base", isolation_level=None)
        self._base.execute("pragma page_size=65536")
        self._base.execute("pragma journal_mode=wal")
        self._base.execute("pragma synchronous=off")
        self._base.execute("create table if not exists entry(id integer primary key, key text unique, value blob)")

    def write(self, items: Mapping[str, bytes]) -> None:
        self._base.execute("begin immediate")
        self._base.executemany("insert or replace into entry(key, value) values (?, ?)", items.items())
        self._base.execute("commit")

    def read(self, keys: Sequence[str]) -> list[Any]:
        self._base.execute("begin")
        ask = self._base.execute
        found = [ask("select value from entry where key = ?", (key,)).fetchone()[0] for key in keys]
        ask("commit")
        return found

    def close(self) -> None:
        self._base.close()


class IndexedSegments:
    """Segments of values; SQLite knows which segment and where."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._fds = folder, {}
        self._base = sqlite3.connect(folder / "base", isolation_level=None)
        self._base.execute("pragma journal_mode=wal")
        self._base.execute("pragma synchronous=off")
        self._base.execute(
            "create table if not exists entry(key text primary key, seg int, place int, length int) without rowid"
        )
        self._number, self._end = 0, 0

    def _fd(self, number: int) -> int:
        if number not in self._fds:
            self._fds[number] = os.open(self._folder / f"{number:08d}.seg", os.O_RDWR | os.O_CREAT, 0o600)
        return self._fds[number]

    def write(self, items: Mapping[str, bytes]) -> None:
        if self._end >= SEGMENT_BYTES:
            self._number, self._end = self._number + 1, 0
        os.pwritev(self._fd(self._number), list(items.values()), self._end)
        rows = []
        for key, value in items.items():
            rows.append((key, self._number, self._end, len(value)))
            self._end += -(-len(value) // 4096) * 4096 if len(value) > 4096 else len(value)
        self._base.execute("begin immediate")
        self._base.executemany("insert or replace into entry values (?, ?, ?, ?)", rows)
        self._base.execute("commit")

    def read(self, keys: Sequence[str]) -> list[Any]:
        marks = ",".join("?" * len(keys))
        rows = {
            key: rest for key, *rest in self._base.execute(f"select * from entry where key in ({marks})", tuple(keys))
        }
        return [os.pread(self._fd(seg), length, place) for seg, place, length in map(rows.__getitem__, keys)]

    def close(self) -> None:
        self._base.close()
        for fd in self._fds.values():
            os.close(fd)


class Shade:
    """The disk store as it is."""

    def __init__(self, folder: Path) -> None:
        self._store = open_store(f"disk://{folder}?capacity=4GB")

    def write(self, items: Mapping[str, bytes]) -> None:
        assert all(self._store.set_many(items))

    def read(self, keys: Sequence[str]) -> list[Any]:
        return self._store.get_many(keys)

    def close(self) -> None:
        self._store.close()


ENGINES: dict[str, type[Engine]] = {
    "lmdb": Lmdb,
    "log": Log,
    "files": Files,
    "sqlite": Sqlite,
    "sqlite + segments": IndexedSegments,
    "shade": Shade,
}


def read_all(engine: Engine, batches: Sequence[Sequence[str]]) -> float:
    """Returns the seconds of reading and checking these batches."""
    begun = time.perf_counter()
    for keys in batches:
        for value in engine.read(keys):
            xxhash.xxh3_64_intdigest(value)
    return time.perf_counter() - begun


def _reader(kind: type[Engine], folder: Path, batches: list[list[str]], begin: Any, done: Any) -> None:
    engine = kind(folder)
    engine.read(batches[0])
    begin.wait()
    read_all(engine, batches)
    done.wait()
    engine.close()


def together(kind: type[Engine], folder: Path, batches: list[list[str]], num_processes: int) -> float:
    """Returns the seconds in which processes read all batches each."""
    context = multiprocessing.get_context("fork")
    begin, done = context.Barrier(num_processes + 1), context.Barrier(num_processes + 1)
    readers = [context.Process(target=_reader, args=(kind, folder, batches, begin, done)) for _ in range(num_processes)]
    for reader in readers:
        reader.start()
    begin.wait()
    begun = time.perf_counter()
    done.wait()
    took = time.perf_counter() - begun
    for reader in readers:
        reader.join()
    return took


def measure(
    kind: type[Engine], folder: Path, size: int, count: int, generator: np.random.Generator
) -> dict[str, float]:
    """Measures one engine at one size; returns entries a second, and the restart in milliseconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    keys = [f"shade:ns:{{k1x}}{number}" for number in range(count)]
    value = generator.bytes(size)
    engine = kind(folder)
    begun = time.perf_counter()
    for start in range(0, count, BATCH):
        engine.write(dict.fromkeys(keys[start : start + BATCH], value))
    wrote = time.perf_counter() - begun
    engine.close()
    order = generator.permutation(count)
    batches = [[keys[i] for i in order[start : start + BATCH]] for start in range(0, count, BATCH)]
    begun = time.perf_counter()
    engine = kind(folder)
    engine.read(batches[0])
    restart = time.perf_counter() - begun
    warm = read_all(engine, batches)
    engine.close()
    forget(folder)
    engine = kind(folder)
    cold = read_all(engine, batches)
    engine.close()
    two = together(kind, folder, batches, 2)
    used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return {
        "writes/s": count / wrote,
        "warm reads/s": count / warm,
        "cold reads/s": count / cold,
        "reads/s of 2 processes": 2 * count / two,
        "restart ms": restart * 1e3,
        "bytes on disk / bytes": used / (size * count),
    }


def main() -> None:
    """Runs every engine in turn, and prints the medians."""
    parser = argparse.ArgumentParser(description="Which engine should keep entries on a local disk?")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(ENGINES), nargs="*", default=list(ENGINES))
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    for name, (size, count) in SIZES.items():
        runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in args.only}
        for _ in range(args.rounds):
            for engine in args.only:
                runs[engine].append(measure(ENGINES[engine], args.folder / "run", size, count, generator))
        for engine, results in runs.items():
            row = {what: median(each[what] for each in results) for what in results[0]}
            print(json.dumps({"size": name, "engine": engine} | {what: round(each, 2) for what, each in row.items()}))


if __name__ == "__main__":
    main()
