"""Shared by the verbs of ``shade checkpoint``: opens the locations, chooses a snapshot, writes times as text."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shade.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from shade.checkpoint._restore.reader import Reader, Snapshot
    from shade.checkpoint._tiers.memory import MemoryTier
    from shade.checkpoint._tiers.storage import StorageTier
    from shade.checkpoint._tiers.tier import Tier
    from shade.storage import Volume
    from shade.store import Store

TIMEOUT_SECONDS = 5.0
"""Longest wait for a store's next bytes."""
_logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Verb:
    """A verb of ``shade checkpoint``."""

    name: str
    help: str
    """Short text for the list of verbs."""
    description: str
    epilog: str
    """Examples, and the meaning of the output."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    answer: Callable[[argparse.Namespace], int]


@dataclass
class Locations:
    """The open tiers of one run."""

    run: str
    reader: Reader
    memory: MemoryTier | None
    storage: StorageTier | None
    is_partial: bool = False
    """Whether a named location does not answer; the reason was written to standard error."""

    def snapshots(self) -> list[Snapshot]:
        """Returns all snapshots, newest first."""
        found = self.reader.snapshots()
        self.is_partial |= bool(self.reader.unreachable)
        return found

    def of_step(self, step: int | None) -> Snapshot | None:
        """Returns the newest snapshot of a step, or of all; if there is none, writes the known steps to standard
        error."""
        found = self.snapshots()
        for snapshot in found:
            if step in (None, snapshot.record.step):
                return snapshot
        known = ", ".join(str(snapshot.record.step) for snapshot in found) or "none at all"
        wanted = "" if step is None else f" of step {step}"
        sys.stderr.write(f"no snapshot{wanted} of run {self.run}; there are: {known}\n")
        return None


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a snapshot: a step, or None for the newest."""
    parser.add_argument("step", type=_step, metavar="STEP", help="a step that shade checkpoint list shows, or newest")


def _step(text: str) -> int | None:
    if text == "newest":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a step or newest, got {text!r}")
    return int(text)


def add_locations(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the locations to look."""
    where = parser.add_argument_group("where to look")
    where.add_argument("--store", metavar="URL", help="a cluster's memory, as redis+cluster://host:7000")
    where.add_argument("--persist-to", metavar="URL", help="durable storage: a path, s3://bucket/path, …")
    where.add_argument("--run", metavar="ID", help="id of the run (default: the only run there)")


@contextlib.contextmanager
def opened(given: argparse.Namespace, *, shared_memory: bool = False) -> Iterator[Locations]:
    """Opens the locations that the arguments of `add_locations` name, and this machine's shared memory if asked for
    and the run has left anything there. Raises ConfigError if none was named, or there is no run, or there are
    several; StoreError or StorageError if what is needed to find the runs does not answer."""
    from shade.checkpoint._restore.reader import Reader
    from shade.checkpoint._tiers.memory import MemoryTier
    from shade.checkpoint._tiers.storage import StorageTier
    from shade.storage import open_volume
    from shade.store import open_store

    if given.store is None and given.persist_to is None:
        raise ConfigError.of("where to look", "neither --store nor --persist-to", "name at least one")
    with contextlib.ExitStack() as resources:
        resources.enter_context(_warnings_once())
        store = volume = None
        if given.store is not None:
            store = resources.enter_context(open_store(given.store, timeout_seconds=TIMEOUT_SECONDS))
        if given.persist_to is not None:
            volume = resources.enter_context(open_volume(given.persist_to))
        run = given.run or _only_run(store, volume)
        memory = storage = None
        partial = False
        if store is not None:
            try:
                memory = MemoryTier(store, run)
                resources.callback(memory.close)
            except StoreError as error:
                if volume is None:
                    raise
                partial = True
                _logger.warning("cluster memory cannot be read: %s", error)
        if volume is not None:
            storage = StorageTier(volume, run)
        shared = _shared_memory(run, given) if shared_memory else []
        tiers = [*shared, *(tier for tier in (memory, storage) if tier is not None)]
        for tier in shared:
            resources.callback(tier.close)
        yield Locations(run, Reader(tiers), memory, storage, partial)


@contextlib.contextmanager
def _warnings_once() -> Iterator[None]:
    """Writes the warnings of the tiers to standard error, each once."""
    handler = _Once()
    _logger.addHandler(handler)
    try:
        yield
    finally:
        _logger.removeHandler(handler)


class _Once(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        if message not in self._seen:
            self._seen.add(message)
            sys.stderr.write(f"{message}\n")


def _only_run(store: Store | None, volume: Volume | None) -> str:
    from shade.checkpoint._tiers.run_lock import runs_in_store, runs_in_volume

    runs: set[str] = set()
    store_error: StoreError | None = None
    if volume is not None:
        runs.update(runs_in_volume(volume))
    if store is not None:
        try:
            runs.update(runs_in_store(store))
        except StoreError as error:
            store_error = error
    if len(runs) == 1:
        return runs.pop()
    if store_error is not None:
        raise store_error
    if not runs:
        looked = " and ".join(each.url for each in (store, volume) if each is not None)
        raise ConfigError.of("snapshots", f"none at all in {looked}", "check the address")
    raise ConfigError.of("one run", ", ".join(sorted(runs)), "choose one with --run")


def _shared_memory(run: str, given: argparse.Namespace) -> list[Tier]:
    from shade.checkpoint._buffer.shared_memory_folder import own_folder
    from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
    from shade.checkpoint._tiers import identity

    # What another storage's run has left under this id is not asked for.
    name = identity.find(run, given.store, given.persist_to)
    return [SharedMemoryTier(run, 0, identity=name)] if name and (own_folder(run) / name).is_dir() else []


def moment(seconds: float) -> str:
    """Returns a time in the local time zone as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
