"""When a save falls due: every so many steps, every so many seconds, or as often as a share of the time allows.

Ranks must save at the same step, and their clocks differ. So seconds and shares become steps: at each save all ranks
take rank 0's pace, which came to them with the save before, and count on from there. Until the pace is known, saves are
`WARM_UP_STEPS` apart; they are also what measures the cost.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from shade.errors import ConfigError

WARM_UP_STEPS: Final = 10
"""Steps before the first save where the interval depends on the pace."""
_SPEC: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(|steps?|s|m|h|%)\s*")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Pace:
    """What rank 0 has measured; the same on every rank by the time it is used."""

    step_seconds: float = 0.0
    """A step in which no save was under way."""
    cost_seconds: float = 0.0
    """What one save has added to the steps it fell into: waiting and interference together."""


class Schedule:
    """Counts steps to the next save.

    Args:
        every: ``50`` or ``"50"`` (steps), ``"30s"``, ``"5m"``, ``"1h"``, ``"2%"`` (of the time), or ``"never"``.

    Raises:
        ConfigError: Something else.
    """

    def __init__(self, every: str | int) -> None:
        match = _SPEC.fullmatch(str(every))
        self._steps, self._seconds, self._share = 0, 0.0, 0.0
        if match is not None and float(match[1]) > 0:
            amount, unit = float(match[1]), match[2]
            if unit in _SECONDS:
                self._seconds = amount * _SECONDS[unit]
            elif unit == "%":
                self._share = amount / 100
            elif amount == int(amount):
                self._steps = int(amount)
        if not (self._steps or self._seconds or self._share or every == "never"):
            cure = "use 50, '30s', '5m', '2%' or 'never'"
            raise ConfigError.of("a number of steps, a time, a share of the time, or never", every, cure)
        self._never = every == "never"
        self._next = self._steps or WARM_UP_STEPS

    def is_due(self, step: int) -> bool:
        """Whether a save falls due after this step."""
        return not self._never and step >= self._next

    def saved(self, step: int, pace: Pace) -> None:
        """Counts on from a save.

        Args:
            step: At which it was taken.
            pace: The same on every rank.
        """
        if self._steps:
            interval = self._steps
        elif pace.step_seconds > 0 and self._seconds:
            interval = round(self._seconds / pace.step_seconds)
        elif pace.step_seconds <= 0 or pace.cost_seconds <= 0:
            interval = WARM_UP_STEPS
        else:
            interval = math.ceil(pace.cost_seconds / (self._share * pace.step_seconds))
        self._next = step + max(1, interval)


class PaceMeter:
    """Measures this rank's `Pace` from the moments at which steps end."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._was_busy = False
        self._quiet_seconds = 0.0
        self._extra_seconds = 0.0
        self._cost_seconds = 0.0

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
                self._quiet_seconds = took if not self._quiet_seconds else 0.9 * self._quiet_seconds + 0.1 * took
        if self._was_busy and not busy:
            self._cost_seconds, self._extra_seconds = max(0.0, self._extra_seconds), 0.0
        self._last, self._was_busy = now, busy

    @property
    def pace(self) -> Pace:
        """As measured so far."""
        return Pace(self._quiet_seconds, self._cost_seconds)
