"""Says at any moment what an end would cost: "if killed now: lose 3 steps / 1.2 s, recover in 0.4 s from own memory".

Three ends are told apart, because three things survive them: this process dies (own memory is left), its machine is
lost (the cluster's memory is left; it is taken to lie on other machines), everything is lost but storage. For each:
how many steps and seconds of training would be done again, and how long the way back takes.

Nothing is measured for its own sake. The losses follow from the saves that have landed; the times from the last few of
them, and once something has been restored from how long that took. Reading costs microseconds and is safe in any
thread. On rank 0 a thread asks the store whether the snapshot that landed last is durable, at intervals that grow with
the answer's delay: at most 20 small questions a second, none when all is durable. Other ranks ask when they are read.

Invariant: what is said to be recoverable had landed there; the error is on the side of losing more.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from shade.checkpoint._save.async_writer import CommitResult, SaveHandle
from shade.errors import StoreError
from shade.types import Clock

OWN, CLUSTER, STORAGE = "own memory", "cluster memory", "storage"
"""Names of the tiers, as in `Tier.name`."""
FIRST_COPY_BYTES_PER_SECOND: Final = 1e9
"""Of a copy, before one has been measured: into pages that are touched for the first time."""
_RECENT: Final = 3
_MOST_DIRTY: Final = 8
_LEAST_POLL_SECONDS: Final = 0.05
_POLL_FRACTION: Final = 0.05
"""Of the time since the result: what is measured is right within so much."""
MEANING: Final[Mapping[str, str]] = {
    "lost_steps": "Optimizer steps that would have to be done again.",
    "lost_seconds": "Training time that would have to be spent again.",
    "recover_seconds": "Reading the state back; without starting processes. Absent where there is nothing to read.",
}
"""How to read each quantity of a `Loss`."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Loss:
    """What one kind of end would cost."""

    steps: int
    seconds: float
    recover_seconds: float | None
    """Measured, or expected from the rates of writing; None where there is no telling, or nothing to recover."""
    tier: str | None
    """Where from; None where nothing would be left."""

    def __str__(self) -> str:
        lost = f"lose {self.steps} step{'' if self.steps == 1 else 's'} / {self.seconds:.1f} s"
        if self.tier is None:
            return f"{lost}, nothing to recover from"
        took = "" if self.recover_seconds is None else f" in {self.recover_seconds:.2f} s"
        return f"{lost}, recover{took} from {self.tier}"


@dataclass(frozen=True)
class RecoveryEstimate:
    """What an end would cost, now."""

    step: int
    """Optimizer steps done."""
    process: Loss
    """This process is killed; its machine stays."""
    machine: Loss
    """Its machine is lost, and what lies in its memory."""
    cluster: Loss
    """All machines are; storage stays."""

    def __str__(self) -> str:
        said = f"if killed now: {self.process}"
        if self.machine.tier != self.process.tier:
            said += f"; with this machine: {self.machine}"
        if self.cluster.tier != self.machine.tier:
            said += f"; with all machines: {self.cluster}"
        return said

    def row(self) -> dict[str, float | str | None]:
        """For a metrics file: ``checkpoint_process_lost_steps`` and so on."""
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
        """The same in the Prometheus text format: ``shade_checkpoint_lost_steps{end="process",tier="own memory"} 3``.

        Args:
            labels: Put on every line: ``{"rank": 0}``.

        Returns:
            Lines, each ended.
        """
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
    """How long a save begun now would take, in seconds from its beginning; None: nothing like it has been seen."""

    waiting_seconds: float
    """Until the save under way has landed: a new one waits for it. Comes on top of the others."""
    copied_seconds: float
    committed_seconds: float | None
    """Until it is beyond own memory."""
    durable_seconds: float | None


@dataclass(frozen=True)
class _Held:
    """A snapshot that could be gone back to."""

    step: int
    taken: float
    """When its state was, by the clock."""


@dataclass
class _Recent:
    """Seconds from a save's beginning, of the last few; the worst of them is what the next one is expected to take."""

    copied: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    committed: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    durable: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


