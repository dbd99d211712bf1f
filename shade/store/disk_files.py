"""Reads and writes the files of a `DiskStore`: an index in SQLite, and the values beside it.

`shade.store.disk` says what the files are and why; this is one generation of them, open in one process. What changes
the index runs in a transaction that the caller begins and ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import xxhash

from shade.process import exclusive_lock
from shade.types import Bytes

FORMAT: Final = 1
UNIT_BYTES: Final = 512
_INLINE_BYTES: Final = 128
"""Values up to this length lie in the index."""
_ROW_BYTES: Final = 96
"""A row of the index without its key, its share of half-empty pages included."""
_LOCK_SECONDS: Final = 10.0
"""Wait for another process's batch to be written; a disk that needs longer is left alone by the circuit breaker."""
KEYS_AT_ONCE: Final = 1000
JOB: Final = ".job"
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
Row: TypeAlias = "tuple[int, int, bytes, bytes | None]"
"""Length, checksum, places, and the value if it lies in the row."""
_ROW_TYPES: Final = ((int, int, bytes, type(None)), (int, int, bytes, bytes))


def _digest(key: str, value: Bytes) -> int:
    """Returns 63 bits, which SQLite's signed integers hold."""
    return xxhash.xxh3_64_intdigest(value, seed=xxhash.xxh3_64_intdigest(key.encode())) >> 1


