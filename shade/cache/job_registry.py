"""Who shares a cache: one note a job, which its owner keeps changing while it lives.

Jobs that train on the same data set (the same fingerprint) meet in the same store. Each has a *slot*: a namespace of
its own for the entries it brings in. Only the owner of a slot writes or removes what is in it; everybody reads. So
nobody has to agree with anybody before a write, no entry has two accounts, and what a dead job has left is exactly
what lies in its slot. Slot 0 is the data set's plain namespace: a job that is alone uses the cache as if there were no
jobs.

Under each slot lies a note: who owns it, how far that job has come, what it may keep. It is written again every beat.

* A note that does not change for `LEASE_SECONDS`, or whose process was on this machine and is gone, or that says so
  itself, is that of a job that has left. Clocks of two machines are never compared.
* What a job has left goes to the living job in the lowest slot: it writes its own name under that slot, and from then
  on these entries are its own, to keep or to remove as its plan says. Nothing is lost that others still want, and
  nothing stays that nobody wants.
* A job may keep `capacity / jobs`. One that wants more than it has claims it first, looks then, and takes it only if
  all claims together fit: of two that do so at the same time, at least one sees the other.

Stories: 1. *Two take the same slot.* An empty one goes to whoever added the note. A left one to whoever wrote last; the
other finds a name that is not its own at its next beat, gives up what it had there, and takes another slot. 2. *A job
is stopped for longer than its lease* and goes on: the same. What its workers write until they know is no longer theirs;
the new owner finds it when it counts. 3. *The store is emptied.* Everybody writes its note again at the next beat.

Price: two small round trips a beat and job. Invariant: the claims of living jobs never exceed the capacity, and bytes
in a slot never exceed its owner's claim by more than a batch a process.

The names of entries, in the slots of all jobs that share a cache: see `shade.cache.job_registry`.

A job writes in its first slot. It owns others, too, once it has taken over what another job left, and it looks into
those of all jobs. Which ones these are is on the board, so that workers follow when it changes.
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

from shade.cache.residency_map import ResidencyMap
from shade.errors import ConfigError, StoreUnavailableError
from shade.process import start_of, this_machine
from shade.store.base import Store
from shade.store.keys import SampleKeys
from shade.types import Clock

MAX_JOBS: Final = 16
BEAT_SECONDS: Final = 0.25
LEASE_SECONDS: Final = 10.0
"""Forty beats: a process that the system or a compiler holds up for seconds is still alive."""

logger = logging.getLogger("shade.cache")


@dataclass(frozen=True)
class JobRecord:
    """What the owner of a slot says of itself."""

    owner: str
    """Unique to a job; under each slot that it has."""
    machine: str
    """Where its process id means something."""
    process_id: int
    started: str
    home: int = 0
    """The slot in which it writes; others that it owns were left by jobs before."""
    beat: int = 0
    has_left: bool = False
    claim_bytes: int = 0
    """What its entries may come to, or still come to: what others have to leave to it."""
    quota_bytes: int = 0
    """What it keeps at most from now on."""
    epoch: int = 0
    num_fetched: int = 0
    """Samples of that epoch that have been fetched: by then they are in the cache, if they are to be."""
    order_epochs: tuple[int, ...] = ()
    """Epochs whose order it has published."""
    group: str = ""
    """Of jobs that follow one stream; empty: none."""

    def to_bytes(self) -> bytes:
        """As it is kept."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> JobRecord | None:
        """Reads one; None for anything else."""
        try:
            fields = json.loads(content)
            return cls(**{**fields, "order_epochs": tuple(fields["order_epochs"])})
        except (ValueError, TypeError, KeyError):
            return None

    @property
    def has_ended(self) -> bool:
        """Whether its owner said so, or was on this machine and is no more."""
        on_this = bool(self.machine) and self.machine == this_machine()
        return self.has_left or (on_this and start_of(self.process_id) != self.started)


_UNREADABLE: Final = JobRecord("", "", 0, "", has_left=True)
"""Where a note is not to be read."""


@dataclass(frozen=True)
class SharedCacheView:
    """All slots, as one look found them."""

    living: Mapping[int, JobRecord]
    """Slot → note of a job that lives; a job with several slots is there under each."""
    left: Mapping[int, JobRecord]
    """Slot → note of a job that has left, and that nobody has taken yet."""

    def slots_of(self, owner: str) -> list[int]:
        """A job's slots, the one in which it writes first."""
        mine = [slot for slot, record in self.living.items() if record.owner == owner]
        return sorted(mine, key=lambda slot: (slot != self.living[slot].home, slot))

    def others(self, owner: str) -> dict[int, JobRecord]:
        """Every other living job, under the slot in which it writes."""
        return {record.home: record for _, record in sorted(self.living.items()) if record.owner != owner}

    def leader_of(self, group: str, owner: str) -> JobRecord | None:
        """Whose stream a job follows: that of the first of its group; None where it leads, or is in none."""
        homes = {record.home: record for record in self.living.values() if group and record.group == group}
        return None if not homes or homes[min(homes)].owner == owner else homes[min(homes)]


@functools.lru_cache(maxsize=4 * MAX_JOBS)
def slot_keys(fingerprint: str, slot: int) -> SampleKeys:
    """The names of the entries in a slot.

    Args:
        fingerprint: Of the data set.
        slot: 0 is the data set's plain namespace.

    Returns:
        The keys; made once a process.
    """
    return SampleKeys(fingerprint if slot == 0 else f"{fingerprint}.{slot}")


