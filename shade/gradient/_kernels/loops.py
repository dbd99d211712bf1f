"""The loops in numba: a sample's lines, a line's elements, what rounding lost, what is to be 0, what goes back, Adam.

Most of them read or write a place here and a place there, so what counts is many accesses under way at once. numpy does
the same in `_kernels.arrays`, several times as slowly: it begins a loop of its own for each line, and
widens indices before it uses them.

Legend: D bucket · K kept · L lines of 16.
"""

from __future__ import annotations

import numpy as np

from shade.gradient._kernels.arrays import LINE, Places
from shade.gradient._kernels.compiling import compiled
from shade.types import Bools, Floats


@compiled
def add_sample(gradient_D: Floats, residual_D: Floats, start: int, stride: int, sample_L: Floats) -> None:
    """See `arrays.add_sample`."""
    for row in range(len(sample_L)):
        first = (start + row * stride) * LINE
        for lane in range(LINE):
            sample_L[row, lane] = gradient_D[first + lane] + residual_D[first + lane]


@compiled
def line_energy(lines_L: Floats, scale: np.float32) -> Floats:
    """See `arrays.line_energy`."""
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
def name_elements(lines: Places, indices_L: Places) -> None:
    """See `arrays.name_elements`."""
    for row in range(len(lines)):
        first = lines[row] * np.uint32(LINE)
        for lane in range(LINE):
            indices_L[row, lane] = first + np.uint32(lane)


@compiled
def keep_lost(rest_D: Floats, indices_K: Places, values_K: Floats, seen_K: Floats) -> None:
    """See `arrays.keep_lost`."""
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
    """See `arrays.gain_adam`."""
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
    """See `arrays.gain_second`."""
    beta2, rest2, unbias2, eps = coefficients[2], coefficients[3], coefficients[5], coefficients[6]
    for place in range(len(gradient_D)):
        gradient = gradient_D[place]
        second = second_D[place] * beta2 + gradient * gradient * rest2
        new_second_D[place] = second
        direction_D[place] = gradient / (np.sqrt(second) * unbias2 + eps)


@compiled
def clear(array_D: Floats, indices_K: Places) -> None:
    """See `arrays.clear`."""
    for place in range(len(indices_K)):
        array_D[indices_K[place]] = 0


@compiled
def put_back(rest_D: Floats, places: Places, values: Floats, is_kept: Bools) -> int:
    """See `arrays.put_back`."""
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
