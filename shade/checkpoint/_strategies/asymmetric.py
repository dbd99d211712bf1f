"""Asymmetric: copies a part of the state in each window of the next pass, as much as the window has time for.

`overlap` begins after the optimizer's step and copies as fast as it can, so it takes its bandwidth from the first
layers of the forward pass, which are short. Here every window releases its partition, small in the forward pass and
large in the backward pass, and the copy never runs ahead of what is released. The last partition is released a little
before the pass ends, because the finished copy is checked; what is left when the optimizer wants to step is copied at
once.

This pays in windows with spare time: a device computes, or cores are idle. Where the training computes on all cores,
no window has spare time and all partitions are empty: then the training stands still, all threads copy, and each
hashes what is in its cache; only the short check runs beside the training. Beside such a training the same work costs
up to three times as much, because an operation of several threads ends with its slowest, so time taken from one core
is lost on all.

Copied bytes are written while the rest follows, in batches of the best length (`_pacing.batching`).

AsymCheck (DAC 2026, §3): its snapshot and flushing modules. Differences: partitions are byte ranges of the shard as it
is stored, not slices of a second flat state, so nothing is joined afterwards; windows and idle cores are measured all
the time; the first save of a run, before any measurement, is copied as `overlap` does. Invariant: as for all
strategies, the buffer holds the state of one moment, or the snapshot is refused.

Three ablations show what each module of AsymCheck brings, as in the paper: ``asymmetric-naive`` copies an equal part
in each window; ``asymmetric-S`` as much as the window has time for (asymmetric snapshotting); ``asymmetric-S+O`` also
writes in batches of the best length (optimal flushing). All three copy beside the training, whether or not cores are
idle (decisions 0020, 0027).
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
from shade.checkpoint._strategies.deepfreeze import Pooled
from shade.checkpoint._strategies.windows import Windows, partition

_LEAST_BYTES: Final = 2**20
"""Released at once: below, waking the threads would cost more than the copy."""
_PIECE_BYTES: Final = 16 * 2**20
"""A thread takes at a time, at most."""
_MOST_THREADS: Final = 4
"""More do not copy faster: it is memory that they wait for."""
_TAIL_FRACTION: Final = 1 / 8
"""Of the pass, at its end, that is left to the check."""
_PASSES: Final = 2
"""Where no window begins for as long as so many passes take, the training does something else: nothing to wait for."""


@STRATEGIES.register("asymmetric")
class Asymmetric(Pooled):
    """Copying threads, paced by the training."""

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
        """Bytes that the windows of the forward and of the backward pass release, in the save begun last."""
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
            wait(self._copied)  # the check runs beside the training
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
        """Returns whether the training waits for the copy, because it leaves no core idle."""
        return self._windows.cores_left() == 0

    def _shares(self, windows: Sequence[float]) -> list[float]:
        """Returns the part of the state that each window releases: as much as it has time for, without the tail.

        Args:
            windows: Seconds of each.

        Returns:
            One for each, in any unit.
        """
        return _without_tail(windows)

    def _at_mark(self, number: int) -> None:
        """A window begins: its partition may be copied."""
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
        """Takes its share of what is released, until all is copied or taken by others."""
        moved = 1
        while moved:
            with self._turn:
                if not self._turn.wait_for(self._may_go_on, self._patience_seconds):
                    self._all = True
                    self._turn.notify_all()
                waiting = _PIECE_BYTES if self._all else (self._released - self._taken) // num_threads
                share = min(_PIECE_BYTES, max(_LEAST_BYTES, waiting))
                self._taken += share
            moved = copying.advance(share)
            with self._turn:
                self._taken += moved - share  # more, where a tensor is not divided

    def _may_go_on(self) -> bool:
        """Something has been released, or all has: then there is something left, or nothing to wait for."""
        return self._all or self._released - self._taken >= _LEAST_BYTES or self._released == self._ends[-1]


def _without_tail(seconds: Sequence[float]) -> list[float]:
    """Windows as far as a partition may use them."""
    left = (1 - _TAIL_FRACTION) * sum(seconds)
    usable = []
    for each in seconds:
        usable.append(min(each, left))
        left -= usable[-1]
    return usable


class _Beside(Asymmetric):
    """Never lets the training wait while it can do otherwise."""

    is_ablation = True

    @override
    def _stands_still(self) -> bool:
        return False


@STRATEGIES.register("asymmetric-naive")
class AsymmetricNaive(_Beside):
    """Equal partitions."""

    config = StrategyConfig()

    @override
    def _shares(self, windows: Sequence[float]) -> list[float]:
        return [1.0] * len(windows)


@STRATEGIES.register("asymmetric-S")
class AsymmetricSnapshot(_Beside):
    """Partitions by time; nothing else."""

    config = StrategyConfig()


@STRATEGIES.register("asymmetric-S+O")
class AsymmetricSnapshotFlush(_Beside):
    """Partitions by time, written in batches."""

    config = StrategyConfig(streams=True, batches=True)
