"""The ways to train on several machines that `bench_gradient` compares: the same network, data, optimizer and schedule.

A method has one verb, `step`: it takes a loss whose backward has not run, and returns when the weights may be used for
the next forward. `settle` brings the weights to where everything that was sent is in them; it comes before the weights
are looked at from outside, on all ranks.

==============  ===========================================================================================
none            no exchange: each rank trains alone. The floor: what a step costs without a network
ddp             DistributedDataParallel as it comes: float32, all-reduced while backward runs
ddp-bf16        the same with `bf16_compress_hook`
powersgd4       the same with `powerSGD_hook`, rank 4, error feedback and warm start, from the third step on
powersgd4-late  the same hook without DDP, a step's exchange beside the next one's compute, as the engine does
diloco          `DiLoCo`: each rank trains alone for H steps, then the ranks agree
local-updates   `LocalUpdates`, the same with a sixty-fourth of the distance in two bits a value
diloco-bf16     DiLoCo as torchft has it: an all-reduce of bf16, and torch's Nesterov SGD as outer optimizer
hook            `sparse_hook` on DistributedDataParallel: sparse on the wire, dense in the optimizer
engine          `GradientEngine` with `SparseSGD` or `LocalAdamW`, a step's exchange beside the next one's compute
==============  ===========================================================================================
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

MOMENTUM, WEIGHT_DECAY = 0.9, 0.01
POWERSGD_RANK, POWERSGD_FROM_STEP = 4, 2
OUTER_MOMENTUM = 0.9


@dataclass(frozen=True)
class Settings:
    """What the flags of `train_gradient` say."""

    optimizer: str
    lr: float
    steps: int
    batch_size: int
    compressor: str = "threshold-v"
    density: float = 0.01
    quantiser: str = "bf16"
    staleness: int = 1
    controller: bool = False
    correction: bool = False
    """Momentum or Adam's moments before the choice, in error feedback, and not after it, in the optimizer."""
    density_warm_up: int = 0
    """Steps over which the density falls to where it shall be."""
    inner_steps: int = 20
    """DiLoCo's H."""
    fragments: int = 1
    delay: int = 0
    """Inner steps beside which local updates exchange a fragment."""
    outer_lr: float = 0.7
    """The rate of diloco-bf16's outer optimizer."""

    def of_sparse(self) -> dict[str, Any]:
        """What hook and engine are told alike."""
        from shade.gradient._engine.density import WarmUp

        return {
            "compressor": self.compressor,
            "density": WarmUp(self.density, self.density_warm_up),
            "quantiser": self.quantiser,
        }

    def momentum_correction(self) -> Any:
        """SGD's momentum before the choice; None: it is the optimizer's, or there is none."""
        from shade.gradient.correction import MomentumCorrection

        return MomentumCorrection(MOMENTUM) if self.correction and self.optimizer == "sgd" else None

    def lr_factor(self, step: int) -> float:
        """Warm-up over the first tenth, then a cosine to zero."""
        warm_up = max(1, self.steps // 10)
        return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))


class Method:
    """One way; the base exchanges nothing."""

    density: float = 1.0
    """Kept fraction of the gradient in the last step."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.raw, self.settings = model, settings
        self.model = self.wrap(model)
        self.optimizer = self.build_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, settings.lr_factor)

    def wrap(self, model: nn.Module) -> nn.Module:
        """What forward is called on."""
        return model

    def build_optimizer(self) -> torch.optim.Optimizer:
        """torch's own, fused: the fastest there is."""
        parameters, lr = self.raw.parameters(), self.settings.lr
        if self.settings.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, fused=True)
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, loss: Tensor) -> None:
        """Backward, exchange, update."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def settle(self) -> None:
        """Brings the weights up to date with what was sent."""

    def close(self) -> None:
        """Ends threads and groups of its own."""


class DDP(Method):
    """As it comes."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)


class DDPBF16(Method):
    """Half the bytes."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return wrapped


class PowerSGD(Method):
    """Low rank. In one bucket, as its authors advise; compressed as early as torch allows with error feedback."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1024)
        wrapped.register_comm_hook(_powersgd_state(), powerSGD_hook.powerSGD_hook)
        return wrapped


def _powersgd_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_FROM_STEP
    )


class LatePowerSGD(Method):
    """PowerSGD with the engine's staleness: a step applies the gradient of the step before it.

    The hook is torch's own. It takes a bucket and returns a future; that of one step is waited for in the next.
    A gradient is applied at the rate of its own step. Compressing begins on the training thread, and what follows an
    all-reduce runs on gloo's threads.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        super().__init__(model, settings)
        self.state = _powersgd_state()
        self.parameters = list(model.parameters())
        self.on_its_way: torch.futures.Future[Any] | None = None

    def step(self, loss: Tensor) -> None:
        loss.backward()
        bucket = FlatBucket(self.parameters)
        self.optimizer.zero_grad()
        self.settle()
        self.on_its_way = powerSGD_hook.powerSGD_hook(self.state, bucket)  # type: ignore[arg-type]
        self.sent = bucket

    def settle(self) -> None:
        if self.on_its_way is None:
            return
        self.on_its_way.wait()
        self.on_its_way = None
        for parameter, gradient in zip(self.parameters, self.sent.gradients(), strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


class FlatBucket:
    """All gradients end to end, with the methods of torch's `GradBucket`, which only DDP can make.

    Args:
        parameters: Their gradients are copied, in order.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        self._buffer = torch.cat([gradient.flatten() for gradient in found])
        self._views = [
            part.view(parameter.shape)
            for part, parameter in zip(self._buffer.split([each.numel() for each in found]), parameters, strict=True)
        ]

    def buffer(self) -> Tensor:
        """Returns the memory of all."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Returns one view for each parameter."""
        return self._views

    def index(self) -> int:
        """Returns the number of the bucket."""
        return 0

    def is_last(self) -> bool:
        """Returns whether it ends the step."""
        return True


