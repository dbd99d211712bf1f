"""Replays a trace of preemptions against a way to save: what of the time was training, and where the rest went.

A trace is a CSV file::

    time_seconds,kind,down_seconds
    1830.5,machine,120
    4000,process,0
    86400,end,

``kind`` is what the event takes: ``process``, a trainer and nothing else; ``machine``, one machine with its memory;
``cluster``, all memory there is. ``down_seconds`` is how long it takes until as many machines are there again (none
where a spare stands by). ``end`` says how long was watched; without it the last event ends the trace. Columns may stand
in any order, ``kind`` may be left out (``machine``), and so may ``down_seconds`` (0): a list of times, as providers
publish it, is a trace with a line ``time_seconds`` above it. Lines that begin with # are remarks.

The replay is exact, not drawn: between two events the run is periodic (so many steps, then what a save adds, and
again), so the state at any moment follows by division, and a trace of a year takes milliseconds. What is followed is
what each tier holds: own memory is lost when a machine dies, cluster memory when all memory goes, storage never. A save
that was committed becomes durable even if the trainer dies meanwhile, because the flusher lives on; it does not if all
memory goes.

A save is taken where its cost begins. An event during a recovery begins the recovery again. A step that was begun and
not ended is lost with the rest. Invariant: useful, lost, saving, recovering and down seconds add up to the trace.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from shade.checkpoint._strategies.predict import Prediction
from shade.errors import ConfigError, DataError

Kind = Literal["process", "machine", "cluster"]
KINDS: Final[tuple[Kind, ...]] = ("process", "machine", "cluster")
_COLUMNS: Final = ("time_seconds", "kind", "down_seconds")
_END: Final = "end"
_ROUNDING: Final = 1e-9
"""Of a step: what division leaves over."""


@dataclass(frozen=True)
class Failure:
    """One event."""

    time_seconds: float
    """Since the trace began."""
    kind: Kind = "machine"
    down_seconds: float = 0.0
    """Until training could go on, before it has restored anything."""


@dataclass(frozen=True)
class PreemptionTrace:
    """Events in order, and how long was watched."""

    failures: tuple[Failure, ...]
    length_seconds: float

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures, as far as the trace shows: infinity where nothing failed."""
        return self.length_seconds / len(self.failures) if self.failures else float("inf")

    @classmethod
    def load(cls, path: Path) -> PreemptionTrace:
        """Reads a file.

        Args:
            path: Of it; the format is at the top.

        Returns:
            The trace.

        Raises:
            DataError: It is no such file; the message names the line.
        """
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError.of("a trace in CSV", f"{path}: {error}", "name a readable file") from error
        return cls.parse(lines, str(path))

    @classmethod
    def parse(cls, lines: Iterable[str], name: str = "trace") -> PreemptionTrace:
        """Reads lines; as `load`.

        Args:
            lines: With the names of the columns in the first that is no remark.
            name: For messages.

        Returns:
            The trace.

        Raises:
            DataError: They are no trace.
        """
        rows = csv.reader(line if line.strip() and not line.lstrip().startswith("#") else "" for line in lines)
        columns: list[str] = []
        failures: list[Failure] = []
        end: float | None = None
        for row in rows:
            if not row:
                continue
            cells = [cell.strip() for cell in row]
            if not columns:
                columns = cells
                if "time_seconds" not in columns or not set(columns) <= set(_COLUMNS):
                    raise DataError.of(f"columns {', '.join(_COLUMNS)}", ", ".join(cells), f"name them in {name}")
                continue
            place = f"{name}, line {rows.line_num}"
            if end is not None:
                raise DataError.of(f"nothing after {_END}", ",".join(row), f"see {place}")
            named = dict(zip(columns, cells, strict=False))
            time = _seconds(named["time_seconds"], place)
            if failures and time < failures[-1].time_seconds:
                raise DataError.of("times in order", named["time_seconds"], f"sort the lines; see {place}")
            kind = named.get("kind") or "machine"
            if kind == _END:
                end = time
            elif kind in KINDS:
                down = _seconds(named.get("down_seconds") or "0", place)
                failures.append(Failure(time, kind, down))
            else:
                raise DataError.of(f"one of {', '.join(KINDS)}, {_END}", kind, f"see {place}")
        length = end if end is not None else failures[-1].time_seconds if failures else 0.0
        if length <= 0:
            raise DataError.of("a trace that lasts", f"{name} of {length} s", f"add a line for each event, or {_END}")
        return cls(tuple(failures), length)

    def to_csv(self) -> str:
        """The same as text; `parse` gives it back bit for bit."""
        rows = [f"{each.time_seconds!r},{each.kind},{each.down_seconds!r}" for each in self.failures]
        return "\n".join([",".join(_COLUMNS), *rows, f"{self.length_seconds!r},{_END},"]) + "\n"

    @classmethod
    def synthetic(
        cls,
        mtbf_seconds: float,
        length_seconds: float,
        seed: int = 0,
        *,
        down_seconds: float = 0.0,
        kind: Kind = "machine",
    ) -> PreemptionTrace:
        """Makes one up: failures at random moments, independent of each other.

        Args:
            mtbf_seconds: Mean time between two of them, > 0.
            length_seconds: Of the trace, > 0.
            seed: Of the moments.
            down_seconds: After each.
            kind: Of all.

        Returns:
            The trace.

        Raises:
            ConfigError: One of the times is not positive.
        """
        if not (mtbf_seconds > 0 and length_seconds > 0):
            cure = "give both in seconds"
            raise ConfigError.of("a mean time between failures and a length > 0", (mtbf_seconds, length_seconds), cure)
        generator, failures, time = random.Random(seed), [], 0.0
        while (time := time + generator.expovariate(1 / mtbf_seconds)) < length_seconds:
            failures.append(Failure(time, kind, down_seconds))
        return cls(tuple(failures), length_seconds)


def _seconds(text: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise DataError.of("seconds ≥ 0", text, f"see {place}")
    return value


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
