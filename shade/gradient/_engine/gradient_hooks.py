"""Moves gradients from ``p.grad`` to the open step as the backward pass completes them.

Gradients move without a copy, so the next backward pass cannot overwrite a gradient that is still being sent. Until
`GradientEngine.step`, ``p.grad`` is a `MovedGradient`, which refuses to be computed with. Accumulated passes move none:
``p.grad`` is this rank's own sum, and the script's to read and change.

Mixed precision: ``torch.amp.GradScaler`` looks for infinities in ``p.grad``, on each rank alone. Here gradients leave
``p.grad`` early, and the exchange reports every rank's overflow to all. So the engine unscales while it gathers, and
`LossScale` does what ``scaler.update()`` would do, through the scaler's public setters. A step that overflows on any
rank is skipped on all.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shade.errors import ConfigError
from shade.gradient._comm.step import GradientStep, StepState
from shade.gradient._engine.bucket_state import BucketState
from shade.gradient._optim.base import SparseOptimizer

_LEFT = "gradients to be left to the engine after the backward pass"
_TAKE_BACK = (
    "go backward inside `with engine.accumulate():`, from which gradients leave at engine.step(); "
    "or drop a batch by engine.num_samples = 0 before its backward pass"
)
_CHANGE = (
    "clip with GradientEngine(..., clip_norm=...), change a rank's own gradient in p.register_hook(...) or after "
    "`with engine.accumulate():`; engine.step() unscales, steps the optimizer and clears p.grad"
)


class MovedGradient(torch.Tensor):
    """Stands in ``p.grad`` for a gradient that is on its way; has its shape, and no values."""

    @staticmethod
    def of(parameter: Tensor) -> MovedGradient:
        """Returns the one for a parameter."""
        moved: MovedGradient = torch.Tensor._make_wrapper_subclass(
            MovedGradient, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return moved

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise ConfigError.of(_LEFT, str(func), _CHANGE)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MovedGradient({tuple(self.shape)})"


class GradientHooks:
    """The hooks on all parameters of an engine, until `close`."""

    def __init__(self, bucket_states: Sequence[BucketState], optimizer: SparseOptimizer, scale: LossScale) -> None:
        self._bucket_states, self._optimizer, self._scale = bucket_states, optimizer, scale
        self._places = {
            parameter: (number, position)
            for number, bucket_state in enumerate(bucket_states)
            for position, parameter in enumerate(bucket_state.bucket.parameters)
        }
        self.is_closed = self._is_accumulating = False
        self.work: GradientStep | None = None
        """The open step."""
        self._moved = {parameter: MovedGradient.of(parameter) for parameter in self._places}
        _HOLDERS.update(dict.fromkeys(map(id, self._places), weakref.ref(self)))
        self._made: dict[Tensor, int] = {}
        """The ids of the gradients in ``p.grad`` that backward passes of the open step have made."""
        self._has_scripts = False
        """Whether a gradient of the open step lies in memory of the script's own."""
        self._hooks: list[Any] = []
        optimizer.is_stepped_by_engine = True
        for parameter in self._places:
            # The first hook runs before the backward pass adds to p.grad, the second afterwards.
            self._hooks.append(parameter.register_hook(functools.partial(self._make_room, parameter)))  # type: ignore[no-untyped-call]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take))  # type: ignore[no-untyped-call]

    def holds(self, parameter: Tensor) -> bool:
        """Returns whether these hooks still take a parameter's gradients."""
        return not self.is_closed and parameter in self._places

    @property
    def is_empty(self) -> bool:
        """Whether the open step has no gradient yet, neither moved nor in ``p.grad``."""
        is_untouched = self.work is None or self.work.is_untouched
        return is_untouched and all(_gradient_of(parameter) is None for parameter in self._places)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Adds gradients up inside the context."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def check_all_known(self) -> None:
        """Raises `ConfigError` if a parameter without these hooks has a gradient."""
        # It was frozen when the engine was made, or added to the optimizer later: the optimizer would apply its
        # gradient on this rank alone.
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._places:
                    got = f"one of another parameter, of shape {tuple(parameter.shape)}"
                    cure = "make a new engine after parameters were unfrozen or added to the optimizer"
                    expected = "gradients of the parameters that were trainable when the engine was made"
                    raise ConfigError.of(expected, got, cure)

    def check_none_taken_back(self, work: GradientStep) -> None:
        """Raises `ConfigError` if a gradient that has left is not in ``p.grad`` any more, or another one is."""
        if work.sealed.is_set():
            # An earlier refusal has cleared them.
            return
        for parameter, (number, position) in self._places.items():
            if work.has(number, position) and parameter.grad is not self._stand_in(parameter):
                name = self._bucket_states[number].bucket.names[position]
                got = f"p.grad of {name!r} {'set to None' if parameter.grad is None else 'replaced'}, after it had left"
                raise ConfigError.of(_LEFT, got, _TAKE_BACK)
        if self._scale.is_undone(self._optimizer):
            raise ConfigError.of(_LEFT, "scaler.unscale_(optimizer)", _CHANGE)

    def seal(self, work: GradientStep) -> None:
        """Ends a step's backward pass: a missing gradient counts as zero. This rank's errors reach all ranks."""
        is_waited_for = self._has_scripts or any(map(self._is_scripts, self._places))
        self._has_scripts = False
        self._made.clear()
        for parameter, (number, position) in self._places.items():
            if not work.has(number, position):
                self._put(work, number, position, parameter)
            parameter.grad = None
        work.sealed.set()
        if is_waited_for:
            # A late step is on its way while the script already writes to its own memory again.
            work.wait(StepState.PACKED)

    def refuse(self, work: GradientStep, refusal: Exception) -> None:
        """Fails a step on all ranks, and waits until they know it."""
        work.trouble.append(refusal)
        self.seal(work)
        # Without the wait this rank's script may end before the others know why.
        work.wait(StepState.MERGED)

    def close(self) -> None:
        """Removes the hooks. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self.is_closed, self._optimizer.is_stepped_by_engine = True, False
        for parameter in self._places:
            parameter.grad = _gradient_of(parameter)

    def _make_room(self, parameter: Tensor, gradient: Tensor) -> None:
        del gradient
        parameter.grad = _gradient_of(parameter)
        self._has_scripts |= self._is_scripts(parameter)

    def _take(self, parameter: Tensor) -> None:
        """Hook: moves a complete gradient to the open step."""
        if self.work is None:
            return
        number, position = self._places[parameter]  # type: ignore[index]
        work = self.work
        if work.has(number, position):
            name = self._bucket_states[number].bucket.names[position]
            cure = (
                "put all but the last into `with engine.accumulate():` (all, where reentrant checkpoints share a "
                "weight), or call engine.step() after each, with engine.num_samples = 0 for a batch to be dropped; "
                "freeze it for a pass that is not to train it, as in a GAN"
            )
            refusal = ConfigError.of("one backward pass per step", f"a second gradient of {name!r}", cure)
            self.refuse(work, refusal)
            raise refusal
        if not self._is_accumulating:
            self._put(work, number, position, parameter)
            # Not None, with which ``clip_grad_norm_`` would clip nothing and say nothing.
            parameter.grad = self._stand_in(parameter)
        elif not self._has_scripts:
            self._made[parameter] = id(parameter.grad)

    def _is_scripts(self, parameter: Tensor) -> bool:
        """Returns whether the script has put a gradient of its own into ``p.grad``."""
        gradient = _gradient_of(parameter)
        return gradient is not None and self._made.get(parameter) != id(gradient)

    def _put(self, work: GradientStep, number: int, position: int, parameter: Tensor) -> None:
        # One scale for the whole step: `LossScale.stepped` may move it before the last gradient is gathered.
        if work.is_untouched:
            work.scale = self._scale.unscale
        # The step refuses a converted parameter, with its name; its gradient would only fail in the thread before.
        work.put(number, position, None if self._stand_in(parameter) is None else _gradient_of(parameter))

    def _stand_in(self, parameter: Tensor) -> MovedGradient | None:
        """Returns what stands in p.grad, which must have its parameter's type, device and shape."""
        moved = self._moved[parameter]  # type: ignore[index]
        now = (parameter.dtype, parameter.device, parameter.shape)
        return moved if (moved.dtype, moved.device, moved.shape) == now else None


