"""Measures the windows of a training step, and divides a snapshot among them.

A window begins where a module's forward pass begins, and where the gradient of its output arrives, which is where its
backward pass begins. Windows are measured all the time, in steps without a copy. What hooks modules is no default
(decision 0048).

`partition` divides a state of R bytes (AsymCheck, DAC 2026): t_i seconds get r_i = R · t_i / (ΣT_f + ΣT_b) bytes.
Invariant: the partitions add up to R.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from shade.checkpoint._strategies.overlap import PROFILED_STEPS, CoresLeft


class ModuleHook:
    """A forward hook that stays with its module: a copy of the module, pickled or not, gets one that does nothing.

    Args:
        action: Takes what PyTorch passes to the hook.
    """

    def __init__(self, action: Callable[..., None]) -> None:
        self._action = action

    def __call__(self, *passed: Any) -> None:
        """Calls the action."""
        self._action(*passed)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # Takes any arguments and returns None; a method of the standard library, so that a pickled module can be loaded
        # where shade is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


class Windows:
    """The marks of some modules' steps.

    Args:
        on_mark: Called at every mark between `begin` and `end`, with its number in the step, while `is_watched`.
    """

    def __init__(self, on_mark: Callable[[int], None]) -> None:
        self._on_mark = on_mark
        self.is_watched = False
        """Whether `on_mark` is called; such a step is not measured, since the copy would lengthen it."""
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()
        self._marks: list[_Mark] = []
        self._first_backward: int | None = None
        self._passes: deque[_Pass] = deque(maxlen=PROFILED_STEPS)
        self._is_spoilt = True
        self._is_on_device = False
        self._cores = CoresLeft(PROFILED_STEPS)

    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Hooks the innermost modules, each once, and the optimizers, whose step ends a pass and begins the next."""
        for module in modules:
            for inner in module.modules():
                # Modules without children do nearly all the work.
                if not any(True for _ in inner.children()) and id(inner) not in self._hooked:
                    self._hooked.add(id(inner))
                    at_end = ModuleHook(lambda *passed: at_gradient(passed[-1], self._backward))
                    self._hooks.append(inner.register_forward_pre_hook(ModuleHook(lambda *_: self._forward())))
                    self._hooks.append(inner.register_forward_hook(at_end))
            self._is_on_device |= any(parameter.is_cuda for parameter in module.parameters())
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.end()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.begin()))

    def begin(self) -> None:
        """Begins a pass."""
        self._marks.clear()
        self._first_backward = None
        self._is_spoilt = self.is_watched

    def end(self) -> None:
        """Ends the pass; keeps its marks if nothing was copied in it."""
        if self._marks and not self._is_spoilt and not self.is_watched:
            self._passes.append(_Pass([*self._marks, self._mark()], self._first_backward))
            self._cores.end()
        self._marks.clear()
        self._is_spoilt = True

    def seconds(self) -> tuple[list[float], list[float]]:
        """Returns the median length of each forward and of each backward window, over steps formed like the last.

        Both lists are empty before the first measured step.
        """
        if not self._passes:
            return [], []
        last = self._passes[-1]
        alike = [each.seconds() for each in self._passes if each.form == last.form]
        medians = [statistics.median(windows) for windows in zip(*alike, strict=True)]
        num_forward = last.form[1]
        return medians[:num_forward], medians[num_forward:]

    def cores_left(self) -> int | None:
        """Returns the cores that are idle during the windows; None if not measured yet, or on a device."""
        return None if self._is_on_device else self._cores.number()

    def close(self) -> None:
        """Removes the hooks. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ── hooks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _forward(self) -> None:
        if torch.compiler.is_compiling():  # a hook would cut the compiled graph in two
            return
        if self._first_backward is None and torch.is_grad_enabled():  # neither evaluation nor recomputation
            self._arrive()

    def _backward(self) -> None:
        if self._first_backward is None:
            self._first_backward = len(self._marks)
        self._arrive()

    def _arrive(self) -> None:
        if not self._marks:
            # Waits before the first mark lie outside all windows.
            self._cores.begin()
        self._marks.append(self._mark())
        if self.is_watched:
            self._is_spoilt = True
            self._on_mark(len(self._marks) - 1)

    def _mark(self) -> _Mark:
        if not self._is_on_device or self.is_watched:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


_Mark = float | torch.cuda.Event


class _Pass:
    """The marks of one step, with its end."""

    def __init__(self, marks: list[_Mark], first_backward: int | None) -> None:
        self._marks = marks
        num_windows = len(marks) - 1
        self.form = num_windows, num_windows if first_backward is None else first_backward

    def seconds(self) -> list[float]:
        """Returns the length of each window."""
        return [_between(begin, end) for begin, end in zip(self._marks, self._marks[1:], strict=False)]


def _between(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def at_gradient(output: Any, action: Callable[[], None]) -> None:
    """Calls an action when the gradient of a module's output arrives, if it has one."""
    if torch.compiler.is_compiling():
        return
    tensor = _first_tensor(output)
    if tensor is not None and tensor.requires_grad:
        tensor.register_hook(lambda _: action())  # type: ignore[no-untyped-call]


def _first_tensor(output: Any) -> torch.Tensor | None:
    """Returns the first tensor in a module's output; None if it has none."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((found for value in values if (found := _first_tensor(value)) is not None), None)


def partition(num_bytes: int, window_seconds: Sequence[float]) -> list[int]:
    """Returns how many bytes of a state each window of a pass takes, from the windows' lengths, ≥ 0, in order. Shares
    are equal if all lengths are 0."""
    if not window_seconds:
        return []
    total = sum(window_seconds)
    reached = itertools.accumulate(window_seconds) if total > 0 else range(1, len(window_seconds) + 1)
    ends = [round(num_bytes * min(1.0, seconds / (total or len(window_seconds)))) for seconds in reached]
    ends[-1] = num_bytes
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
