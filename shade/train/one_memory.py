"""Divides the servers' memory between samples and snapshots: samples yield to snapshots, never the reverse.

A run resumes from a snapshot; a sample in the cache saves one read. So before a save all ranks together, after the same
step, reduce the cache's capacity by the missing bytes (docs/decisions/0014-one-memory.md). The capacity is set again
when an epoch begins, because a plan is made then anyway:

* A save falls due in the epoch: samples get the memory that is left when that save is in memory.
* None does: slots whose snapshots are in storage, and are not the newest, are emptied, and samples get everything.

Price: at a save one exchange between the ranks and a few requests by rank 0; nothing where the servers are not the
same, or have no limit. Invariant: samples and the snapshot to come fit together when its first byte is sent, or there
are no samples left.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from concurrent.futures import wait
from typing import Final

from shade.cache.cache import SampleCache
from shade.checkpoint._save.async_writer import SaveHandle
from shade.checkpoint._tiers.memory import MemoryTier
from shade.errors import StoreError
from shade.rank_group import current_group

logger = logging.getLogger("shade.train")


_ROUNDS: Final = 5
LANDING_SECONDS: Final = 5.0
"""Longest wait of an epoch's beginning for the save in flight, whose slots may then be emptied."""


class OneMemory:
    """Divides the servers' memory. Collective, as are its methods.

    Args:
        cache: The cache of samples.
        tier: The memory tier of snapshots.
        flushed: Whether a flusher takes snapshots to storage.
    """

    def __init__(self, cache: SampleCache, tier: MemoryTier, *, flushed: bool) -> None:
        self._cache, self._tier, self._flushed = cache, tier, flushed
        self._group = current_group("the memory of samples and snapshots")
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
        # With the room of a save that is due the epoch's plan fits from the start. Slots keep their bytes from save to
        # save: a run that saves often deletes nothing after its first saves.
        self._divide(self._shard_bytes if due else [], at_most=self._cache.capacity_bytes)

    def _empty_slots(self) -> None:
        """Empties slots whose snapshot is in storage, but for the newest and bases of others. No save is in flight."""
        with contextlib.suppress(StoreError):
            held = self._tier.held()
            # What cannot be read may be the newest, or build on another.
            if self._tier.damaged:
                return
            newest = max((record.sequence for record in held.values()), default=0)
            needed = {record.base for record in held.values()}
            for place, record in held.items():
                is_needed = record.sequence >= newest or record.digest in needed
                if self._flushed and not is_needed and not self._tier.is_dirty(place):
                    self._tier.discard(place)

    def _divide(self, shard_bytes: list[int], at_most: int) -> None:
        """Sets the cache's capacity, on all ranks alike."""
        before, num_left = self._cache.allowed_bytes, 0
        # The size of an entry is known to some per cent only, so the servers are asked again after entries were
        # removed.
        for _ in range(_ROUNDS):
            # Only rank 0 looks at the servers, so that the ranks' plans stay equal.
            allowed = self._group.share(self._allowed(shard_bytes, at_most) if self._group.rank == 0 else None)
            # Only `allowed_bytes` decides, because `resize` alone changes it, on all ranks alike. The capacity follows
            # the share among other jobs too, which a thread of each rank learns at its own time: two ranks that decided
            # by it once waited for each other in two collectives.
            if allowed == self._cache.allowed_bytes:
                break
            num_left += self._cache.resize(allowed, self._group.rank, self._group.world_size)
            # Now every rank has removed its part.
            self._group.gather(None)
            at_most = min(at_most, allowed)
        after = self._cache.allowed_bytes
        if after != before and self._group.rank == 0:
            logger.info(
                "the cache may hold %.1f MB now, not %.1f; %d samples left", after / 1e6, before / 1e6, num_left
            )

    def _allowed(self, shard_bytes: list[int], at_most: int) -> int:
        """Returns the bytes that samples may occupy while a snapshot comes in; unchanged if the servers do not say."""
        try:
            spare = self._tier.spare_bytes(shard_bytes)
            counted = self._cache.admission.counted_bytes()
        except (StoreError, ValueError) as error:
            logger.debug("samples keep their room: %s", error)
            return min(at_most, self._cache.allowed_bytes)
        if spare is None or counted + spare >= at_most:
            return at_most
        policy = self._cache.policy
        # Entries that the plan has dropped and workers have not removed yet still take room, so they count twice.
        leaving = max(0, counted - policy.used_bytes) if policy is not None else 0
        return max(0, counted + spare - leaving)

    def close(self) -> None:
        """Closes the process group."""
        self._group.close()
