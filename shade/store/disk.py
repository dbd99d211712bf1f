"""Keeps bytes in a folder of a local disk. They survive the job: the next one, and jobs beside it, find them there.

Files, whose names begin with the format version and a generation: ``1-0.entries`` has the values, each in whole units
of 512 bytes. ``1-0.index`` is a SQLite database: for each key the length, the checksum and the extents of its value,
the gaps in ``entries``, and the bytes in use. ``1.users`` is locked (shared) by every process that has the folder open,
``1.<namespace>.job`` by those that use the entries of one data set; entries that no process uses make room.

The index may be newer or older than the values: after a power failure, a flipped bit, or when an extent was given to
another value between a look-up and the read. So each value is checked with xxh3, seeded with its key. A damaged index
is given up: the next generation begins empty.

Invariant: a value that is returned is byte for byte one that was written to that key; the values and their rows take at
most the capacity, the write-ahead log (some 4 MB) aside. Decision 0039 has the races and the measurements.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from typing_extensions import override

from shade.errors import ConfigError, StoreAuthError, StoreError, StoreFullError, StoreUnavailableError
from shade.process import exclusive_lock, file_system_of, is_network, this_machine
from shade.store._servers.data_sets import prefixes_of
from shade.store.base import STORES, NodeStats, Store, StoreStats
from shade.store.disk_files import (
    JOB,
    KEYS_AT_ONCE,
    DiskFiles,
    job_path,
    newest_generation,
    open_file,
    replace_damaged,
    stored_bytes,
)
from shade.store.keys import placement_tags
from shade.store.url import StoreURL
from shade.types import Bytes

logger = logging.getLogger("shade.store")


def disk_url(text: str | os.PathLike[str]) -> StoreURL:
    """Returns the address of a folder and its capacity, named as ``/folder?capacity=500GiB`` or as a ``disk://`` URL.
    Raises ConfigError for all else."""
    text = os.fspath(text)
    folder, question, options = text.partition("?")
    path = quote(os.path.abspath(os.path.expanduser(folder)))
    url = StoreURL.parse(text if "://" in text else f"disk://{path}{question}{options}")
    if url.scheme != "disk" or url.capacity_bytes is None:
        cure = "write /nvme/shade?capacity=500GiB"
        raise ConfigError.of("a folder of a local disk, and the bytes that may lie there", text, cure)
    return url


def check_local(folder: str) -> None:
    """Raises ConfigError if a folder is on a network mount."""
    kind = file_system_of(folder)
    if is_network(kind):
        got, cure = f"{folder} on {kind}", "name a folder of a disk in this machine, such as /nvme/shade"
        raise ConfigError.of("a local disk, whose files no other machine changes", got, cure)


_abandoned: list[DiskFiles] = []
"""Files of a parent process: a child closes none of them, since SQLite's locks belong to processes."""


def _abandon(files_by_process: dict[int, list[DiskFiles]]) -> None:
    _abandoned.extend(itertools.chain.from_iterable(files_by_process.values()))
    files_by_process.clear()


def _close(files_by_process: dict[int, list[DiskFiles]], entered: list[int]) -> None:
    """Closes what this process opened, at `close` or as the store is collected."""
    while entered:
        os.close(entered.pop())
    opened = files_by_process.pop(os.getpid(), [])
    _abandon(files_by_process)
    for files in opened:
        with files.lock:
            files.close()


