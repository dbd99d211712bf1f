"""Reads whole files of the data set's origin, the only slow place, many at once where that pays.

Invariants: results come in the order of the paths, and one unreadable file never hides the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from types import BuiltinFunctionType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from typing_extensions import override

from shade.data._origin.file_reads import read_files
from shade.data._origin.read_pool import MOST, ReadPool

logger = logging.getLogger("shade.data")

PARALLEL_SECONDS = 0.0005
"""A mean read slower than this waits rather than copies: from here on reads run in parallel."""
_MEAN_DECAY = 0.9
_UNKNOWN_BYTES = 128 << 10
"""Assumed size of a file whose size the caller did not give."""
_ROOM_BYTES = 1 << 20
"""Small files are read together, as many as fit into this."""
_MOST_OPEN = 128
"""Files that stay open for the next range of them."""


class ByteRange(NamedTuple):
    """The bytes ``start`` … ``stop`` of a file, ``stop`` left out."""

    path: str
    start: int
    stop: int


FileOrRange: TypeAlias = "str | ByteRange"
"""A whole file by its path or URL, or a range of one."""


class _Room(threading.local):
    """Memory of each thread, into which it reads small files."""

    def __init__(self) -> None:
        self.bytes_S = np.empty(_ROOM_BYTES, dtype=np.uint8)


class _OpenFile:
    """A file that is open as long as anything refers to it, which a thread that reads it does."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # it never opened
            os.close(self.descriptor)


class Origin(ABC):
    """Reads files of one kind of storage, or ranges of them.

    Belongs to one process, any number of its threads; pickles as its settings.

    Args:
        num_threads: Upper limit of concurrent reads, ≥ 1.
    """

    def __init__(self, num_threads: int = MOST) -> None:
        self.num_threads = num_threads
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._pool: ReadPool | None = None
        self._making = threading.Lock()
        self._mean_seconds = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"num_threads": self.num_threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read_many(self, paths: Sequence[FileOrRange], sizes: Sequence[int] | None = None) -> list[bytes | OSError]:
        """Reads whole files, or ranges of them; returns the bytes of each in order, or the error that reading it
        raised. Expected sizes, if known, bound the memory under way."""
        if self._pid != os.getpid():
            self._forget()
        expected = [_UNKNOWN_BYTES] * len(paths) if sizes is None else sizes
        results: list[bytes | OSError] = []
        # On a local disk a read takes tens of microseconds and threads only cost; on NFS or object storage it takes
        # milliseconds of waiting, and a batch must pay that latency once and not once a sample.
        while (done := len(results)) < len(paths):
            left, left_bytes = paths[done:], expected[done:]
            # The first slow read of a batch sends the rest of it to the threads.
            if len(left) > 1 and self.num_threads > 1 and self._mean_seconds > PARALLEL_SECONDS:
                reads = [partial(self._read, path, size) for path, size in zip(left, left_bytes, strict=True)]
                return results + self._threads().run(reads, left_bytes)
            results += self._read_first(left, left_bytes)
        return results

    def _threads(self) -> ReadPool:
        with self._making:
            if self._pool is None:
                self._pool = ReadPool(self.num_threads)
                weakref.finalize(self, self._pool.close).atexit = False
            return self._pool

    def _read(self, path: FileOrRange, size: int) -> bytes | OSError:
        (content,) = self._read_first([path], [size])
        return content

    def _read_first(self, paths: Sequence[FileOrRange], sizes: Sequence[int]) -> list[bytes | OSError]:
        """Reads the first path, and those after it that the same call can read."""
        del sizes
        return [self._read_alone(paths[0])]

    def _read_alone(self, path: FileOrRange) -> bytes | OSError:
        begun = time.perf_counter()
        try:
            content = self._content(path)
        except OSError as error:
            return error
        self._mean_seconds = _MEAN_DECAY * self._mean_seconds + (1 - _MEAN_DECAY) * (time.perf_counter() - begun)
        return content

    @abstractmethod
    def _content(self, path: FileOrRange) -> bytes:
        """Returns a whole file, or a range of one, or raises OSError."""

    def close(self) -> None:
        """Ends the threads. Safe to call twice; the next read starts them again."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.close()
        self._pool = None


class FileOrigin(Origin):
    """Reads files of a mounted file system, small ones together."""

    @override
    def _forget(self) -> None:
        super()._forget()
        self._open_files: dict[str, _OpenFile] = {}
        self._room = _Room()

    @override
    def _read_first(self, paths: Sequence[FileOrRange], sizes: Sequence[int]) -> list[bytes | OSError]:
        small = self._small(paths, sizes)
        # Else a script has put its own `open` instead of Python's, which then reads the files.
        if small and isinstance(open, BuiltinFunctionType):
            pace = self._mean_seconds, _MEAN_DECAY, PARALLEL_SECONDS
            contents, self._mean_seconds = read_files(small, self._room.bytes_S, *pace)
            if contents:
                return contents
        return super()._read_first(paths, sizes)

    def _small(self, paths: Sequence[FileOrRange], sizes: Sequence[int]) -> list[str]:
        """Returns the whole files at the beginning that fit into a thread's memory together."""
        small: list[str] = []
        free = _ROOM_BYTES
        for path, size in zip(paths, sizes, strict=True):
            free -= size + 1
            if isinstance(path, ByteRange) or free < 0:
                break
            small.append(path)
        return small

    @override
    def _content(self, path: FileOrRange) -> bytes:
        if isinstance(path, ByteRange):
            return self._range(path)
        with open(path, "rb", buffering=0) as file:
            return file.read()

    def _range(self, place: ByteRange) -> bytes:
        # The file stays open, because opening may take as long as reading.
        file = self._open_files.get(place.path) or _OpenFile(place.path)
        with self._making:
            self._open_files.pop(place.path, None)
            # The last one used is the last in the dict.
            self._open_files[place.path] = file
            unused = next(iter(self._open_files))
            if len(self._open_files) > _MOST_OPEN:
                # A thread that reads it holds a reference; the last one closes it.
                self._open_files.pop(unused)
        parts, at = [], place.start
        while at < place.stop:
            # One call returns at most 2 GiB.
            part = os.pread(file.descriptor, place.stop - at, at)
            if not part:
                raise OSError(f"{place.path} ends at byte {at}, before byte {place.stop}")
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @override
    def close(self) -> None:
        super().close()
        self._open_files.clear()
