"""How many reads of the origin are worth having under way: more while that brings more, fewer when it makes a queue.

One link or disk serves so many bytes a second, and answers after some time. Up to the product of the two, one more
read under way is one more served meanwhile; beyond it, it only makes all others wait, other ranks' as well, and holds
memory. Neither number is known before, and both change with who else is there, so they are felt for: the limit grows
as long as growing pays, goes back when it does not, and is tried again after a while.

Price: a step up that does not pay costs a window of reads at a longer latency. Invariant: a window counts only if
something waited to be read all the time; how fast nothing was asked for says nothing.
"""

from __future__ import annotations

FIRST, MOST = 8, 64
WINDOW_READS = 16
"""Fewest reads that say something; and at least two for each that may be under way."""
GAIN = 1.1
"""A step up that brings less than this brings nothing."""
QUEUE = 1.2
"""Each read takes longer by this factor: they wait for each other."""
PATIENCE_WINDOWS = 8
"""Windows until a step up is tried again."""


class Pace:
    """Limits the reads under way; arithmetic alone.

    Args:
        most: Never more than this, ≥ 1.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.limit = min(FIRST, most)
        """Reads that may be under way now."""
        self._trial: tuple[int, float, float] | None = None
        """Limit, bytes a second and seconds a read before a step that is being tried."""
        self._calm: tuple[float, float] | None = None
        """Bytes a second and seconds a read where it settled."""
        self._rest = 0
        self._begin(None)

    def _begin(self, now: float | None) -> None:
        self._began = now
        self._reads = self._bytes = 0
        self._seconds = 0.0

    def idle(self) -> None:
        """Nothing waits to be read: what was seen of this window says nothing."""
        self._begin(None)

    def finished(self, seconds: float, num_bytes: int, now: float) -> None:
        """A read came to its end while others waited for their turn.

        Args:
            seconds: That it took.
            num_bytes: That it brought.
            now: Monotonic seconds.
        """
        if self._began is None:
            self._begin(now)
            return
        self._reads += 1
        self._bytes += num_bytes
        self._seconds += seconds
        if self._reads >= max(WINDOW_READS, 2 * self.limit) and now > self._began:
            self._judge(self._bytes / (now - self._began), self._seconds / self._reads)
            self._begin(now)

    def _judge(self, rate: float, latency: float) -> None:
        if self._trial is not None:
            self._end_trial(self._trial, rate, latency)
            return
        if self._calm is not None and latency > QUEUE * self._calm[1] and rate < GAIN * self._calm[0]:
            self._try(max(1, self.limit // 2), rate, latency)  # somebody else is there now, too
        elif self._rest:
            self._rest -= 1
        elif self.limit == self._most:
            self._calm = self._calm or (rate, latency)
        else:
            self._try(min(2 * self.limit, self._most), rate, latency)

    def _try(self, limit: int, rate: float, latency: float) -> None:
        if limit != self.limit:
            self._trial = (self.limit, rate, latency)
            self.limit = limit

    def _end_trial(self, trial: tuple[int, float, float], rate: float, latency: float) -> None:
        limit, rate_before, latency_before = trial
        self._trial = None
        if self.limit > limit and rate >= GAIN * rate_before:
            self._calm = None
            self._try(min(2 * self.limit, self._most), rate, latency)
            return
        went_up = self.limit > limit
        keeps = latency <= QUEUE * latency_before if went_up else rate * GAIN >= rate_before
        if not keeps:
            self.limit = limit
        self._calm = (rate, latency) if keeps else (rate_before, latency_before)
        self._rest = PATIENCE_WINDOWS
        if keeps and not went_up:
            self._try(max(1, self.limit // 2), rate, latency)
