"""When a save is due: after so many steps or seconds, for a share of the time, or as often as saves fit.

Ranks must save at the same step, and their clocks differ. So every measured time becomes a number of steps: at each
save all ranks take rank 0's pace, which came to them with an earlier save, and count on from there. Until the pace is
known, saves are `WARM_UP_STEPS` apart. Where a time was given and is over before these steps are done, since steps have
become slower, rank 0 announces an earlier step.

*Profiled* is what CheckFreq (FAST 2021, §4) and PCcheck (ASPLOS 2025, §4) do: the next save begins when its buffer is
free, k = max(⌈(T − o) / (N·q·t)⌉, 1) steps after the last, for a save of T seconds of which training waits o, steps of
t, q·t during a save, and N saves in flight. *Best* is what Young (CACM 1974) and Daly (FGCS 2006) do, exactly
(`best_cycle`): a cycle of c = τ + C, failures that are a Poisson process of mean M, saves that are safe L after the
cycle, restores of R::

    G = τ e^(-(R + L)/M) / (M (e^(c/M) - 1))

which for L = 0 is Daly's ("A higher order estimate of the optimum checkpoint interval", FGCS 2006). Neither R nor L
moves its maximum: x = c/M solves x + e^(-x) = 1 + C/M. For C ≪ M that is Young's √(2CM) (CACM 1974). No series is cut
off. `benchmarks/planning/goodput.py` computes G, and a replay of traces drawn from such a process agrees with it.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from shade.errors import ConfigError

WARM_UP_STEPS: Final = 10
"""Steps between saves until the pace is known, where the interval depends on it."""
DRIFT_STEPS: Final = 8
"""Upper bound of the steps by which the training threads of ranks drift apart."""
_SPEC: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(|steps?|s|m|h|%)\s*")
_PROFILED: Final = re.compile(r"\s*profiled(?:\s+([0-9]+(?:\.[0-9]+)?)\s*%)?\s*")
_BEST: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*mtbf\s*([0-9]+(?:\.[0-9]+)?)\s*([smh])\s*")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_QUIET_STEPS: Final = 20
"""Steps whose median is the length of a step: a run's first steps, which take longer, do not count for long."""
_ROUNDS: Final = 60
"""Most rounds of Newton's method; it takes five."""


@dataclass(frozen=True)
class Pace:
    """What rank 0 has measured; the same on every rank by the time it is used."""

    step_seconds: float = 0.0
    """Length of a step in which no save was in flight."""
    cost_seconds: float = 0.0
    """What one save added to the steps it fell into: waiting and interference together. Below 0 where these steps
    happened to be short: without such values the mean of several saves would be too high."""
    save_seconds: float = 0.0
    """Time from the beginning of a save until it was committed; 0 before the first save."""
    blocked_seconds: float = 0.0
    """The part of it that the training thread waited."""


class Board(Protocol):
    """Where ranks write for each other, without waiting for each other."""

    def write(self, name: str, content: Any) -> None:
        """Writes a value."""
        ...

    def read(self, name: str) -> Any:
        """Returns the value of a name; None if it was not written."""
        ...


_Interval = Callable[[Pace], float]
"""Returns the steps between two saves at that pace; NaN while the pace does not say."""


