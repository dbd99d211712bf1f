"""Which chunks of a shard have arrived in its buffer, while the rest of it is still being copied, and their digests.

Whoever copies says which bytes have come, in any order; whoever sends waits for the chunk that is next, and hashes it,
unless the one who has brought it has done so already. A copy from a device has come when its event has: nobody waits
for that but the sender. Price: a dictionary's worth of arithmetic a piece, and pieces that end where a chunk does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import torch

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES


class StreamHash:
    """One shard's; filled by any number of threads, waited for by one.

    Args:
        data: The buffer, as long as the shard.
        chunk_bytes: Of its chunks.
    """

    def __init__(self, data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
        """Views of the buffer; what is in them is theirs once `wait` has said so."""
        self._missing = [len(chunk) for chunk in self.chunks]
        """Bytes of each chunk that have not come."""
        self._digests: dict[int, str] = {}
        self._on_their_way: deque[tuple[torch.cuda.Event, int, int]] = deque()
        self._turn = threading.Condition()
        self._ended = False

    @classmethod
    def of_all(cls, data: memoryview) -> StreamHash:
        """Of a shard that is all there."""
        found = cls(data)
        found.add(0, len(data))
        return found

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """A range of the shard, cut where chunks end."""
        while start < stop:
            end = min(stop, (start // self.chunk_bytes + 1) * self.chunk_bytes)
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

    def missing(self, number: int) -> int:
        """Bytes of a chunk that have not come."""
        return self._missing[number]

    def hashed(self, number: int, digest: str) -> None:
        """Spares whoever waits for a chunk the hashing of it.

        Args:
            number: Of the chunk, the last bytes of which are copied, but not told yet.
            digest: Of all of it.
        """
        self._digests[number] = digest

    def _count(self, start: int, stop: int) -> None:
        for first, last in self.pieces(start, stop):
            self._missing[first // self.chunk_bytes] -= last - first

    def end(self) -> None:
        """Nothing more will come."""
        with self._turn:
            self._ended = True
            self._turn.notify()

    def wait(self, number: int) -> str | None:
        """Waits for a chunk.

        Args:
            number: Which.

        Returns:
            Its digest; None: it will never be there.
        """
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._missing[number] or self._on_their_way or self._ended)
                if not self._missing[number]:
                    break
                if not self._on_their_way:
                    return None
                event, start, stop = self._on_their_way.popleft()
            event.synchronize()
            with self._turn:
                self._count(start, stop)
        return self._digests.get(number) or digest_of(self.chunks[number])
