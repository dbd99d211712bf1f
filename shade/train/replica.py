"""A rank's replica of the model, and the step that all ranks take together: dense as DDP does it, or sparse.

A script calls the replica as it would call the model, ``backward()`` as ever, and `Replica.step` where
``optimizer.step()`` was. What happens there is the launcher's choice: without ``--gradient`` DDP averages whole
gradients; with it, the gradient engine exchanges the largest elements, and with ``--controller`` rank 0 decides how
many from what the link carries.

`sparse_optimizer` stands beside: the engine needs an optimizer that takes sparse gradients, and a scheduler wants to
know it from the beginning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shade.config import RunConfig
from shade.control.controller import FLOOR, Controller
from shade.control.profile import Profile
from shade.errors import ConfigError
from shade.gradient._engine.engine import GradientEngine
from shade.gradient.optim import LocalAdam, LocalAdamW, SparseSGD
from shade.train.steering import Steering

_SPARSE: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.SGD: SparseSGD,
    torch.optim.Adam: LocalAdam,
    torch.optim.AdamW: LocalAdamW,
}


def sparse_optimizer(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The optimizer that takes its place where gradients are sparse.

    Args:
        kind: One of PyTorch's.

    Returns:
        Ours, of the same settings.

    Raises:
        ConfigError: There is none.
    """
    if kind not in _SPARSE:
        known = ", ".join(each.__name__ for each in _SPARSE)
        raise ConfigError.of(
            f"one of {known} under --gradient", kind.__name__, "choose another, or leave --gradient out"
        )
    return _SPARSE[kind]


class Replica(ABC):
    """One rank's part; all ranks step together."""

    @abstractmethod
    def __call__(self, inputs_B: torch.Tensor) -> Any:
        """Forward.

        Args:
            inputs_B: This rank's batch.

        Returns:
            What the model returns.
        """

    @abstractmethod
    def step(self) -> None:
        """Ends a step: gradients come together, weights change, gradients are cleared."""

    @abstractmethod
    def settle(self) -> None:
        """Brings weights and buffers up to date, before they are judged or kept. On all ranks."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Returns what was exchanged since the last call (`shade.gradient._engine.meter.COUNTS`)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What is neither the model's nor the optimizer's."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and groups. Safe to call twice."""


class DenseReplica(Replica):
    """Whole gradients, averaged by DDP where there are several ranks.

    Args:
        model: On its device.
        optimizer: Any.
        scaler: Of mixed precision; may be disabled.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        is_many = dist.is_initialized() and dist.get_world_size() > 1
        self._model = DistributedDataParallel(model) if is_many else model
        self._optimizer, self._scaler = optimizer, scaler

    def __call__(self, inputs_B: torch.Tensor) -> Any:
        """See `Replica`."""
        return self._model(inputs_B)

    def step(self) -> None:
        """See `Replica`."""
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """See `Replica`; nothing ever lags."""

    def figures(self) -> dict[str, float]:
        """See `Replica`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """See `Replica`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Replica`."""

    def close(self) -> None:
        """See `Replica`."""


class SparseReplica(Replica):
    """The gradient engine, its telemetry, and on rank 0 its controller.

    Args:
        model: On its device.
        optimizer: From `sparse_optimizer`.
        scaler: Of mixed precision; may be disabled.
        config: The resolved run, ``config.gradient`` not None.
        host: Name or address of rank 0's machine, as the other ranks reach it.

    Raises:
        ConfigError: On every rank: a setting cannot be, or the ranks' models differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        config: RunConfig,
        host: str,
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
        )
        self._counted: dict[str, float] = {}
        self._steering: Steering | None = None
        if config.controller:
            self._steering = Steering(self._engine, lambda world_size: _controller(config, world_size), host)

    def __call__(self, inputs_B: torch.Tensor) -> Any:
        """See `Replica`; the batch's length is the weight of this rank's gradient."""
        if torch.is_grad_enabled():
            self._engine.num_samples = len(inputs_B)
        return self._model(inputs_B)

    def step(self) -> None:
        """See `Replica`."""
        self._engine.step()
        if self._steering is not None:
            self._steering.steer()

    def settle(self) -> None:
        """See `Replica`: the last gradient, weights that lag, buffers."""
        self._engine.finish()

    def figures(self) -> dict[str, float]:
        """See `Replica`."""
        counts, before = self._engine.counts, self._counted
        self._counted = counts
        return {name: count - before.get(name, 0) for name, count in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """See `Replica`: residuals, what is still to be applied, what has been decided."""
        state: dict[str, Any] = {"engine": self._engine.state_dict()}
        if self._steering is not None:
            state["controller"] = self._steering.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Replica`."""
        self.load_state_dicts([state])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Takes back what all ranks had: where there were more, what the others had kept back is shared out here.

        Args:
            states: Of all ranks that there were.
        """
        self._engine.load_state_dicts([state["engine"] for state in states])
        if self._steering is not None:
            first: dict[str, Any] = next((state["controller"] for state in states if state.get("controller")), {})
            self._steering.load_state_dict(first)

    def close(self) -> None:
        """See `Replica`."""
        self._engine.close()
        if self._steering is not None:
            self._steering.close()


def _controller(config: RunConfig, world_size: int) -> Controller:
    """With what `shade tune` knows of the training, or with what is true of most."""
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
