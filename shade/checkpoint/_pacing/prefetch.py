"""Reads a source ahead in a thread, so that making an item and using the one before overlap.

The flusher fetches chunks while it writes others; a streamed upload compresses one while it writes another. The price
is a thread, and memory for the items that wait. Invariant: the thread has ended when the block is left, in any way.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Final, Generic, TypeVar

T = TypeVar("T")
_POLL_SECONDS: Final = 0.1
"""Time that a thread with a full queue takes to notice that the reader has left."""


class _End:
    """Follows the last item; carries the error of the source, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[T]):
    """Iterates over a source that another thread reads ahead.

    Use it in a ``with`` block. An error of the source is raised where its next item is requested.

    Args:
        source: Read in that thread alone.
        num_items: Items that may wait; with 0 there is no thread, and nothing is fetched before it is requested.
    """

    def __init__(self, source: Iterable[T], num_items: int) -> None:
        self._source, self._has_thread = source, num_items > 0
        self._queue: queue.Queue[T | _End] = queue.Queue(num_items)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="shade-ahead", daemon=True)

    def __enter__(self) -> Iterator[T]:
        if not self._has_thread:
            return iter(self._source)
        self._thread.start()
        return self._items()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()
        if self._has_thread:
            self._thread.join()

    def _items(self) -> Iterator[T]:
        while True:
            item = self._queue.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item

    def _fetch(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except BaseException as raised:  # noqa: BLE001  # raised again in the reading thread
            error = raised
        self._put(_End(error))

    def _put(self, item: T | _End) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=_POLL_SECONDS)
                return True
        return False
