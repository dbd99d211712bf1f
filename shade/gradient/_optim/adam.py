"""Adam on sparse gradients, equal to torch.optim's: skipped steps of an element follow in closed form.

An element without a gradient still moves while its first moment is not 0. k steps after its moments were (m, v),
step j moves it by::

    lr_j · β₁ᵏ m / c₁ⱼ / (√(β₂ᵏ v / c₂ⱼ) + ε)  =  m · a · y / (√v + ε·y)        c₁ⱼ = 1 - β₁ʲ,  c₂ⱼ = 1 - β₂ʲ

with a = lr_j β₁ᵏ / c₁ⱼ and y = √(c₂ⱼ / β₂ᵏ), the same for all elements. While ε is small beside √v, the sum over the
skipped steps is m · Y / √v with Y = Σ a·y. To keep ε, each y in the denominator is replaced by their mean ȳ, weighted
by a·y. By convexity that errs to one side, and by less than the fraction ε²σ²/v, σ the spread of the y under those
weights. So where √v ≥ √10⁷ · ε·σ, the table is right to 10⁻⁷ of the movement, less than float32 rounds off. A line with
an element below that, whose gradients are as small as ε itself, is *replayed*, step by step. Kept are β₁ᵏ, β₂ᵏ, the
decay, Y and the next two moments of y, for each lag, in float64.

Legend: F longest lag + 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from torch.optim.optimizer import ParamsT

from shade.errors import ConfigError
from shade.gradient._compress.compressor import Sparse
from shade.gradient._optim.base import FLUSH_EVERY, SparseOptimizer, loops
from shade.gradient._optim.memory import BucketPart, OptimizerMemory
from shade.types import Floats

_TOLERANCE = 1e-7
"""Largest relative error of a movement taken from the table."""
_KEEP_M, _KEEP_V, _DECAY, _FIRST, _SECOND, _THIRD = range(6)
_LR, _EPS, _COUPLED = 5, 7, 8


class SparseAdam(SparseOptimizer):
    """Adam on the elements that were sent; `SparseOptimizer` lists the differences to torch.optim.Adam.

    Args:
        params: As for any optimizer.
        lr: Learning rate, ≥ 0.
        betas: Decay of both moments, each in [0, 1).
        eps: > 0; at 0 an element without any gradient would be 0/0.
        weight_decay: ≥ 0, added to the gradient of every element; costs the arithmetic of a dense step.
        amsgrad: Must be False.
        maximize: Maximizes instead.
        flush_every: Steps that an element may lag, ≥ 1.

    Raises:
        ConfigError: A setting out of range, or a parameter that is not dense real floating point.
    """

    moments = ("exp_avg", "exp_avg_sq")
    _is_decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        flush_every: int = FLUSH_EVERY,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not float(value) >= 0:
                raise ConfigError.of(f"{name} ≥ 0", value, "see torch.optim.Adam")
        if not all(0 <= float(beta) < 1 for beta in betas):
            raise ConfigError.of("betas in [0, 1)", betas, "(0.9, 0.999) is the default")
        if not float(eps) > 0:
            raise ConfigError.of("eps > 0", eps, "1e-8 is the default")
        if amsgrad:
            raise ConfigError.of("amsgrad=False", amsgrad, "its maximum cannot be caught up with; use torch.optim.Adam")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults, flush_every)

    def _new_memory(self, part: BucketPart, step: int) -> OptimizerMemory:
        history = np.zeros((6, self.flush_every + 1))
        history[[_KEEP_M, _KEEP_V]] = 1.0
        return OptimizerMemory(part, step, history, np.zeros((self.flush_every + 1, 9), dtype=np.float32))

    def _step(self, memory: OptimizerMemory, group: Mapping[str, Any], sparse: Sparse) -> bool:
        if not memory.moments:
            for name in self.moments:
                memory.add_moment(name)
            self._publish_state(memory)
        # Of the steps before this one.
        table_6F = _table(memory, group["eps"])
        self._remember(memory, group)
        # Weight decay within the gradient makes the moments follow the weight, without a closed form: every line is
        # replayed. That costs the arithmetic of the dense step, not its memory traffic. AdamW's decay is free.
        replay = bool(memory.rows[:, _COUPLED].any())
        memory.touch(
            sparse,
            lambda x, moments, last_L, indices, values: loops().apply_adam(
                x, moments[0], moments[1], last_L, indices, values, memory.step, table_6F, memory.rows, replay
            ),
        )
        return False

    def _sweep(self, memory: OptimizerMemory, start: int, stop: int) -> None:
        table_6F = _table(memory, self.param_groups[memory.part.group]["eps"])
        replay = bool(memory.rows[:, _COUPLED].any())
        memory.sweep(
            start,
            stop,
            lambda x, moments, last_L, first, end: loops().sweep_adam(
                x, moments[0], moments[1], last_L, first, end, memory.step, table_6F, memory.rows, replay
            ),
        )

    def _remember(self, memory: OptimizerMemory, group: Mapping[str, Any]) -> None:
        step, (beta1, beta2) = memory.step, (float(beta) for beta in group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        correction1, correction2 = 1 - _power(beta1, step), 1 - _power(beta2, step)
        rate = lr / correction1
        shrink = -lr * decay if self._is_decoupled else 0.0
        memory.rows[step % len(memory.rows)] = (
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            shrink,
            rate,
            1 / math.sqrt(correction2),
            group["eps"],
            0.0 if self._is_decoupled else decay,
        )
        history = memory.history
        history[:, 1:] = history[:, :-1].copy()
        lags = history[:, 1:]
        lags[_KEEP_M] *= beta1
        lags[_KEEP_V] *= beta2
        lags[_DECAY] += shrink + shrink * lags[_DECAY]
        with np.errstate(all="ignore"):  # at a lag where nothing is left of a moment
            y = np.sqrt(correction2 / lags[_KEEP_V])
            weight = rate * lags[_KEEP_M] * y
            lags[_FIRST:] *= 1 + shrink
            for moment in (_FIRST, _SECOND, _THIRD):
                lags[moment] += weight
                weight *= y


class SparseAdamW(SparseAdam):
    """Adam with decoupled weight decay; `SparseOptimizer` lists the differences to torch.optim.AdamW.

    Args:
        params: As for any optimizer.
        lr: Learning rate, ≥ 0.
        betas: Decay of both moments, each in [0, 1).
        eps: > 0; at 0 an element without any gradient would be 0/0.
        weight_decay: ≥ 0; each step takes the fraction ``lr · weight_decay`` of every weight.
        amsgrad: Must be False.
        maximize: Maximizes instead.
        flush_every: Steps that an element may lag, ≥ 1.

    Raises:
        ConfigError: A setting out of range, or a parameter that is not dense real floating point.
    """

    _is_decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        flush_every: int = FLUSH_EVERY,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, flush_every=flush_every)


def _table(memory: OptimizerMemory, eps: float) -> Floats:
    """Returns the loops' table, for each lag: both factors, decay, Y, ε·ȳ, and the v below which a line is replayed."""
    first, second, third = memory.history[_FIRST:]
    table_6F = np.empty((6, len(first)), dtype=np.float32)
    with np.errstate(all="ignore"):  # no movement, or one without bound
        mean = np.where(first > 0, second / first, 1.0)
        variance = np.where(first > 0, np.maximum(third / first - mean * mean, 0.0), 0.0)
        table_6F[:4] = memory.history[:4]
        table_6F[4] = eps * mean
        table_6F[5] = eps * eps * variance / _TOLERANCE
    is_bounded = np.isfinite(table_6F).all(axis=0) & np.isfinite(variance)
    table_6F[:, ~is_bounded] = np.inf
    return table_6F


def _power(base: float, exponent: int) -> float:
    # By squaring: multiplications round the same everywhere, a library's power may not.
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
