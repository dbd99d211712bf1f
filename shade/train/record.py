"""RunRecord: what one rank saw of a run, written where people and tools look for it.

``metrics.jsonl`` and TensorBoard get a row per epoch and rank, ``train.log`` a line, ``rank<r>.prom`` the totals as a
Prometheus page, ``progress.json`` the present moment for the launcher's bar, ``trace.npz`` the order of every epoch for
`shade simulate`, ``trail.jsonl`` the loss of every step for `shade checkpoint certify`.

Rank 0 writes the rows of all ranks: the machines need no file system in common. The trace costs eight bytes a sample an
epoch on its disk (1 GB for 90 epochs of ImageNet). Invariant: every access is counted in exactly one row.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shade.cache.ledger import FIELDS, Ledger
from shade.checkpoint.certify import TRAIL_FILE, Trail
from shade.config import ACCESS_LOG, RunConfig
from shade.data.dataset import ShadeDataset
from shade.data.sampler import ShadeSampler
from shade.errors import ConfigError, DataError
from shade.policy.trace import Trace, TraceRecorder
from shade.telemetry import Histogram, JsonlSink, TensorBoardSink, jsonable, prometheus_text

TRACE_FILE = "trace.npz"
"""In the run directory: the order of every epoch, for `shade simulate`."""
_PROGRESS_SECONDS = 0.2


class RunRecord:
    """One rank's record.

    Args:
        config: The resolved run.
        dataset: Its cache's ledger is what is recorded.
        sampler: Says which epoch and step it is.
        rank: This rank.
        local_rank: Its number on this machine.
        host_group: A gloo group of all ranks, or None when there is one rank.
        snapshots: What became of the snapshots since it was last asked.
        gradient: What was exchanged since it was last asked; empty where nobody counts.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: ShadeDataset,
        sampler: ShadeSampler,
        rank: int,
        local_rank: int,
        host_group: dist.ProcessGroup | None,
        snapshots: Callable[[], dict[str, Any]],
        gradient: Callable[[], dict[str, float]],
    ) -> None:
        self._out = Path(config.out)
        self._dataset, self._sampler = dataset, sampler
        self._rank, self._local_rank, self._host_group = rank, local_rank, host_group
        self._snapshots, self._gradient = snapshots, gradient
        self._world_size = 1 if host_group is None else host_group.size()
        self._metrics = JsonlSink(self._out / "metrics.jsonl") if rank == 0 else None
        self._boards = _tensorboard(self._out / "tensorboard") if rank == 0 else None
        self._recorder = self._open_trace(config.resume) if rank == 0 else None
        self._trail = Trail(self._out / TRAIL_FILE) if rank == 0 else None
        self._ledger = self._ledger_now()
        self._waits = Histogram()
        self._progress_at = time.monotonic()
        self.begin_epoch()

    # ── while an epoch runs ─────────────────────────────────────────────────────────────────────────────────────────

    def begin_epoch(self) -> None:
        """Starts the epoch's clock and averages."""
        self._epoch_began, self._wait_seconds = time.monotonic(), 0.0
        self._loss_sum, self._num_correct, self._num_seen = torch.zeros(()), torch.zeros(()), 0
        self._traced = False

    def batch_came(self, waited_seconds: float) -> None:
        """A batch was waited for so long."""
        self._wait_seconds += waited_seconds
        self._waits.observe(waited_seconds)
        if self._recorder is not None and not self._traced:
            self._traced = True
            sampler = self._sampler
            score_N = sampler.table.scores().score_N if sampler.mode.uses_scores else None
            self._recorder.begin_epoch(sampler.epoch, sampler.order_of(sampler.epoch), score_N)

    def track(self, step: int, losses_B: torch.Tensor, correct_B: torch.Tensor) -> None:
        """Adds one step's losses and right answers to the epoch's averages and the trail, without a device sync."""
        loss = losses_B.detach().float().sum()
        if self._trail is not None:
            self._trail.note(step, loss)
        self._loss_sum = self._loss_sum.to(losses_B.device) + loss
        self._num_correct = self._num_correct.to(losses_B.device) + correct_B.sum()
        self._num_seen += len(losses_B)

    def show_progress(self, gauge: Callable[[], dict[str, Any]]) -> None:
        """A small file that the launcher turns into a progress bar, and that `shade top` shows.

        Args:
            gauge: What an end would cost now: a row of `shade.checkpoint.gauge.Gauge`.
        """
        now = time.monotonic()
        if self._local_rank != 0 or now - self._progress_at < _PROGRESS_SECONDS:
            return
        self._progress_at = now
        self._flush_trail()
        counts, elapsed = self._ledger_now() - self._ledger, max(1e-9, now - self._epoch_began)
        progress = {
            "epoch": self._sampler.epoch,
            "step": self._sampler.steps_done,
            "num_steps": self._sampler.num_steps,
            "samples_per_second": self._num_seen * self._world_size / elapsed,
            "hit_ratio": counts["hits"] / max(1, counts["samples"]),
            "waiting_fraction": self._wait_seconds / elapsed,
            "if_ended_now": gauge(),
        }
        _replace(self._out / "progress.json", json.dumps(progress))

    # ── at its end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def end_epoch(
        self, epoch: int, *, val_loss: float | None, val_accuracy: float | None, learning_rate: float
    ) -> None:
        """Writes the epoch's row of every rank; collective. See `TrainSession.end_epoch` for the arguments."""
        self._flush_trail()
        ledger, seen = self._ledger_since(), self._num_seen
        cache = self._dataset.cache
        row = self._row(epoch, ledger) | {
            "samples": seen,
            "epoch_seconds": time.monotonic() - self._epoch_began,
            "stall_seconds": ledger.stall_seconds(self._wait_seconds),
            "wait_p50_seconds": self._waits.p50,
            "wait_p99_seconds": self._waits.p99,
            "capacity_bytes": cache.capacity_bytes if cache else 0,
            "resident_bytes": cache.policy.used_bytes if cache and cache.policy else 0,
            "loss": float(self._loss_sum) / seen if seen else None,
            "train_accuracy": float(self._num_correct) / seen if seen else None,
            "val_loss": val_loss,
            "val_accuracy": val_accuracy,
            "learning_rate": learning_rate,
            "receipt": vars(self._sampler.receipt),
            "checkpoint": self._snapshots(),
            "gradient": self._gradient(),
        }
        self._write(row)
        self._log(row)
        self._expose()

    def end_run(self) -> None:
        """Accounts for what was read and not used (the prefetch of a run stopped by ``--steps``), and for the snapshots
        since the last epoch's row. Collective."""
        self._flush_trail()
        row = self._row(self._sampler.epoch, self._ledger_since())
        if any(each["hits"] or each["misses"] for each in self._gather(row)):
            self._write(row)
        last = {"kind": "end", "rank": self._rank, "checkpoint": self._snapshots(), "time": time.time()}
        for each in self._gather(last):
            if self._metrics is not None:
                self._metrics.write(each)

    def _flush_trail(self) -> None:
        if self._trail is not None:
            self._trail.flush()

    def close(self) -> None:
        """Closes the files. Safe to call twice."""
        for sink in (self._metrics, self._boards):
            if sink is not None:
                sink.close()

    # ── where it goes ───────────────────────────────────────────────────────────────────────────────────────────────

    def _row(self, epoch: int, ledger: Ledger) -> dict[str, Any]:
        row = {"kind": "epoch", "epoch": epoch, "rank": self._rank, "world_size": self._world_size}
        return row | {"num_samples": len(self._dataset), **ledger.as_dict(), "samples": 0, "time": time.time()}

    def _write(self, row: dict[str, Any]) -> None:
        for each in self._gather(row):
            if self._metrics is not None:
                self._metrics.write(each)
            if self._boards is not None:
                self._boards.write(each)

    def _gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's row, in rank order, on every rank."""
        if self._host_group is None:
            return [row]
        mine = torch.frombuffer(bytearray(json.dumps(jsonable(row)).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world_size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._host_group)
        longest = max(int(length) for length in lengths)
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(rows, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=self._host_group)
        return [json.loads(bytes(each[: int(length)].numpy())) for each, length in zip(rows, lengths, strict=True)]

    def _log(self, row: dict[str, Any]) -> None:
        """A line beside the accesses, for people who look into train.log."""
        path = os.environ.get(ACCESS_LOG)
        if path is None or self._local_rank != 0:
            return
        shown = {"loss": row["loss"], "train_accuracy": row["train_accuracy"], "val_accuracy": row["val_accuracy"]}
        numbers = " ".join(f"{name} {value:.4f}" for name, value in shown.items() if value is not None)
        line = (
            f"epoch {row['epoch']} rank {self._rank} samples {row['samples']} {numbers} {row['epoch_seconds']:.2f} s\n"
        )
        with open(path, "a", encoding="utf-8") as log:
            log.write(line)

    def _expose(self) -> None:
        """The totals so far as a Prometheus page, for a node exporter's textfile collector to pick up."""
        counts = {name: count for name, count in self._ledger_now().as_dict().items() if name in FIELDS}
        page = prometheus_text(counts, FIELDS, {"wait_seconds": self._waits}, {"rank": self._rank})
        _replace(self._out / f"rank{self._rank}.prom", page)

    def _ledger_since(self) -> Ledger:
        """What was counted since this was last asked for; every access is in exactly one answer."""
        now = self._ledger_now()
        since, self._ledger = now - self._ledger, now
        return since

    def _ledger_now(self) -> Ledger:
        cache = self._dataset.cache
        return Ledger() if cache is None else cache.board.totals()

    def _open_trace(self, resume: bool) -> TraceRecorder:
        """Starts recording; a resumed run goes on with what was recorded, if that is whole."""
        path, dataset = self._out / TRACE_FILE, self._dataset
        size_bytes_N = dataset.source.payload_bytes_N if dataset.cache is None else dataset.cache.size_bytes_N
        before: Trace | None = None
        if resume:
            with contextlib.suppress(DataError, ConfigError):
                before = Trace.load(path)
        recorder = TraceRecorder(path, size_bytes_N, self._sampler.global_batch)
        for epoch, order_K in enumerate(before.orders if before is not None else ()):
            assert before is not None
            recorder.begin_epoch(epoch, order_K, before.score_of(epoch))
        return recorder


def _replace(path: Path, text: str) -> None:
    """Writes a file that readers only ever see whole."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(text)
    aside.replace(path)


def _tensorboard(folder: Path) -> TensorBoardSink | None:
    """TensorBoard is an extra: a run without it is a whole run."""
    try:
        return TensorBoardSink(folder)
    except ConfigError:
        return None
