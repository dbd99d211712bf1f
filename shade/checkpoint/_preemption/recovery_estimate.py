"""Estimates what a failure would cost now: "if killed now: lose 3 steps / 1.2 s, recover in 0.4 s from shared memory".

Three failures are distinguished, since each leaves other tiers: this process dies (shared memory is left), its machine
is lost (the cluster's memory is left, if it lies on other machines), all machines are lost (storage is left). The
losses follow from the committed saves; the times from the last few saves, and after a restore from how long it took.

Invariant: a snapshot counted as recoverable was committed in that tier; errors are on the side of losing more.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from shade.checkpoint._save.async_writer import CommitResult, SaveHandle
from shade.errors import StoreError
from shade.types import Clock

SHARED, CLUSTER, STORAGE = "shared memory", "cluster memory", "storage"
"""Names of the tiers, as in `Tier.name`."""
FIRST_COPY_BYTES_PER_SECOND: Final = 1e9
"""Rate of a copy before one has been measured: into pages that are touched for the first time."""
_RECENT: Final = 3
_MOST_DIRTY: Final = 8
_LEAST_POLL_SECONDS: Final = 0.05
_POLL_FRACTION: Final = 0.05
"""Poll interval as a part of the time since the save began: the relative error of the measured durability."""
MEANING: Final[Mapping[str, str]] = {
    "lost_steps": "Optimizer steps that would have to be done again.",
    "lost_seconds": "Training time that would have to be spent again.",
    "recover_seconds": "Reading the state back; without starting processes. Absent where there is nothing to read.",
}
"""How to read each quantity of a `Loss`."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Loss:
    """What one kind of failure would cost."""

    steps: int
    seconds: float
    recover_seconds: float | None
    """Measured, or expected from the rates of writing; None if unknown, or if there is no snapshot to recover."""
    tier: str | None
    """The tier to recover from; None if no snapshot would be left."""

    def __str__(self) -> str:
        lost = f"lose {self.steps} step{'' if self.steps == 1 else 's'} / {self.seconds:.1f} s"
        if self.tier is None:
            return f"{lost}, nothing to recover from"
        took = "" if self.recover_seconds is None else f" in {self.recover_seconds:.2f} s"
        return f"{lost}, recover{took} from {self.tier}"


@dataclass(frozen=True)
class RecoveryEstimate:
    """What each kind of failure would cost now."""

    step: int
    """Optimizer steps done."""
    process: Loss
    """If this process is killed, and its machine stays."""
    machine: Loss
    """If its machine is lost, with its memory."""
    cluster: Loss
    """If all machines are lost, and storage stays."""

    def __str__(self) -> str:
        said = f"if killed now: {self.process}"
        if self.machine.tier != self.process.tier:
            said += f"; with this machine: {self.machine}"
        if self.cluster.tier != self.machine.tier:
            said += f"; with all machines: {self.cluster}"
        return said

    def row(self) -> dict[str, float | str | None]:
        """Returns a row of a metrics file: ``checkpoint_process_lost_steps`` and so on."""
        found: dict[str, float | str | None] = {}
        for end, loss in self._losses().items():
            found |= {
                f"checkpoint_{end}_lost_steps": loss.steps,
                f"checkpoint_{end}_lost_seconds": loss.seconds,
                f"checkpoint_{end}_recover_seconds": loss.recover_seconds,
                f"checkpoint_{end}_tier": loss.tier,
            }
        return found

    def prometheus(self, labels: Mapping[str, object] | None = None) -> str:
        """Returns Prometheus lines, as ``shade_checkpoint_lost_steps{end="process",tier="shared memory"} 3``."""
        lines = []
        for name, meaning in MEANING.items():
            lines += [f"# HELP shade_checkpoint_{name} {meaning}", f"# TYPE shade_checkpoint_{name} gauge"]
            for end, loss in self._losses().items():
                value = {"lost_steps": loss.steps, "lost_seconds": loss.seconds}.get(name, loss.recover_seconds)
                if value is not None:
                    named = {**(labels or {}), "end": end, "tier": loss.tier or "none"}
                    quoted = ",".join(f"{key}={json.dumps(str(each))}" for key, each in named.items())
                    lines.append(f"shade_checkpoint_{name}{{{quoted}}} {value!r}")
        return "\n".join(lines) + "\n"

    def _losses(self) -> dict[str, Loss]:
        return {"process": self.process, "machine": self.machine, "cluster": self.cluster}


