"""Shared by the verbs of ``shade checkpoint``: opens the places to look, chooses a snapshot, writes moments as text."""

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
"""Of a wait for a store's next bytes."""
_logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Verb:
    """One word after ``shade checkpoint``."""

    name: str
    help: str
    """A few words, for the list of verbs."""
    description: str
    epilog: str
    """Examples, and what the output means."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    answer: Callable[[argparse.Namespace], int]


@dataclass
class Places:
    """The tiers of one run that were named, opened."""

    run: str
    reader: Reader
    memory: MemoryTier | None
    storage: StorageTier | None
    is_partial: bool = False
    """Whether a place that was named is silent; the reason was told on standard error."""

    def snapshots(self) -> list[Snapshot]:
        """All that there are, newest first."""
        found = self.reader.snapshots()
        self.is_partial |= bool(self.reader.unreachable)
        return found

    def of_step(self, step: int) -> Snapshot | None:
        """The newest snapshot of a step; if there is none, what steps there are is told on standard error."""
        found = self.snapshots()
        for snapshot in found:
            if snapshot.record.step == step:
                return snapshot
        known = ", ".join(str(snapshot.record.step) for snapshot in found) or "none at all"
        sys.stderr.write(f"no snapshot of step {step} of run {self.run}; there are: {known}\n")
        return None


def add_places(parser: argparse.ArgumentParser) -> None:
    """Adds where to look."""
    where = parser.add_argument_group("where to look")
    where.add_argument("--store", metavar="URL", help="a cluster's memory, as redis+cluster://host:7000")
    where.add_argument("--persist", metavar="URL", help="durable storage: a path, s3://bucket/path, …")
    where.add_argument("--run", metavar="ID", help="whose snapshots (the only run there)")


@contextlib.contextmanager
def opened(given: argparse.Namespace, *, own_memory: bool = False) -> Iterator[Places]:
    """Opens what was named.

    Args:
        given: With the arguments of `add_places`.
        own_memory: Look into this machine's memory too, where the run has left anything there.

    Yields:
        The tiers.

    Raises:
        ConfigError: Nothing was named, nothing is there, or several runs are.
        StoreError: The store does not answer, and its runs have to be known.
        StorageError: The same of storage.
    """
    from shade.checkpoint._restore.reader import Reader
    from shade.checkpoint._tiers.memory import MemoryTier
    from shade.checkpoint._tiers.storage import StorageTier
    from shade.storage import open_volume
    from shade.store import open_store

    if given.store is None and given.persist is None:
        raise ConfigError.of("where to look", "neither --store nor --persist", "name at least one")
    with contextlib.ExitStack() as resources:
        resources.enter_context(_warnings_once())
        store = volume = None
        if given.store is not None:
            store = resources.enter_context(open_store(given.store, timeout_seconds=TIMEOUT_SECONDS))
        if given.persist is not None:
            volume = resources.enter_context(open_volume(given.persist))
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
        own = _own_memory(run) if own_memory else []
        tiers = [*own, *(tier for tier in (memory, storage) if tier is not None)]
        for tier in own:
            resources.callback(tier.close)
        yield Places(run, Reader(tiers), memory, storage, partial)


@contextlib.contextmanager
def _warnings_once() -> Iterator[None]:
    """Shows what the tiers complain of on standard error, each complaint once."""
    told = _Once()
    _logger.addHandler(told)
    try:
        yield
    finally:
        _logger.removeHandler(told)


class _Once(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        if message not in self._said:
            self._said.add(message)
            sys.stderr.write(f"{message}\n")


def _only_run(store: Store | None, volume: Volume | None) -> str:
    from shade.checkpoint._tiers.run_lock import runs_in_store, runs_in_volume

    runs: set[str] = set()
    silent: StoreError | None = None
    if volume is not None:
        runs.update(runs_in_volume(volume))
    if store is not None:
        try:
            runs.update(runs_in_store(store))
        except StoreError as error:
            silent = error
    if len(runs) == 1:
        return runs.pop()
    if silent is not None:
        raise silent
    if not runs:
        looked = " and ".join(each.url for each in (store, volume) if each is not None)
        raise ConfigError.of("snapshots", f"none at all in {looked}", "check the address")
    raise ConfigError.of("one run", ", ".join(sorted(runs)), "choose one with --run")


def _own_memory(run: str) -> list[Tier]:
    from shade.checkpoint._buffer.shared_memory_folder import leftovers
    from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier

    return [SharedMemoryTier(run, 0)] if run in {name for name, _ in leftovers()} else []


def moment(seconds: float) -> str:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