class LossTracker:
    """Follows the saves of one rank.

    Args:
        rank: This rank.
        world_size: Ranks: each reads all shards when it restores.
        num_buffers: Snapshots that own memory has room for; with one there is none while it is copied into.
        step: Optimizer steps done by now.
        is_durable: Asks whether what has landed in the cluster's memory is in storage; None where there is no storage.
        clock: Monotonic seconds.
    """

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
        """Landed in the cluster's memory and not known to be durable, oldest first."""
        self._recent = _Recent()
        self._num_bytes = 0
        self._restored: dict[str, float] = {}
        """Bytes a second of the last restore, by tier."""
        self._wake, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────────────

    def begun(self, handle: SaveHandle, num_bytes: int) -> None:
        """A save has begun.

        Args:
            handle: Its.
            num_bytes: Of this rank's shard.
        """
        with self._lock:
            self._settle()
            self._num_bytes = num_bytes
            num_unfinished = sum(not other.is_in_shared_memory for other in self._in_flight)
            self._in_flight.append(handle)
            if num_unfinished + 1 >= self._num_buffers:  # the newest whole one lay where this one is copied to
                self._held.pop(OWN, None)
        handle.copied.add_done_callback(lambda done: self._copied(handle, done))
        handle.committed.add_done_callback(lambda done: self._committed(handle, done))

    def restored(
        self, step: int, held_by: Collection[str], read: Collection[str], seconds: float, num_bytes: int
    ) -> None:
        """A snapshot was loaded: what an end would go back to until the next one has landed.

        Args:
            step: Of it.
            held_by: Names of the tiers that have it.
            read: Names of those that it was read from.
            seconds: How long that took.
            num_bytes: Of all shards.
        """
        with self._lock:
            self._settle()
            self._held = dict.fromkeys(held_by, _Held(step, self._clock()))
            self._restored |= dict.fromkeys(read, num_bytes / max(seconds, 1e-9))

    def _copied(self, handle: SaveHandle, done: Future[None]) -> None:
        if done.exception() is None:
            with self._lock:
                self._recent.copied.append(self._clock() - handle.begun)

    def _committed(self, handle: SaveHandle, done: Future[CommitResult]) -> None:
        """In the writer's thread."""
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
        """Takes in what the saves under way have come to. Under the lock."""
        for handle in self._in_flight:
            if handle.is_in_shared_memory:
                self._held[OWN] = _Held(handle.step, handle.begun)
        while self._in_flight and self._in_flight[0].committed.done():
            handle = self._in_flight.popleft()
            if handle.committed.exception() is not None:
                continue
            result = handle.committed.result()
            self._held[result.tier.name] = _Held(handle.step, handle.begun)
            if result.tier.name != OWN:
                self._recent.committed.append(handle.commit_seconds)
            if result.tier.name == STORAGE:
                self._recent.durable.append(handle.commit_seconds)
            elif result.tier.name == CLUSTER and self._is_durable is not None:
                self._dirty.append((handle, result))

    # ── whether it is durable ───────────────────────────────────────────────────────────────────────────────────────

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
        """Asks of each dirty snapshot, newest first; whatever is older than a durable one does not matter any more."""
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
                        if self._rank == 0:  # others ask when somebody looks: that is no measurement
                            self._recent.durable.append(self._clock() - handle.begun)
                        self._held[STORAGE] = _Held(handle.step, handle.begun)
                        while self._dirty and self._dirty[0][0].begun <= handle.begun:
                            self._dirty.popleft()
                return

    def is_durable(self, result: CommitResult) -> bool | None:
        """Whether a landed save is in storage, as far as the store says; None where there is no storage."""
        if result.tier.name == STORAGE:
            return True
        if result.tier.name == OWN or self._is_durable is None:
            return None
        return self._is_durable(result)

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # ── what it means ───────────────────────────────────────────────────────────────────────────────────────────────

    def read(self) -> RecoveryEstimate:
        """What an end would cost now."""
        if self._rank != 0:
            self._ask()
        with self._lock:
            self._settle()
            forecast, step = self.forecast(), self._step()
            return RecoveryEstimate(
                step,
                self._loss(step, (OWN, CLUSTER, STORAGE), forecast),
                self._loss(step, (CLUSTER, STORAGE), forecast),
                self._loss(step, (STORAGE,), forecast),
            )

    def _loss(self, step: int, tiers: tuple[str, ...], forecast: RecoveryForecast) -> Loss:
        """Of an end that these tiers survive, nearest first."""
        left = [name for name in tiers if name in self._held]
        if not left:
            return Loss(step, self._clock() - self._began, None, None)
        tier = max(left, key=lambda name: (self._held[name].step, -tiers.index(name)))
        held = self._held[tier]
        return Loss(max(0, step - held.step), self._clock() - held.taken, self._recovery(tier, forecast), tier)

    def _recovery(self, tier: str, forecast: RecoveryForecast) -> float | None:
        """Reading takes as long as it did, or as long as writing."""
        num_bytes = self._num_bytes * self._world_size
        if tier in self._restored and num_bytes:
            return num_bytes / self._restored[tier]
        copied = forecast.copied_seconds * self._world_size
        return {OWN: copied, CLUSTER: forecast.committed_seconds, STORAGE: forecast.durable_seconds}[tier]

    def forecast(self) -> RecoveryForecast:
        """How long a save begun now would take."""
        with self._lock:
            self._settle()
            copied, committed, durable = self._recent.copied, self._recent.committed, self._recent.durable
            waiting = 0.0
            if self._in_flight and committed:
                waiting = max(0.0, max(committed) - (self._clock() - self._in_flight[-1].begun))
            return RecoveryForecast(
                waiting,
                max(copied) if copied else self._num_bytes / FIRST_COPY_BYTES_PER_SECOND,
                max(committed) if committed else None,
                max(durable) if durable else None,
            )
