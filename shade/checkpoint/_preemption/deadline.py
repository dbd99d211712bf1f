"""Saves what can be saved in the time that is left: one last snapshot, of a step that all ranks agree on.

A notice may reach one rank only, at any moment of a step; a snapshot needs all of them, after the same step. No
collective is spent on this in ordinary steps: a thread on each rank looks ten times a second whether its sources, or
another rank, have announced an end. Then:

1. The rank that has heard of it writes so on the *board*, torch.distributed's own key-value store.
2. Every rank's thread sees it there, and writes down the step that its training is in. From then on the training
   pauses at the end of each step until the target is known: it cannot have passed the step that was written down.
3. Rank 0 reads them all; the target is the largest. To learn it a rank waits for the others' *threads* only, never for
   their training: they may be in a collective that waits for this very rank.
4. At the target all save, wait for what the time allows, say what has become of it, and stop.

How far it will get is foreseen from the last saves (`_preemption.recovery_estimate`): durable, if that fits; else
committed in the cluster's memory, from where a flusher goes on; else in own memory, which a process that is killed
leaves behind. If not even the copy fits, none is begun, since it would cost the copy that is there. Invariant:
whatever was committed before the notice still is, unless something newer took its place.
"""

from __future__ import annotations

import json
import logging
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

EXIT_CODE: Final = 143
"""What a shell says of a process that SIGTERM has ended."""
POLL_SECONDS: Final = 0.1
"""Between two looks at sources and board: what a notice to one rank needs to reach the others."""
_AGREE_POLL_SECONDS: Final = 0.01
_DURABLE_POLL_SECONDS: Final = 0.05
_RESERVE_FRACTION: Final = 0.05
_RESERVE_SECONDS: Final = 0.5
"""Of the time left, at most so much is kept back for leaving."""

logger = logging.getLogger("shade.checkpoint")


class Saving(Protocol):
    """What is saved: a `Checkpointer`, as far as it is needed here."""

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
    """Where ranks write for each other, without waiting for each other.

    Args:
        store: Of torch.distributed, or any other that all ranks share.
        rank: This rank.
        world_size: Ranks.

    Raises:
        RuntimeError: By any method: the store is gone, and with it whoever kept it.
    """

    def __init__(self, store: c10d.Store, rank: int, world_size: int) -> None:
        self._store, self.rank, self._world_size = store, rank, world_size

    def write(self, name: str, content: Any) -> None:
        """Writes something; JSON."""
        self._store.set(name, json.dumps(content))

    def read(self, name: str) -> Any:
        """What stands there; None for nothing."""
        return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def write_own(self, content: Any) -> None:
        """Writes this rank's."""
        self.write(f"rank-{self.rank}", content)

    def read_all(self) -> list[Any] | None:
        """What each rank wrote; None while one has not."""
        names = [f"rank-{rank}" for rank in range(self._world_size)]
        return [json.loads(self._store.get(name)) for name in names] if self._store.check(names) else None


_boards = 0


def open_deadline_store(rank: int, world_size: int) -> DeadlineStore:
    """The board of a training run. Collective: the n-th of one rank is the n-th of every other.

    Args:
        rank: This rank.
        world_size: Ranks.

    Returns:
        The board; one of this process alone where there is no other.
    """
    global _boards
    _boards += 1
    if world_size == 1:
        return DeadlineStore(HashStore(), rank, world_size)
    shared: c10d.Store = c10d._get_default_store()
    return DeadlineStore(c10d.PrefixStore(f"shade/notice/{_boards}", shared), rank, world_size)


@dataclass(frozen=True)
class _Plan:
    """What rank 0 has decided."""

    target: int
    """The step after which all save."""
    goal: str | None
    """The tier that is expected to be reached; None: no save is begun."""