class JobRegistry:
    """One job's place among those that share a cache.

    Args:
        store: The cache's.
        namespace: Fingerprint of the data set.
        owner: The name of this job; a new one when None.
        group: Of jobs that follow one stream.
        clock: Monotonic seconds.
    """

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
        """What this job says of itself; the next `beat` says it to all."""

    def order_key(self, slot: int, epoch: int) -> str:
        """Where the order of a job's epoch lies."""
        return slot_keys(self._namespace, slot).counter_key(f"order-{epoch}")

    def draw_key(self, slot: int, epoch: int) -> str:
        """Where its draw lies, for those who follow."""
        return slot_keys(self._namespace, slot).counter_key(f"draw-{epoch}")

    def epoch_keys(self, slot: int, epoch: int) -> list[str]:
        """All that a job may have published of an epoch."""
        return [self.order_key(slot, epoch), self.draw_key(slot, epoch)]

    def look(self) -> SharedCacheView:
        """Reads every note.

        Returns:
            The view.

        Raises:
            StoreError: The store does not answer.
        """
        contents, now = self._store.get_many(self._record_keys), self._clock()
        living: dict[int, JobRecord] = {}
        left: dict[int, JobRecord] = {}
        for slot, content in enumerate(contents):
            if content is None:
                self._seen.pop(slot, None)
                continue
            record = JobRecord.parse(content) or _UNREADABLE
            known, since = self._seen.get(slot, (b"", now))
            if known != content:
                since = now
            self._seen[slot] = (content, since)
            is_silent = record.owner != self.owner and now - since >= LEASE_SECONDS
            (left if record.has_ended or is_silent else living)[slot] = record
        return SharedCacheView(living, left)

    def join(self) -> int:
        """Takes the lowest slot that nobody living has.

        Returns:
            The slot.

        Raises:
            StoreError: The store does not answer.
            ConfigError: All are taken.
        """
        while True:
            view = self.look()
            slot = next((slot for slot in range(MAX_JOBS) if slot not in view.living), None)
            if slot is None:
                raise ConfigError.of(f"at most {MAX_JOBS} jobs on one cache", MAX_JOBS + 1, "give the others another")
            self.record = replace(self.record, home=slot)
            content = {self._record_keys[slot]: self.record.to_bytes()}
            if slot in view.left:
                self._store.set_many(content)
                return slot
            if self._store.add_many(content)[0]:
                return slot
            if self._store.get_many(list(content)) == [None]:  # nobody was faster: its node is away, or full
                raise StoreUnavailableError(f"{self._store.url} takes no note of this job")

    def beat(self) -> SharedCacheView:
        """Says that this job lives, under each slot that is still its own, and looks. Takes what others have left, if
        this is the first of the living; joins anew, if it has lost its slot.

        Returns:
            What it found, its own new notes included.

        Raises:
            StoreError: The store does not answer.
            ConfigError: It lost its slot, and all others are taken.
        """
        view = self.look()
        self.record = replace(self.record, beat=self.record.beat + 1)
        mine = view.slots_of(self.owner)
        if self.record.home not in mine:
            mine.insert(0, self.join())
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
        """Gives back a slot in which nothing is left.

        Args:
            slot: One of this job's, and not its first.

        Raises:
            StoreError: The store does not answer.
        """
        self._store.delete_many([self._record_keys[slot]])

    def leave(self) -> None:
        """Says that this job has left; its entries stay, for those who want them.

        Raises:
            StoreError: The store does not answer; the note will be found silent.
        """
        mine = self.look().slots_of(self.owner)
        self.record = replace(self.record, has_left=True)
        self._store.set_many({self._record_keys[slot]: self.record.to_bytes() for slot in mine})


class EntryNames:
    """One process's view of them.

    Args:
        fingerprint: Of the data set.
        board: Says which slots are whose.
    """

    def __init__(self, fingerprint: str, residency: ResidencyMap) -> None:
        self.fingerprint, self._residency = fingerprint, residency

    @property
    def keys(self) -> SampleKeys:
        """Of the slot in which this job writes."""
        return self.of(self._residency.owned_slots[0])

    @property
    def key_length(self) -> int:
        """Of the longest key in any slot, so that an entry counts the same wherever it lies."""
        return slot_keys(self.fingerprint, MAX_JOBS - 1).key_length

    def of(self, slot: int) -> SampleKeys:
        """Of any slot."""
        return slot_keys(self.fingerprint, slot)

    def owned_names(self, indices: Sequence[int]) -> list[str]:
        """Every name under which this job may have these samples."""
        return [name for slot in self._residency.owned_slots for name in self.of(slot).many(indices)]

    def places(self, own: Sequence[int], elsewhere: Sequence[int]) -> list[tuple[int, int]]:
        """Where to look.

        Args:
            own: Samples that may be in this job's slots.
            elsewhere: Samples that may be in those of others.

        Returns:
            (sample index, slot), this job's first.
        """
        residency = self._residency
        mine = [(index, slot) for slot in residency.owned_slots for index in own]
        return mine + [(index, slot) for slot in residency.other_slots for index in elsewhere]

    def names(self, places: Iterable[tuple[int, int]]) -> list[str]:
        """The keys of `places`."""
        keys = {slot: self.of(slot) for slot in (*self._residency.owned_slots, *self._residency.other_slots)}
        return [keys[slot].key(index) for index, slot in places]
