"""Saves one last snapshot before the deadline of a preemption notice, of a step that all ranks agree on.

A notice may reach one rank only, at any moment of a step. A thread on each rank looks ten times a second:

1. The rank with the notice writes it to torch.distributed's own key-value store.
2. Every rank's thread reads it there, and writes the step that its training is in. From then on the training pauses at
   the end of each step until the target is known.
3. Rank 0 reads all steps; the largest is the target. A rank waits for the other ranks' *threads* only.
4. At the target all ranks save, wait as long as the time allows, log how far the save came, and stop.

How far the save can come is predicted from the last saves. Invariant: what was committed before the notice stays
committed, unless a newer snapshot replaced it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public all the same
from torch.distributed import distributed_c10d as c10d

from shade.checkpoint._preemption.notice import NoticeSource, PreemptionNotice
from shade.checkpoint._preemption.recovery_estimate import LossTracker
from shade.checkpoint._save.async_writer import SaveHandle
from shade.errors import ShadeError
from shade.process import start_of, this_machine
from shade.rank_group import shared_store

EXIT_CODE: Final = 143
"""The exit code of a process that SIGTERM has ended, in a shell."""
POLL_SECONDS: Final = 0.1
"""Time between two looks at sources and store: a notice to one rank needs so long to reach the others."""
_AGREE_POLL_SECONDS: Final = 0.01
_ANSWER_SECONDS: Final = 5.0
"""Time after which a rank whose thread does not answer counts as lost: answers take a tenth of a second."""
_DURABLE_POLL_SECONDS: Final = 0.05
_STEPS_FOR_OTHERS: Final = 2
"""Steps within which another Checkpointer of this process, stepped as often, reaches its target."""
_RESERVE_FRACTION: Final = 0.05
_RESERVE_SECONDS: Final = 0.5
"""Time kept back for the exit: a fraction of the time left, but at most this long."""

logger = logging.getLogger("shade.checkpoint")
_watching: list[Deadline] = []
"""Those of this process, until they are closed."""


class Saving(Protocol):
    """The part of a `Checkpointer` that is needed here."""

    step_count: int

    def save(self) -> SaveHandle:
        """Begins a save; see `Checkpointer.save`."""
        ...

    @property
    def latest(self) -> SaveHandle | None:
        """The save begun last."""
        ...

    def wait_copy_complete(self) -> None:
        """Returns when the state is copied."""
        ...


class DeadlineStore:
    """A key-value store in which ranks write for each other, without waiting for each other. Any method raises
    RuntimeError where the store is gone, with the process that held it."""

    def __init__(self, store: c10d.Store, rank: int, world_size: int) -> None:
        self._store, self.rank, self._world_size = store, rank, world_size

    def close(self) -> None:
        """Drops the store, whose server a new group of this process may start anew."""
        self._store = HashStore()

    def write(self, name: str, content: Any) -> None:
        """Writes a value, as JSON."""
        self._store.set(name, json.dumps(content))

    def read(self, name: str) -> Any:
        """Returns the value of a name; None if it was not written."""
        return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def write_process(self) -> None:
        """Writes which process this rank is, so that others see when it is gone."""
        self.write(f"process-{self.rank}", [this_machine(), os.getpid(), start_of(os.getpid())])

    def has_lost(self, seconds: float) -> bool:
        """Returns whether a rank is gone: its process on this machine, or it has not answered for so many seconds. The
        first rank that finds so informs the others."""
        ranks = range(self._world_size)
        is_silent = seconds > _ANSWER_SECONDS and not self._store.check([f"rank-{rank}" for rank in ranks])
        if self.read("lost") or is_silent or any(self._is_dead(self.read(f"process-{rank}")) for rank in ranks):
            self.write("lost", True)
            return True
        return False

    @staticmethod
    def _is_dead(process: Sequence[Any] | None) -> bool:
        if process is None or not process[0] or process[0] != this_machine():
            return False
        return bool(start_of(process[1]) != process[2])

    def read_all(self, name: str = "rank") -> list[Any] | None:
        """Returns each rank's value; None while one is missing."""
        names = [f"{name}-{rank}" for rank in range(self._world_size)]
        return [json.loads(self._store.get(name)) for name in names] if self._store.check(names) else None


_num_stores = 0


def open_deadline_store(rank: int, world_size: int) -> DeadlineStore:
    """Opens the deadline store of a run. Collective: the n-th store of each rank is the same one; of one rank alone, a
    store within this process."""
    global _num_stores
    _num_stores += 1
    if world_size == 1:
        return DeadlineStore(HashStore(), rank, world_size)
    return DeadlineStore(shared_store(f"notice/{_num_stores}"), rank, world_size)


@dataclass(frozen=True)
class _Decision:
    """Rank 0's decision."""

    target: int
    """The step after which all ranks save."""
    goal: str | None
    """The tier that the save is expected to reach; None: no save is begun."""


