"""Draws a fixed number of samples without replacement, each with its own probability, from one random number.

Systematic sampling: lay the samples end to end in a random order, each as long as its probability, and mark the line
at ``start, start + 1, start + 2, …``. No sample is longer than 1, so none is marked twice; the line is K long, so K are
marked; and a sample is marked with exactly its probability. Where the order keeps classes together, each class is
marked ⌊its length⌋ or ⌈its length⌉ times: a stratified draw for free.

The price: pairs of neighbours are never drawn independently. The order is new each epoch, so no pair is favoured.

Legend: N data set · K drawn in one epoch · C classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shade.sampling.base import Purpose, generator
from shade.sampling.inclusion import ONE, Units
from shade.types import Indices

_BITS = ONE.bit_length() - 1


def draw_systematic(units_N: Units, seed: int, epoch: int, class_N: npt.NDArray[np.uint32] | None = None) -> Indices:
    """Draws.

    Args:
        units_N: Inclusion probabilities as `inclusion.solve_units` gives them.
        seed: Of the run.
        epoch: ≥ 0.
        class_N: Classes as 0 … C−1, to draw stratified; or None.

    Returns:
        int64 (K,), distinct, in the order of the line: shuffle before use.
    """
    line_N = generator(seed, epoch, Purpose.ARRANGE).permutation(len(units_N)).astype(np.int64, copy=False)
    if class_N is not None:
        line_N = _classes_together(line_N, class_N, seed, epoch)
    start = int(generator(seed, epoch, Purpose.START).integers(ONE))
    marks_N = np.cumsum(units_N[line_N], dtype=np.int64)
    marks_N += ONE - 1 - start
    marks_N >>= _BITS  # marks strictly before the end of each sample
    marked_N = np.empty(len(marks_N), dtype=bool)
    marked_N[0] = marks_N[0] > 0
    np.greater(marks_N[1:], marks_N[:-1], out=marked_N[1:])
    return line_N[marked_N]


def _classes_together(line_N: Indices, class_N: npt.NDArray[np.uint32], seed: int, epoch: int) -> Indices:
    """Sorts by class, stably, the classes in a random order of their own."""
    num_classes = int(class_N.max()) + 1
    place_C = generator(seed, epoch, Purpose.TIES).permutation(num_classes)
    narrow = np.uint16 if num_classes <= 2**16 else np.uint32  # numpy sorts 16 bits by radix: five times faster
    place_N = place_C.astype(narrow)[class_N[line_N]]
    return line_N[np.argsort(place_N, kind="stable")]
