"""The passes over a bucket in numba, several times as fast as numpy.

A pass over a bucket reads two arrays and writes one, as ``e += g`` does, so it should cost what memory costs. The
result is written past the caches (`stream_line`): a plain store first reads the line that it overwrites, a third more
traffic.

Comparisons are written ``not (a < b)``, which is true for NaN: so NaN is picked, and found among the picked.

Legend: D bucket · K kept · L lines of 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shade._lazy import compiled
from shade.gradient._kernels import lanes
from shade.gradient._kernels.lines import CHUNK, LINE, OVERFLOW, TILE, Places, aligned_zeros
from shade.types import Bools, Floats

# numba looks for negative indices in signed offsets, and that prevents vector code.
_U64 = np.uint64
# By measurement; larger parts cost up to a fourth more.
_BLOCK, _PART, _SHORT_PART = _U64(64), _U64(512), _U64(128)
_LINE, _TILE = _U64(LINE), _U64(TILE)
# Intrinsics are called without their first argument, which no type checker knows.
add_line: Any = lanes.add_line
move_line: Any = lanes.move_line
stream_line: Any = lanes.stream_line
trailing_zeros: Any = lanes.trailing_zeros
wait_for_streams: Any = lanes.wait_for_streams


@compiled
def line_energy(lines_L: Floats, scale: np.float32) -> Floats:
    """Returns the sum of squares of each line after scaling. Adds halves, in the order of `lanes.add_line`.

    Args:
        lines_L: float32 (L, 16).
        scale: A power of two that brings the largest elements near 1. Squares of 1e-23 vanish and of 1e20 overflow, so
            without it a choice would depend on the loss's scale.

    Returns:
        float32 (L,).
    """
    energy_L = np.empty(len(lines_L), dtype=np.float32)
    sums = np.empty(LINE, dtype=np.float32)
    for row in range(len(lines_L)):
        for lane in range(LINE):
            scaled = lines_L[row, lane] * scale
            sums[lane] = scaled * scaled
        for lane in range(8):
            sums[lane] += sums[lane + 8]
        for lane in range(4):
            sums[lane] += sums[lane + 4]
        for lane in range(2):
            sums[lane] += sums[lane + 2]
        energy_L[row] = sums[0] + sums[1]
    return energy_L


@compiled
def pick_elements(gradient_D: Any, residual_D: Any, rest_D: Any, threshold: Any, indices: Any, values: Any) -> Any:
    """Adds two arrays, moves the large elements of the sum to a list, and writes the rest.

    Args:
        gradient_D: Unchanged.
        residual_D: Unchanged.
        rest_D: From `aligned_zeros`; becomes the sum, 0 where picked.
        threshold: An element is picked unless its magnitude is below; so NaN is picked.
        indices: Becomes the picked places, ascending.
        values: As long; becomes their sums.

    Returns:
        The number of picked elements. Or `OVERFLOW` if ``indices`` had less room than the next tile is long; then
        ``rest_D`` is undefined.
    """
    limit, size, room = np.float32(threshold), _U64(gradient_D.size), _U64(min(indices.size, values.size))
    whole = size - size % _BLOCK
    hits, masks = np.empty(_PART // _BLOCK, np.uint64), np.empty(_PART // _BLOCK, np.uint64)
    count = _U64(0)
    for tile in range(_U64(0), size, _TILE):
        stop = min(tile + _TILE, size)
        if count + stop - tile > room:
            return OVERFLOW
        # The blocks with a hit are listed first and worked off afterwards: at 1 % every second block has one, so the
        # processor would mispredict a branch in the first loop half of the time.
        for part in range(tile, min(stop, whole), _PART):
            num_hits = _U64(0)
            for block in range(part, min(part + _PART, whole), _BLOCK):
                mask = move_line(gradient_D, residual_D, rest_D, block, limit)
                mask |= move_line(gradient_D, residual_D, rest_D, block + _LINE, limit) << _LINE
                mask |= move_line(gradient_D, residual_D, rest_D, block + _U64(2) * _LINE, limit) << _U64(2) * _LINE
                mask |= move_line(gradient_D, residual_D, rest_D, block + _U64(3) * _LINE, limit) << _U64(3) * _LINE
                # Overwritten by the next block unless this one counts.
                hits[num_hits], masks[num_hits] = block, mask
                num_hits += _U64(mask != 0)
            for hit in range(num_hits):
                mask = masks[hit]
                while mask:
                    place = hits[hit] + trailing_zeros(mask)
                    # Clears the lowest bit.
                    mask &= mask - _U64(1)
                    indices[count] = place
                    # Added a second time, from the caches.
                    values[count] = gradient_D[place] + residual_D[place]
                    count += _U64(1)
    wait_for_streams()
    for place in range(whole, size):
        total = gradient_D[place] + residual_D[place]
        rest_D[place] = total
        if not (abs(total) < limit):
            indices[count] = place
            values[count] = total
            rest_D[place] = np.float32(0)
            count += _U64(1)
    return np.int64(count)


@compiled
def pick_lines(
    gradient_D: Any, residual_D: Any, rest_D: Any, scale: Any, threshold: Any, lines: Any, values: Any
) -> Any:
    """Adds two arrays, moves lines of 16 with much energy to a list, and writes the rest. A last line may be shorter.

    Args:
        gradient_D: Unchanged.
        residual_D: Unchanged.
        rest_D: From `aligned_zeros`; becomes the sum, 0 where picked.
        scale: A power of two, see `line_energy`.
        threshold: A line is picked unless its energy is below; so a line with a NaN is picked.
        lines: Becomes the numbers of the picked lines, ascending.
        values: 16 times as long; becomes their sums, 0 beyond the end.

    Returns:
        The number of picked lines, or `OVERFLOW` as in `pick_elements`.
    """
    factor, limit, size = np.float32(scale), np.float32(threshold), _U64(gradient_D.size)
    room = _U64(min(lines.size, values.size // LINE))
    whole = size - size % _LINE
    zeros, end = np.zeros(_LINE, np.float32), np.zeros((1, LINE), np.float32)
    count = _U64(0)
    for tile in range(_U64(0), size, _TILE):
        stop = min(tile + _TILE, size)
        if count + (stop - tile + _LINE - _U64(1)) // _LINE > room:
            return OVERFLOW
        for first in range(tile, min(stop, whole), _LINE):
            if not (add_line(gradient_D, residual_D, rest_D, first, factor) < limit):
                lines[count] = first // _LINE
                for lane in range(_LINE):
                    values[count * _LINE + lane] = gradient_D[first + lane] + residual_D[first + lane]
                # Past the caches, too: a plain store would wait until the line has reached memory and is back.
                stream_line(zeros, _U64(0), rest_D, first)
                count += _U64(1)
    wait_for_streams()
    if whole < size:
        for place in range(whole, size):
            end[0, place - whole] = rest_D[place] = gradient_D[place] + residual_D[place]
        if not (line_energy(end, factor)[0] < limit):
            lines[count] = whole // _LINE
            for lane in range(_LINE):
                values[count * _LINE + lane] = end[0, lane]
            rest_D[whole:size] = np.float32(0)
            count += _U64(1)
    return np.int64(count)


@compiled
def pick_chunks(gradient_D: Any, residual_D: Any, rest_D: Any, density: Any, indices: Any, values: Any) -> int:
    """Adds two arrays, moves the largest elements of each chunk of the sum to a list, and writes the rest.

    Args:
        gradient_D: Unchanged.
        residual_D: Unchanged.
        rest_D: Becomes the sum, 0 where picked.
        density: The share to pick. Of equal magnitudes the first is picked; a zero is not.
        indices: Becomes the picked places, ascending; room for all that are wanted.
        values: As long; becomes their sums.

    Returns:
        The number of picked elements; `OVERFLOW` if the sum holds NaN or infinity.
    """
    # Without their sign, the bits of floats are in the order of the floats.
    bits, bins, words = np.empty(CHUNK, np.uint32), np.empty(2048, np.int64), rest_D.view(np.uint32)
    count = 0
    for start in range(0, gradient_D.size, CHUNK):
        stop = min(start + CHUNK, gradient_D.size)
        for place in range(start, stop):
            rest_D[place] = gradient_D[place] + residual_D[place]
        for place in range(start, stop):
            bits[place - start] = words[place] & np.uint32(0x7FFFFFFF)
        # The last magnitude that is wanted, from its first 11 bits to its last 10.
        last, missing = np.uint32(0), np.int64(np.ceil(stop * density) - np.ceil(start * density))
        for shift in (20, 10, 0):
            bins[:] = 0
            digits, higher = np.uint32(2047 if shift == 20 else 1023), np.uint32(31 if shift == 20 else shift + 10)
            for place in range(stop - start):
                if bits[place] >> higher == last:
                    bins[bits[place] >> np.uint32(shift) & digits] += 1
            if shift == 20 and bins[2040:].any():
                return OVERFLOW
            digit = np.int64(digits)
            while digit > 0 and missing > bins[digit]:
                missing -= bins[digit]
                digit -= 1
            last = last << np.uint32(11 if shift == 20 else 10) | np.uint32(digit)
        for place in range(stop - start):
            if bits[place] >= last and bits[place] > 0 and (bits[place] > last or missing > 0):
                missing -= bits[place] == last
                indices[count], values[count] = start + place, rest_D[start + place]
                rest_D[start + place] = np.float32(0)
                count += 1
    return count


@compiled
def gain_momentum(velocity_D: Any, gradient_D: Any, momentum: Any, gained_D: Any) -> None:
    """Computes a step of momentum, ``momentum · velocity + gradient``; rounds twice.

    Args:
        velocity_D: Unchanged.
        gradient_D: Unchanged.
        momentum: The factor.
        gained_D: From `aligned_zeros`, not one of the other two; overwritten.
    """
    factor, size = np.float32(momentum), _U64(gradient_D.size)
    whole = size - size % _LINE
    # A plain loop of numba cannot store past the caches. So a part is computed into an array that stays in the
    # first-level cache, and is copied out from there.
    scratch = np.empty(_SHORT_PART, np.float32)
    for part in range(_U64(0), whole, _SHORT_PART):
        length = min(_SHORT_PART, whole - part)
        for place in range(length):
            scratch[place] = velocity_D[part + place] * factor + gradient_D[part + place]
        for line in range(_U64(0), length, _LINE):
            stream_line(scratch, line, gained_D, part + line)
    wait_for_streams()
    for place in range(whole, size):
        gained_D[place] = velocity_D[place] * factor + gradient_D[place]


@compiled
def add_sample(gradient_D: Floats, residual_D: Floats, start: int, stride: int, sample_L: Floats) -> None:
    """Adds two arrays on a sample of lines.

    Args:
        gradient_D: Unchanged.
        residual_D: Unchanged.
        start: The first line.
        stride: Lines from one to the next.
        sample_L: float32 (L, 16); becomes the sums; all sampled lines are whole.
    """
    for row in range(len(sample_L)):
        first = (start + row * stride) * LINE
        for lane in range(LINE):
            sample_L[row, lane] = gradient_D[first + lane] + residual_D[first + lane]


@compiled
def name_elements(lines: Places, indices_L: Places) -> None:
    """Writes the indices of all elements of some lines to ``indices_L``, uint32 (L, 16), in order."""
    for row in range(len(lines)):
        first = lines[row] * np.uint32(LINE)
        for lane in range(LINE):
            indices_L[row, lane] = first + np.uint32(lane)


@compiled
def keep_lost(rest_D: Floats, indices_K: Places, values_K: Floats, seen_K: Floats) -> None:
    """Writes the rounding errors of the picked elements to the residual.

    Args:
        rest_D: Overwritten at the places.
        indices_K: The places, < D.
        values_K: What was picked.
        seen_K: What the receiver will decode.
    """
    for place in range(len(indices_K)):
        rest_D[indices_K[place]] = values_K[place] - seen_K[place]


@compiled
def gain_adam(
    first_D: Floats,
    second_D: Floats,
    gradient_D: Floats,
    coefficients: Floats,
    new_first_D: Floats,
    new_second_D: Floats,
    direction_D: Floats,
) -> None:
    """Computes a step of Adam's moments and its direction; rounds after every operation.

    Args:
        first_D: Unchanged.
        second_D: Unchanged.
        gradient_D: Unchanged.
        coefficients: See `_compress.correction.AdamCorrection.coefficients`.
        new_first_D: Overwritten.
        new_second_D: Overwritten.
        direction_D: Overwritten.
    """
    beta1, rest1, beta2, rest2 = coefficients[0], coefficients[1], coefficients[2], coefficients[3]
    unbias1, unbias2, eps = coefficients[4], coefficients[5], coefficients[6]
    for place in range(len(gradient_D)):
        gradient = gradient_D[place]
        first = first_D[place] * beta1 + gradient * rest1
        second = second_D[place] * beta2 + gradient * gradient * rest2
        new_first_D[place] = first
        new_second_D[place] = second
        direction_D[place] = first * unbias1 / (np.sqrt(second) * unbias2 + eps)


@compiled
def gain_second(
    second_D: Floats, gradient_D: Floats, coefficients: Floats, new_second_D: Floats, direction_D: Floats
) -> None:
    """Computes the bits of `gain_adam` for β₁ = 0, where no first moment is kept.

    Args:
        second_D: Unchanged.
        gradient_D: Unchanged.
        coefficients: As for `gain_adam`; those of the first moment are ignored.
        new_second_D: Overwritten.
        direction_D: Overwritten.
    """
    beta2, rest2, unbias2, eps = coefficients[2], coefficients[3], coefficients[5], coefficients[6]
    for place in range(len(gradient_D)):
        gradient = gradient_D[place]
        second = second_D[place] * beta2 + gradient * gradient * rest2
        new_second_D[place] = second
        direction_D[place] = gradient / (np.sqrt(second) * unbias2 + eps)


@compiled
def clear(array_D: Floats, indices_K: Places) -> None:
    """Writes 0 to some places.

    Args:
        array_D: Overwritten there.
        indices_K: The places, < D.
    """
    for place in range(len(indices_K)):
        array_D[indices_K[place]] = 0


@compiled
def put_back(rest_D: Floats, places: Places, values: Floats, is_kept: Bools) -> int:
    """Puts some of the picked units back into the bucket; the others move to the front.

    Args:
        rest_D: Receives what lies within it.
        places: Numbers of the picked units; overwritten.
        values: float32 (U, unit), the values of those units; overwritten.
        is_kept: bool (U,).

    Returns:
        The number of units that are left, at the front of both arrays.
    """
    unit, left = values.shape[1], 0
    for row in range(len(places)):
        if is_kept[row]:
            places[left] = places[row]
            for lane in range(unit):
                values[left, lane] = values[row, lane]
            left += 1
        else:
            first = np.int64(places[row]) * unit
            for lane in range(min(unit, rest_D.size - first)):
                rest_D[first + lane] = values[row, lane]
    return left


def probe() -> None:
    """Compiles every loop for the types that it is called with."""
    gradient_D, residual_D, second_D, direction_D = np.ones((4, LINE), dtype=np.float32)
    rest_D, velocity_D = aligned_zeros(LINE), aligned_zeros(LINE)
    places, values = np.zeros(LINE, dtype=np.uint32), np.zeros(LINE, dtype=np.float32)
    pick_elements(gradient_D, residual_D, rest_D, 1.0, places, values)
    pick_lines(gradient_D, residual_D, rest_D, 1.0, 1.0, places, values)
    pick_chunks(gradient_D, residual_D, rest_D, 1.0, places, values)
    gain_momentum(velocity_D, gradient_D, 0.5, rest_D)
    add_sample(gradient_D, residual_D, 0, 1, values.reshape(1, LINE))
    line_energy(values.reshape(1, LINE), np.float32(1))
    places[:] = 0
    name_elements(places[:1], places.reshape(1, LINE))
    places[:] = 0
    keep_lost(rest_D, places[:1], values[:1], values[:1])
    clear(rest_D, places[:1])
    put_back(rest_D, places[:1], values.reshape(1, LINE), np.ones(1, np.bool_))
    coefficients = np.ones(7, dtype=np.float32)
    gain_adam(values, second_D, gradient_D, coefficients, rest_D, velocity_D, direction_D)
    gain_second(second_D, gradient_D, coefficients, velocity_D, direction_D)
