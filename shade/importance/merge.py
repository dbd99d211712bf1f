"""Merges the ranks' reports, off the training thread: ``report`` only makes private copies of the two tensors.

One daemon thread per rank takes the reports in order, exchanges each with the same-numbered report of the other ranks,
and applies all of them to the table as one batch, in rank order: the batch that a single rank would have reported. So
the table is independent of the number of ranks, for every strategy. Price: one small all-gather a step. With one rank
and CPU tensors there is no thread: reports wait until the table is read.

Contract: all ranks report the same number of times (an empty report is a report) and flush before they read the table.

Legend: N data set · B batch of this rank · C capacity · W world.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shade.errors import ConfigError, ShadeError
from shade.rank_group import CLOSE_SECONDS, GlooGroup, RankGroup, SingleProcessGroup
from shade.types import Floats, Indices

APPLY_EVERY = 1024
"""Reports applied at once if there is no thread and the table is not read before: 3 MB of 256 samples each."""
_INT64 = np.dtype(np.int64)


class _HostReport(NamedTuple):
    """One report from the CPU, as bytes: the cheapest private copy there is."""

    index_B: bytes
    loss_B: bytes
    loss_dtype: np.dtype[Any]

    def arrays(self) -> tuple[Indices, Floats]:
        """Returns the report as int64 and float32."""
        return self.join([self])

    @staticmethod
    def join(reports: list[_HostReport]) -> tuple[Indices, Floats]:
        """Concatenates several reports."""
        index_B = np.frombuffer(b"".join([report.index_B for report in reports]), np.int64)
        if len({report.loss_dtype for report in reports}) == 1:
            joined = b"".join([report.loss_B for report in reports])
            return index_B, np.frombuffer(joined, reports[0].loss_dtype).astype(np.float32)
        parts = [np.frombuffer(report.loss_B, report.loss_dtype).astype(np.float32) for report in reports]
        return index_B, np.concatenate(parts)


class _DeviceReport(NamedTuple):
    """One report from a device: private tensors, on the CPU once ``copied`` (if any) has happened."""

    index_B: Tensor
    loss_B: Tensor
    copied: torch.cuda.Event | None

    def arrays(self) -> tuple[Indices, Floats]:
        """Returns the report as int64 and float32; waits for the device, on the calling thread."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.index_B.cpu().to(torch.int64).numpy(), self.loss_B.cpu().to(torch.float32).numpy()


_Report = _HostReport | _DeviceReport


class ReportTable(Protocol):
    """Takes what a `ScoreMerger` has merged; an `ImportanceTable`, or any other function of the reports."""

    def update(self, index_B: Indices, loss_B: Floats) -> None:
        """Takes in the batch of one step."""
        ...

    def update_in_order(self, index_B: Indices, loss_B: Floats, sizes: Sequence[int]) -> None:
        """Takes in several batches in order."""
        ...


