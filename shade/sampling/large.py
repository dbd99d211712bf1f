"""Draws of more than 2**24 samples: the same probabilities, in passes that the processor's cache can follow.

The draws of smaller sets walk through the data set in a random order, one sample after the other. From some millions
on, each step waits for memory, and a draw grows faster than the data set. Here every pass reads memory from one end to
the other, or stays within a part of it that the processor's cache holds:

1. A permutation (`permuted`) sends each sample to one of many buckets by a random number, so that each place of the
   order is equally likely, and then shuffles each bucket (Rao 1961; Sandelius 1962).
2. The systematic draw (`draw`) takes one bucket after the other: it looks up the bucket's probabilities in ascending
   order of the samples, shuffles both together, and marks the samples as `unbiased` does. What was drawn replaces what
   was read.
3. The probabilities (`solve`) replace the roots of the scores, and the weights replace the probabilities.

So a draw needs 4 bytes a sample for the order of the whole set, 4 for the probabilities, and 4 a drawn sample for the
order that the epoch has. Indices have 32 bits.

Random numbers are SplitMix64's, each a function of a key and a place, and the keys come from the generator of (seed,
epoch, purpose). A choice among n places is uniform up to n / 2**44. The price: the order for a seed is another one than
numpy's shuffle gives. So these draws begin where that one is too slow to be used (`base.LARGE`), and a saved run names
them.

Invariant: probabilities are whole units of 2**-30 that sum to exactly K, so a draw has exactly K samples.

Legend: N data set · K drawn · C classes · M one bucket.

References:
    C. R. Rao, "Generation of random permutations of given number of elements using random sampling numbers", Sankhyā 23
    (1961). G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shade._compiled import compiled
from shade.sampling.base import Classes, Sums, Units
from shade.types import Bools, Floats, Order

BUCKET = 1 << 17
"""Samples a bucket, on average: with their probabilities 1 MB, which fits a core's second cache."""

_PART = 61
"""One of so many samples gives the first guess of the scale."""
_MAX_PROBES = 200
_ONE = 1 << 30
_BITS = 30

_NO_CLASSES: Classes = np.empty(0, dtype=np.uint16)


