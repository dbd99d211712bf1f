"""Picks what is above a threshold, and finds the threshold from a sample of the bucket.

To pick one element in a hundred needs no sort of the bucket: the percentile of a small sample (every n-th cache line
from a random start) is close. A pass can be repeated, since the sum is written apart from the old residual. That makes
the count a guarantee:

1. The sample is large enough for the count to be within its tolerance nearly always.
2. Too many: the smallest picked ones are put back until the wanted number is left.
3. Too few, or more than there is space for: again, with a sample eight times as large.
4. Still not: exactly, by partitioning all magnitudes. That takes ten times as long, on data with millions of equal
   values. Small buckets start here.

================  =================================================================================================
``threshold-v``   Single elements: the exact top-k for its own count; the count is off by up to a tenth
``threshold-v16`` Cache lines of 16 elements by energy, the sum of squares. Picking needs only vector adds, an index
                  costs a sixteenth, the optimizer touches 1/16 of the lines. It captures 0.9 of the energy of single
                  elements on real networks' gradients, 0.6 on independent noise (decision 0015). Lines below 1e-13
                  of the largest element may count as empty
``topk``          The exact top-k: no tolerance; the sample is set to pick too many, and the smallest are put back
================  =================================================================================================

Legend: D bucket · K kept · U units: elements, or lines of 16 · L lines.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
from typing_extensions import override

from shade.gradient._compress.compressor import COMPRESSORS, Compressor, Key, Sparse, check, check_finite, wanted_count
from shade.gradient._kernels.build import prepare
from shade.gradient._kernels.lines import LINE, OVERFLOW, TILE, Places, as_lines
from shade.types import Bools, Floats

_SMALL = 2**16
"""Below so many elements the exact way is fast enough; also the smallest sample."""
_LARGEST_SAMPLES = 1 / 64, 1 / 8
"""The largest share of a bucket in the first and the second sample."""
_SIGMAS = 2.5
"""Allowance for the sample's error: the count is too low once in 160 times, and a second sample follows."""
_CAPACITY = 4
"""Space for one pass, in multiples of the wanted number."""
_LEAST = float(np.finfo(np.float32).smallest_subnormal)
"""The threshold that picks everything except 0."""


