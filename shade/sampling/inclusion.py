"""Turns scores into inclusion probabilities whose sum is exactly the number of samples wanted.

Probabilities are whole numbers of ``UNIT = 2**-30``. A float sum of a million terms is never exactly K, and a
systematic draw from such a sum is sometimes one sample short; a sum of integers is exact, so the draw has K samples
always, and the gradient weight ``1 / pi`` belongs to the very probability that was used. The price is a relative
error of 1e-9 in the wanted proportion, which biases nothing.

Invariant: ``floor_N <= units_N <= ONE`` and ``units_N.sum() == num_drawn * ONE``.

Legend: N data set.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shade.types import Floats

Units = npt.NDArray[np.uint32]
"""Probabilities in units of 2**-30."""

ONE = 1 << 30
"""Probability 1."""

MAX_PROBES = 200
"""Bracketed Newton: 4 to 8 probes in practice, each halves the bracket at worst."""


def budget(num_samples: int, global_batch: int, keep: float) -> int:
    """How many samples an epoch draws.

    Args:
        num_samples: N.
        global_batch: G.
        keep: Wanted share of the data set, in (0, 1].

    Returns:
        The multiple of G nearest to ``keep * N``, at least G; N where there is no such multiple below N.
    """
    if keep >= 1.0 or num_samples <= global_batch:
        return num_samples
    steps = max(1, round(keep * num_samples / global_batch))
    return min(steps, num_samples // global_batch) * global_batch


def solve_units(root_N: Floats, floor_N: Units, num_drawn: int) -> Units:
    """Solves ``pi_i = clip(c * root_i, floor_i, 1)`` for the c that makes the sum ``num_drawn``.

    The sum is piecewise linear and growing in c, so Newton's step is exact within a piece; a bracket keeps it from
    cycling between pieces. What rounding leaves over is handed out a unit at a time.

    Args:
        root_N: float32 (N,), > 0: the wanted proportions.
        floor_N: Smallest units of each; ONE forces a sample in.
        num_drawn: K; ``floor_N.sum() <= K * ONE <= N * ONE``.

    Returns:
        uint32 (N,), summing to exactly ``K * ONE``.
    """
    goal = float(num_drawn) * ONE
    low, high = 0.0, ONE / float(root_N.min())
    scale = min(goal / float(root_N.sum(dtype=np.float64)), high)
    wanted_N = np.empty(len(root_N), dtype=np.float64)
    for _ in range(MAX_PROBES):
        np.multiply(root_N, scale, out=wanted_N, dtype=np.float64)
        free_N = (wanted_N > floor_N) & (wanted_N < ONE)
        slope = float(root_N.sum(dtype=np.float64, where=free_N))
        np.clip(wanted_N, floor_N, ONE, out=wanted_N)
        excess = float(wanted_N.sum()) - goal
        if abs(excess) <= 1e-12 * goal:
            break
        low, high = (low, scale) if excess > 0 else (scale, high)
        step = scale - excess / slope if slope > 0 else low
        scale = step if low < step < high else (low + high) / 2
    np.rint(wanted_N, out=wanted_N)
    units_N = wanted_N.astype(np.uint32)
    del wanted_N, free_N
    _hand_out(units_N, floor_N, num_drawn * ONE - int(units_N.sum(dtype=np.int64)))
    return units_N


def _hand_out(units_N: Units, floor_N: Units, rest: int) -> None:
    """Adds ``rest`` units (or takes them away) where there is room, as evenly as it goes, in place."""
    while rest:
        room_N = ONE - units_N if rest > 0 else units_N - floor_N
        movable = np.flatnonzero(room_N)
        share, extra = divmod(abs(rest), len(movable))
        if share == 0:
            movable = movable[:extra]
        give = np.minimum(room_N[movable], max(share, 1)).astype(np.uint32)
        if rest > 0:
            units_N[movable] += give
            rest -= int(give.sum(dtype=np.int64))
        else:
            units_N[movable] -= give
            rest += int(give.sum(dtype=np.int64))
