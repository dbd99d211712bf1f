"""Records what one rank saw of a run, in files that people and tools read.

``metrics.jsonl`` and TensorBoard get a row per epoch and rank, ``train.log`` a line, ``progress.json`` the present
moment for the launcher's bar and `shade top`, ``trace.npz`` the order of every epoch for `shade simulate`, ``losses``
the loss of each sample for `shade quality`, ``trail.jsonl`` the loss of every step for `scripts/certify`.

Invariant: every access is counted in exactly one row.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shade.cache.ledger import Ledger
from shade.config import ACCESS_LOG, RunConfig
from shade.data._dataset.dataset import ShadeDataset
from shade.data._sampler.sampler import ShadeSampler
from shade.errors import ConfigError, DataError
from shade.policy.trace import Trace, TraceRecorder
from shade.process import replacing
from shade.rank_group import RankGroup
from shade.telemetry import Histogram, JsonlSink, TensorBoardSink, jsonable
from shade.tracking.events import emit, listen
from shade.train.exposition import Exposition
from shade.train.trail import TRAIL_FILE, Trail
from shade.trajectory import LOSSES, LossRecorder, Samples

logger = logging.getLogger("shade.train")


def show_note(out: Path, note: str) -> None:
    """Writes what this machine's first rank does before its first step, for the launcher's bar and `shade top`."""
    # No line of progress is worth a run.
    with contextlib.suppress(OSError), replacing(out / "progress.json") as beside:
        beside.write_text(json.dumps({"note": note}), encoding="utf-8")


TRACE_FILE = "trace.npz"
"""In the run directory: the order of every epoch, for `shade simulate`."""
_PROGRESS_SECONDS = 0.2


class RunRecord:
    """Writes one rank's record.

    Args:
        config: The resolved run.
        dataset: The data set; the ledger of its cache is recorded.
        sampler: The sampler; it knows epoch and step.
        rank: This rank.
        local_rank: Its number on this machine.
        host_group: All ranks.
        snapshots: Returns the outcome of the snapshots since its last call.
        gradient: Returns what was exchanged since its last call; empty without an exchange.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: ShadeDataset,
        sampler: ShadeSampler,
        rank: int,
        local_rank: int,
        host_group: RankGroup,
        snapshots: Callable[[], dict[str, Any]],
        gradient: Callable[[], dict[str, float]],
    ) -> None:
        self._out = Path(config.out)
        self._dataset, self._sampler = dataset, sampler
        self._rank, self._local_rank, self._host_group = rank, local_rank, host_group
        self._snapshots, self._gradient = snapshots, gradient
        self._world_size = host_group.world_size
        # Rank 0 writes the rows of all ranks, so that machines need no file system in common.
        self._metrics = JsonlSink(self._out / "metrics.jsonl") if rank == 0 else None
        boards = _tensorboard(self._out / "tensorboard") if rank == 0 else None
        trackers = config.track.split(",") if config.track and rank == 0 else []
        self._listening = listen(*([] if boards is None else [boards]), *trackers)
        # Eight bytes a sample an epoch on the disk: 1 GB for 90 epochs of ImageNet.
        self._recorder = self._open_trace(config.resume) if rank == 0 else None
        self._trail = Trail(self._out / TRAIL_FILE) if rank == 0 else None
        self._losses = LossRecorder(self._out / LOSSES, self._samples) if rank == 0 else None
        self._exposition = Exposition(config, rank, local_rank)
        self._stalls: dict[str, float] = {}
        self._ledger = self._ledger_now()
        self._waits = Histogram()
        self._progress_at = time.monotonic()
        self.begin_epoch()

    # ── while an epoch runs ─────────────────────────────────────────────────────────────────────────────────────────

    def begin_epoch(self) -> None:
        """Starts the epoch's clock and averages."""
        self._epoch_began, self._wait_seconds, self._step_seconds = time.monotonic(), 0.0, 0.0
        self._loss_sum, self._num_correct, self._num_seen = torch.zeros(()), torch.zeros(()), 0
        self._traced = False

    def batch_came(self, waited_seconds: float) -> None:
        """Adds the time that the training waited for a batch."""
        self._wait_seconds += waited_seconds
        self._waits.observe(waited_seconds)
        if self._recorder is not None and not self._traced:
            self._traced = True
            sampler = self._sampler
            self._recorder.begin_epoch(sampler.epoch, sampler.order_of(sampler.epoch), sampler.scores())

    def batch_done(self, seconds: float) -> None:
        """Adds the time that the script worked on a batch."""
        self._step_seconds += seconds

    def track(self, step: int, losses_B: torch.Tensor, correct_B: torch.Tensor) -> None:
        """Adds one step's losses and right answers to the epoch's averages and the trail, without a device sync."""
        loss = losses_B.detach().float().sum()
        if self._trail is not None:
            self._trail.record(step, loss)
        self._loss_sum = self._loss_sum.to(losses_B.device) + loss
        self._num_correct = self._num_correct.to(losses_B.device) + correct_B.sum()
        self._num_seen += len(losses_B)

    def show_progress(self, gauge: Callable[[], dict[str, Any]]) -> None:
        """Writes the file for the launcher's bar and `shade top`; `gauge` returns what `RecoveryEstimate.row` does."""
        if self._exposition.is_due:
            self._expose()
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
            "loss": float(self._loss_sum) / self._num_seen if self._num_seen else None,
            "hit_ratio": counts["hits"] / max(1, counts["samples"]),
            "origin_bytes_per_second": counts["origin_bytes"] / elapsed,
            "num_ranks": self._world_size,
            "origin_reads": counts["origin_reads"],
            "waiting_fraction": self._wait_seconds / elapsed,
            "stall_seconds": counts.stall_seconds(self._wait_seconds),
            "step_seconds": self._step_seconds,
            "cache": None if self._dataset.cache is None else self._dataset.cache.store.url,
            "if_ended_now": gauge(),
        }
        with replacing(self._out / "progress.json") as beside:
            beside.write_text(json.dumps(progress), encoding="utf-8")

    # ── at its end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def end_epoch(
        self, epoch: int, *, val_loss: float | None, val_accuracy: float | None, learning_rate: float
    ) -> None:
        """Writes the epoch's row of every rank; collective. See `TrainSession.end_epoch` for the arguments."""
        self._flush_trail()
        self._keep_losses(epoch)
        ledger, seen = self._ledger_since(), self._num_seen
        cache = self._dataset.cache
        row = self._row(epoch, ledger) | {
            "samples": seen,
            "epoch_seconds": time.monotonic() - self._epoch_began,
            "stall_seconds": ledger.stall_seconds(self._wait_seconds),
            "step_seconds": self._step_seconds,
            "cpus": len(os.sched_getaffinity(0)),
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
            **self._dataset.check_forecast(ledger.as_dict()),
        }
        self._write(row)
        self._log(row)
        for cause, seconds in row["stall_seconds"].items():
            self._stalls[cause] = self._stalls.get(cause, 0.0) + seconds
        self._stalls["step"] = self._stalls.get("step", 0.0) + self._step_seconds
        self._wait_seconds = self._step_seconds = 0.0
        self._exposition.end_epoch(row | _derived(row))
        self._expose()

    def end_run(self) -> None:
        """Writes rows for what came after the last epoch's row: reads, and snapshots. Collective."""
        self._flush_trail()
        row = self._row(self._sampler.epoch, self._ledger_since())
        # Reads that no step used: the prefetch of a run that --steps ended.
        if any(each["hits"] or each["misses"] for each in self._gather(row)):
            self._write(row)
        score_N = None if self._recorder is None else self._sampler.scores()
        if self._recorder is not None and score_N is not None:
            self._recorder.end_run(score_N)
        last = {"kind": "end", "rank": self._rank, "checkpoint": self._snapshots(), "time": time.time()}
        for each in self._gather(last):
            if self._metrics is not None:
                self._metrics.write(each)

    def _flush_trail(self) -> None:
        if self._trail is not None:
            self._trail.flush()

    def close(self) -> None:
        """Closes the files, and the URL. Safe to call twice."""
        self._exposition.close()
        self._listening.close()
        if self._metrics is not None:
            self._metrics.close()

    # ── where it goes ───────────────────────────────────────────────────────────────────────────────────────────────

    def _row(self, epoch: int, ledger: Ledger) -> dict[str, Any]:
        row = {"kind": "epoch", "epoch": epoch, "rank": self._rank, "world_size": self._world_size}
        return row | {"num_samples": len(self._dataset), **ledger.as_dict(), "samples": 0, "time": time.time()}

    def _write(self, row: dict[str, Any]) -> None:
        for each in self._gather(row):
            if self._metrics is not None:
                self._metrics.write(each)
            if self._rank == 0:
                shown = each | _derived(each) | {"kind": "load", "seconds": each.get("epoch_seconds", 0.0)}
                emit(**shown)

    def _gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns every rank's row, in rank order, on every rank."""
        return self._host_group.gather(jsonable(row))

    def _log(self, row: dict[str, Any]) -> None:
        """Appends a line to ``train.log``, beside the accesses."""
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
        """Writes the totals so far, and the present values, to the Prometheus page."""
        ledger = self._ledger_now()
        counts, cache = ledger - self._ledger, self._dataset.cache
        stalls = dict(self._stalls)
        for cause, seconds in counts.stall_seconds(self._wait_seconds).items():
            stalls[cause] = stalls.get(cause, 0.0) + seconds
        steps = stalls.pop("step", 0.0) + self._step_seconds
        elapsed = max(1e-9, time.monotonic() - self._epoch_began)
        now: dict[str, float] = {
            "epoch": self._sampler.epoch,
            "step": self._sampler.steps_done,
            "capacity_bytes": cache.capacity_bytes if cache else 0,
            "resident_bytes": cache.policy.used_bytes if cache and cache.policy else 0,
        }
        if counts["samples"]:
            now["epoch_samples_per_second"] = self._num_seen / elapsed
            now["epoch_hit_ratio"] = counts["hits"] / counts["samples"]
        waits = {f"stall_{cause}_seconds": seconds for cause, seconds in stalls.items()}
        self._exposition.write({**ledger.as_dict(), **waits, "step_seconds": steps}, now, self._waits)

    def _keep_losses(self, epoch: int) -> None:
        """Writes the epoch's loss of every sample, as all ranks reported it."""
        loss_N = None if self._losses is None else self._sampler.take_losses()
        if self._losses is not None and loss_N is not None:
            # No report is worth a training.
            with contextlib.suppress(OSError):
                self._losses.end_epoch(epoch, loss_N)

    def _samples(self) -> Samples:
        source = self._dataset.source
        first = source.name_of(0)
        # A path or a URL, and not a number for want of one.
        is_named = os.path.isabs(first) or "://" in first
        names = map(source.name_of, range(len(self._dataset))) if is_named else ()
        targets = () if source.target_N is None else source.target_N.tolist()
        return Samples(tuple(names), tuple(targets))

    def _ledger_since(self) -> Ledger:
        """Returns the counts since the last call; every access is in exactly one answer."""
        now = self._ledger_now()
        since, self._ledger = now - self._ledger, now
        return since

    def _ledger_now(self) -> Ledger:
        cache = self._dataset.cache
        return Ledger() if cache is None else cache.residency.totals()

    def _open_trace(self, resume: bool) -> TraceRecorder:
        """Returns a recorder of the trace; that of a resumed run continues the recorded trace, if it is whole."""
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


def _derived(row: dict[str, Any]) -> dict[str, float]:
    # TensorBoard cannot divide, and people look for these first.
    seconds, uses = row.get("epoch_seconds"), row["hits"] + row["misses"]
    known = {"hit_ratio": row["hits"] / uses} if uses else {}
    known["origin_reads_per_sample"] = row["origin_reads"] / max(1, row["num_samples"])
    return known | ({"samples_per_second": row["samples"] / seconds} if seconds else {})


def _tensorboard(folder: Path) -> TensorBoardSink | None:
    """Returns a TensorBoard sink, or None if TensorBoard, an extra, is not installed."""
    try:
        return TensorBoardSink(folder)
    except ConfigError:
        return None