class ThresholdCompressor(Compressor):
    """Base class with the order of events; a subclass defines a unit."""

    unit: ClassVar[int]
    """Elements that are picked together."""
    tolerance: ClassVar[float]
    """The fraction by which the count may miss the wanted number."""
    tail: ClassVar[int] = 800
    """Units of the sample above the threshold; with 800 the count is off by 1 / sqrt(800), a third of the tolerance."""

    def __init__(self) -> None:
        self._places: Places = np.empty(0, dtype=np.uint32)
        self._values: Floats = np.empty(0, dtype=np.float32)
        self._sample: Floats = np.empty((0, LINE), dtype=np.float32)

    @override
    def select(self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, density: float, key: Key) -> Sparse:
        check(gradient_D, residual_D, rest_D, density)
        num_units = -(-gradient_D.size // self.unit)
        wanted = wanted_count(num_units, density)
        capacity = self._reserve(min(_CAPACITY * wanted, num_units))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            count = OVERFLOW
            if gradient_D.size >= _SMALL:
                count = self._pick_sampled(gradient_D, residual_D, rest_D, wanted, capacity, key)
            if count == OVERFLOW:
                np.add(gradient_D, residual_D, out=rest_D)
                check_finite(rest_D)
                count = self._pick_exactly(rest_D, wanted)
            return self._result(rest_D, count, wanted)

    def _reserve(self, num_units: int) -> int:
        """Reserves space for so many units and one tile; returns its size in units."""
        capacity = num_units + TILE // self.unit
        if len(self._places) < capacity:
            self._places = np.empty(capacity, dtype=np.uint32)
            self._values = np.empty(capacity * self.unit, dtype=np.float32)
        return capacity

    def _pick_sampled(
        self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, wanted: int, capacity: int, key: Key
    ) -> int:
        """Does steps 1 to 3; returns the number of picked units, or `OVERFLOW` if no threshold was found."""
        num_units = -(-gradient_D.size // self.unit)
        for attempt, most in enumerate(_LARGEST_SAMPLES):
            stride = self._stride(gradient_D.size, wanted / num_units, most)
            # Anew at every step: with error feedback the sum grows and is emptied at the threshold, so an old threshold
            # says little. Published ones that move by a fixed increment fell behind for hundreds of steps, then sent
            # the head of each tensor only (decision 0015).
            self._take_sample(gradient_D, residual_D, stride, key.draw(stride, attempt))
            threshold = self._threshold(wanted / num_units)
            count = self._pick_above(gradient_D, residual_D, rest_D, threshold, capacity)
            if count != OVERFLOW:
                # NaN and infinity are above every threshold, so only the picked values need a check.
                check_finite(self._values[: count * self.unit])
                if count >= wanted * (1 - self.tolerance) or threshold == _LEAST:
                    return count
        return OVERFLOW

    def _stride(self, size: int, fraction: float, most: float) -> int:
        """Returns the distance of sampled lines, at most ``most`` of the bucket."""
        enough = self.tail * self.unit / fraction / size
        return int(1 / min(enough, max(most, _SMALL / size)))

    def _take_sample(self, gradient_D: Floats, residual_D: Floats, stride: int, start: int) -> None:
        num_lines = len(range(start, gradient_D.size // LINE, stride))
        if len(self._sample) != num_lines:
            self._sample = np.empty((num_lines, LINE), dtype=np.float32)
        prepare().add_sample(gradient_D, residual_D, start, stride, self._sample)

    def _threshold(self, fraction: float) -> float:
        """Returns the sample's threshold for a fraction of the units; lower, where chance may pick too few."""
        scores = self._score_sample(self._sample)
        if fraction == 1:
            return _LEAST
        tail = fraction * scores.size
        aim = max(1.0, (1 - self.tolerance) / max(1 - _SIGMAS / math.sqrt(tail), 2 / _CAPACITY))
        last = scores.size - min(max(1, round(tail * aim)), scores.size)
        scores.partition(last)
        return max(float(scores[last]), _LEAST)

    def _result(self, rest_D: Floats, count: int, wanted: int) -> Sparse:
        """Returns the picked elements; if they are too many, puts the smallest back."""
        places, values = self._places[:count], self._values[: count * self.unit].reshape(count, self.unit)
        if count > wanted * (1 + self.tolerance):
            left = prepare().put_back(rest_D, places, values, are_largest(self._score(values), wanted))
            places, values = places[:left], values[:left]
        indices_K, values_K = self._flat(places, values, rest_D.size)
        return Sparse(indices_K, values_K, rest_D.size)

    @abstractmethod
    def _score_sample(self, sample_L: Floats) -> Floats:
        """Returns what a pass compares with the threshold, for each unit of a sample (L, 16); flat, scratch."""

    @abstractmethod
    def _score(self, values: Floats) -> Floats:
        """Returns the same for picked units (U, unit)."""

    @abstractmethod
    def _pick_above(
        self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, capacity: int
    ) -> int:
        """Adds, picks into `_places` and `_values`, keeps the rest; returns the number of units, or `OVERFLOW`."""

    @abstractmethod
    def _pick_exactly(self, rest_D: Floats, wanted: int) -> int:
        """Picks the ``wanted`` largest units of a sum that are not 0; returns their number."""

    @abstractmethod
    def _flat(self, places: Places, values: Floats, size: int) -> tuple[Places, Floats]:
        """Returns indices and values of picked units by element; they may be scratch memory."""


def are_largest(scores: Floats, wanted: int) -> Bools:
    """Returns a mask of the ``wanted`` largest, or all; among equal ones the first."""
    if wanted >= scores.size:
        return np.ones(scores.size, dtype=np.bool_)
    last = np.partition(scores, scores.size - wanted)[scores.size - wanted]
    is_largest: Bools = scores > last
    missing = wanted - int(np.count_nonzero(is_largest))
    is_largest[np.flatnonzero(scores == last)[:missing]] = True
    return is_largest


@COMPRESSORS.register("threshold-v")
class ThresholdV(ThresholdCompressor):
    """Single elements, by magnitude."""

    unit = 1
    tolerance = 0.1

    def _score_sample(self, sample_L: Floats) -> Floats:
        return np.abs(sample_L, out=sample_L).reshape(-1)

    def _score(self, values: Floats) -> Floats:
        return np.abs(values[:, 0])

    def _pick_above(
        self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, capacity: int
    ) -> int:
        places, values = self._places[:capacity], self._values[:capacity]
        return int(prepare().pick_elements(gradient_D, residual_D, rest_D, threshold, places, values))

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


_LOWEST, _HIGHEST = 1e-12, 1e30
"""The range of energies that need no scaling; elements outside of it are scaled before they are squared."""


@COMPRESSORS.register("threshold-v16")
class ThresholdV16(ThresholdCompressor):
    """Cache lines by energy; the bucket's last line may be shorter."""

    unit = LINE
    tolerance = 0.1
    # A sampled line is one unit, not 16: picking a third too many and putting it back is cheaper.
    tail = 64

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
            # A power of two scales without rounding.
            self._scale = 2.0 ** -min(max(math.frexp(largest)[1], -125), 125)
        return self._score(sample_L)

    def _score(self, values: Floats) -> Floats:
        energy_L: Floats = prepare().line_energy(values, np.float32(self._scale))
        return energy_L

    def _pick_above(
        self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, capacity: int
    ) -> int:
        places, values = self._places[:capacity], self._values[: capacity * LINE]
        return int(prepare().pick_lines(gradient_D, residual_D, rest_D, self._scale, threshold, places, values))

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
        if self._indices.size < places.size * LINE:
            self._indices = np.empty((len(self._places), LINE), dtype=np.uint32)
        indices = self._indices[: len(places)]
        prepare().name_elements(places, indices)
        # The bucket's last line may be shorter.
        missing = -size % LINE if len(places) and int(places[-1]) == size // LINE else 0
        return indices.reshape(-1)[: places.size * LINE - missing]


@COMPRESSORS.register("topk")
class TopK(ThresholdV):
    """The K largest elements, exactly, unless fewer are not 0."""

    tolerance = 0.0
