"""Smooths noisy measurements.

`Smoothed` is one quantity: the median of the last three measurements, then a moving average. The median removes a
single outlier; the average removes the rest of the noise. The average is slow while the medians stay near it, so noise
does not move it, and quick once they do not. Bandwidth is smoothed as seconds per byte: a link that breaks down is
followed within two steps, and one that recovers within about four. This order is right, because a step on an
overestimated link takes long, and a step on an underestimated one only carries less. The price is that lag.

`Slope` is how one quantity grows with another: a line through all measurements, in which old ones lose weight.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
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
    """One quantity; `value` is None before the first measurement."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.value: float | None = None

    def add(self, measured: float) -> None:
        """Adds a measurement.

        Args:
            measured: A value that is not finite is ignored: a broken clock must not steer.
        """
        if not math.isfinite(measured):
            return
        self._recent.append(measured)
        median = statistics.median(self._recent)
        if self.value is None:
            self.value = median
            return
        is_noise = abs(median - self.value) <= NOISE_FRACTION * abs(self.value)
        self.value += (STEADY_WEIGHT if is_noise else QUICK_WEIGHT) * (median - self.value)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        return {"recent": list(self._recent), "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state."""
        self._recent = deque(map(float, state["recent"]), maxlen=WINDOW)
        self.value = None if state["value"] is None else float(state["value"])


class Slope:
    """Estimates how much y grows with x; at least 0, and 0 while the growth may be noise."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = self._yy = 0.0
        self._level_weight = 0.0
        """Total weight of the measurements in the means of x and y."""

    def add(self, x: float, y: float) -> None:
        """Adds a measurement.

        Args:
            x: Finite.
            y: The value measured at x; finite.
        """
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
