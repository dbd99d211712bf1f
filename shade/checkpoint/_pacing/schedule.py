"""When a save falls due: after so many steps or seconds, as often as a share of the time allows, or as saves fit.

Ranks must save at the same step, and their clocks differ. So whatever is measured becomes steps: at each save all ranks
take rank 0's pace, which came to them with a save before, and count on from there. Until the pace is known, saves are
`WARM_UP_STEPS` apart; they are also what measures the cost.

*Profiled* is what CheckFreq (FAST 2021, §4) and PCcheck (ASPLOS 2025, §4) do, which is the same for one save in flight
and for N: the next save begins when its room is free. A save takes T seconds, of which training waits o; a step takes
t, and q·t while one is under way. So k = max(⌈(T − o) / (N·q·t)⌉, 1). Where q − 1 is given as a budget, saves are also
no more frequent than it allows. CheckFreq approaches that by two steps at a time; here the step and the cost are
measured all the time, and the interval follows from them, upwards and downwards.

*Best* is what Young and Daly do, exactly (`best_cycle`), within a share of the time. Failures come at random, one in M
seconds on average (a Poisson process). A save adds C seconds to the training, is safe L seconds later than those, and
the way back takes R. Between two saves lie τ seconds of training, so a cycle is c = τ + C. Of a life between two
failures, R goes by first; then as many cycles count as were safe before its end. A life is longer than x with
probability e^(-x/M), and so the share of time that ends up as training is

    G = τ e^(-(R + L)/M) / (M (e^(c/M) - 1))

which for L = 0 is Daly's ("A higher order estimate of the optimum checkpoint interval", FGCS 2006). Neither R nor L
moves its maximum: x = c/M solves x + e^(-x) = 1 + C/M. For C ≪ M that is Young's √(2CM) (CACM 1974). All exact, no
series cut off; `shade checkpoint simulate` must agree with it on traces drawn from such a process.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shade.errors import ConfigError

WARM_UP_STEPS: Final = 10
"""Steps before the first save where the interval depends on the pace."""
_SPEC: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(|steps?|s|m|h|%)\s*")
_PROFILED: Final = re.compile(r"\s*profiled(?:\s+([0-9]+(?:\.[0-9]+)?)\s*%)?\s*")
_BEST: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*mtbf\s*([0-9]+(?:\.[0-9]+)?)\s*([smh])\s*")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_QUIET_STEPS: Final = 20
"""The last, whose middle is how long a step takes: a run's first, which take longer, do not count for long."""
_ROUNDS: Final = 60
"""Of Newton's method, at most; it takes five."""
MTBF_SECONDS: Final = 86400.0
"""A failure a day, where nobody says how often: spot machines fail more often, one's own less."""


@dataclass(frozen=True)
class Pace:
    """What rank 0 has measured; the same on every rank by the time it is used."""

    step_seconds: float = 0.0
    """A step in which no save was under way."""
    cost_seconds: float = 0.0
    """What one save has added to the steps it fell into: waiting and interference together. Below 0 where these steps
    happened to be short ones: without those the mean of several saves would be too high."""
    save_seconds: float = 0.0
    """From the moment a save was begun until it was committed; 0 before there was one."""
    blocked_seconds: float = 0.0
    """What of that the training thread has waited."""
    worked_seconds: float = 0.0
    """Processor time that saving threads took for it while the training went on."""
    strategy: str = ""
    """Whom the next saves shall be left to, where the strategy chooses among others."""


_Interval = Callable[[Pace], float]
"""Steps between two saves at that pace; NaN where it does not say."""


class Schedule:
    """Counts steps to the next save.

    Args:
        every: ``50`` or ``"50"`` (steps), ``"30s"``, ``"5m"``, ``"1h"``, ``"2%"`` (of the time), ``"never"``;
            ``"profiled"``: as soon as a save finds room; ``"profiled 5%"``: and for no more than 5% of the time;
            ``"2% mtbf 6h"``: what is best if something fails every six hours, and no more than 2% of the time.
        in_flight: Saves that have room at once.

    Raises:
        ConfigError: Something else.
    """

    def __init__(self, every: str | int, in_flight: int = 1) -> None:
        self._never = every == "never"
        interval = _interval(str(every), in_flight)
        if interval is None and not self._never:
            cure = "use 50, '30s', '5m', '2%' or 'never'; 'profiled': as often as saves fit; '2% mtbf 6h': as is best"
            raise ConfigError.of("a number of steps, a time, a share of the time, or never", every, cure)
        self._interval: _Interval = interval or _never
        self._next = self._steps(Pace())

    def is_due(self, step: int) -> bool:
        """Whether a save falls due after this step."""
        return not self._never and step >= self._next

    def saved(self, step: int, pace: Pace) -> None:
        """Counts on from a save.

        Args:
            step: At which it was taken.
            pace: The same on every rank.
        """
        self._next = step + self._steps(pace)

    def _steps(self, pace: Pace) -> int:
        steps = self._interval(pace)
        return WARM_UP_STEPS if math.isnan(steps) else max(1, math.ceil(steps))


