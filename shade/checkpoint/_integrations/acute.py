"""The interface of ACUTE and DASH over this package: three objects, three calls, and a restore.

::

    communicator, train_node, remote_node = shade.init_acute(args)
    …
    train_node.wait_copy_complete()       # before optimizer.step()
    optimizer.step()
    train_node.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch})
    shade.destroy_acute()

ACUTE: IEEE Access 12, pp. 116891–116904, 2024; DASH is the same code under other names. Here the remote node is no rank
but a Redis server and `shade checkpoint flush`, waiting waits, and a run can be restored. Decision 0013.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public all the same
from torch.distributed.rendezvous import rendezvous

from shade.checkpoint._flush.service import is_served
from shade.checkpoint._interchange.export import load_state
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import read_newest
from shade.checkpoint._session.checkpointer import group_of
from shade.checkpoint._session.state_dict_checkpointer import StateDictCheckpointer
from shade.checkpoint._tiers.run_lock import runs_in_store, runs_in_volume
from shade.checkpoint._tiers.storage import StorageTier
from shade.config import CHECKPOINT_URL
from shade.errors import CheckpointError, ConfigError, TornSnapshotError, shown_place
from shade.rank_group import current_group
from shade.storage import open_volume
from shade.store import StoreURL, open_store

PERSIST_TO: Final = "SHADE_PERSIST_TO"
"""Environment variable: path or URL of durable storage, if ``args`` has no ``persist_to``."""
DEFAULT_STORAGE: Final = "checkpoints"
"""Folder under the working directory, if no other is given."""
LEAST_SLOTS: Final = 2
LATEST: Final = "latest"
_DATE: Final = "_%Y-%m-%d-%H%M%S"
_DATE_PATTERN: Final = re.compile(r"_\d{4}-\d{2}-\d{2}-\d{6}")
_PLACE: Final = re.compile(r"(.+)/([^/]+)/step-(\d{10,})(/[^/]*)?")
_OPENMPI: Final = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
}
_MET: Final = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_DEFAULTS: Final[Mapping[str, Any]] = {
    "training_master_addr": "127.0.0.1",
    "training_master_port": "0",
    "remote_buffer_size": LEAST_SLOTS,
    "shard_size": 1,
    "model_name": "user_model",
    "file_name_include_datetime": False,
    "file_save_in_dictionary": False,
    "snapshot_path": None,
    "starting_epoch": 1,
    "store": None,
    "persist_to": None,
}
"""Attributes of ``args`` that are used, with their defaults."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Communicator:
    """The position of this process among the trainers."""

    rank: int
    world_size: int
    local_rank: int
    """Rank on its machine; also the number of its GPU, if there is one."""
    owns_group: bool
    """Whether `init_acute` has initialised torch.distributed, and `destroy_acute` ends it."""

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        dist.barrier()


@dataclass(frozen=True)
class RemoteNode:
    """Describes what takes the snapshots: a store's memory and a flusher; none of it runs in this process."""

    store: str | None
    """URL of the store, its password hidden; None: there is no memory node, snapshots go to storage directly."""
    persist_to: str
    """Path or URL of durable storage, its login hidden."""
    run: str

    @property
    def command(self) -> str:
        """Command for the memory node, unless the trainers start the flusher on theirs; empty without a store."""
        if self.store is None:
            return ""
        return f"shade checkpoint flush {self.store} --persist-to {self.persist_to} --run {self.run}"

    def is_serving(self) -> bool:
        """Returns whether a flusher serves the run; raises StoreError if the store does not answer."""
        if self.store is None:
            return False
        # `self.store` has its password hidden, so it opens nothing that needs one.
        with open_store(os.environ.get(CHECKPOINT_URL, self.store)) as store:
            return is_served(store, self.run)


