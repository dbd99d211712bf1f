"""Runs the Checkpointer of a training session, and counts its saves for the metrics.

Without flags, snapshots go into the run directory. Each of several machines has its own, so there rank 0 alone saves
what all ranks hold alike, and sends it to the others when the run resumes. No shared file system is needed, as for
everything else that the session writes.

Where samples and snapshots share servers' memory, samples yield to snapshots, never the reverse. A run resumes from a
snapshot; a sample in the cache saves one read. So before a save all ranks together, after the same step, reduce the
cache's capacity by the missing bytes. The policy names the entries of least use; they are gone before the first byte
of the snapshot is sent, and nothing takes their place. Only rank 0 looks at the servers and shares what it found, so
the ranks' plans stay equal.

The capacity is set again when an epoch begins, because a plan is made then anyway:

* A save falls due in the epoch: samples get the memory that is left when that save is in memory, so that the plan of
  the epoch fits from the start. Slots keep their bytes from save to save: a run that saves often reaches a balance
  after its first saves, and then deletes nothing.
* None does: slots whose snapshots are in storage, and are not the newest, are emptied, and samples get everything.

(docs/decisions/0014-one-memory.md.) If a cluster is full of other data, a save goes to storage; the async writer logs
it. Price: at a save one exchange between the ranks and a few requests by rank 0; nothing where the servers are not the
same, or have no limit. Invariant: samples and the snapshot to come fit together when its first byte is sent, or there
are no samples left.

Story: the capacity of a rank also depends on its job's share among other jobs (`shade.cache.sharing`). A thread of each
rank learns it at its own time. Two ranks once read that here, between two updates; one saw a reason to divide and the
other did not, and each waited for the other in another collective. So only `allowed_bytes` decides: `resize` alone
changes it, on all ranks alike.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import wait
from types import TracebackType
from typing import Any, Final

from shade.cache.cache import SampleCache
from shade.checkpoint._commit.protocol import current_group
from shade.checkpoint._save.async_writer import SaveHandle
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint._tiers.memory import MemoryTier
from shade.config import RunConfig
from shade.errors import ConfigError, StoreError
from shade.types import Stateful

_ROUNDS: Final = 5
LANDING_SECONDS: Final = 5.0
"""Longest wait of an epoch's beginning for the save in flight, whose slots may then be emptied."""

logger = logging.getLogger("shade.train")


