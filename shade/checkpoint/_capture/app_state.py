"""What a checkpoint consists of: the attached things, how their state is taken and how it is given back.

Anything with ``state_dict`` and ``load_state_dict`` may be attached. Modules and optimizers are known more closely:
what data-parallel ranks hold alike is saved once, each rank a share; what only an optimizer's step changes may be
copied behind the training's back. All else is each rank's own and copied at once: batch-norm statistics, generators, a
sampler's cursor.

Loading checks first and changes afterwards: a snapshot that does not fit leaves everything as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from shade.checkpoint._capture.flatten import escape, flatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of
from shade.checkpoint._capture.rng import RandomState
from shade.checkpoint._capture.unflatten import unflatten
from shade.errors import ConfigError, ShadeError, StateMismatchError
from shade.types import Parted, Stateful

_SAMPLE_BYTES = 64
_SHAPED = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
    }
)
"""What PyTorch's optimizers keep for each parameter in its own shape; LBFGS and Adafactor keep other shapes too."""


@dataclass(frozen=True)
class CapturedState:
    """The state at one moment; tensors are the live ones."""

    tree: Any
    tensors: dict[str, torch.Tensor]
    steady: frozenset[str]
    """Tensors that nothing but an optimizer's step changes."""

    def specs(self) -> dict[str, TensorSpec]:
        """What a layout has to know of the tensors."""
        return {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}

    def replica(self, world_size: int) -> str:
        """Digest of a few bytes of every CPU tensor that all ranks should hold alike; unlike models differ in all."""
        if world_size == 1:
            return ""
        total = xxhash.xxh3_128()
        for name, tensor in self.tensors.items():
            if "@" not in name and tensor.device.type == "cpu" and tensor.is_contiguous():
                total.update(bytes_of(tensor)[:_SAMPLE_BYTES].numpy().data)
        return total.hexdigest()


