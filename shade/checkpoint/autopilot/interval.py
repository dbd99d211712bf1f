"""How often to save: Young's rule, the exact optimum behind it, and what a run is left with at any interval.

Failures come at random, one in M seconds on average (a Poisson process). A save adds C seconds to the training, is safe
L seconds later than those, and the way back takes R. Between two saves lie τ seconds of training, so a cycle is
c = τ + C. Of a life between two failures, R goes by first; then as many cycles count as were safe before its end. A
life is longer than x with probability e^(-x/M), and so the share of time that ends up as training is

    G = τ e^(-(R + L)/M) / (M (e^(c/M) - 1))

which for L = 0 is Daly's ("A higher order estimate of the optimum checkpoint interval", FGCS 2006). Neither R nor L
moves its maximum: x = c/M solves x + e^(-x) = 1 + C/M. For C ≪ M that is Young's √(2CM) (CACM 1974). All exact, no
series cut off; `shade.checkpoint.autopilot.replay` must agree with it on traces drawn from such a process.
"""

from __future__ import annotations

import math
from typing import Final

_ROUNDS: Final = 60
"""Of Newton's method, at most; it takes five."""


def young(cost_seconds: float, mtbf_seconds: float) -> float:
    """Young's interval: √(2CM), for a cost far below M."""
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


def best_cycle(cost_seconds: float, mtbf_seconds: float) -> float:
    """The cycle, save included, with which most of the time ends up as training.

    Args:
        cost_seconds: C ≥ 0, what a save adds.
        mtbf_seconds: M > 0, mean time between failures; infinity: they do not happen.

    Returns:
        c = τ + C in seconds; C where a save is free, infinity where nothing fails.
    """
    if math.isinf(mtbf_seconds):
        return math.inf
    ratio = cost_seconds / mtbf_seconds
    x = math.sqrt(2 * ratio)
    for _ in range(_ROUNDS):
        slope = -math.expm1(-x)
        if slope == 0:
            break
        change = (x - ratio + math.expm1(-x)) / slope
        x -= change
        if abs(change) <= 1e-12 * x:
            break
    return x * mtbf_seconds


def goodput(
    work_seconds: float,
    cost_seconds: float,
    mtbf_seconds: float,
    *,
    lag_seconds: float = 0.0,
    recover_seconds: float = 0.0,
) -> float:
    """The share of all time that ends up as training that was never done again.

    Args:
        work_seconds: τ > 0, training between two saves, by the clock of a training without saves.
        cost_seconds: C, what a save adds.
        mtbf_seconds: M; infinity: nothing fails.
        lag_seconds: L, from the end of the cost until the save is safe; negative where it is safe before.
        recover_seconds: R, from a failure until training goes on.

    Returns:
        G, between 0 and 1.
    """
    cycle = work_seconds + cost_seconds
    if math.isinf(mtbf_seconds):
        return work_seconds / cycle
    life = mtbf_seconds
    if cycle / life > 500:  # e to that is more than a float holds; nothing is left anyway
        return 0.0
    late = max(-cycle, lag_seconds)
    return work_seconds * math.exp(-(recover_seconds + late) / life) / (life * math.expm1(cycle / life))
