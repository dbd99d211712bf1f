"""Makes numbers one can act on out of measurements that jump.

`Smoothed` is one quantity: the median of the last three, then a moving average.

The median keeps a single hiccup out altogether; the average takes the rest of the noise. It is slow while the medians
stay near it, so that noise moves nothing, and quick once they do not. Bandwidth goes in upside down, as seconds per
byte: then a link that breaks down is believed within two steps, and one that recovers within about four. That is the
right way round, as a step on a link that is overestimated takes long, and one on a link that is underestimated only
carries less. The price is that lag.

`Slope` is how one quantity grows with another: a line through all that was measured, of which old measurements fade.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

WINDOW: Final = 3
QUICK_WEIGHT, STEADY_WEIGHT = 0.8, 0.1
"""Of the newest median in the average: when it is off by more than `NOISE_FRACTION`, and when it is not."""
NOISE_FRACTION: Final = 0.2
"""A median that is further off than that is a change, not noise."""

FADING: Final = 0.99
"""What a measurement's weight in a slope shrinks by with each one after it: a hundred of them count."""
DOUBT: Final = 5 * 0.1**2
"""A slope begins as if five measurements, each a tenth of x off the mean, had shown no growth."""


class Smoothed:
    """One quantity; `value` is None until something came in."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.value: float | None = None

    def add(self, measured: float) -> None:
        """Takes in a measurement.

        Args:
            measured: Finite; what is not is left out, as a broken clock must not steer.
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
        """What it goes on from."""
        return {"recent": list(self._recent), "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it back."""
        self._recent = deque(map(float, state["recent"]), maxlen=WINDOW)
        self.value = None if state["value"] is None else float(state["value"])


class Slope:
    """How much y grows with x; never below 0, and 0 as long as it may be noise."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = self._yy = 0.0
        self._level_weight = 0.0
        """Of the measurements that x and y are means of."""

    def add(self, x: float, y: float) -> None:
        """Takes in a measurement.

        Args:
            x: Finite.
            y: What belongs to it; finite.
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
        """From now on y lies higher or lower for another reason; how much it grows with x stays."""
        self._level_weight = 0.0

    @property
    def value(self) -> float:
        """Of the line, drawn towards 0 where x has hardly varied, less its standard error."""
        spread = self._xx + DOUBT * self._x**2
        if self._weight <= 2 or not spread:
            return 0.0
        slope = self._xy / spread
        unexplained = max(0.0, self._yy - slope * self._xy)
        return max(0.0, slope - math.sqrt(unexplained / (self._weight - 2) / spread))

    def state_dict(self) -> dict[str, Any]:
        """What it goes on from."""
        return {"sums": [self._weight, self._level_weight, self._x, self._y, self._xx, self._xy, self._yy]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it back."""
        sums = map(float, state["sums"])
        self._weight, self._level_weight, self._x, self._y, self._xx, self._xy, self._yy = sums
