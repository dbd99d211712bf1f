"""Scores a sample by the rank of its loss within the batch: SHADE's importance.

The sample with the j-th smallest loss gets ``log(j + 10)``. Ranks can be compared across batches and epochs where
losses cannot, which is the paper's reason; the price is that the scores span only log(B + 9) / log(10), a factor of 1.9
at B = 64, however far the losses are apart. B is the global batch, so the scores do not depend on the number of ranks.

References:
    Khan et al., "SHADE: Enable Fundamental Cacheability for Distributed Deep Learning Training", FAST 2023.
"""

from __future__ import annotations

import math

import numpy as np
from typing_extensions import override

from shade.importance.base import SCORES, ScoreStrategy
from shade.types import Bools, Floats

OFFSET = 10
"""SHADE's constant: keeps the first few ranks from being far apart."""


@SCORES.register("rank")
class RankScore(ScoreStrategy):
    """``log(j + 10)`` for rank j from 0; equal losses keep the order of the batch."""

    by_sample = False

    def __init__(self) -> None:
        self._score_of_rank = np.empty(0, dtype=np.float32)

    @override
    def rescore(self, score_B: Floats, seen_B: Bools, value_B: Floats) -> Floats:
        """Ignores the past."""
        del score_B, seen_B
        size = len(value_B)
        if size > len(self._score_of_rank):
            self._score_of_rank = np.array([math.log(j + OFFSET) for j in range(size)], dtype=np.float32)
        new_B = np.empty(size, dtype=np.float32)
        new_B[np.argsort(value_B, kind="stable")] = self._score_of_rank[:size]
        return new_B
