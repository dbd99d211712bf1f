"""Asymmetric: each window of the next pass copies as many bytes as its length allows.

Every window releases its partition of the state, and the threads copy only what has been released. What has been
copied is written meanwhile. Where the training uses all cores, it waits while every thread copies and hashes.
Invariant: the buffer holds the state of one step, or the snapshot is refused.

AsymCheck (DAC 2026, §3). Where we differ: partitions are byte ranges of the shard as it will be stored; windows and
idle cores are measured all the time. `benchmarks/strategy_ablations.py` measures its modules. Decisions 0020 and 0027.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Final

import torch
from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._strategies.base import STRATEGIES, StrategyConfig
from shade.checkpoint._strategies.overlap import ThreadedCopy
from shade.checkpoint._strategies.windows import Windows, partition

_LEAST_BYTES: Final = 2**20
"""Least amount to release: waking the threads for less would cost more than the copy."""
_PIECE_BYTES: Final = 16 * 2**20
"""Most that a thread takes at a time."""
_MOST_THREADS: Final = 4
"""Upper bound of the copying threads: more do not copy faster, because memory is the limit."""
_TAIL_FRACTION: Final = 1 / 8
"""Share of the pass, at its end, that is reserved for the check."""
_PASSES: Final = 2
"""Length, in passes, without a window after which all is released: the training does something else then."""


@STRATEGIES.register("asymmetric")
class Asymmetric(ThreadedCopy):
    """A strategy whose copying threads follow the windows of the training."""

    config = StrategyConfig(streams=True, batches=True)

    def __init__(self) -> None:
        super().__init__()
        self._windows = Windows(self._at_mark)
        self._ends: list[int] = []
        self._turn = threading.Condition()
        self._released = self._taken = 0
        self._all = False
        self._patience_seconds = 0.0

    @override
    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._windows.attach(modules, optimizers)

    @property
    def partitions(self) -> tuple[list[int], list[int]]:
        """Bytes that each forward and each backward window releases, in the save begun last."""
        forward, _ = self._windows.seconds()
        sizes = [end - begin for begin, end in zip([0, *self._ends], self._ends, strict=False)]
        return sizes[: len(forward)], sizes[len(forward) :]

    @override
    def _num_threads(self) -> int:
        return min(torch.get_num_threads(), _MOST_THREADS)

    @override
    def begin(self, copying: Copying) -> Future[None]:
        snapshot = super().begin(copying)
        if self._stands_still():
            # The parts only: the check runs in the background.
            wait(self._copied)
        return snapshot

    @override
    def _parts(self, copying: Copying) -> Sequence[Callable[[], None]]:
        windows = [] if self._stands_still() else list(itertools.chain(*self._windows.seconds()))
        sizes = partition(copying.num_bytes_left, self._shares(windows))
        self._ends = list(itertools.accumulate(sizes))
        self._patience_seconds = _PASSES * sum(windows)
        self._released, self._taken, self._all = 0, 0, not sizes
        self._windows.is_watched = bool(sizes)
        num_threads = self._num_threads()
        return [partial(self._copy, copying, num_threads)] * num_threads

    def _stands_still(self) -> bool:
        return self._windows.cores_left() == 0

    def _shares(self, windows: Sequence[float]) -> list[float]:
        """Returns each window's share of the state, in any unit: its seconds, without the tail."""
        left = (1 - _TAIL_FRACTION) * sum(windows)
        usable = []
        for each in windows:
            usable.append(min(each, left))
            left -= usable[-1]
        return usable

    def _at_mark(self, number: int) -> None:
        """Releases the partition of the window that begins."""
        end = self._ends[min(number, len(self._ends) - 1)]
        if end - self._released >= _LEAST_BYTES or number == len(self._ends) - 1:
            with self._turn:
                self._released = end
                self._turn.notify_all()

    @override
    def wait(self) -> None:
        self._windows.is_watched = False
        self._release_all()
        super().wait()

    @override
    def close(self) -> None:
        self._windows.close()
        self._release_all()
        super().close()

    def _release_all(self) -> None:
        with self._turn:
            self._all = True
            self._turn.notify_all()

    # ── the threads ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _copy(self, copying: Copying, num_threads: int) -> None:
        """Copies shares of what is released, until nothing is left."""
        moved = 1
        while moved:
            with self._turn:
                # No window has begun for long: the training does something else, and none may come before `wait`.
                if not self._turn.wait_for(self._may_copy, self._patience_seconds):
                    self._all = True
                    self._turn.notify_all()
                waiting = _PIECE_BYTES if self._all else (self._released - self._taken) // num_threads
                share = min(_PIECE_BYTES, max(_LEAST_BYTES, waiting))
                self._taken += share
            moved = copying.advance(share)
            with self._turn:
                # An undivided tensor moves more than its share.
                self._taken += moved - share

    def _may_copy(self) -> bool:
        """Whether enough bytes are released for a share, or no more releases will come."""
        return self._all or self._released - self._taken >= _LEAST_BYTES or self._released == self._ends[-1]