class TrainNode:
    """Saves and restores on one trainer.

    Args:
        checkpointer: The checkpointer.
        starting_epoch: First epoch if nothing is restored.
    """

    def __init__(self, checkpointer: StateDictCheckpointer, starting_epoch: int) -> None:
        self.checkpointer = checkpointer
        self.starting_epoch = starting_epoch
        """The first epoch to train: the one after the snapshot's, if there is a snapshot."""

    def save(self, state: Mapping[str, Any]) -> None:
        """Saves a state in the background. On every rank, after ``optimizer.step()``.

        The tensors are copied while the next batch is computed: call `wait_copy_complete` before the next step. The
        step is ``step`` or ``epoch`` of the state if it rises, else the last step plus one.

        Args:
            state: Dicts, lists, numbers, strings, arrays and tensors, as in ``state_dict()``.

        Raises:
            ConfigError: Something in it cannot be saved.
        """
        self.wait_copy_complete()
        before = self.checkpointer.step_count
        named = (state.get(name) for name in ("step", "epoch"))
        step = next((number for number in named if type(number) is int and number > before), before + 1)
        self.checkpointer.save_state(dict(state), step)

    def wait_copy_complete(self) -> None:
        """Returns when the state of the last save may change."""
        try:
            self.checkpointer.wait_copy_complete()
        # One refused save must not end the training: later ones copy everything at once.
        except TornSnapshotError as error:
            logger.error("%s; from now on save() waits for the whole copy", error)

    waiting_for_copying = wait_copy_complete
    """The original's other name for it."""

    def wait_committed(self) -> str:
        """Waits until the last save outlives this machine, and returns the name of the tier that holds it."""
        return self.checkpointer.wait_committed()

    def wait_durable(self, timeout_seconds: float | None = None) -> None:
        """Waits until the last save is in storage."""
        self.checkpointer.wait_durable(timeout_seconds)

    def restore(self) -> dict[str, Any] | None:
        """Returns the state that ``snapshot_path`` named, as `save` was given it, and resets the generators.

        Returns:
            The state, tensors on the CPU; None if nothing was named, ``latest`` found nothing, or it was taken.
        """
        return self.checkpointer.state_dict_state.take()


_current: tuple[Communicator, TrainNode] | None = None


def init_acute(args: argparse.Namespace | None = None, **overrides: Any) -> tuple[Communicator, TrainNode, RemoteNode]:
    """Starts, on every rank. Initialises torch.distributed if necessary: NCCL if there are GPUs, else gloo.

    Args:
        args: Object with the original's attributes, all optional: ``training_master_addr``, ``training_master_port``,
            ``remote_buffer_size``, ``shard_size``, ``model_name``, ``file_name_include_datetime``,
            ``file_save_in_dictionary``, ``snapshot_path``, ``starting_epoch``; and ``store``, the URL of the memory
            node (else SHADE_CHECKPOINT), and ``persist_to``, storage (else SHADE_PERSIST_TO, else ./checkpoints).
            Its ``starting_epoch`` is set to the first one to train.
        **overrides: The same by keyword; they take precedence.

    Returns:
        Communicator, train node, remote node: all three on every rank.

    Raises:
        ConfigError: An argument is invalid; see `Checkpointer`.
        CheckpointError: What ``snapshot_path`` names cannot be read.
    """
    global _current
    if _current is not None:
        raise ConfigError.of("one init_acute() at a time", "a second", "call destroy_acute() first")
    unknown = overrides.keys() - _DEFAULTS.keys()
    if unknown:
        raise ConfigError.of(f"some of {', '.join(_DEFAULTS)}", sorted(unknown), "leave the others out")
    given = {**_DEFAULTS, **{name: getattr(args, name) for name in _DEFAULTS if hasattr(args, name)}, **overrides}
    communicator = _init_group(given)
    try:
        node, remote = _open(given)
    except BaseException:
        _destroy_group(communicator)
        raise
    if args is not None:
        args.starting_epoch = node.starting_epoch
    _current = communicator, node
    return communicator, node, remote


init_dash = init_DASH = init_ACUTE = init_acute
"""DASH's name for it, and how the original documentation spells both."""


def destroy_acute() -> None:
    """Ends, on every rank, when all saves are committed; raises CheckpointError if the last save is in no tier. Safe to
    call twice."""
    global _current
    if _current is None:
        return
    (communicator, node), _current = _current, None
    try:
        node.checkpointer.close()
    finally:
        _destroy_group(communicator)


destroy_dash = destroy_DASH = destroy_ACUTE = destroy_acute
"""DASH's name for it, and how the original documentation spells both."""


_met: dict[tuple[str, ...], tuple[Any, int, int]] = {}
"""Store, rank and number of ranks, by the variables that say where to meet. Kept for this process's next group: a rank
that began it on a server which rank 0 has yet to end would wait for ever."""
_num_groups = 0


def _init_group(given: Mapping[str, Any]) -> Communicator:
    """Joins the process group of torchrun's variables, or mpirun's, or makes a group of one."""
    global _num_groups
    owns = not dist.is_initialized()
    for name, theirs in _OPENMPI.items():
        if theirs in os.environ:
            os.environ.setdefault(name, os.environ[theirs])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    if owns:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            os.environ.setdefault("MASTER_ADDR", str(given["training_master_addr"]))
            os.environ.setdefault("MASTER_PORT", str(given["training_master_port"]))
            where = tuple(os.environ.get(name, "") for name in _MET)
            if where not in _met:
                _met[where] = next(rendezvous("env://"))
            store, rank, world_size = _met[where]
            named = dist.PrefixStore(f"shade/acute/{_num_groups}", store)  # type: ignore[attr-defined]
            _num_groups += 1
            dist.init_process_group(backend, store=named, rank=rank, world_size=world_size)
        else:
            # A store in this process: a group of one needs no port, which another job may have.
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return Communicator(dist.get_rank(), dist.get_world_size(), local_rank, owns)


