"""Replays a trace of failures against a strategy and an interval, and accounts for the time of the run.

A trace is a CSV file::

    time_seconds,kind,down_seconds
    1830.5,machine,120
    4000,process,0
    86400,end,

``kind`` is what fails: ``process``, a trainer alone; ``machine``, one machine with its memory; ``cluster``, all memory.
``down_seconds`` is the time until as many machines are available again (0 with a spare). ``end`` is the length of the
trace; without it the last event ends the trace. Columns may be in any order; ``kind`` (``machine``) and
``down_seconds`` (0) may be missing: a list of times, as providers publish it, is a trace after a line
``time_seconds``. Lines that begin with # are comments.

The replay is exact: between two events the run is periodic (a number of steps, then the cost of a save), so the state
at any moment follows by division, and a trace of a year takes milliseconds. It tracks what each tier holds: shared
memory is lost with its machine, cluster memory with all memory, storage never. A committed save becomes durable even if
the trainer fails meanwhile, because the flusher survives, unless all memory is lost.

A save holds the state at the moment when its cost begins. An event during a recovery restarts the recovery. A step in
progress at an event is lost. Invariant: useful, lost, saving, recovering and down seconds add up to the trace.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from goodput import goodput
from predict import Prediction

from shade.errors import ConfigError, DataError
from shade.installation import install_hint

Kind = Literal["process", "machine", "cluster"]
KINDS: Final[tuple[Kind, ...]] = ("process", "machine", "cluster")
_COLUMNS: Final = ("time_seconds", "kind", "down_seconds")
_END: Final = "end"
_ROUNDING: Final = 1e-9
"""Part of a step that rounding may lose."""


@dataclass(frozen=True)
class Failure:
    """One failure."""

    time_seconds: float
    """Time since the start of the trace."""
    kind: Kind = "machine"
    down_seconds: float = 0.0
    """Time until the machines are available again, before the restore."""


@dataclass(frozen=True)
class PreemptionTrace:
    """Failures in order, and the length of the trace."""

    failures: tuple[Failure, ...]
    length_seconds: float

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures in the trace; infinity without a failure."""
        return self.length_seconds / len(self.failures) if self.failures else float("inf")

    @classmethod
    def load(cls, path: Path) -> PreemptionTrace:
        """Reads a trace file, or raises DataError with the number of the wrong line."""
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError.of("a trace in CSV", f"{path}: {error}", "name a readable file") from error
        return cls.parse(lines, str(path))

    @classmethod
    def parse(cls, lines: Iterable[str], name: str = "trace") -> PreemptionTrace:
        """Parses the lines of a trace file; ``name`` is for the messages of DataError."""
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
        """Returns CSV that `parse` reads back exactly."""
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
        """Generates a trace of independent failures at random times.

        Raises ConfigError if one of the times is not positive.
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
    """A strategy with its interval."""

    name: str
    """Name of the strategy."""
    prediction: Prediction
    step_seconds: float
    every_steps: int

    @property
    def work_seconds(self) -> float:
        """Training time between two saves."""
        return self.every_steps * self.step_seconds

    @property
    def cost_seconds(self) -> float:
        """Time that a save adds; with ``in_flight`` saves in progress the next one waits for the oldest."""
        safe = self.prediction.safe_seconds / self.prediction.in_flight
        return max(self.prediction.cost_seconds, safe - self.work_seconds)


@dataclass(frozen=True)
class Outcome:
    """How the time of a run was spent."""

    habit: Habit
    num_failures: int
    steps: int
    """Steps that are not lost at the end."""
    useful_seconds: float
    lost_seconds: float
    """Training that had to be repeated, and steps that an event interrupted."""
    saving_seconds: float
    recovering_seconds: float
    down_seconds: float

    @property
    def total_seconds(self) -> float:
        """Sum of all parts: the length of the trace."""
        spent = self.lost_seconds + self.saving_seconds + self.recovering_seconds + self.down_seconds
        return self.useful_seconds + spent

    @property
    def goodput(self) -> float:
        """Useful part of the time."""
        return self.useful_seconds / self.total_seconds


def replay(trace: PreemptionTrace, habit: Habit) -> Outcome:
    """Replays a run through a trace, and returns how its time was spent."""
    run = _Run(habit)
    for failure in trace.failures:
        run.reach(failure.time_seconds)
        run.fail(failure.kind, failure.down_seconds)
    run.reach(trace.length_seconds)
    return run.outcome(len(trace.failures))


def replay_all(trace: PreemptionTrace, habits: Iterable[Habit]) -> list[Outcome]:
    """Replays several runs through a trace; returns the best first."""
    return sorted((replay(trace, habit) for habit in habits), key=lambda outcome: -outcome.goodput)


class _Run:
    """The state of a run in a trace. A *life* is the time from the end of a recovery to the next event."""

    def __init__(self, habit: Habit) -> None:
        self._habit = habit
        self._work, self._cycle = habit.work_seconds, habit.work_seconds + habit.cost_seconds
        self._now = self._down_until = 0.0
        self._born = 0.0
        """When this life begins: after down time and recovery."""
        self._base = self._steps = 0
        """Steps at the beginning of this life, and now."""
        self._own = self._cluster = self._storage = 0
        """Steps of the newest snapshot in shared memory, cluster memory and storage."""
        self._flushing: list[tuple[float, int]] = []
        """For each snapshot in cluster memory: when it will be durable, and its steps."""
        self._executed = 0
        self._torn = self._saving = self._recovering = self._down = 0.0

    def reach(self, moment: float) -> None:
        """Advances the time to an event or the end."""
        self._down += max(0.0, min(moment, self._down_until) - self._now)
        begin = max(self._now, self._down_until)
        self._recovering += max(0.0, min(moment, self._born) - begin)
        if moment > self._born:
            self._live(moment - self._born)
        self._now = moment

    def _live(self, age: float) -> None:
        """Accounts for a complete life, and for the snapshots that it leaves in the tiers."""
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
        """Returns how many of this life's snapshots are older than the lag."""
        if lag is None or age < self._work + lag:
            return 0
        return math.floor((age - self._work - lag) / self._cycle) + 1

    def _after(self, number: int) -> int:
        return self._base + number * self._habit.every_steps

    def fail(self, kind: Kind, down_seconds: float) -> None:
        """Applies a failure at the current time."""
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
        """Returns the outcome at the end; steps since the last recovery count, saved or not."""
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


