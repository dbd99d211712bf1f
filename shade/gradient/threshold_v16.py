"""Cache lines of 16 elements by their energy, over a sampled threshold: cheap to pick, cheap to name.

A line is picked whole. That needs no vector instructions beyond adding, so it is as fast on any processor; a place
costs a sixteenth of an index on the wire; and the optimizer that applies it touches 1/16 of the cache lines. The price
is energy: of a line's 16 elements some are small. On gradients of real networks, where neighbours are of a size, 0.9 of
what single elements would capture at the same count; on independent noise 0.6 (decision 0015).

By energy, the sum of squares, not the sum of magnitudes: at one count no other lines hold more of it. Lines whose
elements are all below 1e-13 of the bucket's largest may count as empty.
"""

from __future__ import annotations

import math

import numpy as np

from shade.gradient.compressor import COMPRESSORS
from shade.gradient.kernels.arrays import LINE, Places, as_lines
from shade.gradient.kernels.choice import prepare
from shade.gradient.threshold import ThresholdCompressor, are_largest
from shade.types import Floats

_LOWEST, _HIGHEST = 1e-12, 1e30
"""Of the greatest energy: beyond, elements are scaled before they are squared."""


@COMPRESSORS.register("threshold-v16")
class ThresholdV16(ThresholdCompressor):
    """Lines by energy; the bucket's last one may be shorter."""

    unit = LINE
    tolerance = 0.1
    tail = 64  # a line looked at is one unit and not 16: rather pick a third too many, and put back the smallest

    def __init__(self) -> None:
        super().__init__()
        self._scale = 1.0
        self._indices: Places = np.empty((0, LINE), dtype=np.uint32)

    def _score_sample(self, sample_L: Floats) -> Floats:
        self._scale = 1.0
        energy_L = self._score(sample_L)
        if _LOWEST < float(energy_L.max(initial=0)) < _HIGHEST:
            return energy_L
        largest = float(max(sample_L.max(initial=0), -sample_L.min(initial=0)))
        if math.isfinite(largest):
            self._scale = 2.0 ** -min(max(math.frexp(largest)[1], -125), 125)
        return self._score(sample_L)

    def _score(self, values: Floats) -> Floats:
        return prepare().line_energy(values, np.float32(self._scale))

    def _walk(self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, room: int) -> int:
        places, values = self._places[:room], self._values[: room * LINE]
        return prepare().pick_lines(gradient_D, residual_D, rest_D, self._scale, threshold, places, values)

    def _pick_exactly(self, rest_D: Floats, wanted: int) -> int:
        lines_L = as_lines(rest_D)
        energy_L = self._score_sample(lines_L)
        places: Places = np.flatnonzero(are_largest(energy_L, wanted) & (energy_L > 0)).astype(np.uint32)
        self._places[: len(places)] = places
        self._values[: len(places) * LINE] = lines_L[places].reshape(-1)
        rest_D[self._elements(places, rest_D.size)] = 0
        return len(places)

    def _flat(self, places: Places, values: Floats, size: int) -> tuple[Places, Floats]:
        indices_K = self._elements(places, size)
        return indices_K, values.reshape(-1)[: len(indices_K)]

    def _elements(self, places: Places, size: int) -> Places:
        """The elements of lines, in order."""
        if self._indices.size < places.size * LINE:
            self._indices = np.empty((len(self._places), LINE), dtype=np.uint32)
        indices = self._indices[: len(places)]
        prepare().name_elements(places, indices)
        missing = -size % LINE if len(places) and int(places[-1]) == size // LINE else 0
        return indices.reshape(-1)[: places.size * LINE - missing]
