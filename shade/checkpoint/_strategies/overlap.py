"""Overlap: a thread copies during the next forward and backward pass; the optimizer's step waits for the rest.

Parameters and optimizer state change in the optimizer's step only, so a thread can copy them between two steps; all
else is copied at once. `ThreadedCopy` does that, and published methods derive from it. Decision 0048 has the exception
of `overlap`. The idea is DataStates-LLM's (Maurya et al., HPDC 2024) and ACUTE's.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._strategies.base import STRATEGIES, Strategy, copy_at_once
from shade.errors import TornSnapshotError

PROFILED_STEPS: Final = 10
"""Steps in the average, as in AsymCheck's warm-up: fewer are too noisy, more describe the past."""
_STAT: Final = Path("/proc/stat")
_IDLE_COLUMNS: Final = slice(4, 6)
"""The columns of idle time and of waiting for a disk."""
_PAUSE_SECONDS: Final = 1.0
"""Least time between measurements: reading takes a millisecond with many cores, and a step may take ten."""


class ThreadedCopy(Strategy):
    """A strategy that copies in the threads of a pool: one, which copies all, unless a class divides the work."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._copied: list[Future[None]] = []
        """The parts of the save begun last; the check follows them."""

    def _num_threads(self) -> int:
        """Returns the size of the pool, which the first save creates."""
        return 1

    def _parts(self, copying: Copying) -> Sequence[Callable[[], None]]:
        """Returns the threads' work in order; the check copies what they leave. The unsteady tensors are copied."""
        del copying
        return ()

    def _secure(self, copying: Copying) -> bool:
        """Prepares the threads' work; returns whether the state may change already."""
        del copying
        return False

    @override
    def begin(self, copying: Copying) -> Future[None]:
        try:
            # What may change at any time (batch-norm statistics, generators, a sampler's cursor) is small, and cannot
            # wait.
            copying.settle(name for name in copying.names if name not in copying.steady)
            may_change = self._secure(copying)
        except TornSnapshotError as error:
            failed = self._running = Future[None]()
            failed.set_exception(error)
            return failed
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads(), thread_name_prefix="shade-copy")
        self._copied = [self._pool.submit(part) for part in self._parts(copying)]
        running = self._pool.submit(_finish, copying, self._copied)
        self._running = None if may_change else running
        return running

    @override
    def wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    @override
    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _finish(copying: Copying, copied: Sequence[Future[None]]) -> None:
    """Checks the copied parts. It is submitted last, so it never waits for a part that is still queued behind it."""
    for each in copied:
        each.result()
    copying.finish()


@STRATEGIES.register("overlap")
class Overlap(ThreadedCopy):
    """A strategy that copies in a thread, or at once where the training leaves no core idle."""

    def __init__(self) -> None:
        super().__init__()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="shade-copy")
        self._cores = CoresLeft(PROFILED_STEPS)
        self._hooks: list[Any] = []

    @override
    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._cores.end()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._cores.begin()))

    @override
    def begin(self, copying: Copying) -> Future[None]:
        # A training that waits for room, or for this copy, leaves its cores idle.
        self._cores.drop()
        # Beside a training that keeps every core busy, the thread takes time from operations of several threads, which
        # end with their slowest: the copy would cost more than it does at once. On a device a copy takes no core.
        if self._cores.number() == 0 and not copying.is_of_devices:
            self._running = copy_at_once(copying, self._helper)
            return self._running
        return super().begin(copying)

    @override
    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._helper.shutdown()
        super().close()


class CoresLeft:
    """A count of idle cores, among those of this process, between `begin` and `end`.

    Args:
        num_remembered: Measurements in the average.
    """

    def __init__(self, num_remembered: int) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=num_remembered)
        self._begun: tuple[float, float] | None = None
        self._next = 0.0

    def begin(self) -> None:
        """Begins a measurement, unless the last one is too recent."""
        self._begun = _idle_seconds() if time.perf_counter() >= self._next else None

    def drop(self) -> None:
        """Discards the measurement that has begun."""
        self._begun = None

    def end(self) -> None:
        """Ends the measurement, if one has begun."""
        begun, self._begun = self._begun, None
        ended = None if begun is None else _idle_seconds()
        if begun is not None and ended is not None:
            self._measured.append((ended[0] - begun[0], ended[1] - begun[1]))
            self._next = ended[1] + _PAUSE_SECONDS

    def number(self) -> int | None:
        """Returns the mean number of idle cores, rounded; None without a measurement or without ``/proc/stat``."""
        seconds = sum(length for _, length in self._measured)
        return round(sum(idle for idle, _ in self._measured) / seconds) if seconds > 0 else None


def _idle_seconds() -> tuple[float, float] | None:
    """Returns the idle seconds of this process's cores together, and the time; None without Linux."""
    try:
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
    except (OSError, AttributeError):  # not Linux
        return None
    # PyTorch threads that wait for each other spin and count as busy. That is right: a thread that takes their core
    # would keep the others waiting.
    ticks = sum(int(ticks) for line in lines if line[0] in ours for ticks in line[_IDLE_COLUMNS])
    return ticks / os.sysconf("SC_CLK_TCK"), time.perf_counter()