class OneMemory:
    """Divides the servers' memory. Collective, as are its methods.

    Args:
        cache: The cache of samples.
        tier: The memory tier of snapshots.
        flushed: Whether a flusher takes snapshots to storage.
    """

    def __init__(self, cache: SampleCache, tier: MemoryTier, *, flushed: bool) -> None:
        self._cache, self._tier, self._flushed = cache, tier, flushed
        self._group = current_group()
        self._shard_bytes: list[int] = []
        self._divided = bool(self._group.share(self._is_one() if self._group.rank == 0 else None))

    def _is_one(self) -> bool:
        """Returns whether samples and snapshots share servers that have a memory limit: writes a key and reads it."""
        key = f"shade:checkpoint:{self._tier.run}:{secrets.token_hex(8)}"
        try:
            if self._tier.spare_bytes(()) is None:
                return False
            self._tier.store.set_many({key: b"here"})
            found = self._cache.store.get_many([key]) == [b"here"]
            self._tier.store.delete_many([key])
        except StoreError as error:
            logger.debug("not known whether samples and snapshots share a memory: %s", error)
            return False
        return found

    def make_room(self, num_bytes: int) -> None:
        """Makes samples yield to this rank's shard. On every rank after the same step, before the save begins."""
        if self._divided:
            self._shard_bytes = self._group.gather(num_bytes)
            self._divide(self._shard_bytes, at_most=self._cache.allowed_bytes)

    def begin_epoch(self, *, due: bool, latest: SaveHandle | None) -> None:
        """Divides the memory for an epoch, with a save due in it or not. On every rank before the epoch is planned."""
        is_whole = self._cache.allowed_bytes == self._cache.capacity_bytes
        if not self._divided or (is_whole and not (due and self._shard_bytes)):
            return
        if not due and self._group.rank == 0 and latest is not None:
            wait([latest.committed], LANDING_SECONDS)
            if latest.committed.done():
                self._empty_slots()
        self._divide(self._shard_bytes if due else [], at_most=self._cache.capacity_bytes)

    def _empty_slots(self) -> None:
        """Empties slots whose snapshot is in storage, but for the newest and bases of others. No save is in flight."""
        with contextlib.suppress(StoreError):
            held = self._tier.held()
            if self._tier.damaged:  # what cannot be read may be the newest, or build on another
                return
            newest = max((record.sequence for record in held.values()), default=0)
            needed = {record.base for record in held.values()}
            for place, record in held.items():
                is_needed = record.sequence >= newest or record.digest in needed
                if self._flushed and not is_needed and not self._tier.is_dirty(place):
                    self._tier.discard(place)

    def _divide(self, shard_bytes: list[int], at_most: int) -> None:
        """Sets the cache's capacity, on all ranks alike.

        The size of an entry is known to some per cent only, so the servers are asked again after entries were removed.
        """
        before, num_left = self._cache.allowed_bytes, 0
        for _ in range(_ROUNDS):
            allowed = self._group.share(self._allowed(shard_bytes, at_most) if self._group.rank == 0 else None)
            if allowed == self._cache.allowed_bytes:
                break
            num_left += self._cache.resize(allowed, self._group.rank, self._group.world_size)
            self._group.gather(None)  # every rank has removed its part
            at_most = min(at_most, allowed)
        after = self._cache.allowed_bytes
        if after != before and self._group.rank == 0:
            logger.info(
                "the cache may hold %.1f MB now, not %.1f; %d samples left", after / 1e6, before / 1e6, num_left
            )

    def _allowed(self, shard_bytes: list[int], at_most: int) -> int:
        """Returns the bytes that samples may occupy while a snapshot comes in; unchanged if the servers do not say.

        Entries that the plan has dropped and workers have not removed yet still take room, so they count twice.
        """
        try:
            spare = self._tier.spare_bytes(shard_bytes)
            counted = self._cache.admission.counted_bytes()
        except (StoreError, ValueError) as error:
            logger.debug("samples keep their room: %s", error)
            return min(at_most, self._cache.allowed_bytes)
        if spare is None or counted + spare >= at_most:
            return at_most
        policy = self._cache.policy
        leaving = max(0, counted - policy.used_bytes) if policy is not None else 0
        return max(0, counted + spare - leaving)

    def close(self) -> None:
        """Closes the process group."""
        self._group.close()


