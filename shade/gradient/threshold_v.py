"""Every element for itself, over a sampled threshold: the most energy for a number of values.

What is over a threshold is the exact top-k for its own count. Only the count is off, by up to a tenth.
"""

from __future__ import annotations

import numpy as np

from shade.gradient.compressor import COMPRESSORS
from shade.gradient.kernels.arrays import Places
from shade.gradient.kernels.choice import prepare
from shade.gradient.threshold import ThresholdCompressor, are_largest
from shade.types import Floats


@COMPRESSORS.register("threshold-v")
class ThresholdV(ThresholdCompressor):
    """Elements by magnitude."""

    unit = 1
    tolerance = 0.1

    def _score_sample(self, sample_L: Floats) -> Floats:
        return np.abs(sample_L, out=sample_L).reshape(-1)

    def _score(self, values: Floats) -> Floats:
        return np.abs(values[:, 0])

    def _walk(self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, room: int) -> int:
        pick = prepare().pick_elements
        return pick(gradient_D, residual_D, rest_D, threshold, self._places[:room], self._values[:room])

    def _pick_exactly(self, rest_D: Floats, wanted: int) -> int:
        magnitude_D = np.abs(rest_D)
        places = np.flatnonzero(are_largest(magnitude_D, wanted) & (magnitude_D > 0))
        self._places[: len(places)] = places
        self._values[: len(places)] = rest_D[places]
        rest_D[places] = 0
        return len(places)

    def _flat(self, places: Places, values: Floats, size: int) -> tuple[Places, Floats]:
        del size
        return places, values.reshape(-1)
