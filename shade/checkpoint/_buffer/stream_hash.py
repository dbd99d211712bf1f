"""Hashes the chunks of a shard while it is still being copied.

The copying threads report which bytes are copied, in any order. The writing thread waits for the next chunk and hashes
it, unless a copying thread has done so already. A copy from a device is done when its event is, and only the writing
thread waits for that. The price is a little arithmetic for each piece, and pieces that end where a chunk ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import torch

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES


class StreamHash:
    """The chunks of one shard: any number of threads report copies, one thread waits for chunks.

    Args:
        data: The buffer, as long as the shard.
        chunk_bytes: Length of a chunk.
    """

    def __init__(self, data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
        """Views of the buffer; a chunk's content is right once `wait` has returned its digest."""
        self._missing = [len(chunk) for chunk in self.chunks]
        """Bytes of each chunk that are not copied yet."""
        self._digests: dict[int, str] = {}
        self._device_copies: deque[tuple[torch.cuda.Event, int, int]] = deque()
        self._turn = threading.Condition()
        self._ended = False

    @classmethod
    def of_all(cls, data: memoryview) -> StreamHash:
        """Returns the stream hash of a shard that is copied already."""
        found = cls(data)
        found.add(0, len(data))
        return found

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields a range of the shard in pieces that end where chunks end."""
        while start < stop:
            end = min(stop, (start // self.chunk_bytes + 1) * self.chunk_bytes)
            yield start, end
            start = end

    def add(self, start: int, stop: int, event: torch.cuda.Event | None = None) -> None:
        """Reports copied bytes of the shard, each byte once; with an event, they are copied when it happens."""
        with self._turn:
            if event is None:
                self._count(start, stop)
            else:
                self._device_copies.append((event, start, stop))
            self._turn.notify()

    def missing(self, number: int) -> int:
        """Returns how many bytes of a chunk are not copied yet."""
        return self._missing[number]

    def hashed(self, number: int, digest: str) -> None:
        """Sets the digest of a chunk, before its last bytes are reported, so that `wait` need not compute it."""
        self._digests[number] = digest

    def _count(self, start: int, stop: int) -> None:
        for first, last in self.pieces(start, stop):
            self._missing[first // self.chunk_bytes] -= last - first

    def end(self) -> None:
        """Reports that all bytes have been copied."""
        with self._turn:
            self._ended = True
            self._turn.notify()

    def wait(self, number: int) -> str | None:
        """Waits until a chunk is copied, and returns its digest; None if its copy has failed."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._missing[number] or self._device_copies or self._ended)
                if not self._missing[number]:
                    break
                if not self._device_copies:
                    return None
                event, start, stop = self._device_copies.popleft()
            event.synchronize()
            with self._turn:
                self._count(start, stop)
        return self._digests.get(number) or digest_of(self.chunks[number])
