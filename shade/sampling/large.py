"""Draws of more than 2**24 samples: the same probabilities, in passes that the processor's cache can follow.

The draws of smaller sets walk through the data set in a random order. From some millions on, each step waits for
memory. Here every pass reads memory from one end to the other, or stays within a part of it that the cache holds:

1. A permutation (`permuted`) sends each sample to one of many buckets by a random number, then shuffles each bucket.
2. The systematic draw (`draw`) sends each sample to its bucket together with its probability, takes one bucket after
   the other, shuffles both alike, and marks the samples as `unbiased` does.
3. Probabilities are computed from the scores wherever they are needed (`Inclusion`).

The order for a seed is another one than numpy's shuffle gives, so these draws begin where that one is too slow to be
used (`base.LARGE`), and a saved run names them. Invariant: units of 2**-30 sum to exactly K.

Legend: N data set · K drawn · C classes · M one bucket.

References:
    C. R. Rao, Sankhyā 23 (1961), for permutations; Steele, Lea, Flood, OOPSLA 2014, for SplitMix64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shade._lazy import compiled
from shade.sampling.base import ONE, Classes, Scores, Sums, Units, scale_for
from shade.types import Bools, Floats, Order

BUCKET = 1 << 17
"""Samples a bucket, on average: with their probabilities 1 MB, which fits a core's second cache."""

_PART = 61
"""Every so many samples, one gives the first guess of the scale."""
_BLOCK = 1 << 12
"""Samples whose probabilities are computed at a time."""
_BITS = 30

Starts = npt.NDArray[np.int64]


