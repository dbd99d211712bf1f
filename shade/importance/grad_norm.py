"""Scores a sample by the length of its gradient at the last layer: closer to what minimises variance than the loss is.

For cross-entropy the gradient with respect to the logits is ``softmax(logits) − onehot(target)``; its norm, times a
factor that is about the same for all samples, bounds the norm of the whole gradient. It costs one softmax of what the
loss has already read, and no backward pass. Report it in place of the loss.

References:
    Katharopoulos & Fleuret, "Not All Samples Are Created Equal", ICML 2018, §3.2.

Legend: B batch · C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shade.importance.base import SCORES
from shade.importance.loss import LossScore


@SCORES.register("grad-norm")
class GradNormScore(LossScore):
    """Moving average, as `LossScore`, of what `last_layer_norm` returns."""

    takes_losses = False


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