class Deadline:
    """Watches for notices on one rank, and acts on the first.

    Args:
        saving: What to save.
        losses: What is known of its saves.
        board: Shared with the other ranks; see `open_deadline_store`.
        sources: What to watch here; other ranks may watch other things, or nothing. Closed with this.
        exit_code: To leave with, by SystemExit out of `at_step`, when all is done; None: go on, see `should_stop`.
    """

    def __init__(
        self,
        saving: Saving,
        losses: LossTracker,
        board: DeadlineStore,
        sources: Sequence[NoticeSource],
        *,
        exit_code: int | None = EXIT_CODE,
    ) -> None:
        self._saving, self._losses, self._board = saving, losses, board
        self._sources, self._exit_code = list(sources), exit_code
        self._lock = threading.Lock()
        self._notice: PreemptionNotice | None = None
        self._plan: _Plan | None = None
        self._agreed, self._wake, self._closed = threading.Event(), threading.Event(), False
        self._acting = threading.Event()
        self._pausing = False
        """Whether the training stands between two steps and waits for the target."""
        self._step_seconds, self._last_step = 0.0, 0.0
        self._done = False
        self._thread = threading.Thread(target=self._serve, name="shade-notice", daemon=True)
        self._thread.start()

    @property
    def should_stop(self) -> bool:
        """Whether an end has been announced, here or on another rank."""
        return self._notice is not None

    # ── hearing of it ───────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._look()
                if self._notice is not None:
                    self._agree(self._notice)
                    self._agreed.set()
                    if not self._acting.wait(max(0.0, self._notice.seconds_left)):
                        self._say("no step has ended in time; nothing new is saved")
                    return
                self._wake.wait(POLL_SECONDS)
        except RuntimeError as error:  # the board's keeper is gone: the run ends without us
            logger.debug("no notices from other ranks any more: %s", error)
        finally:
            self._agreed.set()

    def _look(self) -> None:
        """Step 2, and 1 where it is this rank that has heard of it."""
        notice = self._heard()
        told = None if notice else self._board.read("notice")
        if told is not None:
            deadline = time.monotonic() + told["seconds_left"] - POLL_SECONDS
            notice = PreemptionNotice(f"{told['source']}, on rank {told['rank']}", deadline)
        if notice is None:
            return
        if told is None:
            told = {"rank": self._board.rank, "seconds_left": notice.seconds_left, "source": notice.source}
            self._board.write("notice", told)
        with self._lock:  # a step that ends now pauses, or has been counted
            self._notice = notice
            step = self._saving.step_count + (not self._pausing)
        self._board.write_own(step)

    def _heard(self) -> PreemptionNotice | None:
        return next(filter(None, (source.look() for source in self._sources)), None)

    def _agree(self, notice: PreemptionNotice) -> None:
        """Step 3, in the thread."""
        while not self._closed and notice.seconds_left > 0:
            if self._board.rank == 0 and (steps := self._board.read_all()) is not None:
                target = max(steps)
                goal = self._goal(notice)
                self._board.write("plan", {"target": target, "goal": goal})
                self._say(
                    "%s; %.1f s left; step %d should reach %s",
                    notice.source,
                    notice.seconds_left,
                    target,
                    goal or "nothing",
                )
            plan = self._board.read("plan")
            if plan is not None:
                self._plan = _Plan(**plan)
                return
            time.sleep(_AGREE_POLL_SECONDS)

    def _goal(self, notice: PreemptionNotice) -> str | None:
        """The best that fits into the time, as far as is known; what has never been measured is tried."""
        forecast = self._losses.forecast()
        left = notice.seconds_left - _reserve(notice.seconds_left) - self._step_seconds - forecast.waiting_seconds
        if forecast.committed_seconds is None:
            return "whatever it can"
        if forecast.durable_seconds is not None and forecast.durable_seconds < left:
            return "storage"
        if forecast.committed_seconds < left:
            return "cluster memory"
        return "own memory" if forecast.copied_seconds < left else None

    # ── acting on it ────────────────────────────────────────────────────────────────────────────────────────────────

    def at_step(self) -> bool:
        """What the training calls after each step; returns at once unless there is a notice.

        Returns:
            Whether a last save has just been made.

        Raises:
            SystemExit: It has, and there is an exit code.
        """
        now = time.monotonic()
        self._step_seconds, self._last_step = (now - self._last_step if self._last_step else 0.0), now
        if self._done:
            return False
        notice = self._notice or self._heard()
        with self._lock:
            notice = self._notice or notice
            self._pausing = notice is not None
        if notice is None:
            return False
        self._wake.set()
        self._agreed.wait()
        self._pausing = False
        if self._plan is not None and self._saving.step_count < self._plan.target:
            return False
        self._done = True
        self._acting.set()
        before = self._saving.latest
        self._rescue(notice, self._plan, before)
        if self._exit_code is not None:
            raise SystemExit(self._exit_code)
        return self._saving.latest is not before

    def _rescue(self, notice: PreemptionNotice, plan: _Plan | None, ticket: SaveHandle | None) -> None:
        """Step 4; the ticket is that of the save before."""
        begun = time.monotonic()
        until = notice.deadline - _reserve(notice.seconds_left)
        if plan is None:
            self._say("not all ranks have answered; nothing new is saved")
        elif plan.goal is None:
            self._say("too little time for a copy of step %d; nothing new is saved", plan.target)
        elif ticket is not None and not wait([ticket.landed], _left(until)).done:
            self._say("step %d is still on its way; step %d is not saved", ticket.step, plan.target)
        else:
            ticket = self._save() or ticket
        if ticket is None:
            self._say("%.1f s left; nothing is saved", notice.seconds_left)
            return
        self._follow(ticket, begun, until)

    def _save(self) -> SaveHandle | None:
        try:
            ticket = self._saving.save()
            self._saving.wait_copy_complete()
        except ShadeError as error:
            self._say("%s", error)
            return None
        return ticket

    def _follow(self, ticket: SaveHandle, begun: float, until: float) -> None:
        """Waits for what can still become of the newest snapshot, and says what has."""
        wait([ticket.landed], _left(until))
        at, left = f"{until - time.monotonic():.1f} s left", self._saving.step_count - ticket.step
        behind = f" ({left} step{'' if left == 1 else 's'} behind)" if left else ""
        if not ticket.landed.done():
            kept = "own memory only, if nothing but this process ends" if ticket.kept else "no tier in time"
            self._say("%s; step %d%s is in %s", at, ticket.step, behind, kept)
            return
        if ticket.landed.exception() is not None:
            self._say("%s; step %d%s is not saved: %s", at, ticket.step, behind, ticket.landed.exception())
            return
        landing = ticket.landed.result()
        committed = time.monotonic() - begun
        durable = self._losses.is_durable(landing)
        while durable is False and _left(until) > 0:
            time.sleep(min(_DURABLE_POLL_SECONDS, _left(until)))
            durable = self._losses.is_durable(landing)
        told = {
            None: "",
            False: ", not durable in time: its flusher goes on",
            True: f", durable in {time.monotonic() - begun:.1f} s",
        }[durable]
        where = f"committed in {landing.tier.name} in {committed:.1f} s"
        self._say("%s; step %d%s %s%s", at, ticket.step, behind, where, told)

    def _say(self, text: str, *words: object) -> None:
        if self._board.rank == 0:
            logger.warning("notice: " + text, *words)

    def close(self) -> None:
        """Stops watching. Safe to call twice."""
        self._closed = True
        self._wake.set()
        self._acting.set()
        self._thread.join()
        for source in self._sources:
            source.close()
        self._sources.clear()


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _reserve(seconds_left: float) -> float:
    return min(_RESERVE_SECONDS, _RESERVE_FRACTION * max(0.0, seconds_left))
