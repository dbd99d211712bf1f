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
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np

from shade.gradient.compressor import Compressor, Key, check, refuse_non_finite, wanted_count
from shade.gradient.kernels.arrays import LINE, OVERFLOW, TILE, Places
from shade.gradient.kernels.choice import prepare
from shade.gradient.sparse import Sparse
from shade.types import Bools, Floats

_SMALL = 2**16
"""Elements, below which the exact way is fast enough; and so is a sample of so many."""
_LARGEST_SAMPLES = 1 / 64, 1 / 8
"""Of a large bucket, at the first and the second look."""
_SIGMAS = 2.5
"""Of the sample's error, that are allowed for: once in 160 the count is too low, and it is looked a second time."""
_ROOM = 4
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
        room = self._make_room(min(_ROOM * wanted, num_units))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            count = OVERFLOW
            if gradient_D.size >= _SMALL:
                count = self._pick_sampled(gradient_D, residual_D, rest_D, wanted, room, key)
            if count == OVERFLOW:
                np.add(gradient_D, residual_D, out=rest_D)
                refuse_non_finite(rest_D)
                count = self._pick_exactly(rest_D, wanted)
            return self._result(rest_D, count, wanted)

    def _make_room(self, num_units: int) -> int:
        """Sees to it that so many units may be picked, and a tile more; returns how many that makes."""
        room = num_units + TILE // self.unit
        if len(self._places) < room:
            self._places = np.empty(room, dtype=np.uint32)
            self._values = np.empty(room * self.unit, dtype=np.float32)
        return room

    def _pick_sampled(
        self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, wanted: int, room: int, key: Key
    ) -> int:
        """Steps 1 to 3: how many were picked, enough or all there is; `OVERFLOW` if no threshold was found."""
        num_units = -(-gradient_D.size // self.unit)
        for attempt, most in enumerate(_LARGEST_SAMPLES):
            stride = self._stride(gradient_D.size, wanted / num_units, most)
            self._take_sample(gradient_D, residual_D, stride, key.draw(stride, attempt))
            threshold = self._threshold(wanted / num_units)
            count = self._walk(gradient_D, residual_D, rest_D, threshold, room)
            if count != OVERFLOW:
                refuse_non_finite(self._values[: count * self.unit])
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
        aim = max(1.0, (1 - self.tolerance) / max(1 - _SIGMAS / math.sqrt(tail), 2 / _ROOM))
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
    def _walk(self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, room: int) -> int:
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
