"""Picks what is over a threshold, and finds the threshold by looking at a few lines of the bucket first.

One element in a hundred is over its bucket's 99th percentile; nobody need sort the bucket to know about where that is.
So a small sample, every so many cache lines from a drawn start, is sorted instead, and one walk picks what is over its
percentile. The sample is fresh at every step: under error feedback the sum grows and is emptied at the threshold, so
what held a step ago says little. (Published thresholds that move by a fixed increment fell behind for hundreds of
steps, and then sent the head of each tensor only: research, decision 0015.)

The sum is written apart from the old residual, so a walk may be taken back. That makes the count a promise and not a
hope:

1. The sample is large enough that the count is within its tolerance nearly always.
2. More than that: the smallest of what was picked are put back, until exactly the wanted number is left.
3. Less, or more than there is room for: once more with a sample eight times as large.
4. Still not: exactly, by partitioning all magnitudes. It takes ten times as long, on data with millions of equal
   values.

Small buckets go to 4 at once. NaN and infinity are over every threshold, so they are looked for among what was picked,
for nothing.

Legend: D bucket · K kept · U units: elements, or lines of 16.

Every element for itself, over a sampled threshold: the most energy for a number of values.

What is over a threshold is the exact top-k for its own count. Only the count is off, by up to a tenth.

Cache lines of 16 elements by their energy, over a sampled threshold: cheap to pick, cheap to name.

A line is picked whole. That needs no vector instructions beyond adding, so it is as fast on any processor; a place
costs a sixteenth of an index on the wire; and the optimizer that applies it touches 1/16 of the cache lines. The price
is energy: of a line's 16 elements some are small. On gradients of real networks, where neighbours are of a size, 0.9 of
what single elements would capture at the same count; on independent noise 0.6 (decision 0015).

By energy, the sum of squares, not the sum of magnitudes: at one count no other lines hold more of it. Lines whose
elements are all below 1e-13 of the bucket's largest may count as empty.

The exact top-k: `_compress.threshold` with no tolerance.

The sampled threshold is set so low that too much is picked, and the smallest are put back; if it was too little, once
more. So it is exact, equal ones apart (the first are taken), at little more than the price of a threshold.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np

from shade.gradient._compress.compressor import (
    COMPRESSORS,
    Compressor,
    Key,
    Sparse,
    check,
    check_finite,
    wanted_count,
)
from shade.gradient._kernels.arrays import LINE, OVERFLOW, TILE, Places, as_lines
from shade.gradient._kernels.choice import prepare
from shade.types import Bools, Floats

_SMALL = 2**16
"""Elements, below which the exact way is fast enough; and so is a sample of so many."""
_LARGEST_SAMPLES = 1 / 64, 1 / 8
"""Of a large bucket, at the first and the second look."""
_SIGMAS = 2.5
"""Of the sample's error, that are allowed for: once in 160 the count is too low, and it is looked a second time."""
_CAPACITY = 4
"""Times the wanted number that can be picked in one walk."""
_LEAST = float(np.finfo(np.float32).smallest_subnormal)
"""The threshold that picks whatever is not 0."""


