"""The tiers of one run, as one rank has them: opened, checked, leased, served by a flusher, and closed.

Own memory is always there. With a store comes cluster memory, with a path comes storage; with both, a flusher process
takes what is in memory to storage, and this process writes there only what memory would not take. Rank 0 alone holds
the lease on the run id, starts the flusher where none serves the store, and retires old snapshots where none does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Sequence

from shade.checkpoint._buffer.shared_memory_folder import check_run_name, flusher_log, sweep_logs
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._commit.process_group import ProcessGroup
from shade.checkpoint._flush.service import mark_begun, mark_ended, serving, start_flusher
from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._save.async_writer import CommitResult
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.run_lock import RunLock
from shade.checkpoint._tiers.storage import StorageTier
from shade.errors import CheckpointError, ConfigError, ShadeError, StorageError, StoreError, StoreUnavailableError
from shade.storage import Volume, open_volume
from shade.store import Store, open_store

STORE_TIMEOUT_SECONDS = 5.0
"""Of a wait for the next bytes: a snapshot can wait longer than a batch of samples."""
POLL_SECONDS = 0.02

logger = logging.getLogger("shade.checkpoint")


class Tiers:
    """What a Checkpointer keeps snapshots in.

    Args:
        stage: Own memory.
        memory: Cluster memory, or None.
        storage: Durable storage, or None.
        keep: What stays in storage.
        is_first: Whether this is rank 0.
        lease: On the run id, held by rank 0; None on the others, and where nothing is shared.
        resources: Closed at the end, in reverse.
    """

    def __init__(
        self,
        stage: SharedMemoryTier,
        memory: MemoryTier | None,
        storage: StorageTier | None,
        keep: Keep,
        *,
        is_first: bool,
        lease: RunLock | None,
        resources: contextlib.ExitStack,
    ) -> None:
        self.stage, self.memory, self.storage = stage, memory, storage
        self._keep, self._is_first, self._lease, self._resources = keep, is_first, lease, resources
        self.reader = Reader([tier for tier in (stage, memory, storage) if tier is not None])

    def time_write(self, num_bytes: int) -> float:
        """Seconds that writing so much takes, to where saves go first; 0 where they stay in own memory.

        Args:
            num_bytes: How much.

        Returns:
            Seconds; nothing is left of what was written.

        Raises:
            StoreError: There is no storage, and memory cannot be written.
            StorageError: Storage cannot be written, nor memory, if there is any.
        """
        if self.memory is not None:
            try:
                return self.memory.time_write(num_bytes)
            except StoreError:
                if self.storage is None:
                    raise
        return 0.0 if self.storage is None else self.storage.time_write(num_bytes)

    def check_lease(self) -> None:
        """Asks before a save whether the run id is still ours.

        Raises:
            RunInUseError: Another process has taken over, because this one stood still for too long.
        """
        if self._lease is not None:
            self._lease.check()

    def landed(self, landing: CommitResult) -> None:
        """Tidies up after a save; called in the courier's thread.

        Args:
            landing: Where it has come to.
        """
        if landing.tier is self.storage and self._is_first:
            self._retire()

    def _retire(self) -> None:
        """Removes from storage what the keep rules let go of."""
        assert self.storage is not None
        try:
            places = {record.digest: (place, record) for place, record in self.storage.held().items()}
            records = [record for _, record in places.values()]
            for record in self._keep.discardable(records, self._building(records)):
                self.storage.discard(places[record.digest][0])
        except StorageError as error:
            logger.warning("old snapshots stay in storage: %s", error)

    def _building(self, records: Sequence[Commit]) -> Iterable[Commit]:
        """What lies in cluster memory: a flusher may be bringing something that builds on what storage has."""
        if self.memory is None or all(record.version == 1 for record in records):
            return ()
        with contextlib.suppress(StoreError):  # nor can a flusher read it
            return self.memory.held().values()
        return ()

    def is_durable(self, landing: CommitResult) -> bool:
        """Whether a save is in storage, or one that was taken after it.

        Args:
            landing: Where it has come to.

        Returns:
            False while a flusher has still to bring it there, or one of the two does not say.
        """
        if landing.tier is self.storage:
            return True
        assert self.memory is not None
        assert self.storage is not None
        try:
            if self.memory.is_dirty(landing.place):
                return False
            return any(record.sequence >= landing.sequence for record in self.storage.held().values())
        except (StoreUnavailableError, StorageError):
            return False

    def wait_durable(self, landing: CommitResult, step: int, timeout_seconds: float | None) -> None:
        """Returns when a save is in storage.

        Args:
            landing: Where it has come to.
            step: Of it.
            timeout_seconds: Longest time to wait; None: as long as it takes.

        Raises:
            CheckpointError: It is not, in time; or never will be, as memory has lost it before.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.is_durable(landing):
            if self._is_lost(landing):
                raise CheckpointError.of(
                    f"step {step} to stay in {landing.tier.name} until it is durable",
                    "neither there nor in storage",
                    "was a server restarted empty? save again; replicas outlive the loss of one",
                )
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointError.of(
                    f"step {step} to be durable within {timeout_seconds} s",
                    f"in {landing.tier.name} only",
                    "see whether its flusher runs (shade checkpoint list)",
                )
            time.sleep(POLL_SECONDS)

    def _is_lost(self, landing: CommitResult) -> bool:
        """Whether memory answers, and has it no more, and storage still has not got it."""
        assert self.memory is not None
        try:
            newest = max((record.sequence for record in self.memory.held().values()), default=-1)
        except StoreError:
            return False
        return newest < landing.sequence and not self.is_durable(landing)

    def close(self, *, keep_buffers: bool) -> None:
        """Lets go of everything.

        Args:
            keep_buffers: Leave own memory, if there is a snapshot in it, for a process that comes after.
        """
        if not keep_buffers and (self.memory is not None or self.storage is not None):
            self.stage.remove()
        elif self.stage.held():
            self.stage.close()
        else:
            self.stage.vacate()
        self._resources.close()


