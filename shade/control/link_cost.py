"""Estimates the seconds of an exchange over the slowest hop: those that do not depend on its bytes, and those per byte.

Without the fixed part a fast link reads as a slow one: an exchange of few bytes takes as long as one of more, the
density falls, and bytes and their apparent rate fall with it. It is measured by the exchange's vote, which is small.

A link that changes faster than a decision takes effect cannot be followed. So a cost is an expected one: mostly that of
the present rate, and with the share of steps that found another rate than their density was chosen for, the mean of
what the last `HISTORY` steps found. Decision 0018 has the measurements behind the constants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import quantiles
from typing import Any, Final

from shade.control.smoothing import Smoothed

HISTORY: Final = 200
"""Steps whose rates are remembered."""
DELAY: Final = 4
"""Steps from a measurement to the first step whose density follows it: two of reports, two under way."""
CHANGE: Final = 1.5
"""A rate that differs by this factor is another one."""
DOUBT: Final = 5
"""The share of changed rates starts as if so many steps had found none."""
_PARTS: Final = 16
"""The remembered rates are taken as the borders between so many equal parts."""
_LEAST_SHARE: Final = 0.01
"""Least share of an exchange that its bytes take: an estimate of 0 would never be corrected."""


class LinkCost:
    """Seconds of an exchange, from the exchanges that were measured."""

    def __init__(self) -> None:
        self._fixed, self._per_byte = Smoothed(), Smoothed()
        self._past: deque[tuple[float, bool]] = deque(maxlen=HISTORY)
        """Seconds per byte of the last steps, and whether another rate was expected."""
        self._expected: deque[float] = deque(maxlen=DELAY)
        """Seconds per byte with which the steps under way were planned."""

    @property
    def fixed_seconds(self) -> float:
        """Seconds of an exchange of no bytes."""
        return self._fixed.value or 0.0

    @property
    def seconds_per_byte(self) -> float | None:
        """At present; None before the first measurement."""
        return self._per_byte.value

    def add(self, seconds: float, num_bytes: int, fixed_seconds: float) -> None:
        """Adds an exchange: its time, above 0, its bytes, at least 1, and what it would take without them."""
        self._fixed.add(min(fixed_seconds, seconds))
        per_byte = max(seconds - self.fixed_seconds, _LEAST_SHARE * seconds) / num_bytes
        if len(self._expected) == DELAY:
            self._past.append((per_byte, not 1 / CHANGE < per_byte / self._expected[0] < CHANGE))
        self._per_byte.add(per_byte)
        self._expected.append(self._per_byte.value or per_byte)

    def rates(self) -> list[tuple[float, float]]:
        """Returns what the next exchanges may find: seconds per byte, and the probability of each."""
        present, past = self._per_byte.value or 0.0, [rate for rate, _ in self._past]
        changed = sum(is_change for _, is_change in self._past) / (len(past) + DOUBT)
        if not changed:
            return [(present, 1.0)]
        borders = quantiles(past, n=_PARTS) if len(past) > 1 else past
        return [(present, 1 - changed), *((each, changed / len(borders)) for each in borders)]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        return {
            "fixed": self._fixed.state_dict(),
            "per_byte": self._per_byte.state_dict(),
            "past": [list(each) for each in self._past],
            "expected": list(self._expected),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state."""
        self._fixed.load_state_dict(state["fixed"])
        self._per_byte.load_state_dict(state["per_byte"])
        self._past = deque(((float(rate), bool(is_change)) for rate, is_change in state["past"]), maxlen=HISTORY)
        self._expected = deque(map(float, state["expected"]), maxlen=DELAY)
