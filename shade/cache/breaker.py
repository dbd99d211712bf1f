"""The circuit breaker: leaves a cache that is dead, or slower than the origin, alone for a while.

*Closed*, every batch goes to the store. A failed round opens it at once. A look-up is slow if it takes longer than
`SLOW_SECONDS`, and longer than the origin did lately for as many samples; two in a row open it, or one after a slow
write. Writes have more time, and the median of `WINDOW_WRITES` decides.

*Open*, no batch asks. When the pause is over, a thread asks the store a small question while training continues; if the
answer is bad or late, the pause doubles, up to a minute. After a good answer one batch may pass (*half-open*). An
epoch's plan does not wait for the pause (`Breaker.answers`).

The state is in the residency map, so the discovery of one worker spares the others theirs. A dead cache costs one
timeout for the worker that finds out, then at most one an epoch.
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
"""First pause: a question costs training nothing, and a server may take this long to start."""
LONGEST_PAUSE_SECONDS = 60.0
SLOW_SECONDS = 0.1
"""A round below this is never called slow, whatever the origin does: scheduling noise must not close a cache."""
ENTRY_SECONDS, BYTE_SECONDS = 10e-3, 20e-9
"""What a write may take for each entry and byte, in addition to `SLOW_SECONDS`. A disk writes an entry in 0.05 ms,
and in 4 ms if other programs have the processors."""
SLOW_LOOK_UPS = 2
WINDOW_WRITES, SLOW_WRITES = 5, 3
ASKED_SHARE = 0.05
"""Largest share of the time that plans spend waiting for a store that gives no good answer."""
SIGNING_SECONDS = 0.02
NOT_LOGGED, LOGGED_RECOVERY = 0, -1
"""Values of ``ResidencyMap.logged_by`` beside process ids: nothing was logged yet; the recovery was logged too."""
_READY = 1e-9
"""Value of ``open_until`` after a good answer: the next batch may try."""
_MEMORY = 0.8


def in_thread(action: Callable[[], None]) -> threading.Thread:
    """Runs an action in a thread of its own; returns the thread."""
    thread = threading.Thread(target=action, name="shade-breaker", daemon=True)
    thread.start()
    return thread


class Breaker:
    """Decides whether the store is worth asking.

    ``ask`` is a small question to the store that raises `StoreError`; ``background`` runs it and returns a thread to
    wait for at the end. The clock is monotonic, and comparable between processes of one machine. ``name`` stands for
    the store in log lines.
    """

    def __init__(
        self,
        residency: ResidencyMap,
        ask: Callable[[], object],
        clock: Clock = time.monotonic,
        background: Callable[[Callable[[], None]], threading.Thread | None] = in_thread,
        name: str = "the cache",
    ) -> None:
        self._residency = residency
        self._ask = ask
        self._clock = clock
        self._background = background
        self._thread: threading.Thread | None = None
        self._name = name
        self._is_probing = False
        self._asks_again_at = 0.0
        """Time from which an epoch's plan may ask a store that gave no good answer."""
        self._batch = 1

    @property
    def is_open(self) -> bool:
        """Returns whether the store is left alone."""
        return self._residency.open_until > 0.0

    def allows(self) -> bool:
        """Returns whether this batch may go to the store; asks the store in the background when the pause is over.

        The process that asks, or that passes half-open, first moves the end of the pause for the others.
        """
        until = self._residency.open_until
        if until == 0.0:
            return True
        now = self._clock()
        if now < until:
            return False
        # First, so that no other process asks at the same moment.
        self._push_back(now)
        if until == _READY:
            return True
        self._thread = self._background(self._probe)
        return False

    def answers(self) -> bool:
        """Returns whether the store may be asked, or answers now: like `allows`, but without the pause and waiting for
        the answer. Costs a dead cache one timeout an epoch, and at most `ASKED_SHARE` of the time."""
        self.close()
        begun = self._clock()
        # An epoch that begins within a pause would else be planned without what the cache holds. The bound matters to
        # epochs of some seconds.
        if self._residency.open_until not in (0.0, _READY) and begun >= self._asks_again_at:
            self._push_back(begun)
            self._probe()
            ended = self._clock()
            self._asks_again_at = ended + (ended - begun) * (1 / ASKED_SHARE - 1)
        return self.allows()

    def _push_back(self, now: float) -> None:
        self._residency.open_until = now + self._residency.backoff_seconds
        self._is_probing = True

    def _probe(self) -> None:
        """Asks the store, and opens the breaker again or lets the next batch pass."""
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
        """Records what reading so many samples from the origin cost."""
        self._batch = num_samples
        cost, known = seconds / num_samples, self._residency.origin_seconds
        self._residency.origin_seconds = _MEMORY * known + (1 - _MEMORY) * cost if known else cost

    def is_slow(self, seconds: float, num_samples: int, allowed_seconds: float = 0.0) -> bool:
        """Returns whether the origin would have been faster than the store, which took ``seconds`` for the samples that
        it served or took in, of which ``allowed_seconds`` are none of its fault. False while the origin's cost is
        unknown."""
        is_long = seconds > SLOW_SECONDS + allowed_seconds
        return is_long and 0 < self._residency.origin_seconds * max(1, num_samples) < seconds

    def store_took(self, seconds: float, num_samples: int) -> bool:
        """Records a round that looked up a batch, and found so many samples; returns whether it was slow."""
        residency, is_slow = self._residency, self.is_slow(seconds, num_samples)
        residency.strikes = residency.strikes + 1 if is_slow else 0
        opens = residency.strikes >= SLOW_LOOK_UPS
        self._conclude(is_slow, opens, f"slower than the origin: {seconds:.2f} s for {num_samples} samples")
        return is_slow

    def store_wrote(self, seconds: float, num_entries: int, num_bytes: int) -> None:
        """Records a round that wrote or removed so many entries, and wrote so many bytes."""
        residency, now = self._residency, self._clock()
        is_slow = self.is_slow(seconds, num_entries, num_entries * ENTRY_SECONDS + num_bytes * BYTE_SECONDS)
        if is_slow and not self._is_probing:
            if now - seconds < residency.slow_at:
                return  # it overlaps with one that counted
            residency.slow_at = now
            residency.strikes = max(residency.strikes, 1)  # so that a slow look-up after it opens at once
        residency.slow_writes = (residency.slow_writes << 1 | is_slow) & (1 << WINDOW_WRITES) - 1
        opens = residency.slow_writes.bit_count() >= SLOW_WRITES
        self._conclude(is_slow, opens, f"slower than the origin: {seconds:.2f} s to write {num_entries} entries")

    def _conclude(self, is_slow: bool, opens: bool, reason: str) -> None:
        """Opens the breaker if the trial or too many rounds were slow; closes it after a good trial."""
        residency = self._residency
        if is_slow and (opens or self._is_probing):
            self._open(reason)
        elif self._is_probing:
            self._is_probing = False
            residency.open_until = residency.backoff_seconds = 0.0
            if residency.logged_by > NOT_LOGGED:
                residency.logged_by = LOGGED_RECOVERY
                logger.warning("%s answers again and is back in use", self._name)

    def store_failed(self, error: Exception) -> None:
        """Records a round that failed."""
        self._open(str(error))

    def close(self) -> None:
        """Waits for a question that is under way: at most one timeout of the store. Safe to call twice."""
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
        residency.strikes = residency.slow_writes = 0
        residency.trips += 1
        if self._is_first_to_log():
            logger.warning(
                "%s is out of use (%s); training reads the origin, the cache is tried again after %.0f s",
                self._name,
                reason,
                residency.backoff_seconds,
            )

    def _is_first_to_log(self) -> bool:
        if self._residency.logged_by != NOT_LOGGED:
            return False
        self._residency.logged_by = os.getpid()
        time.sleep(SIGNING_SECONDS)
        return self._residency.logged_by == os.getpid()