@compiled
def _mixed(key: Any, place: Any) -> Any:
    """Returns the random 64 bits that belong to a key and a place: SplitMix64's ``place``-th number."""
    mixed = key + (np.uint64(place) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@compiled
def _below(bound: Any, key: Any, place: Any) -> Any:
    """Returns a random number below ``bound``, which is less than 2**20."""
    return np.int64(((_mixed(key, place) >> np.uint64(20)) * np.uint64(bound)) >> np.uint64(44))


@compiled
def _bucket_starts(num: Any, key: Any, shift: Any, start_M: Any) -> None:
    """Writes where each bucket begins, and at last ``num``, into ``start_M``, which is 0."""
    for place in range(num):
        start_M[np.int64(_mixed(key, place) >> shift) + 1] += 1
    for bucket in range(len(start_M) - 1):
        start_M[bucket + 1] += start_M[bucket]


@compiled
def _scatter(order_K: Any, key: Any, shift: Any, at_M: Any, out_K: Any) -> None:
    """Sends each element (or each place, if ``order_K`` is empty) to its bucket of ``out_K``; moves ``at_M`` there."""
    for place in range(len(out_K)):
        bucket = np.int64(_mixed(key, place) >> shift)
        out_K[at_M[bucket]] = order_K[place] if len(order_K) else place
        at_M[bucket] += 1


@compiled
def _shuffle(order_K: Any, start: Any, stop: Any, key: Any) -> None:
    """Shuffles one bucket."""
    for place in range(stop - 1, start, -1):
        other = start + _below(place - start + 1, key, place)
        order_K[place], order_K[other] = order_K[other], order_K[place]


@compiled
def _mark(line_N: Any, start_M: Any, units_N: Any, class_N: Any, end_C: Any, key: Any, unit_M: Any) -> Any:
    """Shuffles bucket after bucket, and moves the marked samples to the front; returns how many they are.

    ``end_C`` is where each class stands on the line, in units, so that its multiples of ``_ONE`` are the marks.
    ``unit_M`` has room for the probabilities of the largest bucket.
    """
    num_marked = np.int64(0)
    for bucket in range(len(start_M) - 1):
        start, stop = start_M[bucket], start_M[bucket + 1]
        for place in range(start, stop):
            unit_M[place - start] = units_N[line_N[place]]
        for place in range(stop - 1, start, -1):
            other = _below(place - start + 1, key, place)
            line_N[place], line_N[start + other] = line_N[start + other], line_N[place]
            unit_M[place - start], unit_M[other] = unit_M[other], unit_M[place - start]
        for place in range(start, stop):
            sample = line_N[place]
            group = np.int64(class_N[sample]) if len(class_N) else 0
            end = end_C[group] + np.int64(unit_M[place - start])
            # Without a branch, which the processor would guess wrongly half of the time.
            line_N[num_marked] = sample
            num_marked += np.int64(end >> _BITS > end_C[group] >> _BITS)
            end_C[group] = end
    return num_marked


@compiled
def _wanted(root_N: Any, seen_N: Any, floor_C: Any, class_N: Any, scale: Any) -> Any:
    """Returns Σ ``clip(scale * root, floor, _ONE)`` over the samples, and how fast it grows with the scale."""
    total, slope = 0.0, 0.0
    for sample in range(len(root_N)):
        least = np.float64(_ONE)
        if seen_N[sample]:
            least = np.float64(floor_C[np.int64(class_N[sample]) if len(class_N) else 0])
        wanted = np.float64(root_N[sample]) * scale
        if least < wanted < _ONE:
            slope += np.float64(root_N[sample])
        total += min(max(wanted, least), np.float64(_ONE))
    return total, slope


@compiled
def _fill(root_N: Any, seen_N: Any, floor_C: Any, class_N: Any, scale: Any, units_N: Any) -> Any:
    """Writes the probabilities, rounded, into ``units_N`` (the memory of ``root_N``); returns their sum."""
    total = np.int64(0)
    for sample in range(len(root_N)):
        least = np.float64(_ONE)
        if seen_N[sample]:
            least = np.float64(floor_C[np.int64(class_N[sample]) if len(class_N) else 0])
        wanted = min(max(np.float64(root_N[sample]) * scale, least), np.float64(_ONE))
        units_N[sample] = np.uint32(np.rint(wanted))
        total += np.int64(units_N[sample])
    return total


@compiled
def _hand_out(units_N: Any, seen_N: Any, floor_C: Any, class_N: Any, rest: Any, most: Any) -> Any:
    """Adds up to ``most`` units to each sample that has room, in order, until ``rest`` units are gone (below 0: takes
    them away); returns what is left over."""
    for sample in range(len(units_N)):
        if rest == 0:
            break
        if rest > 0:
            moved = min(min(np.int64(_ONE) - np.int64(units_N[sample]), most), rest)
            units_N[sample] += np.uint32(moved)
            rest -= moved
        elif seen_N[sample]:
            least = np.int64(floor_C[np.int64(class_N[sample]) if len(class_N) else 0])
            moved = min(min(np.int64(units_N[sample]) - least, most), -rest)
            units_N[sample] -= np.uint32(moved)
            rest += moved
    return rest


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
def _class_sizes(units_N: Any, class_N: Any, size_C: Any) -> None:
    """Adds the probabilities of each class to ``size_C``."""
    for sample in range(len(units_N)):
        size_C[np.int64(class_N[sample]) if len(class_N) else 0] += np.int64(units_N[sample])


@compiled
def _sum_drawn(order_K: Any, weight_N: Any, class_N: Any, drawn_C: Any, sum_SC: Any) -> Any:
    """Adds to ``drawn_C`` the weights of the drawn samples by class, and to ``sum_SC`` what `Sums` holds of all.

    Each sample counts once: a bit says whether it was drawn, because looking up its weight would wait for memory.
    Returns Σ weight² and the largest weight over the drawn.
    """
    bit_N = np.zeros((len(weight_N) >> 5) + 1, np.uint32)
    for place in range(len(order_K)):
        sample = order_K[place]
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
    class_N = _NO_CLASSES if class_N is None else class_N
    num_classes = int(class_N.max()) + 1 if len(class_N) else 1
    drawn_C, sum_SC = np.zeros(num_classes), np.zeros((4, num_classes))
    squares, largest = _sum_drawn(order_K, weight_N, class_N, drawn_C, sum_SC)
    return Sums(drawn_C, float(squares), float(largest), *sum_SC)


def _keys(random: np.random.Generator) -> npt.NDArray[np.uint64]:
    """Returns two keys: one for the buckets, one for the order in a bucket."""
    return random.integers(0, 2**64, size=2, dtype=np.uint64)


def _shift(num: int) -> np.uint64:
    """Returns how far a random number is shifted to give a bucket; there are two buckets at least."""
    return np.uint64(64 - max(1, (num // BUCKET).bit_length()))


def _into_buckets(order_K: Order, num: int, key: np.uint64) -> tuple[Order, npt.NDArray[np.int64]]:
    """Returns the elements (or the places, if ``order_K`` is empty) bucket after bucket, and where each begins."""
    shift = _shift(num)
    start_M = np.zeros((1 << (64 - int(shift))) + 1, dtype=np.int64)
    _bucket_starts(num, key, shift, start_M)
    out_K = np.empty(num, dtype=np.int32)
    _scatter(order_K, key, shift, start_M[:-1].copy(), out_K)
    return out_K, start_M


def permuted(order_K: Order | int, random: np.random.Generator) -> Order:
    """Returns the elements, or the numbers below an integer, in a random order: each order is equally likely."""
    elements, num = (np.empty(0, np.int32), order_K) if isinstance(order_K, int) else (order_K, len(order_K))
    bucket_key, key = _keys(random)
    out_K, start_M = _into_buckets(elements, num, bucket_key)
    for start, stop in zip(start_M[:-1].tolist(), start_M[1:].tolist(), strict=True):
        _shuffle(out_K, start, stop, key)
    return out_K


def _scale(wanted: tuple[Floats, Bools, Units, Classes], goal: float, highest: float, scale: float) -> float:
    """Returns the scale at which the probabilities sum to ``goal`` units: `unbiased.solve_units`' bracketed Newton."""
    low, high = 0.0, highest
    for _ in range(_MAX_PROBES):
        total, slope = _wanted(*wanted, scale)
        excess = total - goal
        if abs(excess) <= 1e-12 * goal:
            break
        low, high = (low, scale) if excess > 0 else (scale, high)
        step = scale - excess / slope if slope > 0 else low
        scale = step if low < step < high else (low + high) / 2
    return scale


def smallest(score_N: Floats, seen_N: Bools, at: int) -> np.float32:
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
    return np.float32(np.array([upper << 16 | lower], dtype=np.uint32).view(np.float32)[0])


def solve(root_N: Floats, seen_N: Bools, floor_C: Units, class_N: Classes | None, num_drawn: int) -> Units:
    """Solves what `unbiased.solve_units` solves, in the memory of ``root_N``.

    Args:
        root_N: float32 (N,), > 0; overwritten.
        seen_N: Where False, the sample is certain.
        floor_C: uint32, the smallest units of each class; one number without classes.
        class_N: Classes 0 … C−1, or None.
        num_drawn: K.

    Returns:
        uint32 (N,), summing to exactly ``K * 2**30``.
    """
    class_N = _NO_CLASSES if class_N is None else class_N
    goal = float(num_drawn) * _ONE
    highest = _ONE / float(root_N.min())
    part = slice(None, None, _PART)
    few = root_N[part].copy(), seen_N[part].copy(), floor_C, class_N[part].copy()
    scale = _scale(few, goal * len(few[0]) / len(root_N), highest, min(goal / float(few[0].sum() * _PART), highest))
    scale = _scale((root_N, seen_N, floor_C, class_N), goal, highest, scale)
    units_N = root_N.view(np.uint32)
    rest = num_drawn * _ONE - int(_fill(root_N, seen_N, floor_C, class_N, scale, units_N))
    most = 1
    while rest:
        rest = int(_hand_out(units_N, seen_N, floor_C, class_N, rest, most))
        most *= 2
    return units_N


def draw(units_N: Units, class_N: Classes | None, num_drawn: int, streams: dict[str, np.random.Generator]) -> Order:
    """Draws systematically, as `unbiased.draw_systematic` does, and shuffles what was drawn.

    Args:
        units_N: Probabilities as `solve` gives them.
        class_N: Classes 0 … C−1, to draw stratified; or None.
        num_drawn: K.
        streams: The generators ``arrange``, ``start``, ``ties`` and ``shuffle``.

    Returns:
        int32 (K,), distinct, in random order.
    """
    class_N = _NO_CLASSES if class_N is None else class_N
    bucket_key, key = _keys(streams["arrange"])
    line_N, start_M = _into_buckets(np.empty(0, np.int32), len(units_N), bucket_key)
    size_C = np.zeros(int(class_N.max()) + 1 if len(class_N) else 1, dtype=np.int64)
    _class_sizes(units_N, class_N, size_C)
    # Each class where those before it end, the classes in a random order of their own.
    ranked_C = streams["ties"].permutation(len(size_C))
    end_C = np.empty_like(size_C)
    end_C[ranked_C] = np.cumsum(size_C[ranked_C]) - size_C[ranked_C]
    end_C += _ONE - 1 - int(streams["start"].integers(_ONE))
    unit_M = np.empty(int(np.diff(start_M).max()), dtype=np.uint32)
    num_marked = int(_mark(line_N, start_M, units_N, class_N, end_C, key, unit_M))
    assert num_marked == num_drawn, "the probabilities sum to K"
    del unit_M, start_M
    line_N.resize(num_marked, refcheck=False)  # gives memory back before more is needed
    return permuted(line_N, streams["shuffle"])