def _interval(every: str, in_flight: int) -> _Interval | None:
    """What a specification means; None if nothing."""
    profiled = _PROFILED.fullmatch(every)
    if profiled is not None:
        share = float(profiled[1] or 0) / 100
        return None if profiled[1] and not share else _as_they_fit(in_flight, share)
    best = _BEST.fullmatch(every)
    if best is not None:
        share, mtbf_seconds = budget_of(every)
        return _best(share, mtbf_seconds) if share > 0 and mtbf_seconds > 0 else None
    match = _SPEC.fullmatch(every)
    if match is None or float(match[1]) == 0:
        return None
    amount, unit = float(match[1]), match[2]
    if unit in _SECONDS:
        seconds = amount * _SECONDS[unit]
        return lambda pace: float(round(seconds / pace.step_seconds)) if pace.step_seconds > 0 else math.nan
    if unit == "%":
        return _share_of_time(amount / 100)
    return (lambda _: amount) if amount == int(amount) else None


def budget_of(every: str | int) -> tuple[float, float]:
    """What a specification allows and expects.

    Args:
        every: As `Schedule` has it.

    Returns:
        The share of the time that saving may add, 1 where none is said; and the mean seconds between failures.
    """
    best = _BEST.fullmatch(str(every))
    if best is not None:
        return float(best[1]) / 100, float(best[2]) * _SECONDS[best[3]]
    share = _SPEC.fullmatch(str(every))
    return float(share[1]) / 100 if share is not None and share[2] == "%" else 1.0, MTBF_SECONDS


def _best(share: float, mtbf_seconds: float) -> _Interval:
    """So that most of the time ends up as training, and saving adds no more than that share of it."""

    def steps(pace: Pace) -> float:
        if pace.step_seconds <= 0 or pace.cost_seconds <= 0:
            return math.nan
        wanted = best_cycle(pace.cost_seconds, mtbf_seconds) - pace.cost_seconds
        fitting = pace.save_seconds - pace.blocked_seconds
        return max(wanted, fitting, pace.cost_seconds / share) / pace.step_seconds

    return steps


def _share_of_time(share: float) -> _Interval:
    """So that what saves cost is that share of the steps."""

    def steps(pace: Pace) -> float:
        is_known = pace.step_seconds > 0 and pace.cost_seconds > 0
        return pace.cost_seconds / (share * pace.step_seconds) if is_known else math.nan

    return steps


def _as_they_fit(in_flight: int, share: float) -> _Interval:
    """So that a save finds room; a share of 0: whatever it costs."""

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
    """The cycle, save included, with which most of the time ends up as training.

    Args:
        cost_seconds: C ≥ 0, what a save adds.
        mtbf_seconds: M > 0, mean time between failures; infinity: they do not happen.

    Returns:
        c = τ + C in seconds; C where a save is free, infinity where nothing fails.
    """
    if math.isinf(mtbf_seconds):
        return math.inf
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


def goodput(
    work_seconds: float,
    cost_seconds: float,
    mtbf_seconds: float,
    *,
    lag_seconds: float = 0.0,
    recover_seconds: float = 0.0,
) -> float:
    """The share of all time that ends up as training that was never done again.

    Args:
        work_seconds: τ > 0, training between two saves, by the clock of a training without saves.
        cost_seconds: C, what a save adds.
        mtbf_seconds: M; infinity: nothing fails.
        lag_seconds: L, from the end of the cost until the save is safe; negative where it is safe before.
        recover_seconds: R, from a failure until training goes on.

    Returns:
        G, between 0 and 1.
    """
    cycle = work_seconds + cost_seconds
    if math.isinf(mtbf_seconds):
        return work_seconds / cycle
    life = mtbf_seconds
    if cycle / life > 500:  # e to that is more than a float holds; nothing is left anyway
        return 0.0
    late = max(-cycle, lag_seconds)
    return work_seconds * math.exp(-(recover_seconds + late) / life) / (life * math.expm1(cycle / life))


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
        """Of a step without a save; 0 before there was one."""
        return statistics.median(self._quiet) if self._quiet else 0.0

    def step(self, now: float, busy: bool) -> None:
        """A step has ended.

        Args:
            now: Monotonic seconds.
            busy: Whether a save is still under way. The step in which one ends is charged to it, too.
        """
        if self._last is not None:
            took = now - self._last
            if busy or self._was_busy:
                self._extra_seconds += took - self._quiet_seconds
            else:
                self._quiet.append(took)
        if self._was_busy and not busy:
            self._settle()
        self._last, self._was_busy = now, busy

    def begun(self) -> None:
        """A save has begun: what it takes from now on is charged to it, even if it has landed before the step ends.

        Where the one before is still under way, its account is closed here: with saves that follow each other without
        a pause, what one costs is what is added from one beginning to the next.
        """
        if self._was_busy:
            self._settle()
        self._was_busy = True

    def _settle(self) -> None:
        self._cost_seconds, self._extra_seconds = self._extra_seconds, 0.0

    def pace(self, save_seconds: float = 0.0, blocked_seconds: float = 0.0, worked_seconds: float = 0.0) -> Pace:
        """As measured so far.

        Args:
            save_seconds: Of the last save that landed.
            blocked_seconds: Of the same.
            worked_seconds: Of the same.

        Returns:
            The pace.
        """
        return Pace(self._quiet_seconds, self._cost_seconds, save_seconds, blocked_seconds, worked_seconds)
