"""DeepFreeze: a few threads copy the state layer by layer, and each layer leaves as soon as it is copied.

Nicolae et al., CCGrid 2020. Here a layer is what one module owns, or what the optimizer keeps for one parameter. The
threads take layers in the shard's order, so its first chunks are hashed and sent while the last are still copied. The
paper hangs its copies into TensorFlow's graph; PyTorch updates all parameters in one call of the optimizer, so all are
final when `step` returns, and the copy overlaps the next pass. `asymmetric` shares `Pooled`.
"""

from __future__ import annotations

import itertools
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._strategies.base import STRATEGIES, Strategy, StrategyConfig
from shade.errors import TornSnapshotError

NUM_THREADS: Final = min(4, os.cpu_count() or 1)
_LAST_PART: Final = re.compile(r"[./][^./]*$")


class Pooled(Strategy):
    """A strategy that divides a copy among the threads of a pool."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._copied: list[Future[None]] = []
        """The parts of the save begun last; the check follows them."""

    @abstractmethod
    def _num_threads(self) -> int:
        """Returns the size of the pool, which the first save creates."""

    @abstractmethod
    def _parts(self, copying: Copying) -> Sequence[Callable[[], None]]:
        """Returns the threads' work in order; the check copies what they leave. The unsteady tensors are copied."""

    @override
    def begin(self, copying: Copying) -> Future[None]:
        try:
            copying.settle(name for name in copying.names if name not in copying.steady)
        except TornSnapshotError as error:
            failed = self._running = Future[None]()
            failed.set_exception(error)
            return failed
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads(), thread_name_prefix="shade-copy")
        self._copied = [self._pool.submit(part) for part in self._parts(copying)]
        self._running = self._pool.submit(_finish, copying, self._copied)
        return self._running

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


@STRATEGIES.register("deepfreeze")
class DeepFreeze(Pooled):
    """A strategy that copies layers in the shard's order."""

    config = StrategyConfig(streams=True)

    @override
    def _num_threads(self) -> int:
        return NUM_THREADS

    @override
    def _parts(self, copying: Copying) -> Sequence[Callable[[], None]]:
        return [partial(_copy, copying, names) for names in layers(copying.names)]


def layers(names: list[str]) -> list[list[str]]:
    """Groups tensor names, in the shard's order, by layer: neighbours that differ in the last part of their path."""
    return [list(group) for _, group in itertools.groupby(names, key=lambda name: _LAST_PART.sub("", name))]


def _copy(copying: Copying, names: list[str]) -> None:
    for name in names:
        copying.copy(name)
