"""How many reads of the origin are worth having under way: more while they do not wait for each other, else fewer.

One link or disk serves so many bytes a second, and answers after some time. Up to the product of the two, one more
read under way is one more served meanwhile, and none takes longer for it (Little's law: as many a second as are under
way, over what each takes). Beyond it they queue, which helps nobody and holds memory. Neither number is known before,
and both change with who else is there. So the limit is doubled while reads take what they took at best, and halved
where they take much longer; but only if that shortens the queue. A queue that other processes make is theirs to
shorten: who went back alone would wait as long as before, for less.

Invariant: a read counts only if another waited for its turn when it ended; how fast nothing was asked for says
nothing.
"""

from __future__ import annotations

LEAST, MOST = 8, 64
"""A disk's own queue is longer than the one, and what holds so much memory that it matters is above the other."""
WINDOW_READS = 16
"""Reads that are judged together."""
FREE, QUEUE = 1.25, 2.5
"""Times the best latency: below the one nobody waits, above the other there is a queue. A doubled limit at most
doubles the latency, so that a step up does not ask for a step down."""
EASED = 0.65
"""A halved limit brings the latency below this part of what it was, if the queue is one's own."""
PATIENCE_WINDOWS = 8
"""Windows until a step down that did not help is tried again."""


class Pace:
    """Limits the reads under way; arithmetic alone.

    Args:
        most: Never more than this, ≥ 1.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.limit = min(LEAST, most)
        """Reads that may be under way now."""
        self._best = float("inf")
        """Seconds a read, in the best window."""
        self._trial: tuple[int, float] | None = None
        """Limit and seconds a read before a step down that is being tried."""
        self._rest = self._stale = 0
        self.idle()

    def idle(self) -> None:
        """Nothing waits to be read: what was seen of this window says nothing."""
        self._num_reads, self._seconds, self._stale = 0, 0.0, 0

    def finished(self, seconds: float) -> None:
        """A read came to its end while others waited for their turn.

        Args:
            seconds: That it took.
        """
        if self._stale:  # it was begun under another limit
            self._stale -= 1
            return
        self._num_reads += 1
        self._seconds += seconds
        if self._num_reads == WINDOW_READS:
            latency = self._seconds / WINDOW_READS
            self.idle()
            self._judge(latency)

    def _judge(self, latency: float) -> None:
        self._best = min(self._best, latency)
        if self._trial is not None:
            limit, before = self._trial
            self._trial = None
            if latency > EASED * before:  # somebody else's queue, or a link that answers later now
                self._rest = PATIENCE_WINDOWS
                self._set(min(2 * limit, self._most))
                return
        self._rest = max(0, self._rest - 1)
        if latency < FREE * self._best:
            self._set(min(2 * self.limit, self._most))
        elif latency > QUEUE * self._best and not self._rest and self.limit > LEAST:
            self._trial = (self.limit, latency)
            self._set(max(self.limit // 2, LEAST))

    def _set(self, limit: int) -> None:
        self._stale = self.limit if limit != self.limit else 0
        self.limit = limit