def _in_units(length: int) -> int:
    return -(-length // UNIT_BYTES) * UNIT_BYTES


def open_file(path: str) -> int:
    """Opens a file of this user, which is made if it is not there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


class DiskFiles:
    """One process's open files of one generation. Opening creates them, under the folder's lock.

    Args:
        folder: The folder.
        max_bytes: The capacity: what all rows and values may occupy.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.lock = threading.RLock()
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._users = open_file(os.path.join(folder, f"{FORMAT}.users"))
        self.entries = -1
        self.base: Any = None
        try:
            fcntl.flock(self._users, fcntl.LOCK_SH)
            with exclusive_lock(os.path.join(folder, "lock")):
                _remove_older_formats(folder)
                self.generation = newest_generation(folder)
                self.version = FORMAT
                self.stem = os.path.join(folder, f"{FORMAT}-{self.generation}")
                self.entries = open_file(f"{self.stem}.entries")
                owner = os.fstat(self.entries).st_uid
                if owner != os.geteuid():
                    raise PermissionError(errno.EACCES, f"it belongs to user id {owner}")
                index = f"{self.stem}.index"
                os.close(open_file(index))  # for its mode
                self.base = sqlite3.connect(index, timeout=_LOCK_SECONDS, isolation_level=None, check_same_thread=False)
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

    def rows(self, keys: Sequence[str]) -> dict[str, Row]:
        """Returns the rows of those keys that are there."""
        found: dict[str, Row] = {}
        with self.lock:
            for start in range(0, len(keys), KEYS_AT_ONCE):
                part = tuple(keys[start : start + KEYS_AT_ONCE])
                marks = ",".join("?" * len(part))
                asked = f"select key, length, digest, places, value from entry where key in ({marks})"
                for key, *row in self.base.execute(asked, part):
                    if tuple(map(type, row)) not in _ROW_TYPES:
                        raise sqlite3.DatabaseError("a row has other columns than were written")
                    found[key] = tuple(row)
        return found

    def prefetch(self, rows: Iterable[Row]) -> None:
        """Asks the kernel for the values of a batch, all at once."""
        for _, place, room in (piece for row in rows for piece in _pieces(row[2])):
            with contextlib.suppress(OSError, OverflowError):
                os.posix_fadvise(self.entries, place, room, os.POSIX_FADV_WILLNEED)

    def keys_after(self, prefix: str, last: str | None) -> list[str]:
        """Returns the next keys with a prefix, in order; as many as `KEYS_AT_ONCE` if there are more."""
        asked = "select key from entry where key >= ? and substr(key, 1, ?) = ? order by key limit ?"
        if last is not None:
            asked = asked.replace("key >= ?", "key > ?", 1)
        start = (prefix if last is None else last, len(prefix), prefix, KEYS_AT_ONCE)
        with self.lock:
            return [key for (key,) in self.base.execute(asked, start)]

    def bytes_of(self, prefix: str) -> int:
        """Returns what the entries whose keys have a prefix occupy."""
        lengths = (
            f"case when value is null then (length + {UNIT_BYTES - 1}) / {UNIT_BYTES} * {UNIT_BYTES} else length end"
        )
        asked = (
            f"select coalesce(sum(2 * length(key) + {_ROW_BYTES} + {lengths}), 0) from entry where key between ? and ?"
        )
        with self.lock:
            return int(self.base.execute(asked, (prefix, f"{prefix}\U0010ffff")).fetchone()[0])

    def _read(self, row: Row) -> bytes:
        """Returns what lies at a row's places, at most as long as its value; shorter if the file is."""
        length, _, places, value = row
        if value is not None:
            return bytes(value)
        parts = [
            os.pread(self.entries, min(room, length - done), place)
            for done, place, room in _pieces(places)
            if done < length
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def value(self, key: str, row: Row) -> bytes | None:
        """Returns a row's value; None if the bytes are not those that were written under this key."""
        try:
            value = self._read(row)
        except (OverflowError, ValueError, TypeError):  # a flipped bit in the row
            return None
        return value if len(value) == row[0] and _digest(key, value) == row[1] else None

    def put(self, key: str, value: Bytes, old: Row | None) -> bool:
        """Writes a value in place of an old row; returns whether the capacity has room for it."""
        content = value if isinstance(value, bytes) else bytes(value)
        used = self.total("used") - (0 if old is None else stored_bytes(len(key), old[0]))
        if used + stored_bytes(len(key), len(content)) > self._max_bytes:
            return False
        if old is not None:
            self.drop({key: old})
        inline = content if len(content) <= _INLINE_BYTES else None
        places = b"" if inline is not None else self._store(memoryview(content))
        row = (key, len(content), _digest(key, content), places, inline)
        self.base.execute("insert into entry values (?, ?, ?, ?, ?)", row)
        self._count(1, stored_bytes(len(key), len(content)))
        return True

    def _store(self, content: memoryview) -> bytes:
        """Writes a value into gaps or at the end; returns its places."""
        places, done = b"", 0
        for place, room in self._allocate(_in_units(len(content))):
            part, offset = content[done : done + room], place
            while part:
                num_written = os.pwrite(self.entries, part, offset)
                part, offset = part[num_written:], offset + num_written
            places += _PLACE.pack(place, room)
            done += room
        return places

    def _allocate(self, wanted: int) -> Iterator[tuple[int, int]]:
        """Yields places and their bytes: the smallest gap that is large enough, else the end, else the largest gaps."""
        ask, end = self.base.execute, self.total("end")
        gap = self._gap("where length >= ? order by length", wanted)
        while gap is not None or end + wanted > self._max_bytes:
            gap = gap or self._gap("order by length desc")
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

    def drop(self, rows: Mapping[str, Row]) -> None:
        """Deletes rows, and makes gaps of their places."""
        self.base.executemany("delete from entry where key = ?", [(key,) for key in rows])
        for _, place, room in (piece for row in rows.values() for piece in _pieces(row[2])):
            if place + room <= self.total("end"):  # else a flipped bit
                self._make_gap(place, room)
        self._count(-len(rows), -sum(stored_bytes(len(key), row[0]) for key, row in rows.items()))

    def _make_gap(self, place: int, room: int) -> None:
        """Frees a place, joined with the gaps beside it; one at the end makes the file shorter."""
        ask = self.base.execute
        before = self._gap("where place < ? order by place desc", place)
        after = self._gap("where place = ?", place + room)
        begin, end = place, place + room
        if before is not None and sum(before) == place:
            begin = before[0]
        if after is not None:
            end += after[1]
        ask("delete from gap where place in (?, ?)", (begin, place + room))
        if end < self.total("end"):
            ask("insert or replace into gap values (?, ?)", (begin, end - begin))
            return
        ask("update total set number = ? where name = 'end'", (begin,))
        os.ftruncate(self.entries, begin)

    def _gap(self, which: str, *numbers: int) -> tuple[int, int] | None:
        asked = f"select place, length from gap {which} limit 1"
        row: tuple[int, int] | None = self.base.execute(asked, numbers).fetchone()
        if row is not None and tuple(map(type, row)) != (int, int):
            raise sqlite3.DatabaseError("a gap has other columns than were written")
        return row

    def total(self, name: str) -> int:
        """Returns the bytes in use (``used``), the number of entries, or where the values end (``end``)."""
        row = self.base.execute("select number from total where name = ?", (name,)).fetchone()
        if row is None or type(row[0]) is not int:
            raise sqlite3.DatabaseError(f"the total {name!r} is missing")
        return int(row[0])

    def _count(self, num_entries: int, num_bytes: int) -> None:
        changes = [(num_entries, "entries"), (num_bytes, "used")]
        self.base.executemany("update total set number = number + ? where name = ?", changes)


def stored_bytes(key_length: int, value_length: int) -> int:
    """Returns what an entry of these lengths occupies, its row included."""
    inline = value_length if value_length <= _INLINE_BYTES else _in_units(value_length)
    return 2 * key_length + _ROW_BYTES + inline


def newest_generation(folder: str) -> int:
    """Returns the number of the newest generation in a folder, 0 if there is none."""
    return max(_generations(folder), default=0)


def replace_damaged(folder: str, generation: int) -> None:
    """Replaces the files of a generation whose index is damaged by empty ones, unless another process has."""
    with exclusive_lock(os.path.join(folder, "lock")):
        if newest_generation(folder) != generation:
            return
        os.close(open_file(os.path.join(folder, f"{FORMAT}-{generation + 1}.entries")))
        _remove(folder, f"{FORMAT}-{generation}.")


def job_path(folder: str, namespace: str) -> str:
    """Returns the file that is locked by the processes that use a data set's entries."""
    return os.path.join(folder, f"{FORMAT}.{namespace}{JOB}")


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
        descriptor = open_file(users)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, f"{number}-")
            _remove(folder, f"{number}.")
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


def _pieces(places: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields of each piece of a value the bytes before it, its place and its room; nothing of what is no list of
    pieces."""
    done = 0
    for place, room in _PLACE.iter_unpack(places) if len(places) % _PLACE.size == 0 else ():
        yield done, place, room
        done += room
