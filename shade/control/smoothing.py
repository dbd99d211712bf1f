"""Makes a number one can act on out of measurements that jump: the median of the last five, then a moving average.

The median keeps a single hiccup out altogether; the average takes the rest of the noise. It is slow while the medians
stay near it, so that noise moves nothing, and quick once they do not. Bandwidth goes in upside down, as seconds per
byte: then a link that breaks down is believed within three steps, and one that recovers within about six. That is the
right way round, as a step on a link that is overestimated takes long, and one on a link that is underestimated only
carries less. The price is that lag.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

WINDOW: Final = 5
QUICK_WEIGHT, STEADY_WEIGHT = 0.5, 0.1
"""Of the newest median in the average: when it is off by more than `NOISE_FRACTION`, and when it is not."""
NOISE_FRACTION: Final = 0.2
"""A median of five that is further off than that is a change, not noise."""


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
