"""Computes the share of all time that ends up as training; `shade.checkpoint._pacing.schedule` derives the formula."""

from __future__ import annotations

import math


def goodput(
    work_seconds: float,
    cost_seconds: float,
    mtbf_seconds: float,
    *,
    lag_seconds: float = 0.0,
    recover_seconds: float = 0.0,
) -> float:
    """Returns the share of all time that is training which is not done again.

    Args:
        work_seconds: τ > 0, training between two saves, by the clock of a training without saves.
        cost_seconds: C, what a save adds.
        mtbf_seconds: M; infinity: there are no failures.
        lag_seconds: L, from the end of the cost until the save is safe; negative where it is safe before.
        recover_seconds: R, from a failure until training continues.

    Returns:
        G, between 0 and 1.
    """
    cycle = work_seconds + cost_seconds
    if math.isinf(mtbf_seconds):
        return work_seconds / cycle
    life = mtbf_seconds
    if cycle / life > 500:  # e to that overflows a float; the share is 0 anyway
        return 0.0
    late = max(-cycle, lag_seconds)
    return work_seconds * math.exp(-(recover_seconds + late) / life) / (life * math.expm1(cycle / life))
