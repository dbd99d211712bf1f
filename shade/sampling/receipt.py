"""Checks a draw from the outside: from the samples drawn and their weights, nothing else.

The weights 1/pi are right exactly if ``Σ 1/pi over the drawn`` has mean N, so its distance from N, in standard
deviations, convicts a sampler that draws with other probabilities than it says. It cannot see errors that cancel in the
sum; the tests compare gradients.

References:
    J. Hájek, "Asymptotic theory of rejective sampling", Ann. Math. Statist. 35 (1964), for the deviation.

Legend: N data set · K drawn in one epoch · C classes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.sampling.base import Classes, Receipt, Sums, is_large, parts, picked
from shade.types import Floats, Order

ROUNDING = 1e-6
"""Deviation allowed for float32 weights, as a share of N: matters only if all probabilities are the same."""


def measure(order_K: Order, weight_N: Floats, class_N: Classes | None = None) -> Receipt:
    """Makes the receipt of a weighted draw from the samples drawn, the gradient weight ≥ 1 that each sample gets when
    drawn, and the classes 0 … C−1 if the draw was stratified. ``class_drift`` is nan without classes."""
    num_samples = len(weight_N)
    if is_large(num_samples):
        from shade.sampling import large

        found = large.sums(order_K, weight_N, class_N)
    else:
        found = _sums(order_K, weight_N, class_N)
    total = float(found.drawn_C.sum())
    deviation = math.hypot(math.sqrt(_variance(found)), ROUNDING * num_samples)
    drift = float("nan")
    if class_N is not None:
        true_C = np.zeros(len(found.drawn_C))
        for part in parts(num_samples):
            true_C += np.bincount(class_N[part], minlength=len(true_C))
        drift = float(np.abs(found.drawn_C / total - true_C / num_samples).max())
    return Receipt(
        drawn=len(order_K),
        mean_inclusion=float(found.pi_C.sum()) / num_samples,
        weight_sum_z=(total - num_samples) / deviation,
        effective_sample_size=total**2 / found.squares,
        max_weight=found.largest,
        class_drift=drift,
    )


def _sums(order_K: Order, weight_N: Floats, class_N: Classes | None) -> Sums:
    """Adds up what a receipt needs, in numpy; `large.sums` does it in two passes."""
    weight_K = picked(weight_N, order_K).astype(np.float64)
    pi_N = 1.0 / weight_N

    def by_class(x_N: npt.NDArray[Any], classes: Classes | None) -> npt.NDArray[np.float64]:
        if classes is None:
            return np.full(1, x_N.sum(dtype=np.float64))
        return np.bincount(classes, weights=x_N).astype(np.float64, copy=False)

    num_classes = 1 if class_N is None else int(class_N.max()) + 1
    drawn_C = by_class(weight_K, None if class_N is None else class_N[order_K])
    return Sums(
        drawn_C=np.pad(drawn_C, (0, num_classes - len(drawn_C))),
        squares=float(weight_K @ weight_K),
        largest=float(weight_K.max()),
        pi_C=by_class(pi_N, class_N),
        spread_C=by_class(pi_N * (1 - pi_N), class_N),
        left_out_C=by_class(1 - pi_N, class_N),
        within_C=by_class(weight_N - 1, class_N),
    )


def _variance(found: Sums) -> float:
    """Returns the variance of Σ 1/pi over the drawn; see the top of the file."""
    spread_C, left_out_C, count_C = found.spread_C, found.left_out_C, found.pi_C
    mean_C = np.divide(left_out_C, spread_C, out=np.zeros_like(spread_C), where=spread_C > 0)
    within_C = found.within_C - mean_C * left_out_C
    fraction_C = count_C - np.floor(count_C)
    rounding_C = mean_C**2 * fraction_C * (1 - fraction_C) if len(count_C) > 1 else np.zeros(1)
    return float(np.maximum(within_C, 0).sum() + rounding_C.sum())
