"""The registry of the jobs that share a cache: one record a job, which its owner rewrites while it lives.

Jobs that train on the same data set (the same fingerprint) meet in the same store. Each has a *slot*: a namespace for
the entries that it brings in. Only the owner of a slot writes or removes entries there; every job reads them. Slot 0 is
the data set's plain namespace: a job that is alone uses the cache as if there were no jobs.

A job has left if its record says so, or does not change for `LEASE_SECONDS`, or if its process was on this machine and
is gone. The living job in the lowest slot then takes its slots over. Two small round trips a beat and job. Invariant:
the claims of living jobs never exceed the capacity, and the bytes in a slot never exceed its owner's claim by more than
a batch a process. Decision 0024 has the races.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import msgspec

from shade.cache.residency_map import ResidencyMap
from shade.errors import ConfigError, StoreUnavailableError
from shade.process import start_of, this_machine
from shade.store.base import Store
from shade.store.keys import SampleKeys
from shade.types import Clock

MAX_JOBS: Final = 16
BEAT_SECONDS: Final = 0.25
LEASE_SECONDS: Final = 10.0
"""Forty beats: a process that the system or a compiler delays for seconds is still alive."""

logger = logging.getLogger("shade.cache")


@dataclass(frozen=True)
class JobRecord:
    """What the owner of a slot says of itself."""

    owner: str
    """Unique to a job; the same under each of its slots."""
    machine: str
    """The machine on which its process id means something."""
    process_id: int
    started: str
    home: int = 0
    """The slot in which it writes; its other slots were left by earlier jobs."""
    beat: int = 0
    has_left: bool = False
    claim_bytes: int = 0
    """Upper bound of its entries now and soon, which other jobs must leave to it."""
    quota_bytes: int = 0
    """What it keeps at most from now on."""
    epoch: int = 0
    num_fetched: int = 0
    """Samples of that epoch that have been fetched: those that stay are in the cache by then."""
    order_epochs: tuple[int, ...] = ()
    """Epochs whose order it has published."""
    group: str = ""
    """The group of jobs that take one stream; empty: none."""

    def to_bytes(self) -> bytes:
        """Returns the record as it is stored."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> JobRecord | None:
        """Reads a record; returns None for anything else."""
        try:
            found = msgspec.json.decode(content, type=cls)
        except (ValueError, RecursionError):
            return None
        counts = (found.process_id, found.home, found.claim_bytes, found.quota_bytes, found.epoch, found.num_fetched)
        return found if 0 <= min(counts) <= max(counts) < 2**63 and found.home < MAX_JOBS else None

    @property
    def has_ended(self) -> bool:
        """Returns whether its owner said so, or was on this machine and is gone."""
        on_this = bool(self.machine) and self.machine == this_machine()
        return self.has_left or (on_this and start_of(self.process_id) != self.started)


_UNREADABLE: Final = JobRecord("", "", 0, "", has_left=True)
"""Stands for a record that cannot be parsed."""


@dataclass(frozen=True)
class SharedCacheView:
    """All slots, as one look found them."""

    living: Mapping[int, JobRecord]
    """Slot → record of a living job; a job with several slots is under each."""
    left: Mapping[int, JobRecord]
    """Slot → record of a job that has left, and whose slot is not taken over yet."""

    def slots_of(self, owner: str) -> list[int]:
        """Returns a job's slots, the one in which it writes first."""
        mine = [slot for slot, record in self.living.items() if record.owner == owner]
        return sorted(mine, key=lambda slot: (slot != self.living[slot].home, slot))

    def others(self, owner: str) -> dict[int, JobRecord]:
        """Returns every other living job, under the slot in which it writes."""
        return {record.home: record for _, record in sorted(self.living.items()) if record.owner != owner}

    def leader_of(self, group: str, owner: str) -> JobRecord | None:
        """Returns the leader of a group, its member in the lowest slot; None if that is ``owner``, or the group is
        empty."""
        homes = {record.home: record for record in self.living.values() if group and record.group == group}
        return None if not homes or homes[min(homes)].owner == owner else homes[min(homes)]


@functools.lru_cache(maxsize=4 * MAX_JOBS)
def slot_keys(fingerprint: str, slot: int) -> SampleKeys:
    """Returns the keys of the entries in a slot; made once a process."""
    return SampleKeys(fingerprint if slot == 0 else f"{fingerprint}.{slot}")


