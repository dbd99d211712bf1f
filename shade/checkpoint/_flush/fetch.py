"""How many chunks a flusher fetches at once, and the memory that they come into.

Each fetch costs a fixed time T_d, however little it brings: a round trip, threads that are set going and waited for.
And nothing can be written before the first fetch has ended, which takes T_c a chunk. So there is a best number between
few and many; `_pacing.batching` has the formula, AsymCheck's B* = √(C·T_d·C_i / T_c). T_d and T_c are those of
the line through the times of the last fetches. The first fetches of every snapshot are of 1, 2, 4, 8 chunks: so there
is a line, and the disk has something to do at once.

Chunks of a codec may be tiny, and then hundreds are fetched at once; a whole one is enough for a fetch.

Lets a slow source and a slow sink work at the same time: a thread fetches ahead, by so many items and no more.

Reading a snapshot out of the cluster and writing it to disk each leave the other idle; side by side they cost the
slower of the two. The price is a thread, and the items under way in memory. Invariant: when `Prefetch` is closed, by
whatever way the block is left, the thread has ended.
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
"""Fetched at once, unless one chunk alone is longer: received and verified while it is in a core's own cache. With a
round trip of 1 ms that still is 1 GB/s."""
_PAGE_BYTES: Final = 4096
_FIRST: Final = (1, 2, 4, 8)
_REMEMBERED: Final = 8


class FetchPace:
    """Measures fetches, and says how many chunks the next one shall bring."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        """Of the last fetches, by the number that they brought: were all the same, there would be no line."""
        self._num_tried = 0

    def begin(self) -> None:
        """Another snapshot begins."""
        self._num_tried = 0

    def fetched(self, num_chunks: int, seconds: float) -> None:
        """A fetch has ended.

        Args:
            num_chunks: What it brought.
            seconds: What it took.
        """
        self._seconds.setdefault(num_chunks, deque(maxlen=_REMEMBERED)).append(seconds)
        self._num_tried += 1

    def num_chunks(self, num_all: int) -> int:
        """How many the next one shall bring.

        Args:
            num_all: Chunks of the snapshot.

        Returns:
            At least one.
        """
        if self._num_tried < len(_FIRST):
            return _FIRST[self._num_tried]
        line = Line.fit([(num, statistics.median(seconds)) for num, seconds in self._seconds.items()])
        return max(1, round(best_batch_bytes(num_all, line.alpha, 1, line.beta)))


def batches(lengths: Sequence[int], pace: FetchPace, num_all: int) -> Iterator[range]:
    """Divides a shard's chunks into fetches, as the pace has it when each is asked for.

    Args:
        lengths: Stored length of each chunk.
        pace: Says how many.
        num_all: Chunks of the snapshot.

    Yields:
        Numbers of neighbours; at least one, together no longer than `MOST_BYTES` if there is more than one.
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


class Ring:
    """Memory that is given out piece by piece, around and around, each piece from the beginning of a page.

    A piece is given out again when so many bytes have been given out after it that it cannot be in use any more.

    Args:
        longest: Of all pieces.
        num_held: Of the last results of `take`, how many may be in use when the next is asked for.
    """

    def __init__(self, longest: int, num_held: int) -> None:
        most = max(MOST_BYTES, _pages(longest))
        self._length = (num_held + 1) * most + _pages(longest)  # its end may be too short for a piece, and is skipped
        self._memory = memoryview(mmap.mmap(-1, self._length))
        self._next = 0

    def take(self, lengths: Sequence[int]) -> list[memoryview]:
        """Gives out pieces.

        Args:
            lengths: Of each; as `batches` puts them together.

        Returns:
            Memory, each piece in one run.
        """
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
_LOOK_SECONDS: Final = 0.1
"""How long a thread that has run ahead takes to see that nobody wants its items any more."""


class _Ended:
    """Comes after the last item; carries what ended the source before its time."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[T]):
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