class Deadline:
    """Watches for notices on one rank, and acts on the first.

    Args:
        saving: Makes the save.
        losses: Predicts how long a save takes.
        store: Shared with the other ranks; see `open_deadline_store`.
        sources: Sources of notices on this rank; other ranks may watch others, or none. Closed with this object.
        exit_code: Exit code of the SystemExit that `at_step` raises at the end; None: it returns; see `should_stop`.
    """

    def __init__(
        self,
        saving: Saving,
        losses: LossTracker,
        store: DeadlineStore,
        sources: Sequence[NoticeSource],
        *,
        exit_code: int | None = EXIT_CODE,
    ) -> None:
        self._saving, self._losses, self._store = saving, losses, store
        self._sources, self._exit_code = list(sources), exit_code
        self._lock = threading.Lock()
        self._notice: PreemptionNotice | None = None
        self._decision: _Decision | None = None
        self._agreed, self._wake, self._closed = threading.Event(), threading.Event(), False
        self._acting = threading.Event()
        self._pausing = False
        """Whether the training waits between two steps for the target."""
        self._step_seconds, self._last_step = 0.0, 0.0
        self._done = False
        self._num_after = 0
        """Steps after the last save, while other Checkpointers of this process save theirs."""
        _watching.append(self)
        self._thread = threading.Thread(target=self._serve, name="shade-notice", daemon=True)
        self._thread.start()

    @property
    def should_stop(self) -> bool:
        """Whether this rank or another has a notice."""
        return self._notice is not None

    # ── the thread: finds a notice, agrees on a step ────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        try:
            self._store.write_process()
            while not self._closed:
                self._look()
                if self._notice is not None:
                    self._agree(self._notice)
                    self._agreed.set()
                    if not self._acting.wait(max(0.0, self._notice.seconds_left)):
                        self._log("no step has ended in time; nothing new is saved")
                    return
                self._wake.wait(POLL_SECONDS)
        except RuntimeError as error:  # the process that holds the store is gone: the run is ending
            logger.debug("no notices from other ranks any more: %s", error)
        finally:
            self._agreed.set()

    def _look(self) -> None:
        """Looks for a notice here and from other ranks; passes on the one found here, and writes this rank's step."""
        notice = self._notice_here()
        message = None if notice else self._store.read("notice")
        if message is not None:
            deadline = time.monotonic() + message["seconds_left"] - POLL_SECONDS
            notice = PreemptionNotice(f"{message['source']}, on rank {message['rank']}", deadline)
        if notice is None:
            return
        if message is None:
            message = {"rank": self._store.rank, "seconds_left": notice.seconds_left, "source": notice.source}
            self._store.write("notice", message)
        with self._lock:  # a step that ends now pauses, or has been counted
            self._notice = notice
            # From now on the training pauses at the end of each step until the target is known, so it cannot pass this
            # step.
            step = self._saving.step_count + (not self._pausing)
        self._store.write(f"rank-{self._store.rank}", step)

    def _notice_here(self) -> PreemptionNotice | None:
        return next(filter(None, (source.look() for source in self._sources)), None)

    def _agree(self, notice: PreemptionNotice) -> None:
        """Agrees on the step after which all ranks save: rank 0 decides, the others read it. Where one is lost, none
        does: no step can be saved."""
        begun = time.monotonic()
        while not self._closed and notice.seconds_left > 0 and not self._store.has_lost(time.monotonic() - begun):
            if self._store.rank == 0 and (steps := self._store.read_all()) is not None:
                # A rank that waits for the target waits for the other ranks' threads only, never for their training,
                # which may be in a collective that waits for this very rank.
                target = max(steps)
                goal = self._goal(notice)
                self._store.write("plan", {"target": target, "goal": goal})
                self._log(
                    "%s; %.1f s left; step %d should reach %s",
                    notice.source,
                    notice.seconds_left,
                    target,
                    goal or "nothing",
                )
            decision = self._store.read("plan")
            if decision is not None:
                self._decision = _Decision(**decision)
                return
            time.sleep(_AGREE_POLL_SECONDS)

    def _goal(self, notice: PreemptionNotice) -> str | None:
        """Returns the best tier that can be reached in time; without measured saves, any tier is tried."""
        forecast = self._losses.forecast()
        left = notice.seconds_left - _reserve(notice.seconds_left) - self._step_seconds - forecast.waiting_seconds
        if forecast.committed_seconds is None:
            return "whatever it can"
        if forecast.durable_seconds is not None and forecast.durable_seconds < left:
            return "storage"
        # Committed in the cluster's memory: the flusher, which is not preempted, continues from there.
        if forecast.committed_seconds < left:
            return "cluster memory"
        return "shared memory" if forecast.copied_seconds < left else None

    # ── the training thread: saves at the target ────────────────────────────────────────────────────────────────────

    def at_step(self) -> bool:
        """Acts on a notice; the training calls it after each step, and without a notice it returns at once.

        Returns whether the last save has just been made; with an exit code, it raises SystemExit instead.
        """
        now = time.monotonic()
        self._step_seconds, self._last_step = (now - self._last_step if self._last_step else 0.0), now
        if self._done:
            self._exit()
            return False
        notice = self._notice or self._notice_here()
        with self._lock:
            notice = self._notice or notice
            self._pausing = notice is not None
        if notice is None:
            return False
        self._wake.set()
        self._agreed.wait()
        self._pausing = False
        if self._decision is not None and self._saving.step_count < self._decision.target:
            return False
        self._done = True
        self._acting.set()
        before = self._saving.latest
        self._rescue(notice, self._decision, before)
        self._exit()
        return self._saving.latest is not before

    def _exit(self) -> None:
        """Raises SystemExit once every Checkpointer of this process that watches has saved."""
        # One that is stepped less often than this one, or not at all, is not waited for.
        others = [each for each in _watching if each._store.rank == self._store.rank]
        is_waiting = not all(each._done for each in others) and self._num_after < _STEPS_FOR_OTHERS
        self._num_after += 1
        if self._exit_code is not None and not is_waiting:
            raise SystemExit(self._exit_code)

    def at_failure(self, *, is_between_steps: bool) -> None:
        """Saves the last step, where training failed after a notice, since a worker or a peer was ended by it as well.

        Every rank must have failed after the same step, or nothing is saved.

        Args:
            is_between_steps: Whether the state is that of the last step.
        """
        until = time.monotonic() + POLL_SECONDS  # the signal that ended another process may come later here
        while (notice := self._notice or self._notice_here()) is None and time.monotonic() < until:
            time.sleep(_AGREE_POLL_SECONDS)
        if notice is None or self._done:
            return
        self._done = True
        self._acting.set()
        step, steps = self._saving.step_count if is_between_steps else -1, None
        until = notice.deadline - _reserve(notice.seconds_left)
        try:
            self._store.write(f"failed-{self._store.rank}", step)
            begun = time.monotonic()
            while (steps := self._store.read_all("failed")) is None and _left(until) > 0:
                if self._store.has_lost(time.monotonic() - begun):
                    break
                time.sleep(_AGREE_POLL_SECONDS)
        except RuntimeError as error:  # the process that holds the store is gone
            logger.debug("no answers from other ranks: %s", error)
        if steps is None or set(steps) != {step} or step < 0:
            self._log("the training failed before the last save; nothing new is saved")
            return
        self._log("the training failed after the notice; step %d is saved", step)
        self._rescue(notice, _Decision(step, "whatever it can"), self._saving.latest)

    def _rescue(self, notice: PreemptionNotice, decision: _Decision | None, handle: SaveHandle | None) -> None:
        """Takes step 4; the handle is that of the save before."""
        begun = time.monotonic()
        until = notice.deadline - _reserve(notice.seconds_left)
        if decision is None:
            self._log("not all ranks have answered; nothing new is saved")
        elif decision.goal is None:
            self._log("too little time for a copy of step %d; nothing new is saved", decision.target)
        elif handle is not None and not wait([handle.committed], _left(until)).done:
            self._log("step %d is still on its way; step %d is not saved", handle.step, decision.target)
        else:
            handle = self._save() or handle
        if handle is None:
            self._log("%.1f s left; nothing is saved", notice.seconds_left)
            return
        self._follow(handle, begun, until)

    def _save(self) -> SaveHandle | None:
        try:
            handle = self._saving.save()
            self._saving.wait_copy_complete()
        except ShadeError as error:
            self._log("%s", error)
            return None
        return handle

    def _follow(self, handle: SaveHandle, begun: float, until: float) -> None:
        """Waits as long as the time allows for the newest save, and logs how far it came."""
        wait([handle.committed], _left(until))
        at, left = f"{until - time.monotonic():.1f} s left", self._saving.step_count - handle.step
        behind = f" ({left} step{'' if left == 1 else 's'} behind)" if left else ""
        if not handle.committed.done():
            location = (
                "shared memory only, if nothing but this process ends"
                if handle.is_in_shared_memory
                else "no tier in time"
            )
            self._log("%s; step %d%s is in %s", at, handle.step, behind, location)
            return
        if handle.committed.exception() is not None:
            self._log("%s; step %d%s is not saved: %s", at, handle.step, behind, handle.committed.exception())
            return
        result = handle.committed.result()
        committed = time.monotonic() - begun
        durable = self._losses.is_durable(result)
        while durable is False and _left(until) > 0:
            time.sleep(min(_DURABLE_POLL_SECONDS, _left(until)))
            durable = self._losses.is_durable(result)
        message = {
            None: "",
            False: ", not durable in time: its flusher continues",
            True: f", durable in {time.monotonic() - begun:.1f} s",
        }[durable]
        where = f"committed in {result.tier.name} in {committed:.1f} s"
        self._log("%s; step %d%s %s%s", at, handle.step, behind, where, message)

    def _log(self, text: str, *values: object) -> None:
        if self._store.rank == 0:
            logger.warning("notice: " + text, *values)

    def close(self) -> None:
        """Ends the watching. Safe to call twice."""
        self._closed = True
        if self in _watching:
            _watching.remove(self)
        self._wake.set()
        self._acting.set()
        self._thread.join()
        self._store.close()
        for source in self._sources:
            source.close()
        self._sources.clear()


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _reserve(seconds_left: float) -> float:
    return min(_RESERVE_SECONDS, _RESERVE_FRACTION * max(0.0, seconds_left))
