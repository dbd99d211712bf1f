"""Smooths what each step measures: a level that follows changes, and how one quantity grows with another.

Both forget: the level by a moving average, the slope by the weight of its measurements. Decision 0018 has the
measurements behind the constants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Final

WINDOW: Final = 3
QUICK_WEIGHT, STEADY_WEIGHT = 0.8, 0.1
"""Weight of the newest median in the average: when it differs by more than `NOISE_FRACTION`, and when not."""
NOISE_FRACTION: Final = 0.2
"""A median that differs by more is a change, not noise."""

FADING: Final = 0.99
"""Factor of a measurement's weight in a slope with each newer one: about a hundred count."""
DOUBT: Final = 5 * 0.1**2
"""A slope starts as if five measurements, each a tenth of x from the mean, had shown no growth."""


class Smoothed:
    """One smoothed quantity: the median of the last three measurements, then a moving average.

    The median removes a single outlier. The average is slow while medians stay near it, and quick once they do not.
    `value` is None before the first measurement.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.value: float | None = None

    def add(self, measured: float) -> None:
        """Adds a measurement; ignores one that is not finite, because a broken clock must not steer."""
        if not math.isfinite(measured):
            return
        self._recent.append(measured)
        middle = median(self._recent)
        if self.value is None:
            self.value = middle
            return
        # Quick with changes: of seconds per byte that is the safe order, because a step on an overestimated link takes
        # long, and one on an underestimated link only carries less.
        is_noise = abs(middle - self.value) <= NOISE_FRACTION * abs(self.value)
        self.value += (STEADY_WEIGHT if is_noise else QUICK_WEIGHT) * (middle - self.value)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        return {"recent": list(self._recent), "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state."""
        self._recent = deque(map(float, state["recent"]), maxlen=WINDOW)
        self.value = None if state["value"] is None else float(state["value"])


class Slope:
    """The growth of y with x: a line through all measurements, in which old ones lose weight; 0 while it may be
    noise."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = self._yy = 0.0
        self._level_weight = 0.0
        """Total weight of the measurements in the means of x and y."""

    def add(self, x: float, y: float) -> None:
        """Adds a measurement (x, y), both finite."""
        kept = FADING * self._level_weight
        self._weight, self._level_weight = FADING * self._weight + 1, kept + 1
        step_x, step_y, share = x - self._x, y - self._y, kept / self._level_weight
        self._x += step_x / self._level_weight
        self._y += step_y / self._level_weight
        self._xx = FADING * self._xx + share * step_x * step_x
        self._xy = FADING * self._xy + share * step_x * step_y
        self._yy = FADING * self._yy + share * step_y * step_y

    def start_level(self) -> None:
        """Starts a new level of y, which changed for another reason than x; keeps the slope."""
        self._level_weight = 0.0

    @property
    def value(self) -> float:
        """The slope of the line minus its standard error; shrunk towards 0 if x has hardly varied."""
        spread = self._xx + DOUBT * self._x**2
        if self._weight <= 2 or not spread:
            return 0.0
        slope = self._xy / spread
        unexplained = max(0.0, self._yy - slope * self._xy)
        return max(0.0, slope - math.sqrt(unexplained / (self._weight - 2) / spread))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        return {"sums": [self._weight, self._level_weight, self._x, self._y, self._xx, self._xy, self._yy]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state."""
        sums = map(float, state["sums"])
        self._weight, self._level_weight, self._x, self._y, self._xx, self._xy, self._yy = sums
