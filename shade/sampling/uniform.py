"""Uses every sample exactly once an epoch, in a new random order: what `DistributedSampler` does, and the control.

Every other mode falls back on `full_epoch` too, so ``unbiased`` with ``keep=1.0`` and this mode give the same order bit
for bit, and a comparison of the two differs in nothing else.
"""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from shade.sampling.base import MODES, Draw, Purpose, Receipt, SamplingMode, Scores, Validation, generator, is_large
from shade.types import Bools, Order


def shuffled(num_samples: int, random: np.random.Generator) -> Order:
    """Returns the numbers below ``num_samples`` in a random order, as int32."""
    if is_large(num_samples):
        from shade.sampling import large

        return large.permuted(num_samples, random)
    order_N: Order = np.arange(num_samples, dtype=np.int32)
    random.shuffle(order_N)
    return order_N


def full_epoch(num_samples: int, seed: int, epoch: int, *, has_classes: bool) -> Draw:
    """Draws all N samples once, without weights. The receipt's class drift is 0 if there are classes, otherwise nan."""
    order_K = shuffled(num_samples, generator(seed, epoch, Purpose.SHUFFLE))
    receipt = Receipt(
        drawn=num_samples,
        mean_inclusion=1.0,
        weight_sum_z=0.0,
        effective_sample_size=float(num_samples),
        max_weight=1.0,
        class_drift=0.0 if has_classes else float("nan"),
    )
    return Draw(epoch=epoch, order_K=order_K, weight_N=None, receipt=receipt)


@MODES.register("uniform")
class UniformMode(SamplingMode):
    """Every sample once an epoch; scores, cache and validation are ignored."""

    draws_ahead = True
    uses_weights = False
    uses_scores = False
    default_policy = "plan"
    default_score = "loss"

    @override
    def draw(
        self,
        epoch: int,
        scores: Scores | None,
        *,
        resident_N: Bools | None = None,
        validation: Validation | None = None,
    ) -> Draw:
        del scores, resident_N, validation
        return full_epoch(self.num_samples, self.seed, epoch, has_classes=False)
