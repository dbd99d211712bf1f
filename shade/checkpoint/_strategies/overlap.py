"""Overlap: a thread copies during the next forward and backward pass; the optimizer's step waits for the rest.

Parameters and optimizer state change in the optimizer's step only, so a thread can copy them between two steps; all
else is copied at once. `ThreadedCopy` does that, and published methods derive from it. Decision 0048 has the exception
of `overlap`. The idea is DataStates-LLM's (Maurya et al., HPDC 2024) and ACUTE's.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
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
    """A strategy with one copying thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Copying, Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: Future[None] | None = None

    @override
    def begin(self, copying: Copying) -> Future[None]:
        running: Future[None] = Future()
        self._running = running
        try:
            # What may change at any time (batch-norm statistics, generators, a sampler's cursor) is small, and cannot
            # wait.
            copying.settle(name for name in copying.names if name not in copying.steady)
            if self._secure(copying):
                self._running = None
        except TornSnapshotError as error:
            running.set_exception(error)
            return running
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shade-copy", daemon=True)
            self._thread.start()
        self._work.put((copying, running))
        return running

    def _secure(self, copying: Copying) -> bool:
        """Prepares the thread's work; returns whether the state may change already."""
        del copying
        return False

    def _serve(self) -> None:
        while (order := self._work.get()) is not None:
            copying, done = order
            try:
                copying.finish()
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - `wait` raises it
                done.set_exception(error)
            # Frees the copy on the device, which these would keep until the next save.
            del order, copying, done

    @override
    def wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    @override
    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None


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