def _destroy_group(communicator: Communicator) -> None:
    if communicator.owns_group and dist.is_initialized():
        dist.destroy_process_group()


def _open(given: Mapping[str, Any]) -> tuple[TrainNode, RemoteNode]:
    slots, shards = int(given["remote_buffer_size"]), int(given["shard_size"])
    if slots < 1 or shards < 1:
        raise ConfigError.of("remote_buffer_size and shard_size of 1 or more", (slots, shards), "raise them")
    if slots < LEAST_SLOTS and dist.get_rank() == 0:
        logger.warning("remote_buffer_size %d is taken as 2: one slot is filled while another holds a snapshot", slots)
    store = given["store"] or os.environ.get(CHECKPOINT_URL)
    persist_to = str(given["persist_to"] or os.environ.get(PERSIST_TO) or DEFAULT_STORAGE)
    if given["file_save_in_dictionary"]:
        persist_to = f"{persist_to.rstrip('/')}/{given['model_name']}"
    dated = bool(given["file_name_include_datetime"])
    run = _run_id(str(given["model_name"]), dated, given["snapshot_path"], store, persist_to)
    checkpointer = StateDictCheckpointer(
        store, persist_to=persist_to, run=run, slots=max(LEAST_SLOTS, slots), keep="all" if dated else "last=2"
    )
    try:
        starting_epoch = _restore_named(checkpointer, given["snapshot_path"], int(given["starting_epoch"]))
    except BaseException:
        checkpointer.close()
        raise
    # What is shown to the user must not hold the password.
    shown = None if store is None else str(StoreURL.parse(store))
    return TrainNode(checkpointer, starting_epoch), RemoteNode(shown, shown_place(persist_to), run)


def _run_id(name: str, dated: bool, snapshot_path: str | None, store: str | None, persist_to: str) -> str:
    """Returns the model's name; with a date: the newest such run to resume, or a new one. Collective."""
    if not dated:
        return name
    # Each rank's clock may give another second, so rank 0's choice is shared.
    chosen = name + time.strftime(_DATE)
    if dist.get_rank() == 0 and snapshot_path == LATEST:
        with open_volume(persist_to) as volume:
            found = set(runs_in_volume(volume))
        if store is not None:
            with open_store(store) as opened:
                found |= set(runs_in_store(opened))
        ours = [run for run in found if run.startswith(name) and _DATE_PATTERN.fullmatch(run[len(name) :])]
        chosen = max(ours, default=chosen)
    with closing(current_group("the run id")) as group:
        return str(group.share(chosen))


def _restore_named(checkpointer: StateDictCheckpointer, snapshot_path: str | None, starting_epoch: int) -> int:
    if snapshot_path is None:
        return starting_epoch
    if snapshot_path == LATEST:
        checkpointer.restore_latest()
    else:
        _restore_path(checkpointer, str(snapshot_path))
    if checkpointer.state_dict_state.loaded is None or not checkpointer.state_dict_state.epoch:
        return starting_epoch
    return checkpointer.state_dict_state.epoch + 1


def _restore_path(checkpointer: StateDictCheckpointer, path: str) -> None:
    """Reads a snapshot's folder, or a file in it, or another program's file, which is not executed."""
    absolute = path if "://" in path else str(Path(path).absolute())
    match = _PLACE.fullmatch(absolute.rstrip("/"))
    if match is None:
        form = "safetensors" if absolute.endswith((".safetensors", ".json")) else "torch"
        state = load_state(Path(absolute), form)
        checkpointer.state_dict_state.loaded = state if isinstance(state, dict) else {"state": state}
        return
    with open_volume(match[1]) as volume:
        found = read_newest(Reader([StorageTier(volume, match[2])]), group_of(checkpointer), step=int(match[3]))
    if found is None:
        raise CheckpointError.of("a committed snapshot", f"none at {path}", "see shade checkpoint list")
    # A rank that the snapshot's run did not have keeps the generators that it was seeded with.
    is_old = group_of(checkpointer).rank < found.record.world_size
    checkpointer.state_dict_state.read(found.tree, found.tensors, with_generators=is_old)