class ThresholdCompressor(Compressor):
    """The order of events; a subclass says what a unit is."""

    unit: ClassVar[int]
    """Elements that are picked together."""
    tolerance: ClassVar[float]
    """By which fraction the count may miss what is wanted."""
    tail: ClassVar[int] = 800
    """Units wanted in the sample above the threshold; 800: a count is off by 1 / sqrt(800), a third of the allowed."""

    def __init__(self) -> None:
        self._places: Places = np.empty(0, dtype=np.uint32)
        self._values: Floats = np.empty(0, dtype=np.float32)
        self._sample: Floats = np.empty((0, LINE), dtype=np.float32)

    def select(self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, density: float, key: Key) -> Sparse:
        """See `Compressor.select`."""
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
        """Sees to it that so many units may be picked, and a tile more; returns how many that makes."""
        capacity = num_units + TILE // self.unit
        if len(self._places) < capacity:
            self._places = np.empty(capacity, dtype=np.uint32)
            self._values = np.empty(capacity * self.unit, dtype=np.float32)
        return capacity

    def _pick_sampled(
        self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, wanted: int, capacity: int, key: Key
    ) -> int:
        """Steps 1 to 3: how many were picked, enough or all there is; `OVERFLOW` if no threshold was found."""
        num_units = -(-gradient_D.size // self.unit)
        for attempt, most in enumerate(_LARGEST_SAMPLES):
            stride = self._stride(gradient_D.size, wanted / num_units, most)
            self._take_sample(gradient_D, residual_D, stride, key.draw(stride, attempt))
            threshold = self._threshold(wanted / num_units)
            count = self._pick_above(gradient_D, residual_D, rest_D, threshold, capacity)
            if count != OVERFLOW:
                check_finite(self._values[: count * self.unit])
                if count >= wanted * (1 - self.tolerance) or threshold == _LEAST:
                    return count
        return OVERFLOW

    def _stride(self, size: int, fraction: float, most: float) -> int:
        """Every how many lines one is looked at: as few as give the tail, but not more than a part of the bucket."""
        enough = self.tail * self.unit / fraction / size
        return int(1 / min(enough, max(most, _SMALL / size)))

    def _take_sample(self, gradient_D: Floats, residual_D: Floats, stride: int, start: int) -> None:
        """Adds every so many lines."""
        num_lines = len(range(start, gradient_D.size // LINE, stride))
        if len(self._sample) != num_lines:
            self._sample = np.empty((num_lines, LINE), dtype=np.float32)
        prepare().add_sample(gradient_D, residual_D, start, stride, self._sample)

    def _threshold(self, fraction: float) -> float:
        """What about that fraction of the units are over, by the sample; lower, if that may be too few by chance."""
        scores = self._score_sample(self._sample)
        if fraction == 1:
            return _LEAST
        tail = fraction * scores.size
        aim = max(1.0, (1 - self.tolerance) / max(1 - _SIGMAS / math.sqrt(tail), 2 / _CAPACITY))
        last = scores.size - min(max(1, round(tail * aim)), scores.size)
        scores.partition(last)
        return max(float(scores[last]), _LEAST)

    def _result(self, rest_D: Floats, count: int, wanted: int) -> Sparse:
        """What was picked; if that is too much, the smallest are put back."""
        places, values = self._places[:count], self._values[: count * self.unit].reshape(count, self.unit)
        if count > wanted * (1 + self.tolerance):
            left = prepare().put_back(rest_D, places, values, are_largest(self._score(values), wanted))
            places, values = places[:left], values[:left]
        indices_K, values_K = self._flat(places, values, rest_D.size)
        return Sparse(indices_K, values_K, rest_D.size)

    @abstractmethod
    def _score_sample(self, sample_L: Floats) -> Floats:
        """What a walk compares with the threshold, of each unit in a sample (L, 16); flat, may be overwritten."""

    @abstractmethod
    def _score(self, values: Floats) -> Floats:
        """The same of picked units (U, unit)."""

    @abstractmethod
    def _pick_above(
        self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, capacity: int
    ) -> int:
        """Adds, picks into `_places` and `_values`, keeps the rest; how many units, or `OVERFLOW`."""

    @abstractmethod
    def _pick_exactly(self, rest_D: Floats, wanted: int) -> int:
        """Picks the largest units of a sum, as many as wanted and not 0, as a walk would; how many."""

    @abstractmethod
    def _flat(self, places: Places, values: Floats, size: int) -> tuple[Places, Floats]:
        """Places and values of picked units, element by element; they need not be new memory."""


def are_largest(scores: Floats, wanted: int) -> Bools:
    """Which are the largest, exactly ``wanted`` of them or all; of equal ones the first."""
    if wanted >= scores.size:
        return np.ones(scores.size, dtype=np.bool_)
    last = np.partition(scores, scores.size - wanted)[scores.size - wanted]
    is_largest: Bools = scores > last
    missing = wanted - int(np.count_nonzero(is_largest))
    is_largest[np.flatnonzero(scores == last)[:missing]] = True
    return is_largest


@COMPRESSORS.register("threshold-v")
class ThresholdV(ThresholdCompressor):
    """Elements by magnitude."""

    unit = 1
    tolerance = 0.1

    def _score_sample(self, sample_L: Floats) -> Floats:
        return np.abs(sample_L, out=sample_L).reshape(-1)

    def _score(self, values: Floats) -> Floats:
        return np.abs(values[:, 0])

    def _pick_above(
        self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, capacity: int
    ) -> int:
        pick = prepare().pick_elements
        return pick(gradient_D, residual_D, rest_D, threshold, self._places[:capacity], self._values[:capacity])

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

    def _pick_above(
        self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, capacity: int
    ) -> int:
        places, values = self._places[:capacity], self._values[: capacity * LINE]
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


@COMPRESSORS.register("topk")
class TopK(ThresholdV):
    """The K largest, no more and no fewer, unless fewer are not 0."""

    tolerance = 0.0
