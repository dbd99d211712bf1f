"""Holds a rank's replica of the model, and takes the step of all ranks: with dense gradients as DDP, or sparse ones.

A script calls the replica as it would call the model, then ``backward()``, then `Replica.step` instead of
``optimizer.step()``. The launcher's flags choose the exchange: without ``--gradient`` DDP averages whole gradients;
with it, the gradient engine exchanges the largest elements, with ``--controller`` as many as rank 0 decides.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from shade.config import RunConfig
from shade.control.controller import FLOOR, Controller
from shade.control.profile import Profile
from shade.errors import ConfigError
from shade.gradient._engine.engine import GradientEngine
from shade.gradient.optim import LocalAdam, LocalAdamW, SparseSGD
from shade.train.control_client import ControlClient

logger = logging.getLogger("shade.train")


_SPARSE: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.SGD: SparseSGD,
    torch.optim.Adam: LocalAdam,
    torch.optim.AdamW: LocalAdamW,
}


# A function of its own, because a scheduler needs the optimizer before there is a replica.
def sparse_optimizer(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Returns the sparse counterpart of a PyTorch optimizer, with the same settings; raises `ConfigError` without
    one."""
    if kind not in _SPARSE:
        known = ", ".join(each.__name__ for each in _SPARSE)
        raise ConfigError.of(
            f"one of {known} under --gradient", kind.__name__, "choose another, or leave --gradient out"
        )
    return _SPARSE[kind]


class Replica(ABC):
    """Trains one rank's copy of the model; all ranks step together."""

    @abstractmethod
    def __call__(self, inputs_B: torch.Tensor) -> Any:
        """Runs the model forward on this rank's batch."""

    @abstractmethod
    def step(self) -> None:
        """Ends a step: exchanges the gradients, updates the weights, clears the gradients."""

    @abstractmethod
    def settle(self) -> None:
        """Brings weights and buffers up to date, before they are evaluated or saved. On all ranks."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Returns what was exchanged since the last call (`shade.gradient._engine.meter.COUNTS`)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state that neither the model nor the optimizer has."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and groups. Safe to call twice."""


class DenseReplica(Replica):
    """Averages whole gradients with DDP, where there are several ranks.

    Args:
        model: The model, on its device.
        optimizer: Any optimizer.
        scaler: Scaler of mixed precision; may be disabled.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        is_many = dist.is_initialized() and dist.get_world_size() > 1
        self._model = DistributedDataParallel(model) if is_many else model
        self._optimizer, self._scaler = optimizer, scaler

    @override
    def __call__(self, inputs_B: torch.Tensor) -> Any:
        return self._model(inputs_B)

    @override
    def step(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    @override
    def settle(self) -> None:
        pass  # DDP leaves nothing late

    @override
    def figures(self) -> dict[str, float]:
        return {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    @override
    def close(self) -> None:
        pass


class SparseReplica(Replica):
    """Exchanges sparse gradients: the gradient engine, its telemetry, and on rank 0 its controller.

    Args:
        model: The model, on its device.
        optimizer: An optimizer from `sparse_optimizer`.
        scaler: Scaler of mixed precision; may be disabled.
        config: The resolved run, ``config.gradient`` not None.
        host: Name or address of rank 0's machine, as the other ranks reach it.
        timeout_seconds: Silence after which a rank counts as lost.

    Raises:
        ConfigError: On every rank: a setting is out of range, or the ranks' models differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        config: RunConfig,
        host: str,
        timeout_seconds: float,
    ) -> None:
        self._model = model
        assert config.gradient is not None, "the launcher's flag"
        self._engine = GradientEngine(
            model,
            optimizer,  # type: ignore[arg-type]  # the engine says so itself
            compressor=config.gradient,
            density=config.density,
            staleness=config.staleness,
            scaler=scaler,
            seed=config.seed,
            timeout_seconds=timeout_seconds,
        )
        self._counted: dict[str, float] = {}
        self._steering: ControlClient | None = None
        if config.controller:
            self._steering = ControlClient(self._engine, lambda world_size: _controller(config, world_size), host)

    @override
    def __call__(self, inputs_B: torch.Tensor) -> Any:
        # The length of the batch weighs this rank's gradient.
        if torch.is_grad_enabled():
            self._engine.num_samples = len(inputs_B)
        return self._model(inputs_B)

    @override
    def step(self) -> None:
        self._engine.step()
        if self._steering is not None:
            self._steering.steer()

    @override
    def settle(self) -> None:
        # The last gradient, late weights, buffers.
        self._engine.finish()

    @override
    def figures(self) -> dict[str, float]:
        counts, before = self._engine.counts, self._counted
        self._counted = counts
        return {name: count - before.get(name, 0) for name, count in counts.items()}

    @override
    def state_dict(self) -> dict[str, Any]:
        # Residuals, pending gradients, decisions.
        state: dict[str, Any] = {"engine": self._engine.state_dict()}
        if self._steering is not None:
            state["controller"] = self._steering.state_dict()
        return state

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_state_dicts([state])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores from the states of all ranks of the saved run; shares out the residuals of more ranks among
        these."""
        self._engine.load_state_dicts([state["engine"] for state in states])
        if self._steering is not None:
            first: dict[str, Any] = next((state["controller"] for state in states if state.get("controller")), {})
            self._steering.load_state_dict(first)

    @override
    def close(self) -> None:
        self._engine.close()
        if self._steering is not None:
            self._steering.close()


def _controller(config: RunConfig, world_size: int) -> Controller:
    """Returns a controller with the profile of `shade tune`, or with the defaults."""
    if config.profile is None:
        return Controller(world_size, density=config.density, staleness=config.staleness)
    profile, batch = Profile.load(config.profile), config.batch_size * world_size
    return Controller(
        world_size,
        density=config.density,
        staleness=config.staleness,
        curve=profile.curve(batch),
        floor=max(FLOOR, profile.floor(batch)),
    )