def open_tiers(
    run: str,
    group: ProcessGroup,
    store_url: str | None,
    persist_to: str | None,
    *,
    keep: str,
    slots: int,
    replicas: int,
    parity: tuple[int, int] | None,
    buffers: int,
    wished_replicas: int = 0,
    in_flight: int = 1,
) -> Tiers:
    """Opens what a run keeps its snapshots in. Collective.

    Args:
        run: The run id.
        group: The ranks.
        store_url: As given to `Checkpointer`, like all that follow.
        persist_to: Path or URL.
        keep: Keep rules.
        slots: In cluster memory.
        replicas: Of chunks in cluster memory.
        parity: (k, r), or None.
        buffers: In own memory.
        wished_replicas: Replicas where there is no parity, as far as the cluster has servers for them.
        in_flight: Saves under way at once.

    Returns:
        The tiers.

    Raises:
        ConfigError: On every rank: something of it cannot be, or does not answer.
        RunInUseError: On every rank: another live process saves under this id.
    """
    resources = contextlib.ExitStack()
    opened: Tiers | None = None
    failure: Exception | None = None
    try:
        check_run_name(run)
        stage = SharedMemoryTier(
            run, group.rank, num_buffers=buffers, has_others=store_url is not None or persist_to is not None
        )
        stage.claim()
        resources.callback(stage.close)
        volume = None if persist_to is None else _volume(persist_to)
        store = None if store_url is None else _store(store_url, resources)
        memory = storage = None
        if volume is not None:
            storage = StorageTier(volume, run)
            resources.callback(storage.close)
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
        rules = Keep.parse(keep)
        lease = None
        if group.rank == 0:
            lease = _lead(run, store, volume, resources)
            if store is not None and store_url is not None and persist_to is not None:
                _see_to_flusher(store, store_url, persist_to, run, keep)
            elif storage is not None:
                storage.tidy(is_only_writer=True)  # the lock on the run id, in this storage, is ours
            sweep_logs()
        opened = Tiers(stage, memory, storage, rules, is_first=group.rank == 0, lease=lease, resources=resources)
    except ShadeError as error:
        failure = error
    told = group.gather(None if failure is None else str(failure))
    if failure is not None:
        resources.close()
        raise failure
    for rank, message in enumerate(told):
        if message is not None:
            resources.close()
            raise ConfigError(f"rank {rank}: {message}")
    assert opened is not None
    return opened


def _volume(url: str) -> Volume:
    """Storage that can be written."""
    volume = open_volume(url)
    try:
        volume.ping()
    except StorageError as error:
        volume.close()
        cure = "make it writable, or name another --persist"
        raise ConfigError.of("storage that can be written", f"{volume.url}: {error}", cure) from error
    return volume


def _store(url: str, resources: contextlib.ExitStack) -> Store:
    """A store that answers, and that other processes share."""
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


def _lead(run: str, store: Store | None, volume: Volume | None, resources: contextlib.ExitStack) -> RunLock | None:
    """Takes the run id for this process; announces that the run goes on."""
    keeper = store if store is not None else volume
    lease = None if keeper is None else resources.enter_context(RunLock(keeper, run))
    if store is not None:
        mark_begun(store, run)
        resources.callback(_end, store, run)
    return lease


def _end(store: Store, run: str) -> None:
    with contextlib.suppress(StoreError):  # the flusher will find out by itself, later
        mark_ended(store, run)


def _see_to_flusher(store: Store, store_url: str, persist_to: str, run: str, keep: str) -> None:
    """Starts a flusher on this machine where none serves the run yet."""
    if not serving(store, run):
        process_id = start_flusher(store_url, persist_to, run, keep)
        logger.info("started a flusher for run %s: process %d, log in %s", run, process_id, flusher_log(run))
