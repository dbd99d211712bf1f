"""The windows of a pass: what a training step consists of, seen by hooks, and how long each part usually takes.

A window begins where a module's forward begins, and where the gradient of its output has come, which is where its
backward begins. So forward and backward together are a sequence of marks, the same in every step of a model that does
the same in every step. The lengths are measured in steps in which nothing is copied, all the time: the median of the
last few is what a plan is made from, so it follows the training when that changes. (AsymCheck profiles ten steps once.)

The hooks are put on modules without children, which do nearly all the work; what is compiled has none. Backward marks
hang on the outputs' gradients: `register_full_backward_pre_hook` would forbid in-place operations on them, as an
in-place ReLU is one. Price: two calls a module and step, some microseconds each; and a module with hooks of ours can be
copied, but not pickled whole.

On a device the marks are events on the current stream: what a hook sees there is when work is submitted, not when it
is done.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from shade.checkpoint.strategies.cores import CoresLeft

PROFILED_STEPS: Final = 10
"""As many as AsymCheck's warm-up has; medians of fewer are noise, of more are the past."""


class Windows:
    """Marks of the steps of some modules.

    Args:
        on_mark: Called at every mark between `begin` and `end`, with its number in the step, while `is_watched`.
    """

    def __init__(self, on_mark: Callable[[int], None]) -> None:
        self._on_mark = on_mark
        self.is_watched = False
        """Whether marks are told; such a step is not measured: the copy would be measured along."""
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()
        self._marks: list[_Mark] = []
        self._first_backward: int | None = None
        self._passes: deque[_Pass] = deque(maxlen=PROFILED_STEPS)
        self._is_spoilt = True
        self._is_on_device = False
        self._cores = CoresLeft(PROFILED_STEPS)

    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Hangs hooks.

        Args:
            modules: Trained; their innermost modules are marked, each once.
            optimizers: A step of any of them ends a pass, and the next one begins after it.
        """
        for module in modules:
            for inner in module.modules():
                if not any(True for _ in inner.children()) and id(inner) not in self._hooked:
                    self._hooked.add(id(inner))
                    self._hooks.append(inner.register_forward_pre_hook(lambda *_: self._forward()))
                    self._hooks.append(inner.register_forward_hook(lambda *last: self._watch(last[-1])))
            self._is_on_device |= any(parameter.is_cuda for parameter in module.parameters())
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.end()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.begin()))

    def begin(self) -> None:
        """A pass begins."""
        self._marks.clear()
        self._first_backward = None
        self._is_spoilt = self.is_watched

    def end(self) -> None:
        """It has ended; remembered, if nothing was copied in it."""
        if self._marks and not self._is_spoilt and not self.is_watched:
            self._passes.append(_Pass([*self._marks, self._mark()], self._first_backward))
            self._cores.end()
        self._marks.clear()
        self._is_spoilt = True

    def seconds(self) -> tuple[list[float], list[float]]:
        """Median length of each window of the forward and of the backward pass.

        Returns:
            Both empty before the first step has been measured. Steps of another form than the last one do not count.
        """
        if not self._passes:
            return [], []
        last = self._passes[-1]
        alike = [each.seconds() for each in self._passes if each.form == last.form]
        medians = [statistics.median(windows) for windows in zip(*alike, strict=True)]
        num_forward = last.form[1]
        return medians[:num_forward], medians[num_forward:]

    def cores_left(self) -> int | None:
        """Processor cores that nobody uses while the windows last.

        Returns:
            None: not known yet; or the training is on a device, which copies by itself.
        """
        return None if self._is_on_device else self._cores.number()

    def close(self) -> None:
        """Takes the hooks off. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ── hooks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    # Functions, not methods: whoever copies a module copies its hooks along, and us with a method.

    def _forward(self) -> None:
        if torch.compiler.is_compiling():  # then the hook is left out, instead of cutting the graph in two
            return
        if self._first_backward is None and torch.is_grad_enabled():  # neither evaluation nor recomputing
            self._arrive()

    def _watch(self, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        tensor = first_tensor(output)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda _: self._backward())  # type: ignore[no-untyped-call]

    def _backward(self) -> None:
        if self._first_backward is None:
            self._first_backward = len(self._marks)
        self._arrive()

    def _arrive(self) -> None:
        if not self._marks:
            self._cores.begin()  # whatever the training waited for before is not in a window
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
    """The marks of one step, its end included."""

    def __init__(self, marks: list[_Mark], first_backward: int | None) -> None:
        self._marks = marks
        num_windows = len(marks) - 1
        self.form = num_windows, num_windows if first_backward is None else first_backward

    def seconds(self) -> list[float]:
        """Length of each window."""
        return [_between(begin, end) for begin, end in zip(self._marks, self._marks[1:], strict=False)]


def _between(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def first_tensor(output: Any) -> torch.Tensor | None:
    """Of whatever a module returns."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((found for value in values if (found := first_tensor(value)) is not None), None)
