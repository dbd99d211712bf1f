"""Provides doubles for tests of training code: a clock, a failing store, slow storage, a data set that counts reads.

Users can test with them whether their own loop continues, with the same samples, when the cache fails. Each double
records what it did, because a fault test must first show that its fault happened.

Example: ``FaultyStore(open_store("local://")).fail_from("get_many", 3, StoreUnavailableError("gone"))``
"""

from __future__ import annotations

import builtins
import io
import multiprocessing
import os
import pathlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from typing_extensions import override

from shade.store.base import Store, StoreStats
from shade.types import Bytes

__all__ = ["CountingDataset", "FaultyStore", "ManualClock", "SlowStorage"]

T = TypeVar("T")


class ManualClock:
    """A clock that moves only when `advance` is called.

    Args:
        now: Its first time, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds


class FaultyStore(Store):
    """A store that passes every call to another one, failing as scripted.

    It belongs to one process: a copy in a worker has no script.

    Args:
        inner: The store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url, self.shared = inner.url, inner.shared
        self.num_calls: Counter[str] = Counter()
        """Calls by method, with the failed ones."""
        self.num_faults: Counter[str] = Counter()
        """Faults by method."""
        self._scripts: list[tuple[str, range, Exception]] = []

    def __reduce__(self) -> tuple[type[FaultyStore], tuple[Store]]:
        return type(self), (self.inner,)

    def fail_from(self, method: str, call: int, error: Exception, *, num_calls: int = 2**31) -> FaultyStore:
        """Makes ``num_calls`` calls of a method (``*``: of all) raise the error, from this call on, counted from 0
        by method."""
        self._scripts.append((method, range(call, call + num_calls), error))
        return self

    def heal(self) -> None:
        """Removes the script."""
        self._scripts.clear()

    def _call(self, method: str, action: Callable[[], T]) -> T:
        call = self.num_calls[method]
        self.num_calls[method] += 1
        for scripted, calls, error in self._scripts:
            if scripted in (method, "*") and call in calls:
                self.num_faults[method] += 1
                raise error
        return action()

    @override
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._call("get_many", lambda: self.inner.get_many(keys))

    @override
    def get_many_into(self, items: Mapping[str, memoryview]) -> list[bool]:
        return self._call("get_many_into", lambda: self.inner.get_many_into(items))

    @override
    def set_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        return self._call("set_many", lambda: self.inner.set_many(items))

    @override
    def add_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        return self._call("add_many", lambda: self.inner.add_many(items))

    @override
    def delete_many(self, keys: Sequence[str]) -> list[int]:
        return self._call("delete_many", lambda: self.inner.delete_many(keys))

    @override
    def increment(self, key: str, by: int) -> int:
        return self._call("increment", lambda: self.inner.increment(key, by))

    @override
    def scan(self, prefix: str) -> Iterator[str]:
        return self._call("scan", lambda: self.inner.scan(prefix))

    @override
    def stored_bytes(self, key_length: int, value_length: int) -> int:
        return self.inner.stored_bytes(key_length, value_length)

    @override
    def placement(self) -> list[str]:
        return self._call("placement", self.inner.placement)

    @override
    def homes(self, keys: Sequence[str]) -> list[str]:
        return self._call("homes", lambda: self.inner.homes(keys))

    @override
    def stats(self) -> StoreStats:
        return self._call("stats", self.inner.stats)

    @override
    def ping(self) -> None:
        self._call("ping", self.inner.ping)

    @override
    def close(self) -> None:
        self.inner.close()


class SlowStorage:
    """Makes files below a folder as slow to read as remote storage, while it is entered; a context manager.

    Each ``open`` for reading waits, and then until the bytes of the file came through a pipe that all readers share. It
    takes the place of Python's ``open`` in this process and in those that it forks, DataLoader workers too, so every
    loader that opens its files in Python is slowed alike. Names, sizes and times of files stay fast.

    Args:
        folder: The files.
        open_seconds: Wait of each open.
        bytes_per_second: Of the pipe.
    """

    def __init__(self, folder: str | os.PathLike[str], open_seconds: float, bytes_per_second: float) -> None:
        self._folder = os.path.join(os.path.abspath(folder), "")
        self._open_seconds, self._bytes_per_second = open_seconds, bytes_per_second
        # Until when the pipe is booked, files opened, their bytes.
        self._shared = multiprocessing.get_context("fork").Array("d", 3)
        self._true_open: Any = builtins.open

    @property
    def num_opens(self) -> int:
        """Returns the files opened so far, by all processes."""
        return int(self._shared[1])

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of those files, each as often as it was opened."""
        return int(self._shared[2])

    def _open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        opened = self._true_open(file, mode, *arguments, **options)
        if not isinstance(file, int) and set(mode) <= set("rbt") and os.path.abspath(file).startswith(self._folder):
            time.sleep(self._open_seconds)
            num_bytes = os.fstat(opened.fileno()).st_size
            with self._shared.get_lock():
                now = time.monotonic()
                self._shared[0] = ready = max(now, self._shared[0]) + num_bytes / self._bytes_per_second
                self._shared[1] += 1
                self._shared[2] += num_bytes
            time.sleep(ready - now)
        return opened

    def __enter__(self) -> SlowStorage:
        self._put(self._open)
        return self

    def __exit__(self, *exc: object) -> None:
        self._put(self._true_open)

    def _put(self, opener: Any) -> None:
        builtins.open = io.open = opener
        if sys.version_info < (3, 11):  # whose paths keep the function that they found when they were imported
            pathlib._NormalAccessor.open = staticmethod(opener)


class CountingDataset:
    """A map-style data set that counts its reads in this process, and may be slow or broken.

    Args:
        items: The samples.
        seconds: Duration of a read.
        bad: Indices whose read raises `OSError`.
    """

    def __init__(self, items: Sequence[Any], *, seconds: float = 0.0, bad: Sequence[int] = ()) -> None:
        self._items, self._seconds, self._bad = items, seconds, frozenset(bad)
        self._lock = threading.Lock()
        self.reads: list[int] = []
        """The index of every read, in order."""

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            self.reads.append(index)
        time.sleep(self._seconds)
        if index in self._bad:
            raise OSError(f"sample {index} is broken on purpose")
        return self._items[index]