class Schedule:
    """Counts steps to the next save.

    Args:
        every: ``50`` or ``"50"`` (steps), ``"30s"``, ``"5m"``, ``"1h"``, ``"2%"`` (of the time), ``"never"``;
            ``"profiled"``: as soon as a save finds room; ``"profiled 5%"``: and for at most 5% of the time;
            ``"2% mtbf 6h"``: what is best if something fails every six hours, and at most 2% of the time.
        in_flight: Saves that may be in flight at once.
        board: Where rank 0 announces a step; None: this rank saves alone.
        rank: This rank.
        clock: Clock for the time since the last save.

    Raises:
        ConfigError: It is none of these.
    """

    def __init__(
        self,
        every: str | int,
        in_flight: int = 1,
        board: Board | None = None,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._never = every == "never"
        self._seconds, self._board, self._rank, self._clock = _seconds_of(str(every)), board, rank, clock
        self._saved_at, self._num_saves, self._has_announced = clock(), 0, False
        interval = _interval(str(every), in_flight)
        if interval is None and not self._never:
            cure = "use 50, '30s', '5m', '2%' or 'never'; 'profiled': as often as saves fit; '2% mtbf 6h': as is best"
            raise ConfigError.of("a number of steps, a time, a share of the time, or never", every, cure)
        self._interval: _Interval = interval or _never
        self._next = self._steps(Pace())

    def close(self) -> None:
        """Drops the board, whose server a new group of this process may start anew."""
        self._board = None

    def is_due(self, step: int) -> bool:
        """Whether a save is due after this step."""
        return not self._never and step >= self._next

    def look(self, step: int) -> None:
        """Looks at the clock after a step, on every rank: a save that is late comes earlier than planned."""
        if self._seconds is None or self._has_announced or self._clock() - self._saved_at < self._seconds:
            return
        target: int | None = step
        if self._board is not None:
            name, target = f"save-{self._num_saves}", None
            with contextlib.suppress(RuntimeError):  # the process that holds the board has ended
                if self._rank == 0:
                    self._board.write(name, step + DRIFT_STEPS)
                target = self._board.read(name)
        if target is not None:
            self._next, self._has_announced = min(self._next, target), True

    def saved(self, step: int, pace: Pace) -> None:
        """Counts on from a save of that step, at a pace that is the same on every rank."""
        self._next = step + self._steps(pace)
        self._saved_at, self._has_announced = self._clock(), False
        self._num_saves += 1

    def _steps(self, pace: Pace) -> int:
        steps = self._interval(pace)
        return WARM_UP_STEPS if math.isnan(steps) else max(1, math.ceil(steps))


def _seconds_of(every: str) -> float | None:
    """Returns the seconds of a specification that is a time; None for any other."""
    match = _SPEC.fullmatch(every)
    return float(match[1]) * _SECONDS[match[2]] if match is not None and match[2] in _SECONDS else None


def _interval(every: str, in_flight: int) -> _Interval | None:
    """Returns the interval that a specification means; None if it means none."""
    profiled = _PROFILED.fullmatch(every)
    if profiled is not None:
        share = float(profiled[1] or 0) / 100
        return None if profiled[1] and not share else _as_they_fit(in_flight, share)
    best = _BEST.fullmatch(every)
    if best is not None:
        share, mtbf_seconds = float(best[1]) / 100, float(best[2]) * _SECONDS[best[3]]
        return _best(share, mtbf_seconds) if share > 0 and mtbf_seconds > 0 else None
    match = _SPEC.fullmatch(every)
    if match is None or float(match[1]) == 0:
        return None
    amount, unit, seconds = float(match[1]), match[2], _seconds_of(every)
    if seconds is not None:
        return lambda pace: float(round(seconds / pace.step_seconds)) if pace.step_seconds > 0 else math.nan
    if unit == "%":
        return _share_of_time(amount / 100)
    return (lambda _: amount) if amount == int(amount) else None


def _best(share: float, mtbf_seconds: float) -> _Interval:
    """Returns the interval that loses the least training time, while saving adds at most that share of it."""

    def steps(pace: Pace) -> float:
        if pace.step_seconds <= 0 or pace.cost_seconds <= 0:
            return math.nan
        wanted = best_cycle(pace.cost_seconds, mtbf_seconds) - pace.cost_seconds
        # CheckFreq approaches its budget by two steps at a time; step and cost are measured all the time here, so the
        # interval follows them in both directions.
        fitting = pace.save_seconds - pace.blocked_seconds
        return max(wanted, fitting, pace.cost_seconds / share) / pace.step_seconds

    return steps


def _share_of_time(share: float) -> _Interval:
    """Returns the interval at which saves cost that share of the steps' time."""

    def steps(pace: Pace) -> float:
        is_known = pace.step_seconds > 0 and pace.cost_seconds > 0
        return pace.cost_seconds / (share * pace.step_seconds) if is_known else math.nan

    return steps


def _as_they_fit(in_flight: int, share: float) -> _Interval:
    """Returns the shortest interval at which a save finds a free buffer; a share of 0 sets no limit to the cost."""

    def steps(pace: Pace) -> float:
        if pace.step_seconds <= 0 or pace.save_seconds <= 0:
            return math.nan
        hidden_seconds = max(0.0, pace.save_seconds - pace.blocked_seconds)
        fitting = hidden_seconds / (in_flight * (1 + share) * pace.step_seconds)
        affordable = pace.cost_seconds / (share * pace.step_seconds) if share else 0.0
        return max(fitting, affordable)

    return steps


def _never(_: Pace) -> float:
    return math.nan


def best_cycle(cost_seconds: float, mtbf_seconds: float) -> float:
    """Returns the cycle, with its save, in which the largest share of time is training.

    Args:
        cost_seconds: C ≥ 0, what a save adds.
        mtbf_seconds: M > 0, mean time between failures; infinity: there are none.

    Returns:
        c = τ + C in seconds; C where a save is free, infinity where there are no failures.
    """
    if math.isinf(mtbf_seconds):
        return math.inf
    # Neither R nor L moves the maximum of G: x = c / M solves x + e^(-x) = 1 + C / M. For C ≪ M that is Young's
    # √(2CM).
    ratio = cost_seconds / mtbf_seconds
    x = math.sqrt(2 * ratio)
    for _ in range(_ROUNDS):
        slope = -math.expm1(-x)
        if slope == 0:
            break
        change = (x - ratio + math.expm1(-x)) / slope
        x -= change
        if abs(change) <= 1e-12 * x:
            break
    return x * mtbf_seconds


class PaceMeter:
    """Measures this rank's `Pace` from the moments at which steps end."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._was_busy = False
        self._quiet: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._extra_seconds = 0.0
        self._cost_seconds = 0.0

    @property
    def _quiet_seconds(self) -> float:
        """Length of a step without a save; 0 before the first."""
        return statistics.median(self._quiet) if self._quiet else 0.0

    def step(self, now: float, busy: bool) -> None:
        """Counts a step that has ended. The step in which a save ends is charged to it, too."""
        if self._last is not None:
            took = now - self._last
            if busy or self._was_busy:
                # Below 0 as well: without such values the mean of several saves would be too high.
                self._extra_seconds += took - self._quiet_seconds
            else:
                self._quiet.append(took)
        if self._was_busy and not busy:
            self._settle()
        self._last, self._was_busy = now, busy

    def begun(self) -> None:
        """Begins a save's account: the steps from now on are charged to it, even if it is committed within this step.

        If the save before is still in flight, its account ends here: with saves that follow each other without a pause,
        a save costs what is added from one beginning to the next.
        """
        if self._was_busy:
            self._settle()
        self._was_busy = True

    def _settle(self) -> None:
        self._cost_seconds, self._extra_seconds = self._extra_seconds, 0.0

    def pace(self, save_seconds: float = 0.0, blocked_seconds: float = 0.0) -> Pace:
        """Returns the pace measured so far, with two times of the last save that was committed."""
        return Pace(self._quiet_seconds, self._cost_seconds, save_seconds, blocked_seconds)