class JobRegistry:
    """One job among those that share a cache. ``namespace`` is the data set's fingerprint, ``group`` the name
    of the jobs that take one stream; without an ``owner`` the job gets a new name."""

    def __init__(
        self, store: Store, namespace: str, owner: str | None = None, group: str = "", clock: Clock = time.monotonic
    ) -> None:
        self._store, self._namespace, self._clock = store, namespace, clock
        keys = slot_keys(namespace, 0)
        self._record_keys = [keys.counter_key(f"job-{slot}") for slot in range(MAX_JOBS)]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self.owner = owner or secrets.token_hex(8)
        pid = os.getpid()
        self.record = JobRecord(self.owner, this_machine(), pid, start_of(pid) or "", group=group)
        """What this job says of itself; the next `beat` publishes it."""

    def order_key(self, slot: int, epoch: int) -> str:
        """Returns the key of the order of a job's epoch."""
        return slot_keys(self._namespace, slot).counter_key(f"order-{epoch}")

    def draw_key(self, slot: int, epoch: int) -> str:
        """Returns the key of a job's draw, for those that read its stream."""
        return slot_keys(self._namespace, slot).counter_key(f"draw-{epoch}")

    def epoch_keys(self, slot: int, epoch: int) -> list[str]:
        """Returns all keys that a job may have published of an epoch."""
        return [self.order_key(slot, epoch), self.draw_key(slot, epoch)]

    def look(self) -> SharedCacheView:
        """Reads every record. Raises StoreError if the store does not answer."""
        contents, now = self._store.get_many(self._record_keys), self._clock()
        living: dict[int, JobRecord] = {}
        left: dict[int, JobRecord] = {}
        for slot, content in enumerate(contents):
            if content is None:
                self._seen.pop(slot, None)
                continue
            record = JobRecord.parse(content) or _UNREADABLE
            known, since = self._seen.get(slot, (b"", now))
            # By this process's clock: those of two machines are never compared.
            if known != content:
                since = now
            self._seen[slot] = (content, since)
            is_silent = record.owner != self.owner and now - since >= LEASE_SECONDS
            (left if record.has_ended or is_silent else living)[slot] = record
        return SharedCacheView(living, left)

    def join(self) -> int:
        """Takes the lowest slot that no living job has, else the lowest that one only looks after, and returns it.

        Raises StoreError if the store does not answer, and ConfigError if all slots are taken.
        """
        while True:
            view = self.look()
            free = [slot for slot in range(MAX_JOBS) if slot not in view.living]
            # Jobs that begin and leave one after the other, as cells do, would each look after the slots of all before.
            looked_after = [slot for slot, record in sorted(view.living.items()) if slot != record.home]
            slot = next(iter(free + looked_after), None)
            if slot is None:
                raise ConfigError.of(f"at most {MAX_JOBS} jobs on one cache", MAX_JOBS + 1, "give the others another")
            self.record = replace(self.record, home=slot)
            content = {self._record_keys[slot]: self.record.to_bytes()}
            # Such a slot goes to the job that writes last; the other finds a foreign name at its next beat and gives
            # up what it had there.
            if slot in view.left or slot in view.living:
                self._store.set_many(content)
                return slot
            # An empty slot goes to the one job whose record was added.
            if self._store.add_many(content)[0]:
                return slot
            if self._store.get_many(list(content)) == [None]:  # no other job added it: its node is away, or full
                raise StoreUnavailableError(f"{self._store.url} does not take this job's record")

    def beat(self) -> SharedCacheView:
        """Rewrites the record under each slot that is still this job's, and looks. Takes over what others have left, if
        this is the first living job; joins again if it has lost its slot. Returns what it found, with its own new
        records.

        Raises StoreError if the store does not answer, and ConfigError if the slot is lost and all others are taken.
        """
        view = self.look()
        self.record = replace(self.record, beat=self.record.beat + 1)
        mine = view.slots_of(self.owner)
        # It was stopped for longer than its lease, or the store was emptied. The new owner's next count finds what its
        # workers wrote meanwhile.
        if self.record.home not in mine:
            mine.insert(0, self.join())
        # One job alone looks after what others left, so that nothing is lost that another wants and nothing stays that
        # no job wants.
        if view.left and min(mine) <= min(view.living, default=MAX_JOBS):
            logger.info("%d jobs have left this cache; what they kept is looked after", len(view.left))
            for slot, record in view.left.items():
                names = [name for epoch in record.order_epochs for name in self.epoch_keys(slot, epoch)]
                self._store.delete_many(names)
            mine += view.left
        self._store.set_many({self._record_keys[slot]: self.record.to_bytes() for slot in mine})
        left = {slot: record for slot, record in view.left.items() if slot not in mine}
        others = {slot: record for slot, record in view.living.items() if slot not in mine}
        return SharedCacheView(others | dict.fromkeys(mine, self.record), left)

    def release(self, slot: int) -> None:
        """Gives back one of this job's slots, not its first, in which nothing is left. Raises StoreError if the store
        fails."""
        self._store.delete_many([self._record_keys[slot]])

    def leave(self) -> None:
        """Says that this job has left; its entries stay for other jobs. Raises StoreError if the store does not answer;
        the record then ends with its lease."""
        mine = self.look().slots_of(self.owner)
        self.record = replace(self.record, has_left=True)
        self._store.set_many({self._record_keys[slot]: self.record.to_bytes() for slot in mine})


class EntryNames:
    """Names of entries in the slots of all jobs that share a cache, as one process sees them.

    A job writes to its first slot. It owns further slots after it took over what another job left, and it reads those
    of all jobs. The residency map holds which slots these are, so workers notice a change.
    """

    def __init__(self, fingerprint: str, residency: ResidencyMap) -> None:
        self.fingerprint, self._residency = fingerprint, residency

    @property
    def keys(self) -> SampleKeys:
        """Returns the keys of the slot in which this job writes."""
        return self.of(self._residency.owned_slots[0])

    @property
    def key_length(self) -> int:
        """Returns the length of the longest key in any slot, so that an entry counts the same wherever it is."""
        return slot_keys(self.fingerprint, MAX_JOBS - 1).key_length

    def of(self, slot: int) -> SampleKeys:
        """Returns the keys of any slot."""
        return slot_keys(self.fingerprint, slot)

    def owned_names(self, indices: Sequence[int]) -> list[str]:
        """Returns every name under which this job may have these samples."""
        return [name for slot in self._residency.owned_slots for name in self.of(slot).many(indices)]

    def lookups(self, own: Sequence[int], elsewhere: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (sample index, slot) for each slot to look in: ``own`` samples in this job's slots first, then those
        ``elsewhere``."""
        residency = self._residency
        mine = [(index, slot) for slot in residency.owned_slots for index in own]
        return mine + [(index, slot) for slot in residency.other_slots for index in elsewhere]

    def names(self, lookups: Iterable[tuple[int, int]]) -> list[str]:
        """Returns the keys of `lookups`."""
        keys = {slot: self.of(slot) for slot in (*self._residency.owned_slots, *self._residency.other_slots)}
        return [keys[slot].key(index) for index, slot in lookups]
