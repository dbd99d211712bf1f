"""The circuit breaker: a cache that is dead, or slower than the origin, is left alone for a while.

Closed, every batch goes to the store. A round that fails opens it at once; so do two slow batches in a row, where slow
means both above `SLOW_SECONDS` and dearer than reading the origin: all the time spent with the store, writing included,
over the samples it served or took in, against what a sample from the origin cost lately. A cache that does not pay its
way is as good as dead, and one on a thin line in front of an even thinner origin stays in use. While open, nobody asks.
After the pause one batch is let through (half-open); if it fails, the pause doubles up to a minute.

State lives on the shared board, so one worker's discovery spares the others theirs. The price of a dead cache is one
timeout per worker already in flight, then one per doubling pause; the ledger counts it all, and the log says it once
a rank: the first who wants to tell signs the board, waits until whoever signed at the same moment has done so too, and
tells if the signature is still its own (Fischer's mutual exclusion; a process that the system suspends for longer
than `SIGNING_SECONDS` between its look and its signature tells it twice).
"""

from __future__ import annotations

import logging
import os
import time

from shade.cache.board import Board
from shade.types import Clock

logger = logging.getLogger("shade.cache")

FIRST_PAUSE_SECONDS = 2.0
"""Long enough that a probe of a quarter second costs little; short enough to find a restarted server soon."""
LONGEST_PAUSE_SECONDS = 60.0
SLOW_SECONDS = 0.1
"""A batch below this is never called slow, whatever the origin does: scheduling noise must not close a cache."""
SLOW_BATCHES = 2
SIGNING_SECONDS = 0.02
NOBODY, TOLD_BACK = 0, -1
"""Of the board's ``told_by``, beside process ids: nothing was told yet; the end of it was told too."""
_MEMORY = 0.8


class Breaker:
    """Decides whether the store is worth asking.

    Args:
        board: Where the state is shared between the processes of a rank.
        clock: Monotonic seconds, comparable between processes of one machine.
    """

    def __init__(self, board: Board, clock: Clock = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._probing = False

    @property
    def is_pausing(self) -> bool:
        """True while nobody asks the store."""
        return self._board.open_until > self._clock()

    def allows(self) -> bool:
        """True when the store may be asked now. Half-open, the one who is let through pushes the others back."""
        until = self._board.open_until
        if until == 0.0:
            return True
        now = self._clock()
        if now < until:
            return False
        self._board.open_until = now + self._board.backoff_seconds
        self._probing = True
        return True

    def origin_took(self, seconds: float, num_samples: int) -> None:
        """Tells the breaker what the origin costs."""
        cost, known = seconds / num_samples, self._board.origin_seconds
        self._board.origin_seconds = _MEMORY * known + (1 - _MEMORY) * cost if known else cost

    def is_slow(self, seconds: float, num_samples: int) -> bool:
        """True when the origin would have been faster.

        Args:
            seconds: Spent with the store.
            num_samples: Served from it or written to it: what that time was good for.
        """
        return seconds > SLOW_SECONDS and 0 < self._board.origin_seconds * max(1, num_samples) < seconds

    def store_took(self, seconds: float, num_samples: int) -> None:
        """A batch went well; arguments as in `is_slow`."""
        if self.is_slow(seconds, num_samples):
            self._board.strikes += 1
            if self._board.strikes >= SLOW_BATCHES or self._probing:
                self._open(f"slower than the origin: {seconds:.2f} s for {num_samples} samples")
            return
        self._board.strikes = 0
        if self._probing:
            self._probing = False
            self._board.open_until = 0.0
            self._board.backoff_seconds = 0.0
            if self._board.told_by > NOBODY:
                self._board.told_by = TOLD_BACK
                logger.warning("the cache answers again and is back in use")

    def store_failed(self, error: Exception) -> None:
        """A round went wrong."""
        self._open(str(error))

    def _open(self, reason: str) -> None:
        board, now = self._board, self._clock()
        if board.open_until > now and not self._probing:
            return  # another worker's round failed beside ours and has opened it already
        self._probing = False
        board.backoff_seconds = min(max(2 * board.backoff_seconds, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        board.open_until = now + board.backoff_seconds
        board.strikes = 0
        board.trips += 1
        if self._is_first_to_tell():
            logger.warning(
                "the cache is out of use (%s); training goes on from the origin, the cache is tried again after %.0f s",
                reason,
                board.backoff_seconds,
            )

    def _is_first_to_tell(self) -> bool:
        if self._board.told_by != NOBODY:
            return False
        self._board.told_by = os.getpid()
        time.sleep(SIGNING_SECONDS)
        return self._board.told_by == os.getpid()