@compiled
def _mixed(key: Any, position: Any) -> Any:
    """Returns the random 64 bits that belong to a key and a position: SplitMix64's ``position``-th number."""
    mixed = key + (np.uint64(position) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@compiled
def _below(bound: Any, key: Any, position: Any) -> Any:
    """Returns a random number below ``bound``, which is less than 2**20."""
    # A product instead of a division; uniform up to bound / 2**44.
    return np.int64(((_mixed(key, position) >> np.uint64(20)) * np.uint64(bound)) >> np.uint64(44))


@compiled
def _bucket_starts(num: Any, key: Any, shift: Any, start_M: Any) -> None:
    """Writes where each bucket begins, and at last ``num``, into ``start_M``, which is 0."""
    for position in range(num):
        start_M[np.int64(_mixed(key, position) >> shift) + 1] += 1
    for bucket in range(len(start_M) - 1):
        start_M[bucket + 1] += start_M[bucket]


@compiled
def _scatter(order_K: Any, key: Any, shift: Any, at_M: Any, out_K: Any) -> None:
    """Sends each element (each position, if ``order_K`` is empty) to its bucket of ``out_K``; moves ``at_M`` there."""
    for position in range(len(out_K)):
        bucket = np.int64(_mixed(key, position) >> shift)
        out_K[at_M[bucket]] = order_K[position] if len(order_K) else position
        at_M[bucket] += 1


@compiled
def _shuffle(order_K: Any, start: Any, stop: Any, key: Any) -> None:
    """Shuffles one bucket."""
    for position in range(stop - 1, start, -1):
        other = start + _below(position - start + 1, key, position)
        order_K[position], order_K[other] = order_K[other], order_K[position]


@compiled
def _mark(sample_N: Any, unit_N: Any, start_M: Any, class_N: Any, end_C: Any, key: Any) -> Any:
    """Shuffles bucket after bucket, and moves the marked samples to the front; returns how many they are.

    ``end_C`` is where each class stands on the line, in units, so that its multiples of ``ONE`` are the marks.
    """
    num_marked = np.int64(0)
    for bucket in range(len(start_M) - 1):
        start, stop = start_M[bucket], start_M[bucket + 1]
        for position in range(stop - 1, start, -1):
            other = start + _below(position - start + 1, key, position)
            sample_N[position], sample_N[other] = sample_N[other], sample_N[position]
            unit_N[position], unit_N[other] = unit_N[other], unit_N[position]
        for position in range(start, stop):
            sample = sample_N[position]
            group = np.int64(class_N[sample]) if len(class_N) else 0
            # A mark lies within a sample where the multiple of ONE below its end differs from that below its begin.
            end = end_C[group] + np.int64(unit_N[position])
            # Without a branch, which the processor would guess wrongly half of the time.
            sample_N[num_marked] = sample
            num_marked += np.int64(end >> _BITS > end_C[group] >> _BITS)
            end_C[group] = end
    return num_marked


@compiled
def _wanted(score_N: Any, seen_N: Any, class_N: Any, floor_C: Any, per_cap: Any, smallest_root: Any, scale: Any) -> Any:
    """Returns Σ ``clip(scale * root, floor, ONE)`` over the samples, and how fast it grows with the scale."""
    total, slope = 0.0, 0.0
    for sample in range(len(score_N)):
        least = np.float64(ONE)
        if seen_N[sample]:
            least = np.float64(floor_C[np.int64(class_N[sample]) if len(class_N) else 0])
        root = max(np.sqrt(min(np.float64(score_N[sample]) * per_cap, 1.0)), smallest_root)
        if least < root * scale < ONE:
            slope += root
        total += min(max(root * scale, least), np.float64(ONE))
    return total, slope


@compiled
def _units(start: Any, inclusion: Any, rest: Any, unit_B: Any) -> Any:
    """Writes the probabilities of the samples from ``start`` on into ``unit_B``; returns what is left of ``rest``."""
    score_N, seen_N, class_N, floor_C, per_cap, smallest_root, scale, _ = inclusion
    for position in range(len(unit_B)):
        sample = start + position
        least = np.int64(ONE)
        if seen_N[sample]:
            least = np.int64(floor_C[np.int64(class_N[sample]) if len(class_N) else 0])
        root = max(np.sqrt(min(np.float64(score_N[sample]) * per_cap, 1.0)), smallest_root)
        units = np.int64(np.rint(min(max(root * scale, np.float64(least)), np.float64(ONE))))
        if rest != 0:
            moved = min(np.int64(ONE) - units, rest) if rest > 0 else max(least - units, rest)
            units += moved
            rest -= moved
        unit_B[position] = units
    return rest


@compiled
def _scatter_units(inclusion: Any, key: Any, shift: Any, at_M: Any, sample_N: Any, unit_N: Any) -> None:
    """Sends each sample and its probability to its bucket; moves ``at_M`` there."""
    unit_B, rest = np.empty(_BLOCK, np.uint32), np.int64(inclusion[7])
    for start in range(0, len(sample_N), _BLOCK):
        size = min(_BLOCK, len(sample_N) - start)
        rest = _units(start, inclusion, rest, unit_B[:size])
        for position in range(size):
            bucket = np.int64(_mixed(key, start + position) >> shift)
            sample_N[at_M[bucket]] = start + position
            unit_N[at_M[bucket]] = unit_B[position]
            at_M[bucket] += 1


@compiled
def _add_units(inclusion: Any, size_C: Any) -> None:
    """Adds the probabilities of each class to ``size_C``."""
    unit_B, class_N, rest = np.empty(_BLOCK, np.uint32), inclusion[2], np.int64(inclusion[7])
    for start in range(0, len(inclusion[0]), _BLOCK):
        size = min(_BLOCK, len(inclusion[0]) - start)
        rest = _units(start, inclusion, rest, unit_B[:size])
        for position in range(size):
            size_C[np.int64(class_N[start + position]) if len(class_N) else 0] += np.int64(unit_B[position])


@compiled
def _fill_weights(inclusion: Any, weight_N: Any) -> None:
    """Writes the weight of each sample."""
    unit_B, rest = np.empty(_BLOCK, np.uint32), np.int64(inclusion[7])
    for start in range(0, len(weight_N), _BLOCK):
        size = min(_BLOCK, len(weight_N) - start)
        rest = _units(start, inclusion, rest, unit_B[:size])
        for position in range(size):
            weight_N[start + position] = np.float64(ONE) / np.float64(unit_B[position])


@compiled
def _count_halves(bits_N: Any, seen_N: Any, upper: Any, count_H: Any) -> None:
    """Counts the upper halves of the seen, or the lower halves of those with one upper half; -0 counts as 0."""
    for sample in range(len(bits_N)):
        bits = np.int64(bits_N[sample] & np.uint32(0x7FFFFFFF))
        if upper < 0:
            count_H[bits >> 16] += np.int64(seen_N[sample])
        else:
            count_H[bits & 0xFFFF] += np.int64(seen_N[sample] and bits >> 16 == upper)


@compiled
def _sum_drawn(order_K: Any, weight_N: Any, class_N: Any, drawn_C: Any, sum_SC: Any) -> Any:
    """Adds to ``drawn_C`` the weights of the drawn samples by class, and to ``sum_SC`` what `Sums` holds of all.

    Each sample counts once: a bit says whether it was drawn, because looking up its weight would wait for memory.
    Returns Σ weight² and the largest weight over the drawn.
    """
    bit_N = np.zeros((len(weight_N) >> 5) + 1, np.uint32)
    for position in range(len(order_K)):
        sample = order_K[position]
        bit_N[sample >> 5] |= np.uint32(1) << np.uint32(sample & 31)
    squares, largest = 0.0, 0.0
    for sample in range(len(weight_N)):
        group = np.int64(class_N[sample]) if len(class_N) else 0
        weight = np.float64(weight_N[sample])
        pi = 1.0 / weight
        sum_SC[0, group] += pi
        sum_SC[1, group] += pi * (1.0 - pi)
        sum_SC[2, group] += 1.0 - pi
        sum_SC[3, group] += weight - 1.0
        if bit_N[sample >> 5] >> np.uint32(sample & 31) & np.uint32(1):
            drawn_C[group] += weight
            squares += weight * weight
            largest = max(largest, weight)
    return squares, largest


def sums(order_K: Order, weight_N: Floats, class_N: Classes | None) -> Sums:
    """Adds up what the receipt of a draw needs, by class; one class if ``class_N`` is None."""
    num_classes = 1 if class_N is None else int(class_N.max()) + 1
    class_N = np.empty(0, dtype=np.uint16) if class_N is None else class_N
    drawn_C, sum_SC = np.zeros(num_classes), np.zeros((4, num_classes))
    squares, largest = _sum_drawn(order_K, weight_N, class_N, drawn_C, sum_SC)
    return Sums(drawn_C, float(squares), float(largest), *sum_SC)


def _keys(random: np.random.Generator) -> npt.NDArray[np.uint64]:
    """Returns two keys: one for the buckets, one for the order in a bucket."""
    return random.integers(0, 2**64, size=2, dtype=np.uint64)


def _buckets(num: int, key: np.uint64) -> tuple[np.uint64, Starts]:
    """Returns how random numbers are shifted, and where each bucket begins."""
    shift = np.uint64(64 - max(1, (num // BUCKET).bit_length()))  # two buckets at least
    start_M = np.zeros((1 << (64 - int(shift))) + 1, dtype=np.int64)
    _bucket_starts(num, key, shift, start_M)
    return shift, start_M


def permuted(order_K: Order | int, random: np.random.Generator) -> Order:
    """Returns the elements, or the numbers below an integer, in a random order: each order is equally likely."""
    elements, num = (np.empty(0, np.int32), order_K) if isinstance(order_K, int) else (order_K, len(order_K))
    bucket_key, key = _keys(random)
    shift, start_M = _buckets(num, bucket_key)
    out_K = np.empty(num, dtype=np.int32)
    _scatter(elements, bucket_key, shift, start_M[:-1].copy(), out_K)
    for start, stop in zip(start_M[:-1].tolist(), start_M[1:].tolist(), strict=True):
        _shuffle(out_K, start, stop, key)
    return out_K


def smallest(score_N: Floats, seen_N: Bools, at: int) -> float:
    """Returns the ``at``-th smallest seen score ≥ 0, counted from 0, in two passes without a copy.

    The bits of such floats have the floats' order, so the first pass counts their upper halves, and the second one the
    lower halves of those with the right upper half.
    """
    upper, lower = -1, -1
    for _ in range(2):
        count_H = np.zeros(1 << 16, dtype=np.int64)
        _count_halves(score_N.view(np.uint32), seen_N, lower, count_H)
        before_H = np.cumsum(count_H)
        upper, lower = lower, int(np.searchsorted(before_H, at, side="right"))
        at -= int(before_H[lower] - count_H[lower])
    return float(np.array([upper << 16 | lower], dtype=np.uint32).view(np.float32)[0])


class Inclusion(NamedTuple):
    """The probabilities of all samples: not stored, because they follow from the scores at less than the price of a
    look-up."""

    score_N: Floats
    seen_N: Bools
    class_N: Classes
    floor_C: Units
    per_cap: float
    """Scores are multiplied by this; products above 1 count as 1."""
    smallest_root: float
    scale: float
    """The probability of a sample with root 1, in units, before it is clipped."""

    rest: int = 0
    """Units that the rounded probabilities lack of K * ``ONE``; below 0, that they are too many. The first samples that
    have room take them."""

    def class_sizes(self) -> Starts:
        """Returns the units of each class."""
        size_C = np.zeros(len(self.floor_C), dtype=np.int64)
        _add_units(tuple(self), size_C)
        return size_C

    def weights(self) -> Floats:
        """Returns float32 (N,) gradient weights, 1 / pi."""
        weight_N = np.empty(len(self.score_N), dtype=np.float32)
        _fill_weights(tuple(self), weight_N)
        return weight_N


def _scaled(inclusion: Inclusion, goal: float) -> Inclusion:
    """Sets the scale at which the probabilities sum to ``goal`` units."""

    def probe(scale: float) -> tuple[float, float]:
        total, slope = _wanted(*inclusion._replace(scale=scale)[:-1])
        return float(total), float(slope)

    return inclusion._replace(scale=scale_for(goal, probe, inclusion.scale, ONE / inclusion.smallest_root))


def solve(
    scores: Scores, cap: float, smallest_root: float, floor_C: Units, class_N: Classes | None, num_drawn: int
) -> Inclusion:
    """Solves what `unbiased.solve_units` solves: returns probabilities that sum to exactly K. Scores above ``cap``
    count as this; ``smallest_root`` is the smallest sqrt(score) as a share of the largest; ``floor_C`` are uint32,
    the smallest units of each class, one number without classes."""
    classes = np.empty(0, dtype=np.uint16) if class_N is None else class_N
    per_cap = 1 / cap if cap > 0 else 1.0  # else every score that counts is 0
    goal = float(num_drawn) * ONE
    few = slice(None, None, _PART)
    part = Inclusion(
        scores.score_N[few].copy(),
        scores.seen_N[few].copy(),
        classes[few].copy(),
        floor_C,
        per_cap,
        smallest_root,
        goal / len(scores.score_N),
    )
    guess = _scaled(part, goal * len(part.score_N) / len(scores.score_N))
    found = _scaled(Inclusion(scores.score_N, scores.seen_N, classes, *guess[3:]), goal)
    return found._replace(rest=num_drawn * ONE - int(found.class_sizes().sum()))


def draw(inclusion: Inclusion, streams: dict[str, np.random.Generator]) -> Order:
    """Draws systematically, as `unbiased.draw_systematic` does, and shuffles what was drawn.

    Args:
        inclusion: Probabilities as `solve` gives them; stratified if they have classes.
        streams: The generators ``arrange``, ``start``, ``ties`` and ``shuffle``.

    Returns:
        int32 (K,), distinct, in random order.
    """
    bucket_key, key = _keys(streams["arrange"])
    num = len(inclusion.score_N)
    shift, start_M = _buckets(num, bucket_key)
    sample_N, unit_N = np.empty(num, dtype=np.int32), np.empty(num, dtype=np.uint32)
    _scatter_units(tuple(inclusion), bucket_key, shift, start_M[:-1].copy(), sample_N, unit_N)
    size_C = inclusion.class_sizes()
    # Each class where those before it end, the classes in a random order of their own.
    ranked_C = streams["ties"].permutation(len(size_C))
    end_C = np.empty_like(size_C)
    end_C[ranked_C] = np.cumsum(size_C[ranked_C]) - size_C[ranked_C]
    end_C += ONE - 1 - int(streams["start"].integers(ONE))
    num_marked = int(_mark(sample_N, unit_N, start_M, inclusion.class_N, end_C, key))
    assert num_marked * ONE == size_C.sum(), "each unit of probability was passed once"
    del unit_N  # before more memory is needed
    return permuted(sample_N[:num_marked], streams["shuffle"])
