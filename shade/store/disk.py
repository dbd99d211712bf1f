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
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import xxhash
from typing_extensions import override

from shade.errors import ConfigError, StoreAuthError, StoreError, StoreFullError, StoreUnavailableError
from shade.process import exclusive_lock, file_system_of, is_network, this_machine
from shade.store.base import STORES, NodeStats, Store, StoreStats
from shade.store.keys import placement_tags
from shade.store.url import StoreURL
from shade.types import Bytes

logger = logging.getLogger("shade.store")

FORMAT: Final = 1
UNIT_BYTES: Final = 512
_INLINE_BYTES: Final = 128
"""Values up to this length lie in the index."""
_ROW_BYTES: Final = 96
"""A row of the index without its key, its share of half-empty pages included."""
_LOCK_SECONDS: Final = 10.0
"""Wait for another process's batch to be written; a disk that needs longer is left alone by the circuit breaker."""
_KEYS_AT_ONCE: Final = 1000
_JOB: Final = ".job"
"""End of the names of files that are locked by the processes that use a data set's entries."""
_PLACE: Final = struct.Struct("<QQ")
_SCHEMA: Final = """
begin immediate;
create table if not exists entry(
    key text primary key, length integer not null, digest integer not null, places blob not null, value blob
) without rowid;
create table if not exists gap(place integer primary key, length integer not null);
create index if not exists gap_length on gap(length);
create table if not exists total(name text primary key, number integer not null) without rowid;
insert or ignore into total values ('used', 0), ('end', 0), ('entries', 0);
commit;
"""
_Row: TypeAlias = "tuple[int, int, bytes, bytes | None]"
"""Length, checksum, places, and the value if it lies in the row."""
_ROW_TYPES: Final = ((int, int, bytes, type(None)), (int, int, bytes, bytes))


def disk_url(text: str) -> StoreURL:
    """Returns the address of a folder and its capacity, named as ``/folder?capacity=500GiB`` or as a ``disk://`` URL.
    Raises ConfigError for all else."""
    folder, question, options = text.partition("?")
    url = StoreURL.parse(text if "://" in text else f"disk://{quote(os.path.abspath(folder))}{question}{options}")
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


def _digest(key: str, value: Bytes) -> int:
    """Returns 63 bits, which SQLite's signed integers hold."""
    return xxhash.xxh3_64_intdigest(value, seed=xxhash.xxh3_64_intdigest(key.encode())) >> 1


def _in_units(length: int) -> int:
    return -(-length // UNIT_BYTES) * UNIT_BYTES


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


class _Files:
    """One process's open files of one generation. Opening creates them, under the folder's lock."""

    def __init__(self, folder: str) -> None:
        self.lock = threading.RLock()
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._users = _open(os.path.join(folder, f"{FORMAT}.users"))
        self.entries = -1
        self.base: Any = None
        try:
            fcntl.flock(self._users, fcntl.LOCK_SH)
            with exclusive_lock(os.path.join(folder, "lock")):
                # Other versions use other names, so a job of either version never reads the other's files.
                _remove_older_formats(folder)
                self.generation = max(_generations(folder), default=0)
                self.stem = os.path.join(folder, f"{FORMAT}-{self.generation}")
                self.entries = _open(f"{self.stem}.entries")
                owner = os.fstat(self.entries).st_uid
                if owner != os.geteuid():
                    raise PermissionError(errno.EACCES, f"it belongs to user id {owner}")
                index = f"{self.stem}.index"
                os.close(_open(index))  # for its mode
                self.base = sqlite3.connect(index, _LOCK_SECONDS, isolation_level=None, check_same_thread=False)
                self._use_log(index)
                self.base.execute("pragma synchronous=normal")
                if not self.base.execute("select 1 from sqlite_master where name = 'total'").fetchall():
                    self.base.executescript(_SCHEMA)  # else nothing is written: another job's batch may take long
        except BaseException:
            self.close()
            raise

    def _use_log(self, index: str) -> None:
        try:
            self.base.execute("pragma journal_mode=wal")
        except sqlite3.OperationalError as error:
            with open(index, "rb") as file:
                has_log = file.read(20)[18:] == b"\2\2"
            if has_log:
                raise
            # Processes open it one after the other: one that is in use has a log, unless its first page is lost.
            raise sqlite3.DatabaseError("the index has lost its first page") from error

    @property
    def is_gone(self) -> bool:
        """Returns whether the files were unlinked: the index was damaged, or the folder was deleted."""
        return os.fstat(self.entries).st_nlink == 0

    def close(self) -> None:
        """Closes all files."""
        if self.base is not None:
            self.base.close()
        for descriptor in (self.entries, self._users):
            if descriptor >= 0:
                os.close(descriptor)


def _generations(folder: str) -> list[int]:
    names = [name.removesuffix(".entries").split("-") for name in os.listdir(folder) if name.endswith(".entries")]
    return [int(name[1]) for name in names if len(name) == 2 and name[0] == str(FORMAT) and name[1].isdecimal()]


def _remove(folder: str, prefix: str) -> None:
    for name in os.listdir(folder):
        if name.startswith(prefix):
            os.unlink(os.path.join(folder, name))


def _remove_older_formats(folder: str) -> None:
    """Removes the files of older format versions that no process has open."""
    for number in range(FORMAT):
        users = os.path.join(folder, f"{number}.users")
        if not os.path.exists(users):
            continue
        descriptor = _open(users)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, f"{number}-")
            _remove(folder, f"{number}.")
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