class Snapshots:
    """Saves and restores a run. Collective, as are all its methods.

    Args:
        config: The resolved run; the run id of machine 0 counts.
        things: The objects to save, by name.
        cache: The cache that may share the store with snapshots, or None.

    Raises:
        ConfigError: The places for snapshots cannot be used.
        RunInUseError: Another live process saves under the run's id.
    """

    def __init__(self, config: RunConfig, things: Mapping[str, Stateful], cache: SampleCache | None) -> None:
        group = current_group()
        self._is_elastic = config.min_nodes is not None
        run, resumes = group.share([config.run, config.resume or self._is_elastic])
        self.resumes: bool = resumes
        """Whether the run resumes from a snapshot. Machine 0 decides, because it sees them."""
        group.close()
        self._checkpointer = Checkpointer(
            config.checkpoint_url,
            persist_to=config.persist_to,
            run=run,
            strategy=config.checkpoint_strategy,
            every=config.checkpoint_every,
            keep=config.checkpoint_keep,
            first_rank_saves=config.nodes > 1 and config.keeps_beside,
            make_room=self._make_room,
        )
        self._checkpointer.attach(**things)
        self._checkpointer.watch("SIGTERM", *filter(None, [config.notice]))
        tiers = self._checkpointer.tiers
        self._one_memory = None
        if cache is not None and tiers.memory is not None:
            self._one_memory = OneMemory(cache, tiers.memory, flushed=tiers.storage is not None)
        self._handles: list[SaveHandle] = []
        self._blocked_seconds = 0.0
        self._committed: SaveHandle | None = None
        self._durable_step = 0

    def restore(self) -> int:
        """Restores the newest whole snapshot; returns its step, or 0 for an elastic run without a snapshot.

        Raises `ConfigError` if there is no snapshot, and `CheckpointError`, which says why, if none can be used.
        """
        restored = self._checkpointer.restore_latest()
        if not restored and not self._is_elastic:
            raise ConfigError.of("a checkpoint to resume from", f"none of {self._checkpointer.run}", "start without it")
        return restored.step if restored else 0

    def _make_room(self, num_bytes: int) -> None:
        if self._one_memory is not None:
            self._one_memory.make_room(num_bytes)

    def begin_epoch(self, total_steps: int, num_steps: int) -> None:
        """Divides the memory for an epoch of at most `num_steps` steps, before it is planned."""
        if self._one_memory is not None:
            due = self._checkpointer.is_due(total_steps + num_steps - 1)
            self._one_memory.begin_epoch(due=due, latest=self._checkpointer.latest)

    def step(self, total_steps: int) -> None:
        """Saves if a save is due; call it between two steps, with the steps of the whole run."""
        self._checkpointer.step_count = total_steps - 1
        if self._checkpointer.step():
            self._follow(self._checkpointer.latest)

    def save(self, total_steps: int, metrics: Mapping[str, float] | None = None) -> None:
        """Saves now, with metrics to choose the best snapshot by; returns when the training may continue."""
        self._checkpointer.step_count = total_steps
        self._follow(self._checkpointer.save(metrics))

    def wait_committed(self) -> None:
        """Waits until the newest save outlives this process; raises `CheckpointError` if no tier has it."""
        self._checkpointer.wait_committed()

    def settle(self) -> None:
        """Waits until the newest save is committed or has failed."""
        if self._checkpointer.latest is not None:
            self._checkpointer.wait_copy_complete()
            wait([self._checkpointer.latest.committed])

    def _follow(self, handle: SaveHandle | None) -> None:
        assert handle is not None, "a save was begun"
        self._handles.append(handle)
        handle.committed.add_done_callback(lambda _: self._note_commit(handle))

    def _note_commit(self, handle: SaveHandle) -> None:
        if handle.committed.exception() is None:
            self._committed = handle

    def gauge(self) -> dict[str, Any]:
        """Returns what a failure of each kind would cost now, as `RecoveryEstimate.row` does."""
        return self._checkpointer.recovery_estimate().row()

    def figures(self) -> dict[str, Any]:
        """Returns the outcome of the saves since the last call, and the present steps.

        Returns:
            ``saves``, ``failed`` (nowhere at all), ``blocked_seconds`` (the training waited for them),
            ``committed_step`` (the newest that outlives this machine), ``durable_step`` (in storage), 0 for none, and
            ``if_ended_now``: the `shade.checkpoint._preemption.recovery_estimate.RecoveryEstimate`.
        """
        done = [handle for handle in self._handles if handle.committed.done()]
        blocked_seconds = sum(handle.blocked_seconds for handle in self._handles)
        figures = {
            "saves": len(done),
            "failed": sum(handle.committed.exception() is not None for handle in done),
            "blocked_seconds": blocked_seconds - self._blocked_seconds,
            "committed_step": self._committed.step if self._committed else 0,
            "durable_step": self._durable(),
            "if_ended_now": self.gauge(),
        }
        self._handles = [handle for handle in self._handles if not handle.committed.done()]
        self._blocked_seconds = sum(handle.blocked_seconds for handle in self._handles)
        return figures

    def _durable(self) -> int:
        if self._committed is not None and self._checkpointer.is_durable(self._committed):
            self._durable_step = self._committed.step
        return self._durable_step

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the Checkpointer. After an error shared memory stays, for a restart on this machine.

        Raises `CheckpointError` if there was no error, but no tier has the last save.
        """
        try:
            self._checkpointer.__exit__(kind, error, trace)
        finally:
            if self._one_memory is not None and error is None:
                self._one_memory.close()