HEADER = (
    "strategy", "every", "stall", "cost", "safe", "kept", "lost", "saving", "recovering", "down", "lost/failure",
    "expected",
)  # fmt: skip
"""``cost`` is stall and drag; ``expected`` is the closed form for failures at random times."""


def expected(habit: Habit, mtbf_seconds: float) -> float:
    """Returns the expected goodput for failures at random times without down time."""
    prediction, cost = habit.prediction, habit.cost_seconds
    return goodput(
        habit.work_seconds,
        cost,
        mtbf_seconds,
        lag_seconds=prediction.safe_seconds - cost,
        recover_seconds=prediction.recover_seconds,
    )


def rows(outcomes: Sequence[Outcome], mtbf_seconds: float) -> list[list[str]]:
    """Returns the cells of a table, heading first, then a line for each outcome."""
    found = [list(HEADER)]
    for outcome in outcomes:
        prediction, total = outcome.habit.prediction, outcome.total_seconds
        shares = (outcome.lost_seconds, outcome.saving_seconds, outcome.recovering_seconds, outcome.down_seconds)
        lost = f"{outcome.lost_seconds / outcome.num_failures:.1f} s" if outcome.num_failures else "-"
        found.append(
            [
                outcome.habit.name,
                str(outcome.habit.every_steps),
                f"{prediction.stall_seconds:.3f} s",
                f"{outcome.habit.cost_seconds:.3f} s",
                f"{prediction.safe_seconds:.2f} s",
                f"{100 * outcome.goodput:.3f} %",
                *(f"{100 * share / total:.3f} %" for share in shares),
                lost,
                f"{100 * expected(outcome.habit, mtbf_seconds):.3f} %",
            ]
        )
    return found


def plot(curves: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Plots the goodput over the seconds between two saves, one line per strategy.

    Raises ConfigError if matplotlib is not installed, or the path cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError.of(
            "matplotlib, to draw a plot", None, f"{install_hint('report')}, or use the table"
        ) from None
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for name, outcomes in curves.items():
        seconds = [outcome.habit.work_seconds for outcome in outcomes]
        panel.plot(seconds, [100 * outcome.goodput for outcome in outcomes], marker=".", label=name)
    panel.set(xscale="log", xlabel="training between two saves, s", ylabel="time that ends up as training, %")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError.of("a --plot that can be written", f"{path}: {error}", "name a .png") from None