@STORES.register("disk")
class DiskStore(Store):
    """A folder of a local disk.

    Args:
        url: ``disk:///folder?capacity=500GiB``; the capacity bounds what all users of the folder keep there together.
        timeout_seconds: Unused: the circuit breaker leaves a slow disk alone.

    Raises:
        ConfigError: No capacity. By every other method too, until the folder is open: it is on a network mount.
        StoreAuthError: By every method: the folder or its files belong to another user.
        StoreUnavailableError: By every method: the disk does not read or write; the message has the system's reason.
    """

    shared = checks_values = True
    medium = "disk"

    def __init__(self, url: StoreURL, timeout_seconds: float) -> None:
        self.url, self._url, self._timeout_seconds = str(url), url, timeout_seconds
        self._folder = url.path
        if url.capacity_bytes is None:
            cure = f"write disk://{url.path}?capacity=500GiB"
            raise ConfigError.of("a capacity, which bounds what is kept on the disk", self.url, cure)
        self._max_bytes = url.capacity_bytes
        self._files_by_process: dict[int, list[DiskFiles]] = {}
        self._opening = threading.Lock()
        self._opener = os.getpid()
        self._entered: list[int] = []
        weakref.finalize(self, _close, self._files_by_process, self._entered).atexit = False

    def __reduce__(self) -> tuple[type[DiskStore], tuple[StoreURL, float]]:
        return type(self), (self._url, self._timeout_seconds)

    def _files(self) -> DiskFiles:
        """Returns this process's files; opens them if they are not open, or were unlinked meanwhile."""
        # SQLite's connections and locks must not cross a fork.
        process = os.getpid()
        # A forked child has none of its parent's threads, one of which may have held the lock.
        if process != self._opener:
            self._opening, self._opener = threading.Lock(), process
            _abandon(self._files_by_process)
        opened = self._files_by_process.get(process)
        if opened and not opened[-1].is_gone:
            return opened[-1]
        with self._opening:
            opened = self._files_by_process.setdefault(process, [])
            if not opened or opened[-1].is_gone:
                # What is gone is closed with the store: another thread may be in the middle of a batch.
                opened.append(self._open())
            return opened[-1]

    def _open(self) -> DiskFiles:
        check_local(self._folder)
        for _ in range(3):
            try:
                return DiskFiles(self._folder, self._max_bytes)
            except sqlite3.OperationalError:
                raise
            # The latter where SQLite's words quote damaged text.
            except (sqlite3.DatabaseError, UnicodeDecodeError):
                replace_damaged(self._folder, newest_generation(self._folder))
        raise StoreUnavailableError(f"the disk {self._folder} damages what is written to it; name another folder")

    @contextlib.contextmanager
    def _using(self, *, writes: bool) -> Iterator[DiskFiles]:
        """Gives this process's files, in a transaction if it ``writes``, and turns what fails into a `StoreError`."""
        self._check_open()
        files = None
        try:
            files = self._files()
            if not writes:
                yield files
                return
            with files.lock:
                files.base.execute("begin immediate")
                try:
                    yield files
                    files.base.execute("commit")
                except BaseException:
                    if files.base.in_transaction:
                        files.base.execute("rollback")
                    raise
        except sqlite3.ProgrammingError:
            self._check_open()  # closed by another thread
            raise
        except (sqlite3.DatabaseError, UnicodeDecodeError, OSError) as error:
            raise self._failure(error, files) from error

    def _failure(self, error: Exception, files: DiskFiles | None) -> StoreError:
        words = str(error)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in words:
            return StoreFullError(f"the disk of {self._folder} has no space left; free some, or lower the capacity")
        if isinstance(error, PermissionError):
            return StoreAuthError(f"expected this user's folder {self._folder}, got {words}; name a folder of your own")
        is_damage = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        if (is_damage or "no such table" in words or "decode" in words) and files is not None:
            with contextlib.suppress(OSError):
                replace_damaged(self._folder, files.generation)
            return StoreUnavailableError(f"the index in {self._folder} is damaged ({words}); it begins anew, empty")
        return StoreUnavailableError(f"the disk of {self._folder} does not work: {words}")

    @override
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._using(writes=False) as files:
            rows = files.rows(keys)
            files.prefetch(rows.values())
            found = {key: files.value(key, row) for key, row in rows.items()}
            for key in [key for key, value in found.items() if value is None]:
                with contextlib.suppress(StoreError):  # a disk that cannot be written may still be read
                    found[key] = self._second_look(key)
        return [found.get(key) for key in keys]

    def _second_look(self, key: str) -> bytes | None:
        """Reads an entry again, and removes it if it is damaged."""
        # In a transaction, while no process writes: the extent may have been given to another value before the read.
        with self._using(writes=True) as files:
            row = files.rows([key]).get(key)
            value = None if row is None else files.value(key, row)
            if row is not None and value is None:
                files.drop({key: row})
        return value

    @override
    def set_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        return self._write(items, replaces=True)

    @override
    def add_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        return self._write(items, replaces=False)

    def _write(self, items: Mapping[str, Bytes], *, replaces: bool) -> list[bool]:
        try:
            with self._using(writes=True) as files:
                rows = files.rows(list(items))
                return [
                    (replaces or key not in rows) and files.put(key, value, rows.get(key))
                    for key, value in items.items()
                ]
        except StoreFullError:
            return [False] * len(items)

    @override
    def delete_many(self, keys: Sequence[str]) -> list[int]:
        with self._using(writes=True) as files:
            rows = files.rows(keys)
            files.drop(rows)
        lengths = {key: row[0] for key, row in rows.items()}
        return [lengths.pop(key, -1) for key in keys]

    @override
    def increment(self, key: str, by: int) -> int:
        with self._using(writes=True) as files:
            old = files.rows([key]).get(key)
            value = b"0" if old is None else files.value(key, old)
            try:
                number = int(value or b"0") + by  # a damaged counter begins at 0, and is counted again by its owner
            except ValueError:
                raise StoreError(f"expected an integer under {key!r}, got other bytes; use another key") from None
            if not files.put(key, b"%d" % number, old):
                raise StoreFullError(f"expected room for the counter {key!r}, got a full store; raise its capacity")
        return number

    @override
    def scan(self, prefix: str) -> Iterator[str]:
        last = None
        while True:
            with self._using(writes=False) as files:
                keys = files.keys_after(prefix, last)
            yield from keys
            if len(keys) < KEYS_AT_ONCE:
                return
            last = keys[-1]

    @override
    def stored_bytes(self, key_length: int, value_length: int) -> int:
        return stored_bytes(key_length, value_length)

    @override
    def placement(self) -> list[str]:
        self._check_open()
        return [placement_tags()[0]]

    @override
    def identity(self) -> str:
        with self._using(writes=False):
            place = os.stat(self._folder)
        return f"{this_machine()}:{place.st_dev}:{place.st_ino}"

    @override
    def enter(self, namespace: str, wanted_bytes: int, held_bytes: int = 0) -> None:
        with self._using(writes=False), exclusive_lock(os.path.join(self._folder, "lock")):
            own = job_path(self._folder, namespace)
            held = open_file(own)
            fcntl.flock(held, fcntl.LOCK_SH)
            os.utime(own)
            self._entered.append(held)
            others = [os.path.join(self._folder, name) for name in os.listdir(self._folder) if name.endswith(JOB)]
            others = sorted((path for path in others if path != own), key=lambda path: os.stat(path).st_mtime)
        # Those of the job that came longest ago make room first.
        for path in others:
            if self.stats().used_bytes + wanted_bytes - self._bytes_of(namespace) <= self._max_bytes:
                return
            self._remove_unused(path)

    def _bytes_of(self, namespace: str) -> int:
        with self._using(writes=False) as files:
            return sum(files.bytes_of(prefix) for prefix in prefixes_of(namespace))

    def _remove_unused(self, path: str) -> None:
        """Removes a data set's entries, unless a process uses them."""
        namespace = os.path.basename(path).removesuffix(JOB).partition(".")[2]
        held = open_file(path)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for prefix in prefixes_of(namespace):
                while keys := list(itertools.islice(self.scan(prefix), KEYS_AT_ONCE)):
                    self.delete_many(keys)
            logger.info("removed the entries of the data set %s, which no job uses, from %s", namespace, self._folder)
        except BlockingIOError:
            pass
        finally:
            os.close(held)

    @override
    def stats(self) -> StoreStats:
        with self._using(writes=False) as files, files.lock:
            used, entries, version = files.total("used"), files.total("entries"), files.version
        return StoreStats((NodeStats(self._folder, "primary", used, self._max_bytes, entries, f"format {version}"),))

    @override
    def ping(self) -> None:
        """Writes nothing, but asks whether this process may write."""
        self.stats()
        if not os.access(self._folder, os.W_OK):
            raise StoreUnavailableError(f"the disk of {self._folder} is read-only; mount it writable, or name another")

    @override
    def close(self) -> None:
        self._closed = True
        _close(self._files_by_process, self._entered)
