"""AdamW whose moments stay on each rank: of each rank's own whole gradient.

An Adam that receives one element in thirty divides the sum of the skipped gradients by the size of such sums, and
learns a fifth as fast (decision 0016 has the figures). So the engine averages directions of
`_compress.correction.AdamCorrection`. What is left here is ``w ← w − lr · (direction + weight_decay · w)``.

By default there is no first moment. At 3 % an element waits about 30 steps in the residual until it is among the
largest, and then carries the mean of that time. A first moment in front of it adds 9 steps of delay and smooths nothing
(decision 0016). Where nearly everything is sent, use (0.9, 0.999): on one rank that is `torch.optim.AdamW`. On several
ranks, the mean of the ranks' directions replaces the direction of the mean; the paper below shows that it converges
alike.

Moments are part of the engine's state, not of the optimizer's. A rank that joins starts without them.

References:
    Chen et al., "Efficient-Adam: Communication-Efficient Distributed Adam", 2022 (arXiv 2205.14473), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import ParamsT
from typing_extensions import override

from shade.errors import ConfigError
from shade.gradient._compress.correction import AdamCorrection
from shade.gradient._optim.base import FLUSH_EVERY
from shade.gradient._optim.sgd import SparseSGD


class LocalAdamW(SparseSGD):
    """AdamW for a `GradientEngine`.

    Args:
        params: As for any optimizer.
        lr: Learning rate, ≥ 0.
        betas: Decay of the moments, each 0 ≤ beta < 1; read when the engine is made. Not torch's default (0.9, 0.999),
            for the reason given above.
        eps: Added to the denominator, > 0; read when the engine is made.
        weight_decay: ≥ 0, decoupled from the gradient.
        flush_every: Steps that an element may lag, ≥ 1.

    Raises:
        ConfigError: A setting out of range, or a parameter that is not dense real floating point.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.0, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        flush_every: int = FLUSH_EVERY,
    ) -> None:
        # Made only for its checks.
        AdamCorrection(betas, eps)
        super().__init__(params, lr, weight_decay=weight_decay, flush_every=flush_every)
        self.defaults |= {"betas": betas, "eps": eps}
        for group in self.param_groups:
            group.setdefault("betas", betas)
            group.setdefault("eps", eps)

    @override
    def correction(self, group: Mapping[str, Any]) -> AdamCorrection:
        return AdamCorrection(tuple(group["betas"]), group["eps"])

    @override
    def _check_gradients(self) -> None:
        super()._check_gradients()
        # No engine has turned them into directions.
        cure = "call engine.step(), or use torch.optim.AdamW where no engine is"
        raise ConfigError.of(f"{type(self).__name__} under a GradientEngine", "optimizer.step()", cure)


class LocalAdam(LocalAdamW):
    """Adam for a `GradientEngine`: `LocalAdamW` without weight decay.

    Args:
        params: As for any optimizer.
        lr: Learning rate, ≥ 0.
        betas: As for `LocalAdamW`.
        eps: As for `LocalAdamW`.
        weight_decay: Must be 0: Adam's own is part of the gradient, which no rank has as a whole.
        flush_every: Steps that an element may lag, ≥ 1.

    Raises:
        ConfigError: As `LocalAdamW`, or a weight decay.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.0, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        flush_every: int = FLUSH_EVERY,
    ) -> None:
        if weight_decay:
            raise ConfigError.of("weight_decay 0 with Adam", weight_decay, "use AdamW, whose decay suits it better")
        super().__init__(params, lr, betas, eps, 0.0, flush_every=flush_every)
