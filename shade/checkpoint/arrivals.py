"""Which chunks of a shard have arrived in its buffer, while the rest of it is still being copied.

Whoever copies says which bytes have come, in any order; whoever sends waits for the chunk that is next. A copy from a
device has come when its event has: nobody waits for that but the sender. Price: a dictionary's worth of arithmetic a
piece, and pieces that end where a chunk does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import torch

from shade.checkpoint.manifest import CHUNK_BYTES


class Arrivals:
    """One shard's; filled by any number of threads, waited for by one.

    Args:
        num_bytes: Length of the shard's data.
        chunk_bytes: Of its chunks.
    """

    def __init__(self, num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._missing = [min(chunk_bytes, num_bytes - start) for start in range(0, num_bytes, chunk_bytes)]
        """Bytes of each chunk that have not come."""
        self._on_their_way: deque[tuple[torch.cuda.Event, int, int]] = deque()
        self._turn = threading.Condition()
        self._ended = False

    @classmethod
    def of_all(cls, num_bytes: int) -> Arrivals:
        """Of a shard that is all there."""
        found = cls(num_bytes)
        found.add(0, num_bytes)
        return found

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """A range of the shard, cut where chunks end."""
        while start < stop:
            end = min(stop, (start // self._chunk_bytes + 1) * self._chunk_bytes)
            yield start, end
            start = end

    def add(self, start: int, stop: int, event: torch.cuda.Event | None = None) -> None:
        """Some bytes have come; each is told once.

        Args:
            start: First of them, in the shard.
            stop: One past the last.
            event: They will have come when it has; None: they are here.
        """
        with self._turn:
            if event is None:
                self._count(start, stop)
            else:
                self._on_their_way.append((event, start, stop))
            self._turn.notify()

    def _count(self, start: int, stop: int) -> None:
        for first, last in self.pieces(start, stop):
            self._missing[first // self._chunk_bytes] -= last - first

    def end(self) -> None:
        """Nothing more will come."""
        with self._turn:
            self._ended = True
            self._turn.notify()

    def wait(self, number: int) -> bool:
        """Waits for a chunk.

        Args:
            number: Which.

        Returns:
            Whether it is there; false: it never will be.
        """
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._missing[number] or self._on_their_way or self._ended)
                if not self._missing[number]:
                    return True
                if not self._on_their_way:
                    return False
                event, start, stop = self._on_their_way.popleft()
            event.synchronize()
            with self._turn:
                self._count(start, stop)
