"""Overlap: a thread copies during the next forward and backward pass; the optimizer's step waits for the rest.

Parameters and optimizer state change in the optimizer's step only, so a thread can copy them between two steps. All
else (batch-norm statistics, generators, a sampler's cursor) may change at any time, is small, and is copied at once.
The idea is DataStates-LLM's (Maurya et al., HPDC 2024) and ACUTE's; there the user had to wait, or the wait did not
work. `ThreadedCopy` does that, and published methods derive from it.

The price is interference. Where the training keeps every core busy, the thread takes time from operations of several
threads, which end with their slowest, and the copy costs more than it would have alone. So `overlap`, the default,
counts idle cores between an optimizer's steps (`CoresLeft`). If there are none, and the state lies on the host, it
copies at once, as `copy` does; on a device a copy takes no core. The first save, before anything is counted, is copied
in the background. It hooks optimizers and no module, so the modules stay as they were (decision 0048).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._strategies.base import STRATEGIES, Strategy
from shade.checkpoint._strategies.copy import Copy
from shade.checkpoint._strategies.windows import PROFILED_STEPS, CoresLeft
from shade.errors import TornSnapshotError


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
            del order, copying, done  # frees the copy on the device

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
        self._at_once = Copy()
        self._cores = CoresLeft(PROFILED_STEPS)
        self._hooks: list[Any] = []

    @override
    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._cores.end()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._cores.begin()))

    @override
    def begin(self, copying: Copying) -> Future[None]:
        self._cores.drop()  # a training that waits for room, or for this copy, leaves its cores idle
        if self._cores.number() == 0 and not copying.is_of_devices:
            self._running = self._at_once.begin(copying)
            return self._running
        return super().begin(copying)

    @override
    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._at_once.close()
        super().close()
