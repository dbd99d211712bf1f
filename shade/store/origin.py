"""The origin: where the data set lives, and the only slow place in the house.

Reads whole files, many at once when that pays. On a local disk a read takes tens of microseconds and threads only cost;
on NFS or object storage it takes milliseconds of waiting, and a batch must pay that latency once and not once a sample.
Which of the two it is, the reader measures as it goes. Invariant: results come in the order of the paths, and one
unreadable file never hides the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

PARALLEL_SECONDS = 0.0005
"""A mean read slower than this is waiting, not copying: from here on reads run in parallel."""
_MEMORY = 0.9


class FileOrigin:
    """Reads files of a mounted file system.

    Belongs to one process; pickles as its settings.

    Args:
        num_threads: Most reads in flight, ≥ 1.
    """

    def __init__(self, num_threads: int = 16) -> None:
        self.num_threads = num_threads
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._mean_seconds = 0.0

    def __getstate__(self) -> dict[str, int]:
        return {"num_threads": self.num_threads}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read_many(self, paths: Sequence[str]) -> list[bytes | OSError]:
        """Reads whole files.

        Args:
            paths: What to read.

        Returns:
            The bytes of each in order, or the error that reading it raised.
        """
        if self._pid != os.getpid():
            self._forget()
        if len(paths) > 1 and self.num_threads > 1 and self._mean_seconds > PARALLEL_SECONDS:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="shade-origin")
            return list(self._pool.map(self._read, paths))
        return [self._read(path) for path in paths]

    def _read(self, path: str) -> bytes | OSError:
        begun = time.perf_counter()
        try:
            with open(path, "rb", buffering=0) as file:
                content = file.read()
        except OSError as error:
            return error
        self._mean_seconds = _MEMORY * self._mean_seconds + (1 - _MEMORY) * (time.perf_counter() - begun)
        return content

    def close(self) -> None:
        """Ends the threads. Safe to call twice; the next read starts them again."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown()
        self._pool = None
