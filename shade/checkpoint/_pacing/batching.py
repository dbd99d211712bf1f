"""Batch length of a streamed shard: how many bytes are written at once, so that the last write ends soonest.

Every write costs a fixed time T_d, however short; and the first write cannot begin before its bytes are copied. With
shards of C bytes, chunks of C_i bytes that become ready every T_c seconds, and batches of B bytes, the time that is not
hidden is T(B) = (C / B)·T_d + (B / C_i)·T_c, and dT/dB = 0 at B* = √(C·T_d·C_i / T_c): AsymCheck (DAC 2026, §3.4). Its
code has the constants of the authors' machine in it, and loses the rest of the last batch. Here T_d and T_c are
measured with every save: T_d is the intercept of the line through the times of the last writes, so the first writes
have different lengths on purpose.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

from shade.checkpoint._pacing.write_cost import Line

_REMEMBERED: Final = 64
"""Last writes and chunks that count; older ones may be of other conditions."""
_TRIED: Final = (1, 2, 4, 8)
"""Lengths of the first batches, in chunks: a line needs more than one length."""


def best_batch_bytes(num_bytes: int, latency_seconds: float, chunk_bytes: int, chunk_seconds: float) -> float:
    """Returns B*, between a chunk and the whole shard, from C, T_d ≥ 0, C_i and T_c ≥ 0 as the module's text has
    them."""
    if chunk_seconds <= 0:
        return max(num_bytes, chunk_bytes)
    best = math.sqrt(num_bytes * latency_seconds * chunk_bytes / chunk_seconds)
    return min(max(best, chunk_bytes), max(num_bytes, chunk_bytes))


class Batching:
    """Measures one rank's writes, and chooses the length of the next one."""

    def __init__(self) -> None:
        self._writes: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._chunk_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._num_tried = 0

    def made(self, seconds: float) -> None:
        """Counts the seconds that waiting for a chunk and hashing it took."""
        self._chunk_seconds.append(seconds)

    def wrote(self, num_bytes: int, seconds: float) -> None:
        """Counts a write and its seconds."""
        self._writes.append((num_bytes, seconds))
        self._num_tried += 1

    def batch_bytes(self, num_bytes: int, chunk_bytes: int) -> int:
        """Returns the least length of the next write, for a shard of so many bytes in chunks of a length."""
        if self._num_tried < len(_TRIED) or len({length for length, _ in self._writes}) == 1:
            return chunk_bytes * _TRIED[self._num_tried % len(_TRIED)]
        chunk_seconds = statistics.median(self._chunk_seconds) if self._chunk_seconds else 0.0
        return int(best_batch_bytes(num_bytes, self.latency_seconds, chunk_bytes, chunk_seconds))

    @property
    def latency_seconds(self) -> float:
        """T_d: where the line through the writes meets a write of 0 bytes; at least 0."""
        return Line.fit(self._writes).alpha
