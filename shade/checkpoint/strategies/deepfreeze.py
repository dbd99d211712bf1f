"""DeepFreeze: layer by layer, each copied by whichever thread is free and on its way as soon as it is copied.

Nicolae et al., CCGrid 2020. The state is not one thing but hundreds of tensors that become final one after the other;
each layer's are copied by themselves, serialised in threads of their own, and shared out among the ranks that hold the
same. Here a layer is what one module owns, or what the optimizer keeps for one parameter; a few threads copy layers in
the order in which they lie in the shard, so that its first chunks are complete, hashed and sent while the last are
still being copied; and every rank has its share of the layers anyway.

Where we differ: the paper hangs its copies into TensorFlow's graph, where a layer's update is final before the backward
pass has reached the layers below. PyTorch updates all parameters in one call of the optimizer, so all are final at the
same moment: when `step` has returned, which is when a save is begun. What is overlapped is the next pass.
"""

from __future__ import annotations

import itertools
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from shade.checkpoint.copying import Copying
from shade.checkpoint.strategies.base import STRATEGIES, Strategy, Terms
from shade.errors import TornSnapshotError

NUM_THREADS: Final = min(4, os.cpu_count() or 1)
_LAST_PART: Final = re.compile(r"[./][^./]*$")


@STRATEGIES.register("deepfreeze")
class DeepFreeze(Strategy):
    """A pool of copying threads."""

    terms = Terms(streams=True)

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def begin(self, copying: Copying) -> Future[None]:
        """See `Strategy`."""
        try:
            copying.settle(name for name in copying.names if name not in copying.steady)
        except TornSnapshotError as error:
            failed = self._running = Future[None]()
            failed.set_exception(error)
            return failed
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="shade-copy")
        copied = [self._pool.submit(_copy, copying, names) for names in layers(copying.names)]
        self._running = self._pool.submit(_finish, copying, copied)
        return self._running

    def wait(self) -> None:
        """See `Strategy`."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """See `Strategy`."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def layers(names: list[str]) -> list[list[str]]:
    """Names of tensors by layer: neighbours that share all of their path but its last part.

    Args:
        names: In the order of the shard.

    Returns:
        The same names, in the same order.
    """
    return [list(group) for _, group in itertools.groupby(names, key=lambda name: _LAST_PART.sub("", name))]


def _copy(copying: Copying, names: list[str]) -> None:
    for name in names:
        copying.copy(name)


def _finish(copying: Copying, copied: list[Future[None]]) -> None:
    """Checks what the others have copied. Story: it is submitted last, so whoever runs it waits for nobody queued."""
    for each in copied:
        each.result()
    copying.finish()
