"""How many bytes of a snapshot are copied in which part of a pass: as many as its share of the time.

AsymCheck (DAC 2026): windows are long in the backward pass and short in the forward pass, and partitions of equal size
stall in the short ones. With windows of t_i seconds and a state of R bytes, r_i = R · t_i / (ΣT_f + ΣT_b). The code
published with it corrects the rounding of each pass by itself, so that its partitions hold the state twice and the last
forward one is the largest; here the cumulative shares are rounded, once. Invariant: the partitions add up to R.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def partition(num_bytes: int, window_seconds: Sequence[float]) -> list[int]:
    """Divides a state among windows.

    Args:
        num_bytes: Of the state, R ≥ 0.
        window_seconds: Length of each window of a pass, in order; not negative.

    Returns:
        Bytes for each, adding up to R; equal shares where nothing has been measured, none where there is no window.
    """
    if not window_seconds:
        return []
    total = sum(window_seconds)
    reached = itertools.accumulate(window_seconds) if total > 0 else range(1, len(window_seconds) + 1)
    ends = [round(num_bytes * min(1.0, seconds / (total or len(window_seconds)))) for seconds in reached]
    ends[-1] = num_bytes
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
