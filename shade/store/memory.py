"""Keeps bytes in this process: for tests, and for a single process that wants no server.

Another process that opens ``memory://`` gets its own store (``shared`` is False), and so does an unpickled copy; after
fork the child has its own copy. With ``?capacity=`` it refuses what would not fit, as a full server does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from typing_extensions import override

from shade.errors import StoreError, StoreFullError
from shade.store.base import STORES, NodeStats, Store, StoreStats
from shade.store.keys import placement_tags
from shade.store.url import StoreURL
from shade.types import Bytes

_ENTRY_BYTES: Final = 200
"""Headers of two Python objects and a place in a dict at its emptiest, rounded up."""


@STORES.register("memory")
class MemoryStore(Store):
    """A dict behind the interface of a server.

    Args:
        url: Its ``capacity`` bounds the sum of `stored_bytes`.
        timeout_seconds: Unused; memory always answers.
    """

    shared = False

    def __init__(self, url: StoreURL, timeout_seconds: float) -> None:
        self.url = str(url)
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._max_bytes = url.capacity_bytes
        self._used_bytes = 0
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[MemoryStore], tuple[StoreURL, float]]:
        return type(self), (self._url, self._timeout_seconds)

    @override
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._check_open()
        return [self._values.get(key) for key in keys]

    @override
    def set_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        with self._lock:
            self._check_open()
            return [self._put(key, value) for key, value in items.items()]

    @override
    def add_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key not in self._values and self._put(key, value) for key, value in items.items()]

    def _put(self, key: str, value: Bytes) -> bool:
        kept = bytes(value)
        old = self._values.get(key)
        grown_bytes = self.stored_bytes(len(key), len(kept))
        if old is not None:
            grown_bytes -= self.stored_bytes(len(key), len(old))
        if self._max_bytes is not None and self._used_bytes + grown_bytes > self._max_bytes:
            return False
        self._values[key] = kept
        self._used_bytes += grown_bytes
        return True

    @override
    def delete_many(self, keys: Sequence[str]) -> list[int]:
        removed = []
        with self._lock:
            self._check_open()
            for key in keys:
                value = self._values.pop(key, None)
                removed.append(-1 if value is None else len(value))
                if value is not None:
                    self._used_bytes -= self.stored_bytes(len(key), len(value))
        return removed

    @override
    def increment(self, key: str, by: int) -> int:
        with self._lock:
            self._check_open()
            try:
                number = int(self._values.get(key, b"0")) + by
            except ValueError:
                raise StoreError(f"expected an integer under {key!r}, got other bytes; use another key") from None
            if not self._put(key, b"%d" % number):
                raise StoreFullError(f"expected room for the counter {key!r}, got a full store; raise its capacity")
            return number

    @override
    def scan(self, prefix: str) -> Iterator[str]:
        self._check_open()
        # A copy of the keys: callers delete while they scan.
        yield from [key for key in list(self._values) if key.startswith(prefix)]

    @override
    def stored_bytes(self, key_length: int, value_length: int) -> int:
        return key_length + value_length + _ENTRY_BYTES

    @override
    def placement(self) -> list[str]:
        self._check_open()
        return [placement_tags()[0]]

    @override
    def stats(self) -> StoreStats:
        self._check_open()
        node = NodeStats("memory", "primary", self._used_bytes, self._max_bytes or 0, len(self._values), "")
        return StoreStats((node,))

    @override
    def ping(self) -> None:
        self._check_open()

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values = {}
            self._used_bytes = 0
