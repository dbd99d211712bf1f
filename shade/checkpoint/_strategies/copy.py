"""Stop and copy: training waits for one copy of its state, and for nothing else.

The simplest correct strategy: no tensor has to stand still behind the training. A save costs the state's size over the
memory's bandwidth. One core does not use all of that bandwidth, so two threads copy.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._strategies.base import STRATEGIES, Strategy, StrategyConfig, copy_at_once


@STRATEGIES.register("copy")
class Copy(Strategy):
    """A strategy that copies the whole state in `begin`."""

    config = StrategyConfig(save_waits_for="copied")

    def __init__(self) -> None:
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="shade-copy")
        self._done: Future[None] = Future()

    @override
    def begin(self, copying: Copying) -> Future[None]:
        self._done = copy_at_once(copying, self._helper)
        return self._done

    @override
    def wait(self) -> None:
        if self._done.done():
            self._done.result()

    @override
    def close(self) -> None:
        self._helper.shutdown()
