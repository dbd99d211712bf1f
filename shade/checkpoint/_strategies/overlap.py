"""Overlap: a thread copies during the next forward and backward pass; the optimizer's step waits for the rest.

Parameters and optimizer state change in the optimizer's step only, so a thread can copy them between two steps. All
else (batch-norm statistics, generators, a sampler's cursor) may change at any time, is small, and is copied at once.
The price is interference: the thread shares cores and memory bandwidth with the training. The idea is
DataStates-LLM's (Maurya et al., HPDC 2024) and ACUTE's; there the user had to wait, or the wait did not work.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._strategies.base import STRATEGIES, Strategy
from shade.errors import TornSnapshotError


@STRATEGIES.register("overlap")
class Overlap(Strategy):
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
