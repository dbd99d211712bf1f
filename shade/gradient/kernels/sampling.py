"""The sample's loops in numba: they read a line here and a line there, so what counts is many reads under way at once.

numpy does the same in `shade.gradient.kernels.arrays`, five times as slowly: it begins a loop of its own for each line.

Legend: D bucket · L lines of 16.
"""

from __future__ import annotations

import numpy as np

from shade.gradient.kernels.arrays import LINE
from shade.gradient.kernels.compiling import compiled
from shade.types import Floats


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
