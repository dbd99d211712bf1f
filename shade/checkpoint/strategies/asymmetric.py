"""Asymmetric: a thread copies a little in each window of the next pass, as much as the window has time for.

As `overlap`, but evenly spread. `overlap` begins when the optimizer's step has ended and copies as fast as it can: so
it takes all its bandwidth from the first layers of the forward pass, which are short. Here every window releases its
partition (`partition`), small ones in the forward pass and large ones in the backward pass, and the thread copies no
more than has been released. All is released a little before the pass ends, because the copy is checked when it is
done; what is left when the optimizer wants to step is copied at once.

What has been copied is hashed and written while the rest follows, in batches of the length that ends soonest
(`shade.checkpoint.batching`).

AsymCheck (DAC 2026, §3), its snapshot and its flushing module. Where we differ: partitions are byte ranges of the shard
as it will be stored, not slices of a second flat state, so nothing is joined afterwards; windows are measured all the
time; what has not been measured yet (the first save of a run) is copied as `overlap` does. Invariant: as for all
strategies, the buffer holds one moment, or the snapshot is refused.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

import torch

from shade.checkpoint.copying import Copying
from shade.checkpoint.strategies.base import STRATEGIES, Strategy, Terms
from shade.checkpoint.strategies.partition import partition
from shade.checkpoint.strategies.windows import Windows
from shade.errors import TornSnapshotError

_LEAST_BYTES: Final = 2**20
"""Released at once: below, waking the thread would cost more than the copy."""
_TAIL_FRACTION: Final = 1 / 8
"""Of the pass, at its end, that is left to the check."""
_PASSES: Final = 2
"""Where no window begins for as long as so many passes take, the training does something else: nothing to wait for."""


@STRATEGIES.register("asymmetric")
class Asymmetric(Strategy):
    """One copying thread, paced by the training."""

    terms = Terms(streams=True, batches=True)

    def __init__(self) -> None:
        self._windows = Windows(self._at_mark)
        self._ends: list[int] = []
        self._turn = threading.Condition()
        self._released = self._copied = 0
        self._all = False
        self._patience_seconds = 0.0
        self._work: tuple[Copying, Future[None]] | None = None
        self._running: Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See `Strategy`."""
        self._windows.attach(modules, optimizers)

    @property
    def partitions(self) -> tuple[list[int], list[int]]:
        """Bytes that the windows of the forward and of the backward pass release, in the save begun last."""
        forward, _ = self._windows.seconds()
        sizes = [end - begin for begin, end in zip([0, *self._ends], self._ends, strict=False)]
        return sizes[: len(forward)], sizes[len(forward) :]

    def begin(self, copying: Copying) -> Future[None]:
        """See `Strategy`."""
        running = self._running = Future[None]()
        try:
            copying.settle(name for name in copying.names if name not in copying.steady)
        except TornSnapshotError as error:
            running.set_exception(error)
            return running
        forward, backward = self._windows.seconds()
        sizes = partition(copying.num_bytes_left, self._shares([*forward, *backward]))
        self._ends = list(itertools.accumulate(sizes))
        self._patience_seconds = _PASSES * sum((*forward, *backward))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shade-copy", daemon=True)
            self._thread.start()
        with self._turn:
            self._released, self._all = 0, not sizes
            self._work = copying, running
            self._turn.notify()
        self._windows.is_watched = bool(sizes)
        return running

    def _shares(self, windows: Sequence[float]) -> list[float]:
        """What part of the state each window shall release: as much as it has time for, short of the tail.

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
                self._turn.notify()

    def wait(self) -> None:
        """See `Strategy`."""
        self._windows.is_watched = False
        running, self._running = self._running, None
        with self._turn:
            self._all = True
            self._turn.notify()
        if running is not None:
            running.result()

    def close(self) -> None:
        """See `Strategy`."""
        self._windows.close()
        if self._thread is not None:
            with self._turn:
                self._closed = self._all = True
                self._turn.notify()
            self._thread.join()
            self._thread = None

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._work is not None or self._closed)
                if self._work is None:
                    return
                (copying, done), self._work = self._work, None
            try:
                self._copy(copying)
                copying.finish()
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the thread that waits
                done.set_exception(error)
            del copying, done

    def _copy(self, copying: Copying) -> None:
        """Follows what is released; returns when all may be copied, or has been."""
        self._copied = 0
        while True:
            with self._turn:
                is_released = self._turn.wait_for(self._may_go_on, self._patience_seconds)
                if self._all or not is_released:
                    return
                allowed = self._released - self._copied
            moved = copying.advance(allowed)
            if moved == 0:
                return
            self._copied += moved

    def _may_go_on(self) -> bool:
        return self._all or self._released - self._copied >= _LEAST_BYTES


def _without_tail(seconds: Sequence[float]) -> list[float]:
    """Windows as far as a partition may use them."""
    left = (1 - _TAIL_FRACTION) * sum(seconds)
    usable = []
    for each in seconds:
        usable.append(min(each, left))
        left -= usable[-1]
    return usable
