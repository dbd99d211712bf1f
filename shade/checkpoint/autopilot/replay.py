"""Replays a trace of preemptions against a way to save: what of the time was training, and where the rest went.

Exact, not drawn: between two events the run is periodic (so many steps, then what a save adds, and again), so the state
at any moment follows by division, and a trace of a year takes milliseconds. What is followed is what each tier holds:
own memory is left when a process dies, cluster memory when a machine does, storage always. A save that was committed
becomes durable even if the trainer dies meanwhile, because the flusher lives on; it does not if all memory goes.

A save is taken where its cost begins. An event during a recovery begins the recovery again. A step that was begun and
not ended is lost with the rest. Invariant: useful, lost, saving, recovering and down seconds add up to the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shade.checkpoint.autopilot.predict import Prediction
from shade.checkpoint.autopilot.trace import Kind, PreemptionTrace

_ROUNDING: Final = 1e-9
"""Of a step: what division leaves over."""


@dataclass(frozen=True)
class Habit:
    """A way to save, as often as it is done."""

    name: str
    """Of the strategy."""
    prediction: Prediction
    step_seconds: float
    every_steps: int

    @property
    def work_seconds(self) -> float:
        """Training between two saves."""
        return self.every_steps * self.step_seconds

    @property
    def cost_seconds(self) -> float:
        """What a save adds; a save that falls due while as many are under way as may be waits for the oldest."""
        landing = self.prediction.landed_seconds / self.prediction.in_flight
        return max(self.prediction.cost_seconds, landing - self.work_seconds)


@dataclass(frozen=True)
class Outcome:
    """Where the time went."""

    habit: Habit
    num_failures: int
    steps: int
    """That count in the end."""
    useful_seconds: float
    lost_seconds: float
    """Of training that was done again, or that an event left undone."""
    saving_seconds: float
    recovering_seconds: float
    down_seconds: float

    @property
    def total_seconds(self) -> float:
        """All of it: the trace."""
        spent = self.lost_seconds + self.saving_seconds + self.recovering_seconds + self.down_seconds
        return self.useful_seconds + spent

    @property
    def goodput(self) -> float:
        """The share that counts."""
        return self.useful_seconds / self.total_seconds


def replay(trace: PreemptionTrace, habit: Habit) -> Outcome:
    """Plays a run from the beginning of a trace to its end.

    Args:
        trace: What happened.
        habit: How the run saved.

    Returns:
        Where the time went.
    """
    run = _Run(habit)
    for failure in trace.failures:
        run.reach(failure.time_seconds)
        run.fail(failure.kind, failure.down_seconds)
    run.reach(trace.length_seconds)
    return run.outcome(len(trace.failures))


def replay_all(trace: PreemptionTrace, habits: Iterable[Habit]) -> list[Outcome]:
    """The same for several, the best first."""
    return sorted((replay(trace, habit) for habit in habits), key=lambda outcome: -outcome.goodput)


class _Run:
    """A run somewhere in a trace. A *life* is the time from the end of a recovery to the next event."""

    def __init__(self, habit: Habit) -> None:
        self._habit = habit
        self._work, self._cycle = habit.work_seconds, habit.work_seconds + habit.cost_seconds
        self._now = self._down_until = 0.0
        self._born = 0.0
        """When this life begins: down and recovery end."""
        self._base = self._steps = 0
        """Steps at its beginning, and now."""
        self._own = self._cluster = self._storage = 0
        """Steps of the newest snapshot that each holds."""
        self._flushing: list[tuple[float, int]] = []
        """Committed to the cluster's memory: when it will be in storage, and its steps."""
        self._executed = 0
        self._torn = self._saving = self._recovering = self._down = 0.0

    def reach(self, moment: float) -> None:
        """Lets the time pass until an event, or the end."""
        self._down += max(0.0, min(moment, self._down_until) - self._now)
        begin = max(self._now, self._down_until)
        self._recovering += max(0.0, min(moment, self._born) - begin)
        if moment > self._born:
            self._live(moment - self._born)
        self._now = moment

    def _live(self, age: float) -> None:
        """Accounts for a whole life, and for what it leaves in the tiers."""
        habit = self._habit
        cycles = math.floor(age / self._cycle)
        rest = age - cycles * self._cycle
        steps = min(habit.every_steps, math.floor(rest / habit.step_seconds + _ROUNDING))
        executed = cycles * habit.every_steps + steps
        saving = cycles * habit.cost_seconds + max(0.0, rest - self._work)
        self._executed += executed
        self._saving += saving
        self._torn += age - saving - executed * habit.step_seconds
        self._steps = self._base + executed
        self._leave(age)

    def _leave(self, age: float) -> None:
        prediction = self._habit.prediction
        kept = self._num_safe(age, prediction.kept_seconds)
        committed = self._num_safe(age, prediction.committed_seconds)
        durable = self._num_safe(age, prediction.durable_seconds)
        if kept:
            self._own = self._after(kept)
        if self._num_safe(age, 0.0) > kept and prediction.in_flight == 1:
            self._own = 0  # the buffer is being written to
        if committed:
            self._cluster = self._after(committed)
        if durable:
            self._storage = max(self._storage, self._after(durable))
        if prediction.durable_seconds is not None:
            for number in range(durable + 1, committed + 1):
                taken = self._born + self._work + (number - 1) * self._cycle
                self._flushing.append((taken + prediction.durable_seconds, self._after(number)))

    def _num_safe(self, age: float, lag: float | None) -> int:
        """How many of this life's snapshots are as old as it takes."""
        if lag is None or age < self._work + lag:
            return 0
        return math.floor((age - self._work - lag) / self._cycle) + 1

    def _after(self, number: int) -> int:
        return self._base + number * self._habit.every_steps

    def fail(self, kind: Kind, down_seconds: float) -> None:
        """Something goes away, now."""
        self._storage = max([self._storage, *(steps for ready, steps in self._flushing if ready <= self._now)])
        self._flushing = [each for each in self._flushing if each[0] > self._now]
        if kind != "process":
            self._own = 0
        if kind == "cluster":
            self._cluster, self._flushing = 0, []
        prediction = self._habit.prediction
        held = (
            (self._own, prediction.recover_own_seconds),
            (self._cluster, prediction.recover_cluster_seconds),
            (self._storage, prediction.recover_storage_seconds),
        )
        self._base = self._steps = max(steps for steps, _ in held)
        seconds = next(seconds for steps, seconds in held if steps == self._base)
        self._down_until = max(self._down_until, self._now + down_seconds)
        self._born = self._down_until + (seconds or 0.0) * (self._base > 0)

    def outcome(self, num_failures: int) -> Outcome:
        """At the end; steps since the last recovery count, saved or not."""
        step = self._habit.step_seconds
        return Outcome(
            self._habit,
            num_failures,
            self._steps,
            self._steps * step,
            (self._executed - self._steps) * step + self._torn,
            self._saving,
            self._recovering,
            self._down,
        )