@dataclass(frozen=True)
class RecoveryForecast:
    """How long a save begun now would take, in seconds from its beginning; None: no such save has been measured."""

    waiting_seconds: float
    """Time until the save in flight is committed, which a new save waits for; it adds to the other times."""
    copied_seconds: float
    committed_seconds: float | None
    """Time until it is committed beyond shared memory."""
    durable_seconds: float | None


@dataclass(frozen=True)
class _Held:
    """A snapshot that could be restored."""

    step: int
    taken: float
    """When its state was taken, by the clock."""


class LossTracker:
    """Follows the saves of one rank. Shared memory has room for ``num_buffers`` snapshots; a single buffer holds none
    while it is copied into. ``is_durable`` says whether a save committed in the cluster's memory is in storage; None if
    there is no storage."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        num_buffers: int,
        step: Callable[[], int],
        is_durable: Callable[[CommitResult], bool] | None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._rank, self._world_size, self._num_buffers = rank, world_size, num_buffers
        self._step, self._is_durable, self._clock = step, is_durable, clock
        self._lock = threading.RLock()
        self._began = clock()
        self._held: dict[str, _Held] = {}
        self._in_flight: deque[SaveHandle] = deque()
        self._dirty: deque[tuple[SaveHandle, CommitResult]] = deque(maxlen=_MOST_DIRTY)
        """Saves committed in the cluster's memory and not known to be durable, oldest first."""
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        """Seconds of the last saves until they were copied, committed, durable; the next may take as long as any."""
        self._num_bytes = 0
        self._restored: dict[str, float] = {}
        """Bytes per second of the last restore, by tier."""
        self._wake, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def begun(self, handle: SaveHandle, num_bytes: int) -> None:
        """Counts a save that has begun, with the length of this rank's shard."""
        with self._lock:
            self._settle()
            self._num_bytes = num_bytes
            num_unfinished = sum(not other.is_in_shared_memory for other in self._in_flight)
            self._in_flight.append(handle)
            if num_unfinished + 1 >= self._num_buffers:  # this save overwrites the newest whole snapshot
                self._held.pop(SHARED, None)
        handle.copied.add_done_callback(lambda done: self._copied(handle, done))
        handle.committed.add_done_callback(lambda done: self._committed(handle, done))

    def restored(
        self, step: int, held_by: Collection[str], read: Collection[str], seconds: float, num_bytes: int
    ) -> None:
        """Counts a restored snapshot, which a failure would go back to until the next save is committed.

        ``held_by`` are the tiers that have it, ``read`` those that it was read from, in so many seconds.
        """
        with self._lock:
            self._settle()
            self._held = dict.fromkeys(held_by, _Held(step, self._clock()))
            self._restored |= dict.fromkeys(read, num_bytes / max(seconds, 1e-9))

    def _copied(self, handle: SaveHandle, done: Future[None]) -> None:
        if done.exception() is None:
            with self._lock:
                self._recent["copied"].append(self._clock() - handle.begun)

    def _committed(self, handle: SaveHandle, done: Future[CommitResult]) -> None:
        """Logs a committed save, in a thread of the writer."""
        if self._rank != 0 or done.exception() is not None:
            return
        logger.info(
            "step %d is in %s: %.1f MB a rank, training waited %.3f s, committed after %.2f s; %s",
            *(handle.step, done.result().tier.name, self._num_bytes / 1e6),
            *(handle.blocked_seconds, handle.commit_seconds, self.read()),
        )
        with self._lock:
            if self._dirty and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name="shade-recovery-estimate", daemon=True)
                self._thread.start()
        self._wake.set()

    def _settle(self) -> None:
        """Counts how far the saves in flight have come. Called under the lock."""
        for handle in self._in_flight:
            if handle.is_in_shared_memory:
                self._held[SHARED] = _Held(handle.step, handle.begun)
        while self._in_flight and self._in_flight[0].committed.done():
            handle = self._in_flight.popleft()
            if handle.committed.exception() is not None:
                continue
            result = handle.committed.result()
            self._held[result.tier.name] = _Held(handle.step, handle.begun)
            if result.tier.name != SHARED:
                self._recent["committed"].append(handle.commit_seconds)
            if result.tier.name == STORAGE:
                self._recent["durable"].append(handle.commit_seconds)
            elif result.tier.name == CLUSTER and self._is_durable is not None:
                self._dirty.append((handle, result))

    # ── durability ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                oldest = self._dirty[0][0].begun if self._dirty else None
            if self._closed:
                return
            if oldest is None:
                self._wake.wait()
            else:
                self._wake.wait(max(_LEAST_POLL_SECONDS, _POLL_FRACTION * (self._clock() - oldest)))
            self._ask()

    def _ask(self) -> None:
        """Asks for each dirty save, newest first, if it is durable; the saves before a durable one need no question."""
        with self._lock:
            self._settle()
            asked = list(self._dirty)
        for handle, result in reversed(asked):
            assert self._is_durable is not None, "nothing is dirty without storage"
            try:
                durable = self._is_durable(result)
            except StoreError:
                return
            if durable:
                with self._lock:
                    if (handle, result) in self._dirty:
                        if self._rank == 0:  # other ranks ask only when read, which measures nothing
                            self._recent["durable"].append(self._clock() - handle.begun)
                        self._held[STORAGE] = _Held(handle.step, handle.begun)
                        while self._dirty and self._dirty[0][0].begun <= handle.begun:
                            self._dirty.popleft()
                return

    def is_durable(self, result: CommitResult) -> bool | None:
        """Whether a committed save is in storage, as far as the store says; None if there is no storage."""
        if result.tier.name == STORAGE:
            return True
        if result.tier.name == SHARED or self._is_durable is None:
            return None
        return self._is_durable(result)

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # ── estimates ───────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self) -> RecoveryEstimate:
        """Returns what each kind of failure would cost now."""
        if self._rank != 0:
            self._ask()
        with self._lock:
            self._settle()
            forecast, step = self.forecast(), self._step()
            return RecoveryEstimate(
                step,
                self._loss(step, (SHARED, CLUSTER, STORAGE), forecast),
                self._loss(step, (CLUSTER, STORAGE), forecast),
                self._loss(step, (STORAGE,), forecast),
            )

    def _loss(self, step: int, tiers: tuple[str, ...], forecast: RecoveryForecast) -> Loss:
        """Returns the loss if these tiers survive, nearest first."""
        left = [name for name in tiers if name in self._held]
        if not left:
            return Loss(step, self._clock() - self._began, None, None)
        tier = max(left, key=lambda name: (self._held[name].step, -tiers.index(name)))
        held = self._held[tier]
        return Loss(max(0, step - held.step), self._clock() - held.taken, self._recovery(tier, forecast), tier)

    def _recovery(self, tier: str, forecast: RecoveryForecast) -> float | None:
        """Returns how long a restore takes: at the rate of the last restore, or as long as the save took."""
        # Each rank reads all shards.
        num_bytes = self._num_bytes * self._world_size
        if tier in self._restored and num_bytes:
            return num_bytes / self._restored[tier]
        copied = forecast.copied_seconds * self._world_size
        return {SHARED: copied, CLUSTER: forecast.committed_seconds, STORAGE: forecast.durable_seconds}[tier]

    def forecast(self) -> RecoveryForecast:
        """Returns how long a save begun now would take."""
        with self._lock:
            self._settle()
            slowest = {level: max(seconds) for level, seconds in self._recent.items()}
            committed, waiting = slowest.get("committed"), 0.0
            if self._in_flight and committed is not None:
                waiting = max(0.0, committed - (self._clock() - self._in_flight[-1].begun))
            copied = slowest.get("copied", self._num_bytes / FIRST_COPY_BYTES_PER_SECOND)
            return RecoveryForecast(waiting, copied, committed, slowest.get("durable"))
