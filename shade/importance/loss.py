"""Scores a sample by the moving average of its loss: the default.

One report an epoch is noisy (augmentation, dropout), so half of the score is the past. The half-life of one epoch cuts
the noise's variance to a third and lags a falling loss by about one epoch, on all samples alike; only ratios matter.
"""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from shade.importance.base import SCORES, ScoreStrategy
from shade.types import Bools, Floats

NEW_SHARE = np.float32(0.5)
"""Weight of the newest report."""


@SCORES.register("loss")
class LossScore(ScoreStrategy):
    """Exponential moving average; a negative value counts as 0."""

    @override
    def rescore(self, score_B: Floats, seen_B: Bools, value_B: Floats) -> Floats:
        value_B = np.maximum(value_B, np.float32(0))
        return np.where(seen_B, score_B + NEW_SHARE * (value_B - score_B), value_B)
