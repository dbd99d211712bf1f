"""Recording: the files of a recorded stream, in one folder.

::

    items    encoded items, one behind the other
    index    by item: u64 end of the item in `items`, u64 xxh3-64 of its bytes
    mark     what is safe from a power cut: count, name and states of the stream, whether it has ended; xxh3-64
    wanted   u64: how many items are asked for
    lock     locked by the process that records

An item's row is written after the item, so an item that has a row is whole. Everything is read and written by position,
so forked processes may share the files. Invariant: rows never change, and are never fewer than the mark's count.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from shade.data._source import item_codec
from shade.errors import CorruptEntryError, DataError, StorageFullError
from shade.process import remove_leftovers, replacing
from shade.store.disk_files import open_file

_VERSION: Final = 1
_ROW: Final = np.dtype([("end", "<u8"), ("digest", "<u8")])
_NUMBER: Final = struct.Struct("<Q")
_locks: Final = set[int]()
# A child that held its parent's lock would keep others from recording when the parent is dead.
os.register_at_fork(after_in_child=lambda: _close(_locks))


class Recording:
    """One process's open files of a recording; the folder is made if it is not there."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, exist_ok=True)
        self._items, self._index, self._wanted = (
            open_file(f"{folder}/{each}") for each in ("items", "index", "wanted")
        )
        self._lock = -1
        self._rows: npt.NDArray[Any] = np.empty(0, _ROW)
        self._digest, self._num_digested = xxhash.xxh3_64(), 0

    def __reduce__(self) -> tuple[type[Recording], tuple[str]]:
        return Recording, (self.folder,)

    def close(self) -> None:
        """Closes the files."""
        _close({self._items, self._index, self._wanted})

    @property
    def count(self) -> int:
        """Returns how many items are recorded."""
        return os.fstat(self._index).st_size // _ROW.itemsize

    def mark(self) -> dict[str, Any]:
        """Returns the mark; that of an empty recording if there is none. Raises DataError if it is damaged."""
        found: dict[str, Any] = {"version": _VERSION, "count": 0, "name": None, "states": [], "is_complete": False}
        with suppress(FileNotFoundError):
            content = Path(self.folder, "mark").read_bytes()
            body, digest = content[: -_NUMBER.size], content[-_NUMBER.size :]
            found = item_codec.decode(body) if digest == _NUMBER.pack(xxhash.xxh3_64_intdigest(body)) else {}
        if not isinstance(found, dict):
            raise self._damaged("a mark", type(found).__name__)
        if found.get("version") != _VERSION:
            raise self._damaged(f"a mark of version {_VERSION}", f"version {found.get('version')}")
        return found

    def _damaged(self, expected: str, got: object) -> DataError:
        cure = "remove the folder, so that the stream is recorded again"
        return DataError.of(f"{expected} in the recording in {self.folder}", got, cure)

    def rows(self, stop: int) -> npt.NDArray[Any]:
        """Returns the rows of the first items, at least ``stop`` of them. Raises DataError if there are fewer."""
        if stop > len(self._rows):
            if self.count < stop:
                raise self._damaged(f"{stop} items", self.count)
            self._rows = np.memmap(f"{self.folder}/index", _ROW, "r", shape=(self.count,)).view(np.ndarray)
        return self._rows

    def payloads(self, indices: Sequence[int]) -> list[Any]:
        """Returns items as they were encoded, with an exception in place of a damaged one."""
        rows, index_B = self.rows(max(indices, default=-1) + 1), np.asarray(indices, np.int64)
        # A row has no checksum of its own: what it states is not asked of the system beyond the file.
        num_bytes = os.fstat(self._items).st_size
        stop_B = np.minimum(rows["end"][index_B], num_bytes).astype(np.int64)
        ends, digests = stop_B.tolist(), rows["digest"][index_B].tolist()
        before_B = np.minimum(rows["end"][index_B - 1], num_bytes).astype(np.int64) if len(rows) else stop_B
        starts = np.where(index_B > 0, np.minimum(before_B, stop_B), 0).tolist()
        for start, end in zip(starts, ends, strict=True) if len(ends) > 1 else ():
            os.posix_fadvise(self._items, start, end - start, os.POSIX_FADV_WILLNEED)  # all at once
        found: list[Any] = []
        for index, start, end, digest in zip(indices, starts, ends, digests, strict=True):
            payload = os.pread(self._items, end - start, start)
            is_whole = xxhash.xxh3_64_intdigest(payload) == digest
            expected = f"expected item {index} as it was recorded in {self.folder}"
            found.append(payload if is_whole else CorruptEntryError(f"{expected}, got other bytes"))
        return found

    def digest_of(self, count: int) -> str:
        """Returns the digest of the first items."""
        if count < self._num_digested:
            self._digest, self._num_digested = xxhash.xxh3_64(), 0
        self._digest.update(self.rows(count)[self._num_digested : count].tobytes())
        self._num_digested = count
        return self._digest.hexdigest()

    def num_bytes(self, count: int) -> int:
        """Returns the bytes of the first items."""
        return int(self.rows(count)["end"][count - 1]) if count else 0

    @property
    def wanted(self) -> int:
        """Returns how many items are asked for."""
        return int.from_bytes(os.pread(self._wanted, _NUMBER.size, 0), "little")

    @wanted.setter
    def wanted(self, count: int) -> None:
        os.pwrite(self._wanted, _NUMBER.pack(count), 0)

    # ── by the process that records ─────────────────────────────────────────────────────────────────────────────────

    def try_to_lock(self) -> bool:
        """Takes the lock, which ends with the process; returns whether it was free."""
        descriptor = open_file(f"{self.folder}/lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._lock = descriptor
        _locks.add(descriptor)
        return True

    def unlock(self) -> None:
        """Leaves the recording to others."""
        _locks.discard(self._lock)
        os.close(self._lock)

    def cut(self) -> dict[str, Any]:
        """Removes what a power cut has torn, and returns the mark."""
        mark, count = self.mark(), self.count
        rows = self.rows(max(count, mark["count"]))
        for index in range(mark["count"], count):
            # A row of zeros ends where it begins, and has another checksum.
            is_far = int(rows["end"][index]) > os.fstat(self._items).st_size
            if is_far or isinstance(self.payloads([index])[0], Exception):
                count = index
                break
        self._cut_to(count)
        remove_leftovers(Path(self.folder, "mark"))
        return mark

    def _cut_to(self, count: int) -> None:
        num_bytes, self._rows = self.num_bytes(count), self._rows[:count]
        os.ftruncate(self._index, count * _ROW.itemsize)
        os.ftruncate(self._items, num_bytes)

    def append(self, count: int, payloads: Sequence[bytes]) -> None:
        """Writes items behind the first ``count``: all, or none if it raises StorageFullError."""
        rows, start = np.empty(len(payloads), _ROW), self.num_bytes(count)
        rows["end"] = start + np.cumsum([len(payload) for payload in payloads])
        rows["digest"] = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        try:
            _write(self._items, b"".join(payloads), start)
            _write(self._index, rows.tobytes(), count * _ROW.itemsize)
        except OSError as error:
            self._cut_to(count)
            raise self._full(error) from error

    def seal(self, mark: dict[str, Any]) -> None:
        """Makes what is recorded safe from a power cut, and replaces the mark."""
        try:
            os.fsync(self._items)
            os.fsync(self._index)
            body = item_codec.encode({"version": _VERSION} | mark)
            with replacing(Path(self.folder, "mark"), durable=True) as path:
                path.write_bytes(body + _NUMBER.pack(xxhash.xxh3_64_intdigest(body)))
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> Exception:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
        expected, got = f"room for the recording in {self.folder}", f"{error.strerror} after {self.count} items"
        return StorageFullError.of(expected, got, "free some space and start again, which continues there")


def _close(descriptors: set[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _write(descriptor: int, content: bytes, place: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written
