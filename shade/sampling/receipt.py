"""Checks a draw from the outside: from the samples drawn and their weights, nothing else.

The weights 1/pi are right exactly if ``Σ 1/pi over the drawn`` has mean N, so its distance from N, in standard
deviations, convicts a sampler that draws with other probabilities than it says. The deviation is Hájek's for a
fixed-size draw, within each class: ``V = Σ (1 − pi)/pi − (Σ (1 − pi))² / Σ pi (1 − pi)``, plus the rounding of each
class's count to a whole number. It holds within a few per cent for a systematic draw on a random order.

It cannot see weights and probabilities that are wrong in a way that cancels in the sum. The tests compare gradients.

References:
    J. Hájek, "Asymptotic theory of rejective sampling", Ann. Math. Statist. 35 (1964).

Legend: N data set · K drawn in one epoch · C classes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.sampling.base import Receipt
from shade.types import Floats, Indices

ROUNDING = 1e-6
"""Deviation allowed for float32 weights, as a share of N: matters only if all probabilities are the same."""


def measure(order_K: Indices, weight_N: Floats, class_N: npt.NDArray[Any] | None = None) -> Receipt:
    """Makes the receipt of a weighted draw from the samples drawn, the gradient weight ≥ 1 that each sample gets when
    drawn, and the classes 0 … C−1 if the draw was stratified. ``class_drift`` is nan without classes."""
    num_samples = len(weight_N)
    weight_K = weight_N[order_K].astype(np.float64)
    total = float(weight_K.sum())
    pi_N = 1.0 / weight_N
    deviation = math.hypot(math.sqrt(_variance(pi_N, weight_N, class_N)), ROUNDING * num_samples)
    drift = float("nan")
    if class_N is not None:
        true_C = np.bincount(class_N) / num_samples
        drift = float(
            np.abs(np.bincount(class_N[order_K], weights=weight_K, minlength=len(true_C)) / total - true_C).max()
        )
    return Receipt(
        drawn=len(order_K),
        mean_inclusion=float(pi_N.mean(dtype=np.float64)),
        weight_sum_z=(total - num_samples) / deviation,
        effective_sample_size=total**2 / float(weight_K @ weight_K),
        max_weight=float(weight_K.max()),
        class_drift=drift,
    )


def _variance(pi_N: Floats, weight_N: Floats, class_N: npt.NDArray[Any] | None) -> float:
    """Returns the variance of Σ 1/pi over the drawn; see the top of the file."""

    def sums(x_N: Floats) -> npt.NDArray[np.float64]:
        if class_N is None:
            return np.full(1, x_N.sum(dtype=np.float64))
        return np.bincount(class_N, weights=x_N).astype(np.float64, copy=False)

    spread_C = sums(pi_N * (1 - pi_N))
    left_out_C = sums(1 - pi_N)
    mean_C = np.divide(left_out_C, spread_C, out=np.zeros_like(spread_C), where=spread_C > 0)
    within_C = sums(weight_N - 1) - mean_C * left_out_C
    count_C = sums(pi_N)
    fraction_C = count_C - np.floor(count_C)
    rounding_C = mean_C**2 * fraction_C * (1 - fraction_C) if len(count_C) > 1 else np.zeros(1)
    return float(np.maximum(within_C, 0).sum() + rounding_C.sum())
