"""Runs the part of a training script that is the same in every script: `TrainSession`.

It sets up the ranks, times the waiting for data, saves snapshots and resumes from them (`shade.train.snapshots`), keeps
the record (`shade.train.record`), and turns a deliberate error into the one line that the launcher shows. What a user
should see and copy (data set, sampler, loss, backward, report) stays in the script.

A snapshot is taken between two steps, when ``--checkpoint-every`` says so, and at every epoch's end; it travels while
the training continues. Invariant: a run that is killed at any moment and resumed takes the steps that it would have
taken, from its last snapshot on, and on the same number of CPU ranks with the same parameters, bit for bit.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shade.config import RUN_FILE, RunConfig
from shade.data._dataset.dataset import ShadeDataset
from shade.data._sampler.sampler import ShadeSampler
from shade.data._transforms.randomness import set_generators
from shade.errors import ConfigError, PeerLostError, ShadeError
from shade.process import die_with_parent
from shade.rank_group import TIMEOUT_SECONDS, RankGroup, SingleProcessGroup, current_group
from shade.train.record import RunRecord, show_note
from shade.train.replica import DenseReplica, Replica, SparseReplica, sparse_optimizer
from shade.train.snapshots import Snapshots
from shade.types import Stateful

logger = logging.getLogger("shade.train")

LOST_SECONDS = 120
"""Silence after which a rank counts as lost, where the run can continue without its machine (``min_nodes``). The end of
a process is noticed at once; this is for a machine that loses its power or its network."""


class _EpochState:
    """State of the present epoch that a snapshot holds besides the sampler's."""

    def __init__(self) -> None:
        self.epoch_ended = False
        """Whether `TrainSession.end_epoch` has run: the next epoch is due, though no step of it was taken."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch_ended = state["epoch_ended"]


class TrainSession:
    """Runs one rank's part of a run; use as a context manager.

    Args:
        config: The resolved run; `from_environment` reads the launcher's.
    """

    def __init__(self, config: RunConfig) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.config = config if config.min_nodes is None else config.shared_by(self.world_size)
        cuda = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{self.local_rank % torch.cuda.device_count()}" if cuda else "cpu")
        self._dataset: ShadeDataset | None = None
        self._sampler: ShadeSampler | None = None
        self._snapshots: Snapshots | None = None
        self._host_group: RankGroup = SingleProcessGroup()
        self._record: RunRecord | None = None
        self._replica: Replica | None = None
        self._steps_before = 0
        self._epoch_steps = 0
        self._epoch_state = _EpochState()
        self._saved: tuple[int, bool] | None = None

    @classmethod
    def from_environment(cls) -> TrainSession:
        """Returns the launcher's session, not yet entered; raises `ConfigError` if no launcher started this process."""
        path = os.environ.get(RUN_FILE)
        if path is None:
            raise ConfigError.of(
                f"the launcher's {RUN_FILE}", None, "start the script with shade run SCRIPT TRAIN_PATH …"
            )
        return cls(RunConfig.load(path))

    def __enter__(self) -> TrainSession:
        try:
            self._enter()
        except ShadeError as error:
            # Python calls `__exit__` only for what comes later, and the launcher is to know.
            self.__exit__(type(error), error, None)
            raise
        return self

    def _enter(self) -> None:
        logging.basicConfig(format=f"rank {self.rank}: %(message)s", level=logging.INFO, force=True)
        if RUN_FILE in os.environ:
            die_with_parent(os.getppid())
        torch.manual_seed(self.config.seed)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            elastic = self.config.min_nodes is not None
            if elastic and self.rank == 0 and self.config.node_rank > 0:
                cure = "number the machines so that -nr 0 is the one whose address comes first"
                raise ConfigError.of("rank 0 on machine 0", f"on machine {self.config.node_rank}", cure)
            timeout = timedelta(seconds=LOST_SECONDS) if elastic else None
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=timeout)
            self._host_group = current_group("the metrics", timeout_seconds=self._timeout_seconds)
            _check_same_flags(self._host_group, self.config)
        self._show_note("building data set and model")

    def _show_note(self, note: str) -> None:
        if self.local_rank == 0 and RUN_FILE in os.environ:
            show_note(Path(self.config.out), note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ShadeError) and not isinstance(
            error, PeerLostError
        ):  # PeerLostError follows from an error elsewhere
            (Path(self.config.out) / f"failure-{self.rank}.txt").write_text(_one_line(error) + "\n")
        try:
            if error is None and self._record is not None:
                self._attached()[3].settle()
                self._record.end_run()
            if self._snapshots is not None:
                self._snapshots.close(kind, error, trace)
        finally:
            for thing in (self._sampler, self._dataset, self._record, self._replica, self._host_group):
                if thing is not None:
                    thing.close()
            if dist.is_initialized() and error is None:
                dist.destroy_process_group()

    # ── what is trained ─────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, dataset: ShadeDataset, sampler: ShadeSampler, **stateful: Stateful) -> None:
        """Registers the objects to save and, with ``--resume``, restores them. On every rank.

        Args:
            dataset: Its cache's ledger goes into the metrics.
            sampler: Its state goes into the snapshots.
            **stateful: Model, optimizer, scheduler, scaler … by name.

        Raises:
            ConfigError: The places for snapshots cannot be used, or there is no snapshot to resume from.
            CheckpointError: No snapshot fits, or none is whole.
        """
        self._dataset, self._sampler = dataset, sampler
        if self._replica is not None and self._exchanges:
            stateful["replica"] = self._replica
        self._snapshots = Snapshots(
            self.config, {"sampler": sampler, **stateful, "session": self._epoch_state}, dataset.cache
        )
        if self._snapshots.resumes:
            self._show_note("restoring the newest snapshot")
            total_steps = self._snapshots.restore()
            self._epoch_steps = sampler.steps_done
            self._steps_before = total_steps - sampler.steps_done
            self.config = replace(self.config, resume=total_steps > 0)
        self._record = RunRecord(
            self.config,
            dataset,
            sampler,
            self.rank,
            self.local_rank,
            self._host_group,
            self._snapshots.figures,
            self._replica.figures if self._replica is not None else dict,
        )
        self._show_note("loading the first batch")

    def optimizer(self, kind: type[torch.optim.Optimizer], *parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        """Returns an optimizer: of this class, or under ``--gradient`` its counterpart for sparse gradients.

        Args:
            kind: A class of ``torch.optim``.
            *parameters: Positional arguments of the class.
            **settings: Keyword arguments of the class.

        Returns:
            The optimizer.

        Raises:
            ConfigError: The class has no sparse counterpart, or not with these settings.
        """
        return (sparse_optimizer(kind) if self._exchanges else kind)(*parameters, **settings)

    def replica(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
    ) -> Replica:
        """Returns this rank's replica of the model; call it before `attach`, which saves the replica too.

        Args:
            model: On `device`.
            optimizer: An optimizer from `optimizer`.
            scaler: Scaler of mixed precision; may be disabled.

        Returns:
            DDP, or under ``--gradient`` the gradient engine.

        Raises:
            ConfigError: On all ranks: a setting is out of range, or the ranks' models differ.
        """
        if self._exchanges:
            host = self.config.master_address if self.config.nodes > 1 else "127.0.0.1"
            timeout = self._timeout_seconds
            self._replica = SparseReplica(model, optimizer, scaler, self.config, host, timeout)
        else:
            self._replica = DenseReplica(model, optimizer, scaler)
        return self._replica

    @property
    def _timeout_seconds(self) -> float:
        return TIMEOUT_SECONDS if self.config.min_nodes is None else LOST_SECONDS

    @property
    def _exchanges(self) -> bool:
        return self.config.gradient is not None and self.world_size > 1

    def save(self) -> None:
        """Saves between two steps, on every rank, until it outlives this process; raises `CheckpointError` if no
        tier has it."""
        snapshots = self._attached()[3]
        self._begin_save(again=True)
        snapshots.wait_committed()

    def _begin_save(self, metrics: Mapping[str, float] | None = None, *, again: bool = False) -> None:
        """Begins a save, unless this moment has a snapshot already."""
        moment = (self.total_steps, self._epoch_state.epoch_ended)
        if again or moment != self._saved:
            self._attached()[3].save(self.total_steps, metrics)
            self._saved = moment

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────

    def epochs(self) -> Iterator[int]:
        """Yields the epochs still to run; after a resume, first the interrupted one."""
        assert self._sampler is not None, "attach() comes first"
        # An epoch that was interrupted between its last step and `end_epoch` has no batches left, and is ended again.
        first = self._sampler.epoch + self._epoch_state.epoch_ended
        for epoch in range(first, self.config.epochs):
            if self._out_of_steps():
                return
            yield epoch

    @property
    def total_steps(self) -> int:
        """Returns the steps of the whole run whose losses were reported."""
        # steps_done has the batch that the loop is in, until a loss of the pass is reported.
        if self._sampler is not None and self._sampler.place.steps_reported:
            self._epoch_steps = self._sampler.place.steps_reported
        return self._steps_before + self._epoch_steps

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the loader's batches, and measures how long each was waited for; ends early when ``--steps`` are used
        up."""
        sampler, dataset, record, snapshots = self._attached()
        if sampler.place.steps_reported == 0:
            self._steps_before, self._epoch_steps = self.total_steps, 0
        self._epoch_state.epoch_ended = False
        record.begin_epoch()
        snapshots.begin_epoch(self.total_steps, -(-sampler.num_samples // sampler.global_batch))
        dataset.generators.follow(self.config.seed, sampler.epoch)
        source = iter(loader)
        taken = self._epoch_steps
        while not self._out_of_steps():
            begun = time.monotonic()
            batch = next(source, None)
            if batch is None:
                break
            came = time.monotonic()
            record.batch_came(came - begun)
            # Whatever a snapshot says of the generators, so that a run may resume with other ranks.
            set_generators(self.config.seed, self.total_steps, self.rank)
            yield batch
            record.batch_done(time.monotonic() - came)
            taken += 1
            # A script may have nothing to report.
            self._epoch_steps = max(self._epoch_steps, taken)
            record.show_progress(snapshots.gauge)
            # The step before is over, the next one has not begun.
            snapshots.step(self.total_steps)
        if self._out_of_steps():
            self._begin_save()

    def _out_of_steps(self) -> bool:
        return self.config.steps is not None and self.total_steps >= self.config.steps

    def track(self, losses_B: torch.Tensor, correct_B: torch.Tensor) -> None:
        """Adds one step's losses and right answers to the epoch's averages and the trail, without a device sync."""
        self._attached()[2].track(self.total_steps, losses_B, correct_B)

    def end_epoch(
        self, epoch: int, *, val_loss: float | None, val_accuracy: float | None, learning_rate: float
    ) -> None:
        """Writes the epoch's metrics row of every rank, and begins a snapshot. All ranks call it together.

        The validation figures are over the whole validation set, the accuracy in [0, 1].
        """
        sampler, _, record, _ = self._attached()
        record.end_epoch(epoch, val_loss=val_loss, val_accuracy=val_accuracy, learning_rate=learning_rate)
        if val_accuracy is not None:
            sampler.report_validation(val_accuracy)
        self._epoch_state.epoch_ended = sampler.steps_done >= sampler.num_steps
        if self._epoch_state.epoch_ended:
            measured = {"val_loss": val_loss, "val_accuracy": val_accuracy}
            self._begin_save({name: value for name, value in measured.items() if value is not None})

    def _attached(self) -> tuple[ShadeSampler, ShadeDataset, RunRecord, Snapshots]:
        assert self._sampler is not None, "attach() comes first"
        assert self._dataset is not None
        assert self._record is not None
        assert self._snapshots is not None
        return self._sampler, self._dataset, self._record, self._snapshots


_FLAGS = {"nodes": "-n", "processes": "-g", "working_set_fraction": "-wss", "replication_factor": "-rep"}
"""What is typed for settings whose flag has another name."""
_PLACES = ("val_paths", "cache", "checkpoint", "persist_to")
"""Settings that may name other places on other machines, but must be there on all or on none."""
_OWN = (
    *("out", "script", "train_paths", "node_rank", "master_address", "master_port", "master_socket", "workers", "disk"),
    *("resume", "run", "profile", "restarts", "notice", "metrics_port"),
)
"""Settings that each machine may have for itself, or that machine 0 decides."""


def _check_same_flags(group: RankGroup, config: RunConfig) -> None:
    """Raises `ConfigError`, on every rank, if a machine was started with another plan than the first. Collective."""
    plan = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _OWN}
    plan |= {name: "given" if plan[name] and plan[name] != "none" else "left out" for name in _PLACES}
    plans = group.gather([config.node_rank, plan])
    (_, first), *others = plans
    for machine, theirs in others:
        for name, value in first.items():
            if theirs[name] != value:
                flag = _FLAGS.get(name, f"--{name}")
                expected = f"{flag} on all machines to be as on machine 0, {value!r}"
                raise ConfigError.of(expected, f"{theirs[name]!r} on machine {machine}", "type the same flags on each")


def _one_line(error: ShadeError) -> str:
    """Returns the message of an error as one line; an error of a worker process contains the worker's traceback."""
    text = str(error).strip()
    _, name, message = text.rpartition(f"{type(error).__module__}.{type(error).__qualname__}: ")
    return " ".join((message if name else text).split())
