"""Turns a batch of per-sample losses into scores: by rank (SHADE's), by moving average, or by gradient.

`RankScore`: the sample with the j-th smallest loss gets ``log(j + 10)``. Ranks can be compared across batches and
epochs where losses cannot, which is the paper's reason; the price is that the scores span only log(B + 9) / log(10), a
factor of 1.9 at B = 64, however far the losses are apart. B is the global batch, so the scores do not depend on the
number of ranks.

`LossScore`: a moving average, because one report an epoch is noisy (augmentation, dropout).

`GradNormScore`: for cross-entropy the gradient with respect to the logits is ``softmax(logits) − onehot(target)``; its
norm, times a factor that is about the same for all samples, bounds the norm of the whole gradient. That is closer to
what minimises variance than the loss is. It costs one softmax of what the loss has already read. Report it in place of
the loss.

`TargetGradScore`, the default of `unbiased`: the part of that gradient at the target's logit, ``1 − p``, which the loss
gives without the logits, since ``p = exp(−loss)``. A sample that is hopelessly wrong counts as one that is wrong, so
wrong labels and outliers are drawn less often than by their loss. Decision 0053 has the trainings that chose it.

References:
    Khan et al., "SHADE: Enable Fundamental Cacheability for Distributed Deep Learning Training", FAST 2023 (rank).
    Katharopoulos & Fleuret, "Not All Samples Are Created Equal", ICML 2018, §3.2 (gradient norm).

Legend: B batch · C classes.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor
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


# The half-life of one epoch cuts the noise's variance to a third and lags a falling loss by about one epoch, on all
# samples alike; only ratios matter.
NEW_SHARE = np.float32(0.5)
"""Weight of the newest report."""


@SCORES.register("loss")
class LossScore(ScoreStrategy):
    """Exponential moving average; a negative value counts as 0, and the first one warns."""

    def __init__(self) -> None:
        self._has_warned = False

    def importance_of(self, value_B: Floats) -> Floats:
        """Turns reported values ≥ 0 into those that are averaged."""
        return value_B

    @override
    def rescore(self, score_B: Floats, seen_B: Bools, value_B: Floats) -> Floats:
        if not self._has_warned and (value_B < 0).any():
            self._has_warned = True
            warnings.warn(
                f"report() got a loss of {value_B.min():g}; a negative one counts as 0, so its sample is drawn as the "
                "least important. If losses of this kind may be negative, pass ShadeSampler(…, score='rank'), which "
                "only compares them",
                stacklevel=2,
            )
        value_B = self.importance_of(np.maximum(value_B, np.float32(0)))
        return np.where(seen_B, score_B + NEW_SHARE * (value_B - score_B), value_B)


@SCORES.register("grad-norm")
class GradNormScore(LossScore):
    """Moving average, as `LossScore`, of what `last_layer_norm` returns."""

    takes_losses = False


FLAT_LOSS = np.float32(5)
"""From here on ``1 − exp(−loss)`` is above 0.993, for the most important sample and for the median alike."""

_SQUARINGS, _LARGEST_LOSS = 10, np.float32(64)


@SCORES.register("target-grad")
class TargetGradScore(LossScore):
    """Moving average of ``1 − exp(−loss)``: for cross-entropy, the gradient with respect to the target's logit.

    Losses of another kind may be so large that all samples look alike. The first batch of samples seen before warns if
    most of its losses are above `FLAT_LOSS`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_warned_of_flatness = False

    @override
    def importance_of(self, value_B: Floats) -> Floats:
        # Products and quotients alone are the same on every processor, as the scores of all ranks must be. The limit of
        # (1 + x/n)**n is exp(x): with n = 1024 the score is right to a thousandth.
        power_B = 1 + np.minimum(value_B, _LARGEST_LOSS).astype(np.float64) / (1 << _SQUARINGS)
        for _ in range(_SQUARINGS):
            np.square(power_B, out=power_B)
        return (1 - 1 / power_B).astype(np.float32)

    @override
    def rescore(self, score_B: Floats, seen_B: Bools, value_B: Floats) -> Floats:
        # An untrained model's losses say nothing of their kind, so only those of samples seen before count.
        is_flat = 2 * np.count_nonzero(value_B > FLAT_LOSS) > len(value_B) and seen_B.all()
        if is_flat and not self._has_warned_of_flatness:
            self._has_warned_of_flatness = True
            warnings.warn(
                f"half of the losses that report() got are above {np.median(value_B):g}; score='target-grad' is made "
                "for cross-entropy and takes losses this large for equal, so the draw becomes a random one. If yours "
                "are of another kind, pass ShadeSampler(…, score='loss')",
                stacklevel=2,
            )
        return super().rescore(score_B, seen_B, value_B)


@torch.no_grad()
def last_layer_norm(logits_BC: Tensor, targets_B: Tensor) -> Tensor:
    """Returns the norm of the cross-entropy's gradient with respect to the logits, per sample.

    Args:
        logits_BC: Float (B, C), any dtype and device; left unmodified.
        targets_B: int64 (B,), on the same device.

    Returns:
        float32 (B,), in [0, sqrt(2)], on the same device; nothing is synchronised.
    """
    gradient_BC = torch.softmax(logits_BC.float(), dim=1)
    gradient_BC.scatter_add_(1, targets_B[:, None], gradient_BC.new_full((len(targets_B), 1), -1.0))
    norm_B: Tensor = torch.linalg.vector_norm(gradient_BC, dim=1)
    return norm_B
