"""Fetches chunks from cluster memory while earlier ones are written: how many at once, and into which memory.

Each fetch costs a fixed time T_d for the round trip and the threads. The first write waits for the first fetch, which
takes T_c per chunk. So there is a best number of chunks: AsymCheck's B* = √(C·T_d·C_i / T_c), see `_pacing.batching`.
T_d and T_c come from a line through the times of the last fetches. The first fetches of every snapshot bring 1, 2, 4
and 8 chunks, which gives the line different points and the disk an early start. Encoded chunks may be tiny, and then
hundreds are fetched at once; a whole chunk is enough for one fetch.

Reading a snapshot from the cluster and writing it to disk each leave the other idle; in parallel they cost the slower
of the two. `Prefetch` costs a thread, and memory for the items in flight. Invariant: when `Prefetch` is closed, in
whatever way the block is left, its thread has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import statistics
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, Generic, TypeVar

from shade.checkpoint._pacing.batching import best_batch_bytes
from shade.checkpoint._pacing.write_cost import Line

MOST_BYTES: Final = 2**20
"""Bytes of one fetch, unless one chunk alone is longer: it is received and verified while it is in a core's cache. With
a round trip of 1 ms this is still 1 GB/s."""
_PAGE_BYTES: Final = 4096
_FIRST_FETCHES: Final = (1, 2, 4, 8)
_REMEMBERED: Final = 8


class FetchPace:
    """Measures fetches, and chooses the number of chunks of the next one."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        """Times of the last fetches by number of chunks; equal numbers alone would give no line."""
        self._num_tried = 0

    def begin(self) -> None:
        """Starts a new snapshot."""
        self._num_tried = 0

    def fetched(self, num_chunks: int, seconds: float) -> None:
        """Records a fetch of ``num_chunks`` that took ``seconds``."""
        self._seconds.setdefault(num_chunks, deque(maxlen=_REMEMBERED)).append(seconds)
        self._num_tried += 1

    def num_chunks(self, num_all: int) -> int:
        """Returns the number of chunks of the next fetch, at least 1; ``num_all`` is that of the snapshot."""
        if self._num_tried < len(_FIRST_FETCHES):
            return _FIRST_FETCHES[self._num_tried]
        line = Line.fit([(num, statistics.median(seconds)) for num, seconds in self._seconds.items()])
        return max(1, round(best_batch_bytes(num_all, line.alpha, 1, line.beta)))


def batches(lengths: Sequence[int], pace: FetchPace, num_all: int) -> Iterator[range]:
    """Divides a shard's chunks into fetches; asks the pace each time.

    Args:
        lengths: Stored length of each chunk.
        pace: Chooses the number of chunks.
        num_all: Number of chunks of the snapshot.

    Yields:
        Numbers of adjacent chunks: one, or several of together at most `MOST_BYTES`.
    """
    first = 0
    while first < len(lengths):
        stop, most = first + 1, pace.num_chunks(num_all)
        num_bytes = _pages(lengths[first])
        while stop < len(lengths) and stop - first < most and num_bytes + _pages(lengths[stop]) <= MOST_BYTES:
            num_bytes += _pages(lengths[stop])
            stop += 1
        yield range(first, stop)
        first = stop


class BufferRing:
    """Lends memory in turn, each piece at the beginning of a page.

    A piece is lent again when so many bytes were lent after it that it cannot be in use any more.

    Args:
        longest: Length of the longest piece.
        num_held: Number of latest results of `take` that may be in use when the next is requested.
    """

    def __init__(self, longest: int, num_held: int) -> None:
        most = max(MOST_BYTES, _pages(longest))
        self._length = (num_held + 1) * most + _pages(longest)  # the end may be too short for a piece, and is skipped
        self._memory = memoryview(mmap.mmap(-1, self._length))
        self._next = 0

    def take(self, lengths: Sequence[int]) -> list[memoryview]:
        """Returns contiguous memory for each length; the lengths are those of one fetch of `batches`."""
        taken = []
        for length in lengths:
            if self._next + _pages(length) > self._length:
                self._next = 0
            taken.append(self._memory[self._next : self._next + length])
            self._next += _pages(length)
        return taken


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


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
