"""The origin: where the data set lives, and the only slow place in the house.

Reads whole files, many at once when that pays. On a local disk a read takes tens of microseconds and threads only cost;
on NFS or object storage it takes milliseconds of waiting, and a batch must pay that latency once and not once a sample.
Which of the two it is, the reader measures as it goes; how many at once, `shade.store.origin_pace` finds out.
Invariant: results come in the order of the paths, and one unreadable file never hides the others.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from shade.store.origin_pace import MOST
from shade.store.origin_pool import ReadPool

PARALLEL_SECONDS = 0.0005
"""A mean read slower than this is waiting, not copying: from here on reads run in parallel."""
_MEMORY = 0.9
_UNKNOWN_BYTES = 128 << 10
"""Taken for the size of a file whose size nobody said."""


class FileOrigin:
    """Reads files of a mounted file system.

    Belongs to one process, any number of its threads; pickles as its settings.

    Args:
        num_threads: Most reads in flight, ≥ 1.
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

    def read_many(self, paths: Sequence[str], sizes: Sequence[int] | None = None) -> list[bytes | OSError]:
        """Reads whole files.

        Args:
            paths: What to read.
            sizes: Expected bytes of each, if known; they bound the memory under way.

        Returns:
            The bytes of each in order, or the error that reading it raised.
        """
        if self._pid != os.getpid():
            self._forget()
        if len(paths) > 1 and self.num_threads > 1 and self._mean_seconds > PARALLEL_SECONDS:
            expected = [_UNKNOWN_BYTES] * len(paths) if sizes is None else sizes
            return self._threads().run([partial(self._read, path) for path in paths], expected)
        return [self._read(path) for path in paths]

    def _threads(self) -> ReadPool:
        with self._making:
            if self._pool is None:
                self._pool = ReadPool(self.num_threads)
                weakref.finalize(self, self._pool.close).atexit = False
            return self._pool

    def _read(self, path: str) -> bytes | OSError:
        begun = time.perf_counter()
        try:
            content = self._content(path)
        except OSError as error:
            return error
        self._mean_seconds = _MEMORY * self._mean_seconds + (1 - _MEMORY) * (time.perf_counter() - begun)
        return content

    def _content(self, path: str) -> bytes:
        """A whole file; raises OSError."""
        with open(path, "rb", buffering=0) as file:
            return file.read()

    def close(self) -> None:
        """Ends the threads. Safe to call twice; the next read starts them again."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.close()
        self._pool = None
