"""The windows of a training step: their lengths, the bytes each one gets, and the cores that the training leaves idle.

A window begins where a module's forward begins, and where the gradient of its output has come, which is where its
backward begins. So forward and backward together are a sequence of marks, the same in every step of a model that does
the same in every step. The lengths are measured in steps in which nothing is copied, all the time: the median of the
last few is what a plan is made from, so it follows a training that changes. (AsymCheck profiles ten steps once.)

The hooks are put on modules without children, which do nearly all the work; compiled modules have none. Backward marks
are hooks on the outputs' gradients: `register_full_backward_pre_hook` would forbid in-place operations on them, as an
in-place ReLU is one. Price: two calls a module and step, some microseconds each; and a module with hooks of ours can be
copied, but not pickled whole. On a device the marks are events on the current stream: a hook sees there when work is
submitted, not when it is done.

`partition` divides a snapshot among the windows (AsymCheck, DAC 2026). Windows are long in the backward pass and short
in the forward pass, and partitions of equal size stall in the short ones. With windows of t_i seconds and a state of R
bytes, r_i = R · t_i / (ΣT_f + ΣT_b). The code published with it corrects the rounding of each pass by itself, so that
its partitions hold the state twice and the last forward one is the largest; here the cumulative shares are rounded,
once. Invariant: the partitions add up to R.

`CoresLeft` counts idle cores. Linux counts for each core how long it was idle (``/proc/stat``, proc(5)). Threads of
PyTorch that wait for each other do not rest, they spin, and count as working; rightly so, since a thread that takes
their core keeps the others waiting.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

PROFILED_STEPS: Final = 10
"""As many as AsymCheck's warm-up has; medians of fewer are noise, of more are the past."""
_STAT: Final = Path("/proc/stat")
_IDLE_COLUMNS: Final = slice(4, 6)
"""Idle, and waiting for a disk."""
_PAUSE_SECONDS: Final = 1.0
"""After a measurement: asking takes a millisecond where there are many cores, and steps may take ten."""


class Windows:
    """Marks of the steps of some modules.

    Args:
        on_mark: Called at every mark between `begin` and `end`, with its number in the step, while `is_watched`.
    """

    def __init__(self, on_mark: Callable[[int], None]) -> None:
        self._on_mark = on_mark
        self.is_watched = False
        """Whether `on_mark` is called; such a step is not measured, since the copy would be measured too."""
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
        """Returns the processor cores that are idle during the windows.

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

    # Functions, not methods: a copied module copies its hooks too, and a bound method would copy this object.

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


def partition(num_bytes: int, window_seconds: Sequence[float]) -> list[int]:
    """Divides a state among windows.

    Args:
        num_bytes: Of the state, R ≥ 0.
        window_seconds: Length of each window of a pass, in order; not negative.

    Returns:
        Bytes for each, adding up to R; equal shares where nothing has been measured, none where there is no window.
    """
    if not window_seconds:
        return []
    total = sum(window_seconds)
    reached = itertools.accumulate(window_seconds) if total > 0 else range(1, len(window_seconds) + 1)
    ends = [round(num_bytes * min(1.0, seconds / (total or len(window_seconds)))) for seconds in reached]
    ends[-1] = num_bytes
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


class CoresLeft:
    """Measured between `begin` and `end`, of the cores that this process may use.

    Args:
        num_remembered: Measurements that count; more would be of another time.
    """

    def __init__(self, num_remembered: int) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=num_remembered)
        self._begun: tuple[float, float] | None = None
        self._next = 0.0

    def begin(self) -> None:
        """From now on; unless it was measured a moment ago."""
        self._begun = _idle_seconds() if time.perf_counter() >= self._next else None

    def end(self) -> None:
        """Until now, where it was begun."""
        begun, self._begun = self._begun, None
        ended = None if begun is None else _idle_seconds()
        if begun is not None and ended is not None:
            self._measured.append((ended[0] - begun[0], ended[1] - begun[1]))
            self._next = ended[1] + _PAUSE_SECONDS

    def number(self) -> int | None:
        """Returns the idle cores, on average, rounded.

        Returns:
            None: nothing has been measured, or the system does not say.
        """
        seconds = sum(length for _, length in self._measured)
        return round(sum(idle for idle, _ in self._measured) / seconds) if seconds > 0 else None


def _idle_seconds() -> tuple[float, float] | None:
    """Seconds that our cores have been idle, together, and the time."""
    try:
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
    except (OSError, AttributeError):  # no Linux
        return None
    ticks = sum(int(ticks) for line in lines if line[0] in ours for ticks in line[_IDLE_COLUMNS])
    return ticks / os.sysconf("SC_CLK_TCK"), time.perf_counter()
