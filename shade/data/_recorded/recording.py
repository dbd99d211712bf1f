"""Recording: the files of a recorded stream, in one folder.

::

    items    encoded items, one behind the other
    index    by item: u64 end of the item in `items`, u64 xxh3-64 of its bytes
    mark     what is safe from a power cut: count, name and states of the stream, whether it has ended; xxh3-64
    wanted   u64: how many items somebody has asked for
    lock     locked by the process that records

An item's row is written after the item, so an item that has a row is whole. Everything is read and written by position:
forked processes may share the files. Only the process that holds the lock appends.

Invariant: rows never change, and are never fewer than the mark's count.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
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
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_recording: Final = set[tuple[int, str]]()
"""Process and folder of each recorder here: the kernel's lock does not hold within a process."""


@dataclass
class Mark:
    """What a recording says of itself."""

    count: int = 0
    """Items that are synced."""
    name: str | None = None
    """Of the stream's code; None if it has none."""
    states: list[tuple[int, Any]] = field(default_factory=list)
    """The stream's states, oldest first, each after so many items."""
    is_complete: bool = False
    """Whether the stream has ended."""
    version: int = _VERSION


class Recording:
    """One process's open files of a recording; the folder is made if it is not there."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, exist_ok=True)
        self._items, self._index, self._wanted = (
            open_file(f"{folder}/{name}") for name in ("items", "index", "wanted")
        )
        self._lock: int | None = None
        self._rows: npt.NDArray[Any] = np.empty(0, _ROW)
        self._digest, self._num_digested = xxhash.xxh3_64(), 0
        self.is_complete = False
        """Whether the stream has ended, as far as `look` has seen."""
        self.look()

    def __reduce__(self) -> tuple[type[Recording], tuple[str]]:
        return Recording, (self.folder,)

    def close(self) -> None:
        """Closes the files."""
        for descriptor in (self._items, self._index, self._wanted):
            os.close(descriptor)

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def count(self) -> int:
        """Returns how many items are recorded."""
        return os.fstat(self._index).st_size // _ROW.itemsize

    def look(self) -> bool:
        """Returns whether the recording is complete; `count` is its length then."""
        self.is_complete = self.is_complete or self.mark().is_complete
        return self.is_complete

    def mark(self) -> Mark:
        """Returns the mark; an empty one if there is none yet. Raises DataError if it is damaged."""
        try:
            content = Path(self.folder, "mark").read_bytes()
        except FileNotFoundError:
            return Mark()
        body, digest = content[: -_NUMBER.size], content[-_NUMBER.size :]
        found = item_codec.decode(body) if digest == _NUMBER.pack(xxhash.xxh3_64_intdigest(body)) else {}
        if found.get("version") != _VERSION:
            raise self._damaged(f"a mark of version {_VERSION}", f"version {found.get('version')}")
        return Mark(**found)

    def _damaged(self, expected: str, got: object) -> DataError:
        cure = "remove the folder, so that the stream is recorded again"
        return DataError.of(f"{expected} in the recording in {self.folder}", got, cure)

    def rows(self, stop: int) -> npt.NDArray[Any]:
        """Returns the rows of the first items, at least ``stop`` of them. Raises DataError if there are fewer."""
        if stop > len(self._rows):
            if self.count < stop:
                raise self._damaged(f"{stop} items", self.count)
            self._rows = np.memmap(f"{self.folder}/index", _ROW, "r", shape=(self.count,))
        return self._rows

    def payloads(self, indices: Sequence[int]) -> list[Any]:
        """Returns the items of a batch as they were encoded, with an exception in place of a damaged one."""
        rows = self.rows(max(indices, default=-1) + 1)
        spans = [(int(rows["end"][i - 1]) if i else 0, int(rows["end"][i]), int(rows["digest"][i])) for i in indices]
        for start, end, _ in spans if len(spans) > 1 else ():
            # Asks the kernel for all at once.
            os.posix_fadvise(self._items, start, end - start, os.POSIX_FADV_WILLNEED)
        return [self._payload(index, *span) for index, span in zip(indices, spans, strict=True)]

    def _payload(self, index: int, start: int, end: int, digest: int) -> bytes | Exception:
        payload = os.pread(self._items, end - start, start)
        if len(payload) == end - start and xxhash.xxh3_64_intdigest(payload) == digest:
            return payload
        return CorruptEntryError(f"expected item {index} as it was recorded in {self.folder}, got other bytes")

    def digest_of(self, count: int) -> str:
        """Returns the digest of the first items."""
        rows = self.rows(count)
        if count < self._num_digested:
            self._digest, self._num_digested = xxhash.xxh3_64(), 0
        self._digest.update(rows[self._num_digested : count].tobytes())
        self._num_digested = count
        return self._digest.hexdigest()

    def num_bytes(self, count: int) -> int:
        """Returns the bytes of the first items."""
        return int(self.rows(count)["end"][count - 1]) if count else 0

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def wanted(self) -> int:
        """How many items somebody has asked for."""
        return _NUMBER.unpack(os.pread(self._wanted, _NUMBER.size, 0) or bytes(_NUMBER.size))[0]  # type: ignore[no-any-return]

    @wanted.setter
    def wanted(self, count: int) -> None:
        os.pwrite(self._wanted, _NUMBER.pack(count), 0)

    # ── recording ───────────────────────────────────────────────────────────────────────────────────────────────────

    def try_to_lock(self) -> bool:
        """Takes the lock, which ends with the process; returns whether no other one had it."""
        me = os.getpid(), os.path.realpath(self.folder)
        if me in _recording:
            return False
        descriptor = open_file(f"{self.folder}/lock")
        try:
            # A lock of the process: a forked child, such as a loader's worker, does not hold it.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        _recording.add(me)
        self._lock = descriptor
        return True

    def unlock(self) -> None:
        """Leaves the recording to others."""
        if self._lock is not None:
            _recording.discard((os.getpid(), os.path.realpath(self.folder)))
            os.close(self._lock)
            self._lock = None

    def cut(self) -> Mark:
        """Removes what a power cut has torn, and returns the mark."""
        mark, count = self.mark(), self.count
        rows, num_bytes = self.rows(count), os.fstat(self._items).st_size
        for index in range(mark.count, count):
            start, end = self.num_bytes(index), int(rows["end"][index])
            is_whole = start <= end <= num_bytes
            if not is_whole or isinstance(self._payload(index, start, end, int(rows["digest"][index])), Exception):
                count = index
                break
        if count < mark.count:
            raise self._damaged(f"{mark.count} items", count)
        self._cut_to(count)
        remove_leftovers(Path(self.folder, "mark"))
        return mark

    def _cut_to(self, count: int) -> None:
        num_bytes = self.num_bytes(count)
        self._rows = self._rows[:count]
        os.ftruncate(self._index, count * _ROW.itemsize)
        os.ftruncate(self._items, num_bytes)

    def append(self, count: int, payloads: Sequence[bytes]) -> None:
        """Writes items behind the first ``count``. Raises StorageFullError if there is no room; then none of them is
        there."""
        start = self.num_bytes(count)
        rows = np.empty(len(payloads), _ROW)
        rows["end"] = start + np.cumsum([len(payload) for payload in payloads])
        rows["digest"] = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        try:
            _write(self._items, b"".join(payloads), start)
            _write(self._index, rows.tobytes(), count * _ROW.itemsize)
        except OSError as error:
            with suppress(OSError):
                self._cut_to(count)
            raise self._full(error) from error

    def seal(self, mark: Mark) -> None:
        """Makes what is recorded safe from a power cut, and replaces the mark."""
        try:
            os.fsync(self._items)
            os.fsync(self._index)
            body = item_codec.encode(asdict(mark))
            with replacing(Path(self.folder, "mark"), durable=True) as path:
                path.write_bytes(body + _NUMBER.pack(xxhash.xxh3_64_intdigest(body)))
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> OSError | StorageFullError:
        if error.errno not in _NO_ROOM:
            return error
        return StorageFullError.of(
            f"room for the recording in {self.folder}",
            f"{error.strerror} after {self.count} items",
            "free some space and start again, which continues there; or record on a larger disk",
        )


def _write(descriptor: int, content: bytes, place: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written
