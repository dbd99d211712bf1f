"""Lets a slow source and a slow sink work at the same time: a thread fetches ahead, by so many items and no more.

Reading a snapshot out of the cluster and writing it to disk each leave the other idle; side by side they cost the
slower of the two. The price is a thread, and the items under way in memory. Invariant: when `Ahead` is closed, by
whatever way the block is left, the thread has ended.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Final, Generic, TypeVar

T = TypeVar("T")
_LOOK_SECONDS: Final = 0.1
"""How long a thread that has run ahead takes to see that nobody wants its items any more."""


class _Ended:
    """Comes after the last item; carries what ended the source before its time."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Ahead(Generic[T]):
    """An iterator over a source that another thread reads.

    Use it in a ``with`` block; what the source raises is raised where its next item is asked for.

    Args:
        source: Read in that thread alone.
        num_items: How many may wait; with 0 there is no thread, and nothing is fetched before it is asked for.
    """

    def __init__(self, source: Iterable[T], num_items: int) -> None:
        self._source, self._is_ahead = source, num_items > 0
        self._queue: queue.Queue[T | _Ended] = queue.Queue(num_items)
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="shade-ahead", daemon=True)

    def __enter__(self) -> Iterator[T]:
        if not self._is_ahead:
            return iter(self._source)
        self._thread.start()
        return self._items()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._unwanted.set()
        if self._is_ahead:
            self._thread.join()

    def _items(self) -> Iterator[T]:
        while True:
            item = self._queue.get()
            if isinstance(item, _Ended):
                if item.error is not None:
                    raise item.error
                return
            yield item

    def _fetch(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._source:
                if not self._offer(item):
                    return
        except BaseException as raised:  # noqa: BLE001  # it belongs to whoever reads, not to this thread
            error = raised
        self._offer(_Ended(error))

    def _offer(self, item: T | _Ended) -> bool:
        while not self._unwanted.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=_LOOK_SECONDS)
                return True
        return False