class AppState:
    """The attached things, by name.

    Args:
        replicated: Whether ranks hold the same parameters and optimizer state.
    """

    def __init__(self, replicated: bool) -> None:
        self._replicated = replicated
        self._things: dict[str, Stateful] = {"random": RandomState()}

    def attach(self, things: Mapping[str, Any]) -> None:
        """Adds things.

        Args:
            things: By name.

        Raises:
            ConfigError: One has no state to save, or the name is taken.
        """
        for name, thing in things.items():
            if not isinstance(thing, Stateful):
                cure = "give it state_dict() and load_state_dict()"
                raise ConfigError.of(f"{name!r} to have a state", type(thing).__name__, cure)
            if name in self._things and self._things[name] is not thing:
                raise ConfigError.of("a name that is not attached yet", name, f"known: {', '.join(self._things)}")
            self._things[name] = thing

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The attached modules, by name."""
        return {name: thing for name, thing in self._things.items() if isinstance(thing, torch.nn.Module)}

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The attached optimizers, by name."""
        return {name: thing for name, thing in self._things.items() if isinstance(thing, torch.optim.Optimizer)}

    @property
    def names(self) -> list[str]:
        """Of everything attached."""
        return list(self._things)

    @property
    def epoch(self) -> int:
        """Of the first attached thing that counts epochs, a sampler say; 0 where none does."""
        counts = (getattr(thing, "epoch", None) for thing in self._things.values())
        return next((count for count in counts if isinstance(count, int)), 0)

    def capture(self, rank: int, world_size: int) -> CapturedState:
        """Takes the state, without copying a tensor.

        Args:
            rank: This rank.
            world_size: Ranks that save together.

        Returns:
            The state.

        Raises:
            ConfigError: Something in it cannot be saved; the message has its path.
        """
        buffers = {
            f"{escape(name)}/{escape(key)}"
            for name, module in self.modules.items()
            for key, _ in module.named_buffers()
        }
        trained = tuple(f"{escape(name)}/" for name in (*self.modules, *self.optimizers))

        def is_steady(path: str) -> bool:
            return path.startswith(trained) and path not in buffers

        state = {name: thing.state_dict() for name, thing in self._things.items()}
        shared = self._replicated or world_size == 1
        tree, tensors = flatten(
            state, rank=rank, is_own=None if world_size == 1 else lambda path: not (shared and is_steady(path))
        )
        return CapturedState(tree, tensors, frozenset(name for name in tensors if is_steady(name.partition("@")[0])))

    def forgettable(self, name: str) -> bool:
        """Whether a loaded tensor has been copied onwards: modules copy what they load, others may keep it."""
        return name.startswith(tuple(f"{escape(module)}/" for module in self.modules))

    def load(
        self, tree: Any, tensors: Mapping[str, torch.Tensor], names: Collection[str], trees: Sequence[Any] = ()
    ) -> None:
        """Gives things their state back.

        Args:
            tree: Theirs, perhaps with others.
            tensors: All that it names, and that ``trees`` name.
            names: Of the things.
            trees: Of all ranks that saved, for what is shared out anew when ranks are fewer or more.

        Raises:
            StateMismatchError: It does not fit; nothing was changed.
        """
        unknown = sorted(set(names) - self._things.keys())
        if unknown:
            raise ConfigError.of(f"names of what is attached ({', '.join(self._things)})", unknown, "attach() it first")
        state = unflatten(tree, tensors)
        missing = sorted(set(names) - state.keys())
        if missing:
            raise StateMismatchError(
                f"expected a state for {', '.join(missing)}, got {', '.join(sorted(state))}; "
                "restore(only=[...]) loads a part, attach() under the names that were saved loads the rest"
            )
        for name in names:
            thing = self._things[name]
            if isinstance(thing, torch.nn.Module):
                _check_module(name, thing, state[name])
            elif isinstance(thing, torch.optim.Optimizer):
                _check_optimizer(name, thing, state[name])
        parted = [name for name in names if isinstance(self._things[name], Parted)] if trees else []
        states = [unflatten(each, tensors) for each in trees] if parted else []
        self._put(state, names, {name: [each[name] for each in states if name in each] for name in parted})

    def _put(
        self, state: Mapping[str, Any], names: Collection[str], parts: Mapping[str, Sequence[dict[str, Any]]]
    ) -> None:
        """What could still refuse goes first, and is put back if it does; modules and optimizers have been checked."""
        checked = {*self.modules, *self.optimizers}
        before: dict[str, Any] = {}
        try:
            for name in (name for name in names if name not in checked):
                before[name] = copy.deepcopy(self._things[name].state_dict())
                thing = self._things[name]
                if isinstance(thing, Parted) and name in parts:
                    thing.load_state_dicts(parts[name])
                else:
                    thing.load_state_dict(state[name])
        except Exception as error:
            for loaded, old in before.items():
                self._things[loaded].load_state_dict(old)
            if isinstance(error, ShadeError):
                raise
            raise StateMismatchError(
                f"expected a state that {name!r} takes, got one that it refuses ({type(error).__name__}: {error}); "
                "build it as it was when it was saved, or restore(only=[...]) without it"
            ) from error
        for name in (name for name in names if name in checked):
            self._things[name].load_state_dict(state[name])


def _check_module(name: str, module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    own = module.state_dict()
    for said, keys in (("has no", own.keys() - saved.keys()), ("also has", saved.keys() - own.keys())):
        if keys:
            listed = ", ".join(sorted(keys)[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            raise StateMismatchError(
                f"expected the parameters of this {name!r}, got a snapshot that {said} {listed}; "
                "build the model as it was when it was saved"
            )
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor):
            _check_tensor(f"{name}/{key}", tensor, saved[key])


def _check_tensor(name: str, own: torch.Tensor, saved: Any) -> None:
    if not isinstance(saved, torch.Tensor) or (own.shape, own.dtype) != (saved.shape, saved.dtype):
        got = f"{tuple(saved.shape)} {saved.dtype}" if isinstance(saved, torch.Tensor) else repr(saved)
        raise StateMismatchError(
            f"expected {name!r} of shape {tuple(own.shape)} {own.dtype}, got {got}; "
            "build the model as it was when it was saved"
        )


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    if own != theirs:
        raise StateMismatchError(
            f"expected {name!r} with parameter groups of {own}, got {theirs}; "
            "build the optimizer over the same parameters in the same groups"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entry in saved["state"].items():
        for key, value in entry.items():
            is_alike = key in _SHAPED and isinstance(value, torch.Tensor)
            if is_alike and value.shape != params[number].shape:
                raise StateMismatchError(
                    f"expected '{name}/state/{number}/{key}' of shape {tuple(params[number].shape)}, got "
                    f"{tuple(value.shape)}; build the optimizer over the same parameters"
                )