def _gradient_of(parameter: Tensor) -> Tensor | None:
    """Returns what is in p.grad, unless it stands for a gradient that has left."""
    return None if isinstance(parameter.grad, MovedGradient) else parameter.grad


_HOLDERS: dict[int, weakref.ref[GradientHooks]] = {}
"""By the parameter's id: the last hooks on it. Hooks keep their parameters alive, so an id is right while they live."""


def is_held(parameters: Iterable[Tensor]) -> bool:
    """Returns whether an engine that is not closed takes the gradient of any of these: a second one would get none."""
    for parameter in parameters:
        holder = _HOLDERS.get(id(parameter), lambda: None)()
        if holder is not None and holder.holds(parameter):
            return True
    return False


class LossScale:
    """The scale of the script's GradScaler; 1 without one, or with a disabled one."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.num_good_steps = 0
        """Since the scale last changed."""

    @property
    def skips(self) -> bool:
        """Whether an overflow skips the step instead of raising an error."""
        return self._scaler is not None

    @property
    def unscale(self) -> float:
        """The factor for gradients."""
        return 1.0 if self._scaler is None else 1.0 / self._scaler.get_scale()

    def is_undone(self, optimizer: Optimizer) -> bool:
        """Whether the script has unscaled the optimizer's gradients itself."""
        # No public name says so, and torch's fused optimizers ask for the same.
        return self._scaler is not None and bool(self._scaler._found_inf_per_device(optimizer))

    def stepped(self, is_good: bool) -> None:
        """Adapts the scale after one step that was finite on every rank, or was not."""
        if self._scaler is None:
            return
        self.num_good_steps = self.num_good_steps + 1 if is_good else 0
        scale = self._scaler.get_scale()
        if not is_good:
            self._set(scale * self._scaler.get_backoff_factor())
        elif self.num_good_steps == self._scaler.get_growth_interval():
            self._set(scale * self._scaler.get_growth_factor())
            self.num_good_steps = 0

    def _set(self, scale: float) -> None:
        assert self._scaler is not None
        # scaler.update() fails before the first scaler.scale(), and a rank without samples has scaled nothing.
        self._scaler.load_state_dict({**self._scaler.state_dict(), "scale": scale})

    def status(self) -> dict[str, Any]:
        """Returns what a joining rank takes over: `state_dict` and the scale."""
        return {**self.state_dict(), "scale": None if self._scaler is None else self._scaler.get_scale()}

    def load_status(self, status: Mapping[str, Any]) -> None:
        """Takes over another rank's `status`."""
        self.load_state_dict(status)
        if self._scaler is not None and status["scale"] is not None:
            self._set(status["scale"])

    def state_dict(self) -> dict[str, Any]:
        """Returns what the scaler's own state does not hold."""
        return {"num_good_steps": self.num_good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        self.num_good_steps = int(state["num_good_steps"])