class Hook(DDP):
    """Our first door: DDP's loop, and any optimizer; with a correction, SGD without momentum."""

    def wrap(self, model: nn.Module) -> nn.Module:
        from shade import SparseState, sparse_hook
        from shade.gradient.correction import AdamCorrection

        settings, correction = self.settings, self.settings.momentum_correction()
        if settings.correction and settings.optimizer == "adamw":
            correction = AdamCorrection()
        wrapped = DistributedDataParallel(model)
        self.state = SparseState(wrapped, correction=correction, **settings.of_sparse())
        self.density = settings.density
        wrapped.register_comm_hook(self.state, sparse_hook)
        return wrapped

    def build_optimizer(self) -> torch.optim.Optimizer:
        if not self.settings.correction:
            return super().build_optimizer()
        decay = WEIGHT_DECAY if self.settings.optimizer == "adamw" else 0.0
        return torch.optim.SGD(self.raw.parameters(), lr=self.settings.lr, weight_decay=decay, fused=True)

    def close(self) -> None:
        self.state.close()


class Engine(Method):
    """Our second door: the exchange runs beside the next step's compute, and the optimizer steps where it must."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        from shade import GradientEngine

        super().__init__(model, settings)
        given = {"staleness": settings.staleness, "correction": settings.momentum_correction()}
        self.engine = GradientEngine(model, self.optimizer, **given, **settings.of_sparse())
        self.engine.num_samples = settings.batch_size
        self.steering = self.build_steering() if settings.controller else None

    def build_steering(self) -> Any:
        """The controller on rank 0, which listens at its own address on the link."""
        from shade.control.controller import Controller
        from shade.train.control_client import ControlClient

        given = {"density": self.settings.density, "staleness": self.settings.staleness}
        return ControlClient(self.engine, lambda num_ranks: Controller(num_ranks, **given), os.environ["MASTER_ADDR"])

    def build_optimizer(self) -> torch.optim.Optimizer:
        from shade import LocalAdamW, SparseAdamW, SparseSGD

        parameters, lr = self.raw.parameters(), self.settings.lr
        if self.settings.optimizer == "sgd":
            return SparseSGD(parameters, lr=lr, momentum=0.0 if self.settings.correction else MOMENTUM)
        kind = LocalAdamW if self.settings.correction else SparseAdamW
        return kind(parameters, lr=lr, weight_decay=WEIGHT_DECAY)

    def step(self, loss: Tensor) -> None:
        self.density = self.engine.density
        loss.backward()
        self.engine.step()
        self.scheduler.step()
        if self.steering is not None:
            self.steering.steer()

    def settle(self) -> None:
        self.engine.finish()

    def close(self) -> None:
        if self.steering is not None:
            self.steering.close()
        self.engine.close()


class DiLoCo(Method):
    """Each rank its own way for H steps, then a step of an outer optimizer along what they have in common."""

    def build_outer(self, model: nn.Module, settings: Settings) -> Any:
        """What exchanges."""
        from shade import DiLoCo as Outer

        return Outer(model, every=settings.inner_steps)

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        super().__init__(model, settings)
        self.outer = self.build_outer(model, settings)
        self.outer.num_samples = settings.batch_size * settings.inner_steps

    def step(self, loss: Tensor) -> None:
        super().step(loss)
        self.outer.step()

    def settle(self) -> None:
        self.outer.synchronise()

    def close(self) -> None:
        self.outer.close()


class LocalUpdates(DiLoCo):
    """As SparseLoCo has it; the density is a flag's."""

    def build_outer(self, model: nn.Module, settings: Settings) -> Any:
        from shade import LocalUpdates as Outer

        self.density = settings.density
        told = {"fragments": settings.fragments, "delay": settings.delay}
        return Outer(model, every=settings.inner_steps, density=settings.density, **told)


class DiLoCoBF16(Method):
    """As torchft has it: the mean distance of all ranks from the weights they last agreed on, all-reduced in bf16, is
    the gradient of torch's SGD with Nesterov's momentum. Buffers stay each rank's own, as there."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        super().__init__(model, settings)
        self.parameters = list(model.parameters())
        self.agreed = [nn.Parameter(parameter.detach().clone()) for parameter in self.parameters]
        self.outer = torch.optim.SGD(self.agreed, lr=settings.outer_lr, momentum=OUTER_MOMENTUM, nesterov=True)
        self.num_inner = 0

    def step(self, loss: Tensor) -> None:
        super().step(loss)
        self.num_inner += 1
        if self.num_inner == self.settings.inner_steps:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        if not self.num_inner:
            return
        self.num_inner = 0
        distance = torch.cat([(a - p).flatten() for a, p in zip(self.agreed, self.parameters, strict=True)])
        sent = distance.to(torch.bfloat16).div_(dist.get_world_size())
        dist.all_reduce(sent)
        mean = sent.float().split([each.numel() for each in self.agreed])
        for agreed, part in zip(self.agreed, mean, strict=True):
            agreed.grad = part.view(agreed.shape)
        self.outer.step()
        for parameter, agreed in zip(self.parameters, self.agreed, strict=True):
            parameter.copy_(agreed)


METHODS: dict[str, Callable[[nn.Module, Settings], Method]] = {
    "none": Method,
    "ddp": DDP,
    "ddp-bf16": DDPBF16,
    "powersgd4": PowerSGD,
    "powersgd4-late": LatePowerSGD,
    "diloco": DiLoCo,
    "local-updates": LocalUpdates,
    "diloco-bf16": DiLoCoBF16,
    "hook": Hook,
    "engine": Engine,
}
"""All of them."""
