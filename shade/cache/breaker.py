"""The circuit breaker: a cache that is dead, or slower than the origin, is left alone for a while.

Closed, every round goes to the store. A round that fails opens it at once; so do two slow rounds in a row, where slow
means both above `SLOW_SECONDS` and dearer per sample than the origin itself was lately: a cache that does not pay its
way is as good as dead, and one on a thin line in front of an even thinner origin stays in use. While open, nobody
asks. After the pause one round is let through (half-open); if it fails, the pause doubles up to a minute.

State lives on the shared board, so one worker's discovery spares the others theirs. The price of a dead cache is one
timeout per worker already in flight, then one per doubling pause; the log says it once, the ledger counts it all.
"""

from __future__ import annotations

import logging
import time

from shade.cache.board import Board
from shade.types import Clock

logger = logging.getLogger("shade.cache")

FIRST_PAUSE_SECONDS = 2.0
"""Long enough that a probe of a quarter second costs little; short enough to find a restarted server soon."""
LONGEST_PAUSE_SECONDS = 60.0
SLOW_SECONDS = 0.1
"""A round below this is never called slow, whatever the origin does: scheduling noise must not close a cache."""
SLOW_ROUNDS = 2
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
        self._origin_seconds_per_sample: float | None = None
        self._probing = False

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
        cost = seconds / num_samples
        known = self._origin_seconds_per_sample
        self._origin_seconds_per_sample = cost if known is None else _MEMORY * known + (1 - _MEMORY) * cost

    def store_took(self, seconds: float, num_samples: int) -> None:
        """A round went well, in this time."""
        origin = self._origin_seconds_per_sample
        if seconds > SLOW_SECONDS and origin is not None and seconds / num_samples > origin:
            self._board.strikes += 1
            if self._board.strikes >= SLOW_ROUNDS or self._probing:
                self._open(f"slower than the origin ({seconds:.2f} s a batch)")
            return
        self._board.strikes = 0
        if self._probing:
            self._probing = False
            self._board.open_until = 0.0
            self._board.backoff_seconds = 0.0
            if self._board.trips == 1:
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
        if board.trips == 1:
            logger.warning(
                "the cache is out of use (%s); training goes on from the origin, the cache is tried again after %.0f s",
                reason,
                board.backoff_seconds,
            )
