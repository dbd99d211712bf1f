"""Says which nodes of a cluster to leave alone for a while: those that failed, and those much slower than the others.

A failed node would cost every batch a timeout, and a dead third of a cache would cost more than it ever saved. A slow
one holds up what the others have answered long ago, until the whole cluster looks slow. Both are left alone, their
keys are misses meanwhile, and one batch tries them again when the pause is over: 2, 4, then every 8 seconds, so that
a node that stays dead costs 3 % of the time of whoever asks (0.25 s in 8), and one that comes back is in use 8 s
later at most.

*Slow* is a matter of comparison: above `SLOW_SECONDS`, and `SLOW_FACTOR` times what the others needed in the same
round (their median), twice in a row. When most are slow nobody is: that is the network, or this machine, and the
caller's to judge.

Belongs to one process; threads may share it. Invariant: a node that answered in time is never left alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Final, TypeAlias

from shade.types import Clock

Address: TypeAlias = "tuple[str, int]"
"""Host and port."""

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 8.0
SLOW_SECONDS: Final = 0.1
SLOW_FACTOR: Final = 4.0
SLOW_ROUNDS: Final = 2


class Patience:
    """Who is resting.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[Address, float] = {}
        self._pause: dict[Address, float] = {}
        self._strikes: dict[Address, int] = {}

    def resting(self) -> frozenset[Address]:
        """Who is to be left alone now."""
        if not self._until:
            return frozenset()
        now = self._clock()
        return frozenset(address for address, until in list(self._until.items()) if now < until)

    def failed(self, address: Address) -> None:
        """It did not answer."""
        pause = min(2 * self._pause.get(address, FIRST_PAUSE_SECONDS / 2), LONGEST_PAUSE_SECONDS)
        self._pause[address] = pause
        self._until[address] = self._clock() + pause

    def answered(self, seconds: Mapping[Address, float]) -> None:
        """One round: what each of those needed that answered.

        Args:
            seconds: From the question to the last byte.
        """
        usual = statistics.median_low(seconds.values()) if len(seconds) > 1 else 0.0
        for address, took in seconds.items():
            if usual and took > max(SLOW_SECONDS, SLOW_FACTOR * usual):
                self._strikes[address] = self._strikes.get(address, 0) + 1
                if self._strikes[address] >= SLOW_ROUNDS:
                    self.failed(address)
            elif address in self._strikes or address in self._pause:
                for memory in (self._strikes, self._pause, self._until):
                    memory.pop(address, None)
