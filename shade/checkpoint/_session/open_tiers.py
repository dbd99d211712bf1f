"""The tiers of one run, as one rank has them: opened, checked, locked, served by a flusher, and closed.

The shared-memory tier always exists. A store adds cluster memory, a path adds storage; with both, a flusher process
moves snapshots from memory to storage, and this process writes to storage only what memory refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence

from shade.checkpoint._buffer.shared_memory_folder import check_run_name, flusher_log, sweep_logs, sweep_memory
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._commit.protocol import retire
from shade.checkpoint._flush.service import is_served, mark_ended, mark_started, start_flusher
from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._save.async_writer import CommitResult
from shade.checkpoint._tiers import identity
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.run_lock import RunLock
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Tier
from shade.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    ShadeError,
    StorageError,
    StoreError,
    StoreUnavailableError,
)
from shade.rank_group import RankGroup
from shade.storage import Volume, open_volume
from shade.store import Store, open_store

STORE_TIMEOUT_SECONDS = 5.0
"""Longest wait for the next bytes: a snapshot can wait longer than a batch of samples."""
POLL_SECONDS = 0.02
_MEND_SECONDS = 1.0
"""Time between two looks whether a snapshot that is not durable yet is damaged."""
_MEND_TRIES = 5

logger = logging.getLogger("shade.checkpoint")


class Tiers:
    """The tiers that a Checkpointer keeps snapshots in. Rank 0 holds the run lock where anything is shared;
    ``resources`` are closed at the end, in reverse; ``locations`` are URLs of store and storage without passwords."""

    def __init__(
        self,
        shared_memory: SharedMemoryTier,
        memory: MemoryTier | None,
        storage: StorageTier | None,
        keep: Keep,
        *,
        is_first: bool,
        run_lock: RunLock | None,
        resources: contextlib.ExitStack,
        locations: Sequence[str],
    ) -> None:
        self.shared_memory, self.memory, self.storage = shared_memory, memory, storage
        self.locations = locations
        self._known: dict[str, Commit] = {}
        self._keep, self._is_first, self._run_lock, self._resources = keep, is_first, run_lock, resources
        self.reader = Reader([tier for tier in (shared_memory, memory, storage) if tier is not None])

    def time_write(self, num_bytes: int) -> float:
        """Returns the seconds that a write of so many bytes takes to the tier that saves go to first; 0 where they stay
        in shared memory. Raises the tier's error if it cannot be written."""
        if self.memory is not None:
            try:
                return self.memory.time_write(num_bytes)
            except StoreError:
                if self.storage is None:
                    raise
        return 0.0 if self.storage is None else self.storage.time_write(num_bytes)

    def check_run_lock(self) -> None:
        """Raises a RunInUseError if another process has taken the run over while this one stood still."""
        if self._run_lock is not None:
            self._run_lock.check()

    def after_commit(self, result: CommitResult) -> None:
        """Notes that a save lies beyond shared memory, and removes old snapshots; called in a thread of the writer."""
        if result.tier is not self.shared_memory:
            self.shared_memory.note_elsewhere(result.sequence)
        if self.storage is not None and result.tier is self.storage and self._is_first:
            try:
                # Beside cluster memory, its flusher writes here too.
                retire(self.storage, self._keep, self._pending, self._known if self.memory is None else None)
            except StorageError as error:
                logger.warning("old snapshots stay in storage: %s", error)

    def _pending(self) -> Sequence[Commit]:
        # A flusher may be moving one of these, which builds on a snapshot in storage.
        if self.memory is None:
            return ()
        records = [*self.memory.held().values()]
        if self.memory.damaged:
            raise StoreError(f"{self.memory.name}, {', '.join(self.memory.damaged)}")
        return records

    def is_durable(self, result: CommitResult) -> bool:
        """Whether a save, or a later one, is in storage; False also while memory or storage does not answer."""
        if result.tier is self.storage:
            return True
        assert self.memory is not None
        assert self.storage is not None
        try:
            if self.memory.is_dirty(result.location):
                return False
            return any(record.sequence >= result.sequence for record in self.storage.held().values())
        except (StoreUnavailableError, StorageError):
            return False

    def wait_durable(self, result: CommitResult, step: int, timeout_seconds: float | None) -> None:
        """Returns when a save of that step is in storage; a CheckpointError if it is late (None: never), or lost."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        next_look, num_failed = time.monotonic() + _MEND_SECONDS, 0
        while not self.is_durable(result):
            if time.monotonic() > next_look:
                failure = self._mend(result)
                num_failed = 0 if failure is None else num_failed + 1
                # Another rank may have what this one lacks.
                if num_failed == _MEND_TRIES:
                    raise CheckpointError.of(
                        f"step {step} to stay whole in {result.tier.name} until it is durable",
                        failure,
                        "save again; replicas outlive the loss of one server",
                    )
                next_look = time.monotonic() + _MEND_SECONDS
            if self._is_lost(result):
                raise CheckpointError.of(
                    f"step {step} to stay in {result.tier.name} until it is durable",
                    "neither there nor in storage",
                    "was a server restarted empty? save again; replicas outlive the loss of one",
                )
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointError.of(
                    f"step {step} to be durable within {timeout_seconds} s",
                    f"in {result.tier.name} only",
                    "see whether its flusher runs (shade checkpoint list)",
                )
            time.sleep(POLL_SECONDS)

    def _mend(self, result: CommitResult) -> str | None:
        """Repairs, from shared memory, a save that its flusher has found damaged; returns why not where that fails."""
        assert self.memory is not None
        try:
            if not self.memory.is_damaged(result.location):
                return None
            for snapshot in self.reader.snapshots():
                if any((each.tier, each.location) == (self.memory, result.location) for each in snapshot.sources):
                    damages = self.reader.examine(snapshot)
                    self.reader.repair(snapshot, [each for each in damages if each.source.tier is self.memory])
        except CorruptCheckpointError as error:
            with contextlib.suppress(StoreError):
                self.memory.note_damage(result.location)  # what was repaired in part is damaged still
            return str(error)
        except (StoreError, StorageError):  # which may answer again
            pass
        return None

    def _is_lost(self, result: CommitResult) -> bool:
        assert self.memory is not None
        try:
            newest = max((record.sequence for record in self.memory.held().values()), default=-1)
        except StoreError:
            return False
        # Storage after memory: the flusher may have moved the save between the caller's look and this one.
        return newest < result.sequence and not self.is_durable(result)

    def close(self, *, keep_buffers: bool) -> None:
        """Frees all resources; with ``keep_buffers``, a snapshot in shared memory stays for a process that restarts."""
        if not keep_buffers and (self.memory is not None or self.storage is not None):
            self.shared_memory.remove()
        elif self.shared_memory.held() or self.shared_memory.damaged:
            self.shared_memory.close()
        else:
            self.shared_memory.vacate()
        self._resources.close()


def open_tiers(
    run: str,
    group: RankGroup,
    store_url: str | None,
    persist_to: str | os.PathLike[str] | None,
    *,
    keep: str,
    slots: int,
    replicas: int,
    parity: tuple[int, int] | None,
    buffers: int,
    wished_replicas: int = 0,
    in_flight: int = 1,
    is_named: bool = True,
) -> Tiers:
    """Opens the tiers of a run. Collective; the arguments are those of `Checkpointer`. ``wished_replicas`` are copies
    of chunks where there is no parity, as far as the cluster has servers for them; ``is_named`` is whether the caller
    gave the run its id.

    Raises ConfigError on every rank if an argument cannot be honoured or the store or the storage does not answer,
    and RunInUseError on every rank if another live process saves under this id.
    """
    resources = contextlib.ExitStack()
    with _raised_on_all(group, resources):
        check_run_name(run)
        rules = Keep.parse(keep)
        volume = None if persist_to is None else resources.enter_context(_volume(persist_to))
        store = None if store_url is None else _store(store_url, resources)
        storage = None if volume is None else StorageTier(volume, run)
        memory = None
        if store is not None:
            if parity is None:
                replicas = max(replicas, min(wished_replicas, len(store.placement()) - 1))
            memory = MemoryTier(
                store,
                run,
                num_slots=slots,
                replicas=replicas,
                parity=parity,
                flushed=persist_to is not None,
                in_flight=in_flight,
            )
            resources.callback(memory.close)
    locations = [str(each.url) for each in (store, volume) if each is not None]

    def claimed(name: str) -> SharedMemoryTier:
        made = SharedMemoryTier(run, group.rank, identity=name, num_buffers=buffers, has_others=bool(locations))
        made.claim(" and ".join(locations) or " ".join([os.getcwd(), *sys.argv]))
        resources.callback(made.close)
        return made

    name = run_lock = shared_memory = None
    with _raised_on_all(group, resources):
        if group.rank == 0:
            name = identity.of_storage(volume, run) if volume else identity.of_job(run if is_named else None, store_url)
            # Before the lock, which finds out more slowly whether a process of this machine, or this one, has the run.
            shared_memory = None if name is None else claimed(name)
            run_lock = _lock_run(run, store, volume, resources)
            name = name if volume is None else identity.of_storage(volume, run, make=True)
            if memory is not None and volume is not None:
                identity.bind(memory, str(name), volume.url, is_named=is_named)
            if store is not None:
                mark_started(store, run)
                resources.callback(_end, store, run)
    # A rank of its own (DCP's) keeps nothing in shared memory.
    name = group.share(name) or secrets.token_hex(8)
    with _raised_on_all(group, resources):
        shared_memory = shared_memory or claimed(name)
        if group.rank == 0:
            if store is not None and store_url is not None and persist_to is not None:
                _ensure_flusher(store, store_url, os.fspath(persist_to), run, keep)
            elif storage is not None:
                # This process holds the run lock, in this storage.
                storage.tidy(is_only_writer=True)
            sweep_logs()
        sweep_memory()
    assert shared_memory is not None
    return Tiers(
        shared_memory,
        memory,
        storage,
        rules,
        is_first=group.rank == 0,
        run_lock=run_lock,
        resources=resources,
        locations=locations,
    )


@contextlib.contextmanager
def _raised_on_all(group: RankGroup, resources: contextlib.ExitStack) -> Iterator[None]:
    """Raises on every rank what fails on one of them, at the end of the block, and closes what was opened."""
    failure: Exception | None = None
    try:
        yield
    # Raised after the gather: the other ranks wait in it for this rank's outcome.
    except ShadeError as error:
        failure = error
    gathered = group.gather(None if failure is None else str(failure))
    rank = next((rank for rank, message in enumerate(gathered) if message is not None), None)
    if rank is not None:
        resources.close()
        raise failure or ConfigError(f"rank {rank}: {gathered[rank]}")


def open_to_read(
    store_url: str | None, persist_to: str | os.PathLike[str] | None, run: str, resources: contextlib.ExitStack
) -> Reader:
    """Opens cluster memory and storage, at least one of them, for a process that only reads: it takes no lock, and
    writes nothing. ``resources`` receives what is to be closed. Raises ConfigError for an invalid argument, and
    StoreUnavailableError if the store does not answer."""
    check_run_name(run)
    if store_url is None and persist_to is None:
        raise ConfigError.of("a location where snapshots are", "neither store nor persist_to", "name at least one")
    tiers: list[Tier] = []
    if store_url is not None:
        store = resources.enter_context(open_store(store_url, timeout_seconds=STORE_TIMEOUT_SECONDS))
        tiers.append(MemoryTier(store, run))
        resources.callback(tiers[-1].close)
    if persist_to is not None:
        tiers.append(StorageTier(open_volume(persist_to), run))
        resources.callback(tiers[-1].close)
    return Reader(tiers)


def _volume(url: str | os.PathLike[str]) -> Volume:
    volume = open_volume(url)
    try:
        volume.ping()
    except StorageError as error:
        volume.close()
        cure = "make it writable, or name another place; load_weights reads what cannot be written"
        raise ConfigError.of("storage that can be written", f"{volume.url}: {error}", cure) from error
    return volume


def _store(url: str, resources: contextlib.ExitStack) -> Store:
    store = resources.enter_context(open_store(url, timeout_seconds=STORE_TIMEOUT_SECONDS))
    try:
        store.ping()
    except StoreUnavailableError as error:
        cure = "start it (shade cache up), or leave it out to save to storage alone"
        raise ConfigError.of("a store that answers", f"{store.url}: {error}", cure) from error
    if not store.shared or store.url.startswith("local:"):
        cure = "name a server that outlives this process: unix://, redis:// or redis+cluster://"
        raise ConfigError.of("a store for snapshots that other processes reach", store.url, cure)
    return store


def _lock_run(run: str, store: Store | None, volume: Volume | None, resources: contextlib.ExitStack) -> RunLock | None:
    lockable = store if store is not None else volume
    return None if lockable is None else resources.enter_context(RunLock(lockable, run))


def _end(store: Store, run: str) -> None:
    # Without the mark the flusher finds out by itself, later.
    with contextlib.suppress(StoreError):
        mark_ended(store, run)


def _ensure_flusher(store: Store, store_url: str, persist_to: str, run: str, keep: str) -> None:
    if not is_served(store, run):
        process_id = start_flusher(store_url, persist_to, run, keep)
        logger.info("started a flusher for run %s: process %d, log in %s", run, process_id, flusher_log(run))
