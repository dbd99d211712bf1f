"""TrainSession: the part of a training script that is the same in every script.

It sets up the ranks, times the waiting for data, writes a metrics row per epoch and rank, keeps a checkpoint and
resumes from it, and turns a deliberate error into the one line that the launcher shows. What a user should see and copy
(data set, sampler, loss, backward, report) stays in the script.

The checkpoint is one file, written aside and renamed, so it is always whole: after every epoch and at least every
`SAVE_SECONDS` between. Steps are counted by `ShadeSampler.report`, once a step. Before each step the random generators
are set from (seed, step, rank), before each batch's transforms from (seed, epoch, batch); there is no generator state
to save. Invariant: a run killed at any moment and resumed takes the steps it would have taken, from its last checkpoint
on, and on the same number of CPU ranks with the same parameters, bit for bit.

Rank 0 writes the rows of all ranks: the machines need no file system in common. The recorded trace costs eight bytes a
sample an epoch on its disk (1 GB for 90 epochs of ImageNet).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shade.cache.ledger import FIELDS, Ledger
from shade.config import ACCESS_LOG, RUN_FILE, RunConfig
from shade.data.dataset import ShadeDataset
from shade.data.randomness import set_generators
from shade.data.sampler import ShadeSampler
from shade.errors import ConfigError, DataError, ShadeError
from shade.policy.trace import Trace, TraceRecorder
from shade.process import die_with_parent
from shade.telemetry import Histogram, JsonlSink, TensorBoardSink, jsonable, prometheus_text
from shade.types import Stateful

SAVE_SECONDS = 30.0
"""Longest time between two checkpoints: what a kill can cost, against the cost of writing one."""
_PROGRESS_SECONDS = 0.2
TRACE_FILE = "trace.npz"
"""In the run directory: the order of every epoch, for `shade simulate`."""

logger = logging.getLogger("shade.train")


class TrainSession:
    """One rank's part in a run; use as a context manager.

    Args:
        config: The resolved run; `from_environment` reads the launcher's.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{self.local_rank % torch.cuda.device_count()}" if cuda else "cpu")
        self._dataset: ShadeDataset | None = None
        self._sampler: ShadeSampler | None = None
        self._stateful: dict[str, Stateful] = {}
        self._host_group: dist.ProcessGroup | None = None
        self._metrics = JsonlSink(Path(config.out) / "metrics.jsonl") if self.rank == 0 else None
        self._boards = _tensorboard(Path(config.out) / "tensorboard") if self.rank == 0 else None
        self._steps_before = 0
        self._epoch_steps = 0
        self._epoch_ended = False
        self._saved_at = self._progress_at = time.monotonic()
        self._recorder: TraceRecorder | None = None
        self._ledger = Ledger()
        self._waits = Histogram()

    @classmethod
    def from_environment(cls) -> TrainSession:
        """The session of the launcher that started this process.

        Raises:
            ConfigError: There is none.
        """
        path = os.environ.get(RUN_FILE)
        if path is None:
            raise ConfigError.of(
                f"the launcher's {RUN_FILE}", None, "start the script with runshade.py SCRIPT TRAIN_PATH …"
            )
        return cls(RunConfig.load(path))

    def __enter__(self) -> TrainSession:
        logging.basicConfig(format=f"rank {self.rank}: %(message)s", level=logging.INFO, force=True)
        if RUN_FILE in os.environ:
            die_with_parent(os.getppid())
        torch.manual_seed(self.config.seed)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup), "every rank of the world takes part"
            self._host_group = group
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ShadeError):
            (Path(self.config.out) / f"failure-{self.rank}.txt").write_text(_one_line(error) + "\n")
        elif error is None and self._dataset is not None:
            self._write_remainder()
        for thing in (self._sampler, self._dataset, self._metrics, self._boards):
            if thing is not None:
                thing.close()
        if dist.is_initialized() and error is None:
            dist.destroy_process_group()

    # ── what is trained ─────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, dataset: ShadeDataset, sampler: ShadeSampler, **stateful: Stateful) -> None:
        """Takes what has state under its care and, with ``--resume``, brings it back.

        Args:
            dataset: Its cache's ledger goes into the metrics.
            sampler: Its state goes into the checkpoint.
            **stateful: Model, optimizer, scheduler, scaler … by name.
        """
        self._dataset, self._sampler = dataset, sampler
        self._stateful = {"sampler": sampler, **stateful}
        self._ledger = self._ledger_now()
        if self.config.resume:
            state = self._load()
            for name, thing in self._stateful.items():
                thing.load_state_dict(state[name])
            self._epoch_steps = sampler.steps_done
            self._steps_before = state["total_steps"] - sampler.steps_done
            self._epoch_ended = state["epoch_ended"]
        if self.rank == 0:
            self._recorder = self._open_trace(dataset, sampler)

    def _load(self) -> dict[str, Any]:
        """The checkpoint; machine 0 has the file, the other ranks get its bytes."""
        content = torch.empty(0, dtype=torch.uint8)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(self.config.checkpoint.read_bytes()), dtype=torch.uint8)
        if self.world_size > 1:
            length = torch.tensor([len(content)], device=self.device)
            dist.broadcast(length, src=0)
            content = content if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
            content = content.to(self.device)
            dist.broadcast(content, src=0)
        state: dict[str, Any] = torch.load(
            io.BytesIO(content.cpu().numpy().tobytes()), map_location="cpu", weights_only=True
        )
        return state

    def save(self) -> None:
        """Writes the checkpoint now, between two steps. Rank 0 writes; the others return at once."""
        if self.rank != 0:
            return
        state = {name: thing.state_dict() for name, thing in self._stateful.items()}
        path = self.config.checkpoint
        aside = path.with_suffix(".new")
        with aside.open("wb") as file:
            torch.save(state | {"total_steps": self.total_steps, "epoch_ended": self._epoch_ended}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        self._saved_at = time.monotonic()

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────

    def epochs(self) -> Iterator[int]:
        """The epochs still to run; after a resume, first the one that was interrupted.

        One that was interrupted between its last step and `end_epoch` has no batches left, and is ended again.
        """
        assert self._sampler is not None, "attach() comes first"
        first = self._sampler.epoch + self._epoch_ended
        for epoch in range(first, self.config.epochs):
            if self._out_of_steps():
                return
            yield epoch

    @property
    def total_steps(self) -> int:
        """Steps taken in the whole run: those whose losses were reported."""
        if self._sampler is not None and self._sampler.steps_done:
            self._epoch_steps = self._sampler.steps_done
        return self._steps_before + self._epoch_steps

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the loader's batches, and measures how long each was waited for.

        Ends early when ``--steps`` are used up. A checkpoint falls due between two batches.
        """
        sampler, dataset = self._sampler, self._dataset
        assert sampler is not None
        assert dataset is not None
        if sampler.steps_done == 0:
            self._steps_before, self._epoch_steps = self.total_steps, 0
        self._epoch_ended = False
        self._epoch_began, self._wait_seconds = time.monotonic(), 0.0
        self._loss_sum, self._num_correct, self._num_seen = torch.zeros(()), torch.zeros(()), 0
        dataset.generators.follow(self.config.seed, sampler.epoch)
        source = iter(loader)
        taken, recorded = self._epoch_steps, False
        while not self._out_of_steps():
            begun = time.monotonic()
            batch = next(source, None)
            waited = time.monotonic() - begun
            self._wait_seconds += waited
            if batch is None:
                break
            self._waits.observe(waited)
            if self._recorder is not None and not recorded:
                recorded = True
                score_N = sampler.table.scores().score_N if sampler.mode.uses_scores else None
                self._recorder.begin_epoch(sampler.epoch, sampler.order_of(sampler.epoch), score_N)
            set_generators(self.config.seed, self.total_steps, self.rank)
            yield batch
            taken += 1
            self._epoch_steps = max(self._epoch_steps, taken)  # counts scripts, too, that have nothing to report
            if self.local_rank == 0:
                self._show_progress()
            if self.rank == 0 and time.monotonic() - self._saved_at > SAVE_SECONDS:
                self.save()
        if self._out_of_steps():
            self.save()

    def _out_of_steps(self) -> bool:
        return self.config.steps is not None and self.total_steps >= self.config.steps

    def track(self, losses_B: torch.Tensor, correct_B: torch.Tensor) -> None:
        """Adds one step's losses and hits of the target to the epoch's averages, without a device sync."""
        self._loss_sum = self._loss_sum.to(losses_B.device) + losses_B.detach().float().sum()
        self._num_correct = self._num_correct.to(losses_B.device) + correct_B.sum()
        self._num_seen += len(losses_B)

    def end_epoch(
        self, epoch: int, *, val_loss: float | None, val_accuracy: float | None, learning_rate: float
    ) -> None:
        """Writes the epoch's metrics row of every rank, and a checkpoint. All ranks call it together.

        Args:
            epoch: Its number.
            val_loss: Mean over the whole validation set, or None.
            val_accuracy: In [0, 1], or None.
            learning_rate: As used in the epoch.
        """
        sampler, dataset = self._sampler, self._dataset
        assert sampler is not None
        assert dataset is not None
        ledger = self._ledger_since()
        cache, seen = dataset.cache, self._num_seen
        row = self._row(epoch, ledger) | {
            "samples": self._num_seen,
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
            "receipt": vars(sampler.receipt),
        }
        self._write(row)
        self._log_epoch(row)
        self._expose()
        if val_accuracy is not None:
            sampler.report_validation(val_accuracy)
        self._epoch_ended = sampler.steps_done >= sampler.num_steps
        if self._epoch_ended:
            self.save()

    def _write_remainder(self) -> None:
        """Accounts for what was read and not used: the prefetch of a run that was stopped by ``--steps``."""
        assert self._sampler is not None
        ledger = self._ledger_since()
        if any(row["hits"] or row["misses"] for row in self._gather(self._row(self._sampler.epoch, ledger))):
            self._write(self._row(self._sampler.epoch, ledger))

    def _row(self, epoch: int, ledger: Ledger) -> dict[str, Any]:
        assert self._dataset is not None
        row = {"kind": "epoch", "epoch": epoch, "rank": self.rank, "world_size": self.world_size}
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
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._host_group)
        longest = max(int(length) for length in lengths)
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(rows, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=self._host_group)
        return [json.loads(bytes(each[: int(length)].numpy())) for each, length in zip(rows, lengths, strict=True)]

    def _log_epoch(self, row: dict[str, Any]) -> None:
        """A line beside the accesses, for people who look into train.log."""
        path = os.environ.get(ACCESS_LOG)
        if path is None or self.local_rank != 0:
            return
        shown = {"loss": row["loss"], "train_accuracy": row["train_accuracy"], "val_accuracy": row["val_accuracy"]}
        numbers = " ".join(f"{name} {value:.4f}" for name, value in shown.items() if value is not None)
        line = (
            f"epoch {row['epoch']} rank {self.rank} samples {row['samples']} {numbers} {row['epoch_seconds']:.2f} s\n"
        )
        with open(path, "a", encoding="utf-8") as log:
            log.write(line)

    def _expose(self) -> None:
        """The totals so far as a Prometheus page, for a node exporter's textfile collector to pick up."""
        page = prometheus_text(
            {name: count for name, count in self._ledger_now().as_dict().items() if name in FIELDS},
            FIELDS,
            {"wait_seconds": self._waits},
            {"rank": self.rank},
        )
        path = Path(self.config.out) / f"rank{self.rank}.prom"
        path.with_suffix(".new").write_text(page)
        path.with_suffix(".new").replace(path)

    def _ledger_since(self) -> Ledger:
        """What was counted since this was last asked for; every access is in exactly one answer."""
        now = self._ledger_now()
        since, self._ledger = now - self._ledger, now
        return since

    def _ledger_now(self) -> Ledger:
        cache = None if self._dataset is None else self._dataset.cache
        return Ledger() if cache is None else cache.board.totals()

    def _show_progress(self) -> None:
        """A small file that the launcher turns into a progress bar, and that anybody may look at."""
        now = time.monotonic()
        if now - self._progress_at < _PROGRESS_SECONDS:
            return
        self._progress_at = now
        sampler = self._sampler
        assert sampler is not None
        counts = self._ledger_now() - self._ledger
        progress = {
            "epoch": sampler.epoch,
            "step": sampler.steps_done,
            "num_steps": sampler.num_steps,
            "samples_per_second": self._num_seen * self.world_size / max(1e-9, now - self._epoch_began),
            "hit_ratio": counts["hits"] / max(1, counts["samples"]),
            "waiting_fraction": self._wait_seconds / max(1e-9, now - self._epoch_began),
        }
        path = Path(self.config.out) / "progress.json"
        path.with_suffix(".new").write_text(json.dumps(progress))
        path.with_suffix(".new").replace(path)

    def _open_trace(self, dataset: ShadeDataset, sampler: ShadeSampler) -> TraceRecorder:
        """Starts recording for `shade simulate`; a resumed run goes on with what was recorded, if that is whole."""
        path = Path(self.config.out) / TRACE_FILE
        size_bytes_N = dataset.source.payload_bytes_N
        if dataset.cache is not None:
            size_bytes_N = dataset.cache.entry_bytes(size_bytes_N)
        before: Trace | None = None
        if self.config.resume:
            with contextlib.suppress(DataError, ConfigError):
                before = Trace.load(path)
        recorder = TraceRecorder(path, size_bytes_N, sampler.global_batch)
        for epoch, order_K in enumerate(before.orders if before is not None else ()):
            assert before is not None
            recorder.begin_epoch(epoch, order_K, before.score_of(epoch))
        return recorder


def _one_line(error: ShadeError) -> str:
    """The message of an error as one line; one from a worker process comes wrapped in the worker's traceback."""
    text = str(error).strip()
    _, name, message = text.rpartition(f"{type(error).__module__}.{type(error).__qualname__}: ")
    return " ".join((message if name else text).split())


def _tensorboard(folder: Path) -> TensorBoardSink | None:
    """TensorBoard is an extra: a run without it is a whole run."""
    try:
        return TensorBoardSink(folder)
    except ConfigError:
        return None