class ScoreMerger:
    """Merges the reports of all ranks: ``merger.report(indices, losses)``.

    Args:
        table: This rank's table; while the merger is open nothing else writes to it.
        batch_size: C, the most samples that one rank reports at once; the same on every rank.
        group: The ranks that train together; None for all. Creating the merger is collective over them.

    Raises:
        ConfigError: ``batch_size`` below 1, or this rank is not in ``group``.
    """

    def __init__(self, table: ReportTable, batch_size: int, group: dist.ProcessGroup | None = None) -> None:
        if batch_size < 1:
            raise ConfigError.of("batch_size ≥ 1", batch_size, "give the batch size of one rank")
        self.table = table
        self.batch_size = batch_size
        self.world_size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
        if self.world_size < 1:
            raise ConfigError.of("a process group that this rank is in", group, "create the merger on its members only")
        self._worker: _Worker | None = None
        self._waiting: list[_HostReport] = []
        self._pid: int | None = os.getpid()
        self.is_closed = False
        """Whether this process has closed it: then nothing waits."""
        if self.world_size > 1:
            ranks = None if group is None else dist.get_process_group_ranks(group)
            # A group of its own never meets the trainer's collectives.
            self._worker = self._start(GlooGroup("the scores", ranks))

    def report(self, index_B: Tensor, loss_B: Tensor) -> None:
        """Takes one batch of losses; they are in the table after the next `flush` at the latest.

        Args:
            index_B: Integer (B,), the indices that the data set returned with the samples. Any device.
            loss_B: Float (B,), any dtype and device, before reduction; left unmodified, and may be changed afterwards.

        Raises:
            ConfigError: Shapes that do not match, or more than ``batch_size`` samples.
            ShadeError: An earlier report failed, or the merger is closed or of another process.
        """
        try:
            on_host = index_B.is_cpu and loss_B.is_cpu
        except AttributeError:
            raise ConfigError.of(
                "two tensors: the indices of a batch, and one loss for each",
                f"{type(index_B).__name__}, {type(loss_B).__name__}",
                "make tensors of lists and arrays (torch.as_tensor), and add up a sample's losses if there are several",
            ) from None
        if on_host and self._worker is None and self._pid == os.getpid():
            self._waiting.append(_host_copy(index_B, loss_B, self.batch_size))
            if len(self._waiting) >= APPLY_EVERY:
                self._apply_waiting()
            return
        self._check_usable()
        if on_host and self._worker is not None:
            self._worker.inbox.put(_host_copy(index_B, loss_B, self.batch_size))
        else:
            _check_shapes(tuple(index_B.shape), tuple(loss_B.shape), self.batch_size)
            if self._worker is None:
                self._apply_waiting()
                self._worker = self._start(SingleProcessGroup())
            self._worker.inbox.put(_device_copy(index_B, loss_B))

    def flush(self) -> None:
        """Returns when all that was reported, here and for the same steps elsewhere, is in the table. Raises ShadeError
        if a report failed; the table holds what came before it."""
        self._check_usable()
        if self._worker is not None:
            reached = threading.Event()
            self._worker.inbox.put(reached)
            reached.wait()
            self._check_usable()
        self._apply_waiting()

    def close(self) -> None:
        """Ends the thread and frees its group; reports under way get 5 seconds. Safe to call twice, and in a child.
        Raises, if there is no thread, the error of a waiting report."""
        if self._pid != os.getpid():
            return
        self._pid, self.is_closed = None, True
        self._apply_waiting()
        if self._worker is not None:
            self._worker.stop()

    def __enter__(self) -> ScoreMerger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table, "batch_size": self.batch_size, "world_size": self.world_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _worker=None, _waiting=[], _pid=None, is_closed=False)

    def _apply_waiting(self) -> None:
        """Applies the waiting reports, in order; one that fails is dropped with those after it."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            index_B, loss_B = _HostReport.join(waiting)
            self.table.update_in_order(index_B, loss_B, [len(report.index_B) // _INT64.itemsize for report in waiting])

    def _start(self, group: RankGroup) -> _Worker:
        """Starts the thread, which ends when the merger is closed or collected."""
        worker = _Worker(self.table, self.batch_size, group)
        # atexit off: what is left at interpreter exit is stopped by `_stop_all`, which waits for it.
        weakref.finalize(self, worker.inbox.put, None).atexit = False
        _started.add(worker)
        return worker

    def _check_usable(self) -> None:
        """Raises an earlier failure, if there was one."""
        # A forked child has the object but not the thread; a pickled copy has neither thread nor group.
        if self._pid != os.getpid():
            raise ShadeError(
                "expected the score merger of this process, got one that is closed or came from another process; "
                "report from the training loop, not from a worker"
            )
        if self._worker is not None and self._worker.error is not None:
            error = self._worker.error
            message = f"merging scores failed ({type(error).__name__}: {error}); scores stopped there"
            raise ShadeError(message) from error


# It has no reference to the merger, so that one can be collected.
class _Worker:
    """The thread's side: everything but the copying."""

    def __init__(self, table: ReportTable, capacity: int, group: RankGroup) -> None:
        self.inbox: queue.SimpleQueue[_Report | threading.Event | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self._table = table
        self._group = group
        self._losses_at = 1 + capacity
        # Two float32 losses fit into one int64 word.
        num_words = 1 + capacity + (capacity + 1) // 2
        self._mine = np.zeros(num_words, dtype=np.int64)
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="shade-score-merger", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after what was queued, and its group with it."""
        if self._process != os.getpid():
            return
        self.inbox.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        """Works through the inbox until None arrives; after an error it only answers flushes."""
        while (item := self.inbox.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self.error is None:
                try:
                    self._absorb(item)
                except Exception as error:  # noqa: BLE001 - handed to the training thread by the next report or flush
                    self.error = error
        # The garbage collector would close the group too late: in a forked child that would wait for gloo's threads,
        # which a child does not have. A thread that does not end is stuck on a rank that is gone, and keeps its group.
        self._group.close()

    def _absorb(self, report: _Report) -> None:
        """Puts one step, of all ranks, into the table."""
        index_B, loss_B = report.arrays()
        if self._group.world_size == 1:
            self._table.update(index_B, loss_B)
            return
        size = len(index_B)
        self._mine[0] = size
        self._mine[1 : 1 + size] = index_B
        self._mine[self._losses_at :].view(np.float32)[:size] = loss_B
        index_parts: list[Indices] = []
        loss_parts: list[Floats] = []
        for words in self._group.gather_fields(self._mine):
            index_parts.append(words[1 : 1 + words[0]])
            loss_parts.append(words[self._losses_at :].view(np.float32)[: words[0]])
        self._table.update(np.concatenate(index_parts), np.concatenate(loss_parts))


_started: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops the threads of mergers that the script has not closed, after the reports that slower ranks wait for."""
    for worker in list(_started):
        worker.stop()


def _check_shapes(index_shape: tuple[int, ...], loss_shape: tuple[int, ...], batch_size: int) -> None:
    if len(index_shape) == 1 and index_shape == loss_shape and index_shape[0] <= batch_size:
        return
    num_losses, num_samples = math.prod(loss_shape), math.prod(index_shape)
    if index_shape == loss_shape and num_samples > batch_size:
        cure = f"report one batch at a time, and give loader and sampler one batch_size, {batch_size}"
    elif num_losses == 1:
        cure = "compute the losses with reduction='none'"
    elif num_samples and num_losses > num_samples and num_losses % num_samples == 0:
        cure = f"average each sample's {num_losses // num_samples}: losses.view(len(indices), -1).mean(1)"
        cure += ", or both views' if the loss has the views one after the other"
    else:
        cure = "report one batch at a time, with all its indices, flat: view(-1)"
    raise ConfigError.of(f"indices and losses of one shape (B,), B ≤ {batch_size}", (index_shape, loss_shape), cure)


def _host_copy(index_B: Tensor, loss_B: Tensor, batch_size: int) -> _HostReport:
    # Arrays say their shapes in a tenth of the time that tensors take.
    index = index_B.numpy()
    if index.dtype is not _INT64:
        index = _require_integers(index_B).to(torch.int64).numpy()
    try:
        loss = loss_B.detach().numpy()
    except TypeError:  # bfloat16
        loss = loss_B.detach().float().numpy()
    if index.ndim != 1 or index.shape != loss.shape or index.size > batch_size:
        _check_shapes(index.shape, loss.shape, batch_size)
    return _HostReport(index.tobytes(), loss.tobytes(), loss.dtype)


def _device_copy(index_B: Tensor, loss_B: Tensor) -> _DeviceReport:
    """Starts copies that later changes to the originals do not reach; nothing waits for the device."""
    index_B, loss_B = _require_integers(index_B).detach(), loss_B.detach()
    if not (index_B.is_cuda or loss_B.is_cuda):
        return _DeviceReport(index_B.clone(), loss_B.clone(), None)
    stream = torch.cuda.current_stream(loss_B.device if loss_B.is_cuda else index_B.device)
    index_B = index_B.to("cpu", non_blocking=True) if index_B.is_cuda else index_B.clone()
    loss_B = loss_B.to("cpu", non_blocking=True) if loss_B.is_cuda else loss_B.clone()
    return _DeviceReport(index_B, loss_B, stream.record_event())


def _require_integers(index_B: Tensor) -> Tensor:
    """Returns the indices, or raises ConfigError if they are not integers."""
    if index_B.is_floating_point() or index_B.is_complex():
        raise ConfigError.of("integer indices", index_B.dtype, "keep indices integers: floats cannot hold large ones")
    return index_B