_abandoned: list[_Files] = []
"""Files of a parent process: a child closes none of them, since SQLite's locks belong to processes."""


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
        self._files_by_process: dict[int, _Files] = {}
        self._opening = threading.Lock()
        self._opener = os.getpid()
        self._entered: list[int] = []

    def __reduce__(self) -> tuple[type[DiskStore], tuple[StoreURL, float]]:
        return type(self), (self._url, self._timeout_seconds)

    def _files(self) -> _Files:
        """Returns this process's files; opens them if they are not open, or were unlinked meanwhile."""
        # SQLite's connections and locks must not cross a fork.
        process = os.getpid()
        if process != self._opener:  # a child: its parent's threads, and what they hold, are not here
            self._opening, self._opener = threading.Lock(), process
            _abandoned.extend(self._files_by_process.values())
            self._files_by_process = {}
        files = self._files_by_process.get(process)
        if files is not None and not files.is_gone:
            return files
        with self._opening:
            files = self._files_by_process.get(process)
            if files is None or files.is_gone:
                if files is not None:
                    _abandoned.append(files)  # another thread may be in the middle of a batch
                self._files_by_process[process] = files = self._open()
            return files

    def _open(self) -> _Files:
        check_local(self._folder)
        for _ in range(3):
            try:
                return _Files(self._folder)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                self._give_up(max(_generations(self._folder), default=0))
        raise StoreUnavailableError(f"the disk {self._folder} damages what is written to it; name another folder")

    def _give_up(self, generation: int) -> None:
        """Replaces the files of a generation whose index is damaged by empty ones, unless another process has."""
        with exclusive_lock(os.path.join(self._folder, "lock")):
            # Of two processes that find the damage the second finds a newer generation than its own.
            if max(_generations(self._folder), default=0) != generation:
                return
            os.close(_open(os.path.join(self._folder, f"{FORMAT}-{generation + 1}.entries")))
            _remove(self._folder, f"{FORMAT}-{generation}.")

    @contextlib.contextmanager
    def _using(self, *, writes: bool) -> Iterator[_Files]:
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
        except (sqlite3.DatabaseError, OSError) as error:
            raise self._failure(error, files) from error

    def _failure(self, error: Exception, files: _Files | None) -> StoreError:
        words = str(error)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in words:
            return StoreFullError(f"the disk of {self._folder} has no space left; free some, or lower the capacity")
        if isinstance(error, PermissionError):
            return StoreAuthError(f"expected this user's folder {self._folder}, got {words}; name a folder of your own")
        is_damage = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        if (is_damage or "no such table" in words or "decode" in words) and files is not None:
            with contextlib.suppress(OSError):
                self._give_up(files.generation)
            return StoreUnavailableError(f"the index in {self._folder} is damaged ({words}); it begins anew, empty")
        return StoreUnavailableError(f"the disk of {self._folder} does not work: {words}")

    @staticmethod
    def _rows(files: _Files, keys: Sequence[str]) -> dict[str, _Row]:
        found: dict[str, _Row] = {}
        with files.lock:
            for start in range(0, len(keys), _KEYS_AT_ONCE):
                part = tuple(keys[start : start + _KEYS_AT_ONCE])
                marks = ",".join("?" * len(part))
                asked = f"select key, length, digest, places, value from entry where key in ({marks})"
                for key, *row in files.base.execute(asked, part):
                    if tuple(map(type, row)) not in _ROW_TYPES:
                        raise sqlite3.DatabaseError("a row has other columns than were written")
                    found[key] = tuple(row)
        return found

    @staticmethod
    def _read(files: _Files, row: _Row) -> bytes:
        """Returns what lies at a row's places, at most as long as its value; shorter if the file is."""
        length, _, places, value = row
        if value is not None:
            return bytes(value)
        parts = [
            # Not through a mapping: a read error is then an error here and not a signal that ends the training, and the
            # kernel reads a whole value at once.
            os.pread(files.entries, min(room, length - done), place)
            for done, place, room in _pieces(places)
            if done < length
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _value(self, files: _Files, key: str, row: _Row) -> bytes | None:
        """Returns a row's value; None if the bytes are not those that were written under this key."""
        try:
            value = self._read(files, row)
        except (OverflowError, ValueError, TypeError):  # a flipped bit in the row
            return None
        return value if len(value) == row[0] and _digest(key, value) == row[1] else None

    @override
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._using(writes=False) as files:
            rows = self._rows(files, keys)
            for _, place, room in (piece for row in rows.values() for piece in _pieces(row[2])):
                with contextlib.suppress(OSError, OverflowError):
                    os.posix_fadvise(files.entries, place, room, os.POSIX_FADV_WILLNEED)  # the batch at once
            found = {key: self._value(files, key, row) for key, row in rows.items()}
            for key in [key for key, value in found.items() if value is None]:
                with contextlib.suppress(StoreError):  # a disk that cannot be written may still be read
                    found[key] = self._second_look(key)
        return [found.get(key) for key in keys]

    def _second_look(self, key: str) -> bytes | None:
        """Reads an entry again while no process writes; removes it if it is damaged."""
        with self._using(writes=True) as files:
            row = self._rows(files, [key]).get(key)
            # A writer may have replaced the entry between the look-up and the read; now no process writes.
            value = None if row is None else self._value(files, key, row)
            if row is not None and value is None:
                self._drop(files, {key: row})
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
                rows = self._rows(files, list(items))
                return [
                    (replaces or key not in rows) and self._put(files, key, value, rows.get(key))
                    for key, value in items.items()
                ]
        except StoreFullError:
            return [False] * len(items)

    def _put(self, files: _Files, key: str, value: Bytes, old: _Row | None) -> bool:
        content = value if isinstance(value, bytes) else bytes(value)
        used = self._total(files, "used") - (0 if old is None else self.stored_bytes(len(key), old[0]))
        if used + self.stored_bytes(len(key), len(content)) > self._max_bytes:
            return False
        if old is not None:
            self._drop(files, {key: old})
        # Longer values are not in SQLite: one in an overflow chain of pages is written twice and read piece by piece.
        inline = content if len(content) <= _INLINE_BYTES else None
        places = b"" if inline is not None else self._store(files, memoryview(content))
        row = (key, len(content), _digest(key, content), places, inline)
        files.base.execute("insert into entry values (?, ?, ?, ?, ?)", row)
        self._count(files, 1, self.stored_bytes(len(key), len(content)))
        return True

    def _store(self, files: _Files, content: memoryview) -> bytes:
        """Writes a value into gaps or at the end; returns its places."""
        places, done = b"", 0
        for place, room in self._allocate(files, _in_units(len(content))):
            part, offset = content[done : done + room], place
            while part:
                num_written = os.pwrite(files.entries, part, offset)
                part, offset = part[num_written:], offset + num_written
            places += _PLACE.pack(place, room)
            done += room
        return places

    def _allocate(self, files: _Files, wanted: int) -> Iterator[tuple[int, int]]:
        """Yields places and their bytes: the smallest gap that is large enough, else the end, else the largest gaps."""
        ask, end = files.base.execute, self._total(files, "end")
        # A value in one piece is read by one call, so the end of the file comes before several small gaps.
        gap = ask("select place, length from gap where length >= ? order by length limit 1", (wanted,)).fetchone()
        while gap is not None or end + wanted > self._max_bytes:
            gap = gap or ask("select place, length from gap order by length desc limit 1").fetchone()
            if gap is None:
                raise OSError(errno.ENOSPC, "no gap is left")
            place, length = gap
            taken, gap = min(length, wanted), None
            ask("delete from gap where place = ?", (place,))
            if length > taken:
                ask("insert into gap values (?, ?)", (place + taken, length - taken))
            yield place, taken
            wanted -= taken
            if not wanted:
                return
        ask("update total set number = ? where name = 'end'", (end + wanted,))
        yield end, wanted

    def _drop(self, files: _Files, rows: Mapping[str, _Row]) -> None:
        """Deletes rows, and makes gaps of their places."""
        files.base.executemany("delete from entry where key = ?", [(key,) for key in rows])
        for _, place, room in (piece for row in rows.values() for piece in _pieces(row[2])):
            if place + room <= self._total(files, "end"):  # else a flipped bit
                self._make_gap(files, place, room)
        self._count(files, -len(rows), -sum(self.stored_bytes(len(key), row[0]) for key, row in rows.items()))

    def _make_gap(self, files: _Files, place: int, room: int) -> None:
        """Frees a place, joined with the gaps beside it; one at the end makes the file shorter."""
        ask = files.base.execute
        before = ask("select place, length from gap where place < ? order by place desc limit 1", (place,)).fetchone()
        after = ask("select place, length from gap where place = ?", (place + room,)).fetchone()
        begin, end = place, place + room
        if before is not None and sum(before) == place:
            begin = before[0]
        if after is not None:
            end += after[1]
        ask("delete from gap where place in (?, ?)", (begin, place + room))
        if end < self._total(files, "end"):
            ask("insert or replace into gap values (?, ?)", (begin, end - begin))
            return
        ask("update total set number = ? where name = 'end'", (begin,))
        os.ftruncate(files.entries, begin)

    @staticmethod
    def _total(files: _Files, name: str) -> int:
        row = files.base.execute("select number from total where name = ?", (name,)).fetchone()
        if row is None or type(row[0]) is not int:
            raise sqlite3.DatabaseError(f"the total {name!r} is missing")
        return int(row[0])

    @staticmethod
    def _count(files: _Files, num_entries: int, num_bytes: int) -> None:
        changes = [(num_entries, "entries"), (num_bytes, "used")]
        files.base.executemany("update total set number = number + ? where name = ?", changes)

    @override
    def delete_many(self, keys: Sequence[str]) -> list[int]:
        with self._using(writes=True) as files:
            rows = self._rows(files, keys)
            self._drop(files, rows)
        lengths = {key: row[0] for key, row in rows.items()}
        return [lengths.pop(key, -1) for key in keys]

    @override
    def increment(self, key: str, by: int) -> int:
        with self._using(writes=True) as files:
            old = self._rows(files, [key]).get(key)
            value = b"0" if old is None else self._value(files, key, old)
            try:
                number = int(value or b"0") + by  # a damaged counter begins at 0, and is counted again by its owner
            except ValueError:
                raise StoreError(f"expected an integer under {key!r}, got other bytes; use another key") from None
            if not self._put(files, key, b"%d" % number, old):
                raise StoreFullError(f"expected room for the counter {key!r}, got a full store; raise its capacity")
        return number

    @override
    def scan(self, prefix: str) -> Iterator[str]:
        last = None
        while True:
            with self._using(writes=False) as files, files.lock:
                asked = "select key from entry where key >= ? and substr(key, 1, ?) = ? order by key limit ?"
                if last is not None:
                    asked = asked.replace("key >= ?", "key > ?", 1)
                start = (prefix if last is None else last, len(prefix), prefix, _KEYS_AT_ONCE)
                keys = [key for (key,) in files.base.execute(asked, start)]
            yield from keys
            if len(keys) < _KEYS_AT_ONCE:
                return
            last = keys[-1]

    @override
    def stored_bytes(self, key_length: int, value_length: int) -> int:
        inline = value_length if value_length <= _INLINE_BYTES else _in_units(value_length)
        return 2 * key_length + _ROW_BYTES + inline

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
    def enter(self, namespace: str, wanted_bytes: int) -> None:
        with self._using(writes=False), exclusive_lock(os.path.join(self._folder, "lock")):
            own = os.path.join(self._folder, f"{FORMAT}.{namespace}{_JOB}")
            held = _open(own)
            # The lock goes with the process, whatever ends it: no users have to be counted.
            fcntl.flock(held, fcntl.LOCK_SH)
            os.utime(own)
            self._entered.append(held)
            others = [os.path.join(self._folder, name) for name in os.listdir(self._folder) if name.endswith(_JOB)]
            others = sorted((path for path in others if path != own), key=lambda path: os.stat(path).st_mtime)
        # Those of the job that came longest ago make room first.
        for path in others:
            if self.stats().used_bytes + wanted_bytes - self._bytes_of(namespace) <= self._max_bytes:
                return
            self._remove_unused(path)

    def _bytes_of(self, namespace: str) -> int:
        lengths = (
            f"case when value is null then (length + {UNIT_BYTES - 1}) / {UNIT_BYTES} * {UNIT_BYTES} else length end"
        )
        asked = (
            f"select coalesce(sum(2 * length(key) + {_ROW_BYTES} + {lengths}), 0) from entry where key between ? and ?"
        )
        with self._using(writes=False) as files, files.lock:
            ranges = [(prefix, f"{prefix}\U0010ffff") for prefix in _prefixes(namespace)]
            return sum(int(files.base.execute(asked, ends).fetchone()[0]) for ends in ranges)

    def _remove_unused(self, path: str) -> None:
        """Removes a data set's entries, unless a process uses them."""
        namespace = os.path.basename(path).removesuffix(_JOB).partition(".")[2]
        held = _open(path)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for prefix in _prefixes(namespace):
                while keys := list(itertools.islice(self.scan(prefix), _KEYS_AT_ONCE)):
                    self.delete_many(keys)
            logger.info("removed the entries of the data set %s, which no job uses, from %s", namespace, self._folder)
        except BlockingIOError:
            pass
        finally:
            os.close(held)

    @override
    def stats(self) -> StoreStats:
        with self._using(writes=False) as files, files.lock:
            used, entries = self._total(files, "used"), self._total(files, "entries")
        return StoreStats((NodeStats(self._folder, "primary", used, self._max_bytes, entries, f"format {FORMAT}"),))

    @override
    def ping(self) -> None:
        """Writes nothing, but asks whether this process may write."""
        self.stats()
        if not os.access(self._folder, os.W_OK):
            raise StoreUnavailableError(f"the disk of {self._folder} is read-only; mount it writable, or name another")

    @override
    def close(self) -> None:
        self._closed = True
        while self._entered:
            os.close(self._entered.pop())
        files = self._files_by_process.pop(os.getpid(), None)
        if files is not None:
            with files.lock:
                files.close()


def _prefixes(namespace: str) -> list[str]:
    """Returns how the keys of a data set's entries begin: those of one job, and those in the slots of several."""
    return [f"shade:{namespace}{mark}" for mark in ":."]


def _pieces(places: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields of each piece of a value the bytes before it, its place and its room; nothing of what is no list of
    pieces."""
    done = 0
    for place, room in _PLACE.iter_unpack(places) if len(places) % _PLACE.size == 0 else ():
        yield done, place, room
        done += room
