"""TrainSession: the part of a training script that is the same in every script.

It sets up the ranks, times the waiting for data, keeps a checkpoint and resumes from it, has the record kept
(`shade.train.record`), and turns a deliberate error into the one line that the launcher shows. What a user should see
and copy (data set, sampler, loss, backward, report) stays in the script.

The checkpoint is one file, written aside and renamed, so it is always whole: after every epoch and at least every
`SAVE_SECONDS` between. Steps are counted by `ShadeSampler.report`, once a step. Before each step the random generators
are set from (seed, step, rank), before each batch's transforms from (seed, epoch, batch); there is no generator state
to save. Invariant: a run killed at any moment and resumed takes the steps it would have taken, from its last checkpoint
on, and on the same number of CPU ranks with the same parameters, bit for bit.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shade.config import RUN_FILE, RunConfig
from shade.data.dataset import ShadeDataset
from shade.data.randomness import set_generators
from shade.data.sampler import ShadeSampler
from shade.errors import ConfigError, ShadeError
from shade.process import die_with_parent
from shade.train.record import RunRecord
from shade.types import Stateful

SAVE_SECONDS = 30.0
"""Longest time between two checkpoints: what a kill can cost, against the cost of writing one."""

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
        self._record: RunRecord | None = None
        self._steps_before = 0
        self._epoch_steps = 0
        self._epoch_ended = False
        self._saved_at = time.monotonic()

    @classmethod
    def from_environment(cls) -> TrainSession:
        """The session of the launcher that started this process.

        Returns:
            The session, not yet entered.

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
        elif error is None and self._record is not None:
            self._record.end_run()
        for thing in (self._sampler, self._dataset, self._record):
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
        if self.config.resume:
            state = self._load()
            for name, thing in self._stateful.items():
                thing.load_state_dict(state[name])
            self._epoch_steps = sampler.steps_done
            self._steps_before = state["total_steps"] - sampler.steps_done
            self._epoch_ended = state["epoch_ended"]
        self._record = RunRecord(self.config, dataset, sampler, self.rank, self.local_rank, self._host_group)

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
        sampler, dataset, record = self._attached()
        if sampler.steps_done == 0:
            self._steps_before, self._epoch_steps = self.total_steps, 0
        self._epoch_ended = False
        record.begin_epoch()
        dataset.generators.follow(self.config.seed, sampler.epoch)
        source = iter(loader)
        taken = self._epoch_steps
        while not self._out_of_steps():
            begun = time.monotonic()
            batch = next(source, None)
            if batch is None:
                break
            record.batch_came(time.monotonic() - begun)
            set_generators(self.config.seed, self.total_steps, self.rank)
            yield batch
            taken += 1
            self._epoch_steps = max(self._epoch_steps, taken)  # counts scripts, too, that have nothing to report
            record.show_progress()
            if self.rank == 0 and time.monotonic() - self._saved_at > SAVE_SECONDS:
                self.save()
        if self._out_of_steps():
            self.save()

    def _out_of_steps(self) -> bool:
        return self.config.steps is not None and self.total_steps >= self.config.steps

    def track(self, losses_B: torch.Tensor, correct_B: torch.Tensor) -> None:
        """Adds one step's losses and hits of the target to the epoch's averages, without a device sync."""
        self._attached()[2].track(losses_B, correct_B)

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
        sampler, _, record = self._attached()
        record.end_epoch(epoch, val_loss=val_loss, val_accuracy=val_accuracy, learning_rate=learning_rate)
        if val_accuracy is not None:
            sampler.report_validation(val_accuracy)
        self._epoch_ended = sampler.steps_done >= sampler.num_steps
        if self._epoch_ended:
            self.save()

    def _attached(self) -> tuple[ShadeSampler, ShadeDataset, RunRecord]:
        assert self._sampler is not None, "attach() comes first"
        assert self._dataset is not None
        assert self._record is not None
        return self._sampler, self._dataset, self._record


def _one_line(error: ShadeError) -> str:
    """The message of an error as one line; one from a worker process comes wrapped in the worker's traceback."""
    text = str(error).strip()
    _, name, message = text.rpartition(f"{type(error).__module__}.{type(error).__qualname__}: ")
    return " ".join((message if name else text).split())
