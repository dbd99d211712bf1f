"""SparseSGD: momentum, Nesterov, dampening and weight decay as torch.optim.SGD, on the elements that were sent.

Without a gradient, a step of SGD is a linear map of an element's weight and momentum, (x, b), the same for all
elements. So any number of skipped steps is one such map, the product of theirs, whatever the schedulers did in between.
Kept are the products of the last 1 … ``flush_every`` steps, in float64, as ``x += xx·x + xb·b`` and
``b = bx·x + bb·b``. The gradient enters linearly, so it is added after the map.

Price at 25 million parameters and 1 % touched: benchmarks/results/gradient-apply.md.

Legend: F longest lag + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.optim.optimizer import ParamsT

from shade.errors import ConfigError
from shade.gradient._compress.compressor import Sparse
from shade.gradient._optim.base import FLUSH_EVERY, SparseOptimizer, loops
from shade.gradient._optim.memory import BucketPart, OptimizerMemory

_BUFFER = "momentum_buffer"


class SparseSGD(SparseOptimizer):
    """Stochastic gradient descent on the elements that were sent; `SparseOptimizer` lists the differences to torch's.

    Args:
        params: As for any optimizer.
        lr: Learning rate, ≥ 0.
        momentum: ≥ 0.
        dampening: Dampening of momentum.
        weight_decay: ≥ 0, added to the gradient of every element.
        nesterov: Nesterov's momentum; needs momentum and no dampening.
        maximize: Maximizes instead.
        flush_every: Steps that an element may lag, ≥ 1.

    Raises:
        ConfigError: A setting out of range, or a parameter that is not dense real floating point.
    """

    moments = (_BUFFER,)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        flush_every: int = FLUSH_EVERY,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not float(value) >= 0:
                raise ConfigError.of(f"{name} ≥ 0", value, "see torch.optim.SGD")
        if nesterov and (momentum <= 0 or dampening != 0):
            got = f"momentum {momentum}, dampening {dampening}"
            raise ConfigError.of("momentum > 0 and dampening 0 with nesterov", got, "set a momentum, or nesterov=False")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, flush_every)

    def _new_memory(self, part: BucketPart, step: int) -> OptimizerMemory:
        history = np.zeros((4, self.flush_every + 1))
        history[3] = 1.0
        return OptimizerMemory(part, step, history, np.zeros((0, 0), dtype=np.float32))

    def _step(self, memory: OptimizerMemory, group: Mapping[str, Any], sparse: Sparse) -> bool:
        # With neither momentum nor weight decay nothing lags, nothing is kept, and only the touched elements move.
        is_plain = not group["momentum"] and not group["weight_decay"]
        if is_plain and not memory.moments:
            rate = np.float32(group["lr"])
            memory.touch(sparse, lambda x, _, __, indices, values: loops().apply_plain(x, indices, values, rate))
            return True
        is_first = not memory.moments
        if is_first:
            memory.add_moment(_BUFFER)
            memory.last_L[:] = memory.step - 1
            self._publish_state(memory)
        step_map = _map_of(group, is_first)
        _multiply(memory.history, step_map)
        table_4F = memory.history.astype(np.float32)
        gain_x, gain_b = np.float32(step_map.gain_x), np.float32(step_map.gain_b)
        memory.touch(
            sparse,
            lambda x, moments, last_L, indices, values: loops().apply_linear(
                x, moments[0], last_L, indices, values, memory.step, table_4F, gain_x, gain_b
            ),
        )
        return False

    def _sweep(self, memory: OptimizerMemory, start: int, stop: int) -> None:
        table_4F = memory.history.astype(np.float32)
        memory.sweep(
            start,
            stop,
            lambda x, moments, last_L, first, end: loops().sweep_linear(
                x, moments[0], last_L, first, end, memory.step, table_4F
            ),
        )


class _Map(NamedTuple):
    """The linear map of (x, b) in one step, and the gradient's factors."""

    xx: float
    """The factor of x, less 1."""
    xb: float
    bx: float
    bb: float
    gain_x: float
    """The gradient's factor that is subtracted from x."""
    gain_b: float


def _map_of(group: Mapping[str, Any], is_first: bool) -> _Map:
    lr, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
    if not momentum:
        return _Map(-lr * decay, 0.0, 0.0, 1.0, lr, 0.0)
    # PyTorch's first step does not dampen.
    kept = 1.0 if is_first else 1.0 - float(group["dampening"])
    if group["nesterov"]:
        share, pull = 1.0 + momentum * kept, momentum * momentum
    else:
        share, pull = kept, momentum
    return _Map(-lr * share * decay, -lr * pull, kept * decay, momentum, lr * share, kept)


def _multiply(history: npt.NDArray[np.float64], step_map: _Map) -> None:
    # Every product grows by this step, and moves to the next lag; lag 0 stays the map that changes nothing.
    # xx is the difference to 1, which float32 could not hold next to 1.
    xx, xb, bx, bb = history[:, :-1].copy()
    history[0, 1:] = step_map.xx + (1 + step_map.xx) * xx + step_map.xb * bx
    history[1, 1:] = (1 + step_map.xx) * xb + step_map.xb * bb
    history[2, 1:] = step_map.bx * (1 + xx) + step_map.bb * bx
    history[3, 1:] = step_map.bx * xb + step_map.bb * bb
