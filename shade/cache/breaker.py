"""The circuit breaker: a cache that is dead, or slower than the origin, is left alone for a while.

Closed, every batch goes to the store. A round that fails opens it at once; so do two slow batches in a row, where slow
means both above `SLOW_SECONDS` and dearer than reading the origin: all the time spent with the store, writing included,
over the samples it served or took in, against what a sample from the origin cost lately. A cache that does not pay its
way is as good as dead, and one on a thin line in front of an even thinner origin stays in use.

Open, no batch asks. When the pause is over, a thread asks the store a small question, while training goes on without
it; if the answer is bad or late, the pause doubles, up to a minute. After a good answer one batch is let through
(half-open), and closes the breaker or opens it again. An epoch's plan waits for no pause and asks for itself
(`answers`): begun within one, the whole epoch would be planned without what the cache holds.

State lives on the shared board, so one worker's discovery spares the others theirs. The price of a dead cache is one
timeout for whoever was asking at that moment, and one an epoch after that; the ledger counts it all, and the log says
it once a rank: the first who wants to tell signs the board, waits until whoever signed at the same moment has done so
too, and tells if the signature is still its own (Fischer's mutual exclusion; a process that the system suspends for
longer than `SIGNING_SECONDS` between its look and its signature tells it twice).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from shade.cache.residency_map import ResidencyMap
from shade.errors import StoreError
from shade.types import Clock

logger = logging.getLogger("shade.cache")

FIRST_PAUSE_SECONDS = 1.0
"""Asking again costs training nothing; this long a server may take to start."""
LONGEST_PAUSE_SECONDS = 60.0
SLOW_SECONDS = 0.1
"""A batch below this is never called slow, whatever the origin does: scheduling noise must not close a cache."""
SLOW_BATCHES = 2
SIGNING_SECONDS = 0.02
NOT_LOGGED, LOGGED_RECOVERY = 0, -1
"""Of the board's ``told_by``, beside process ids: nothing was told yet; the end of it was told too."""
_READY = 1e-9
"""As ``open_until``: the question was answered well, the next batch may try."""
_MEMORY = 0.8


def in_thread(action: Callable[[], None]) -> threading.Thread:
    """Runs it in a thread of its own, which ends with it."""
    thread = threading.Thread(target=action, name="shade-breaker", daemon=True)
    thread.start()
    return thread


class Breaker:
    """Decides whether the store is worth asking.

    Args:
        board: Where the state is shared between the processes of a rank.
        ask: A small question to the store; raises `StoreError`.
        clock: Monotonic seconds, comparable between processes of one machine.
        background: Runs the question; gives a thread to wait for at the end.
    """

    def __init__(
        self,
        residency: ResidencyMap,
        ask: Callable[[], object],
        clock: Clock = time.monotonic,
        background: Callable[[Callable[[], None]], threading.Thread | None] = in_thread,
    ) -> None:
        self._residency = residency
        self._ask = ask
        self._clock = clock
        self._background = background
        self._thread: threading.Thread | None = None
        self._is_probing = False
        self._batch = 1

    @property
    def is_open(self) -> bool:
        """True while the store is left alone."""
        return self._residency.open_until > 0.0

    def allows(self) -> bool:
        """True when this batch may go to the store. Asks, in the background, when it is time to ask again.

        Whoever asks, and whoever is let through half-open, pushes the others back first.
        """
        until = self._residency.open_until
        if until == 0.0:
            return True
        now = self._clock()
        if now < until:
            return False
        self._push_back(now)
        if until == _READY:
            return True
        self._thread = self._background(self._probe)
        return False

    def answers(self) -> bool:
        """True when the store may be asked, or says now that it may: like `allows`, without regard to the pause, and
        waiting for the answer. For what an epoch depends on: it costs a dead cache one timeout an epoch."""
        self.close()
        if self._residency.open_until not in (0.0, _READY):
            self._push_back(self._clock())
            self._probe()
        return self.allows()

    def _push_back(self, now: float) -> None:
        self._residency.open_until = now + self._residency.backoff_seconds
        self._is_probing = True

    def _probe(self) -> None:
        """Asks the store, and opens again or lets the next batch through."""
        begun = self._clock()
        try:
            self._ask()
        except StoreError as error:
            self._open(str(error))
            return
        seconds = self._clock() - begun
        if self.is_slow(seconds, self._batch):
            self._open(f"slower than the origin: {seconds:.2f} s for one answer")
        else:
            self._residency.open_until = _READY

    def origin_took(self, seconds: float, num_samples: int) -> None:
        """Tells the breaker what the origin costs."""
        self._batch = num_samples
        cost, known = seconds / num_samples, self._residency.origin_seconds
        self._residency.origin_seconds = _MEMORY * known + (1 - _MEMORY) * cost if known else cost

    def is_slow(self, seconds: float, num_samples: int) -> bool:
        """True when the origin would have been faster.

        Args:
            seconds: Spent with the store.
            num_samples: Served from it or written to it: what that time was good for.

        Returns:
            False while nothing is known of the origin.
        """
        return seconds > SLOW_SECONDS and 0 < self._residency.origin_seconds * max(1, num_samples) < seconds

    def store_took(self, seconds: float, num_samples: int) -> None:
        """A batch went well; arguments as in `is_slow`."""
        if self.is_slow(seconds, num_samples):
            self._residency.strikes += 1
            if self._residency.strikes >= SLOW_BATCHES or self._is_probing:
                self._open(f"slower than the origin: {seconds:.2f} s for {num_samples} samples")
            return
        self._residency.strikes = 0
        if self._is_probing:
            self._is_probing = False
            self._residency.open_until = 0.0
            self._residency.backoff_seconds = 0.0
            if self._residency.logged_by > NOT_LOGGED:
                self._residency.logged_by = LOGGED_RECOVERY
                logger.warning("the cache answers again and is back in use")

    def store_failed(self, error: Exception) -> None:
        """A round went wrong."""
        self._open(str(error))

    def close(self) -> None:
        """Waits for a question that is under way: one timeout of the store at most. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _open(self, reason: str) -> None:
        residency, now = self._residency, self._clock()
        if residency.open_until > now and not self._is_probing:
            return  # another worker's round failed beside ours and has opened it already
        self._is_probing = False
        residency.backoff_seconds = min(max(2 * residency.backoff_seconds, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        residency.open_until = now + residency.backoff_seconds
        residency.strikes = 0
        residency.trips += 1
        if self._is_first_to_log():
            logger.warning(
                "the cache is out of use (%s); training goes on from the origin, the cache is tried again after %.0f s",
                reason,
                residency.backoff_seconds,
            )

    def _is_first_to_log(self) -> bool:
        if self._residency.logged_by != NOT_LOGGED:
            return False
        self._residency.logged_by = os.getpid()
        time.sleep(SIGNING_SECONDS)
        return self._residency.logged_by == os.getpid()
