"""SampleCache: a store of bytes and a policy become a cache of samples. A store failure is a miss, never a crash.

One object with two sides. In the *training process* the policy goes through the global order of the epoch, and writes
to the residency map, batch by batch, which samples are in the cache and which stay there (`begin_epoch`, `decide`,
`post`). In the *process that fetches* `fetch_many` acts on it. `shade.cache.admission` keeps the capacity;
`shade.cache.sharing` decides instead of the policy while several jobs use the cache.

Invariant: `fetch_many` returns the origin's bytes for every sample, whatever the store does.

Legend: B batch · G global batch · N data set.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.cache.admission import COUNTER, Admission, SharedCounter
from shade.cache.breaker import Breaker
from shade.cache.capacity import Capacity
from shade.cache.entry import HEADER_BYTES
from shade.cache.fetch import Fetch, ReadOrigin, fetch_through
from shade.cache.job_registry import EntryNames
from shade.cache.ledger import Ledger
from shade.cache.residency_map import STAY, ResidencyMap
from shade.errors import StoreError, StoreUnavailableError
from shade.policy.base import EMPTY, CachePolicy, EpochPlan, Verdict
from shade.store.base import Store
from shade.store.keys import SampleKeys
from shade.types import Bools, Indices

_QUESTION_KEYS = 8


class SampleCache:
    """The cache of one data set, as seen from one rank.

    Args:
        store: Where the bytes are.
        namespace: Fingerprint of the data set's content: other data under the same index never collides.
        payload_bytes_N: int64 (N,), the length of each sample's payload, estimated if it is not known.
        capacity_bytes: What the entries of this data set may occupy in the store, allocator rounding included.
        cached_format: How payloads are encoded, a constant of `shade.cache.entry`.
        disk: The cache of the same data set on this node's disk, asked before the origin.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        payload_bytes_N: npt.NDArray[np.int64],
        capacity_bytes: int,
        cached_format: int,
        disk: SampleCache | None = None,
    ) -> None:
        self.store, self.disk = store, disk
        self.keys = SampleKeys(namespace)
        """Keys of slot 0, which a job uses that is alone."""
        self.residency = ResidencyMap(len(payload_bytes_N))
        self.slots = EntryNames(namespace, self.residency)
        self._capacity = Capacity(capacity_bytes, self.residency)
        self._cached_format = cached_format
        self._size_bytes_N: npt.NDArray[np.int64] | None = self.entry_bytes(payload_bytes_N)
        self._largest_bytes = int(self.size_bytes_N.max())
        self._policy: CachePolicy | None = None
        self.empty_slots: list[int] = []
        """This job's slots in which the last `find_residents` found nothing."""
        self.needs_count = False
        """Whether own slots may hold entries that no count has met: another job's, or those of nodes that were away."""
        self.at_epoch_begin = Ledger()
        """The counts when the present epoch began; zeros if no sampler plans the epochs."""
        self._home = os.getpid()
        """The training process; others are its workers."""
        self._per_process(-1)

    def _per_process(self, worker: int) -> None:
        self._pid, self._worker = os.getpid(), worker
        self.ledger: Ledger = self.residency.ledger(worker)
        name = f"the disk tier {self.store.url}" if self.store.medium == "disk" else "the cache"
        self._breaker = Breaker(self.residency, functools.partial(_ask, self.store, self.keys), name=name)
        self._admission: Admission | None = None
        self._fetcher: Fetch | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "store",
            "disk",
            "_capacity",
            "keys",
            "slots",
            "residency",
            "_cached_format",
            "_largest_bytes",
            "_home",
        )
        return {name: self.__dict__[name] for name in kept} | {"_size_bytes_N": None, "_policy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._per_process(-1)

    def enter_rank(self, payload_bytes_N: npt.NDArray[np.int64]) -> None:
        """Prepares a training process, before it plans. If it got the cache from another one, as an argument of
        ``mp.spawn`` is handed over, it has a plan and counters of its own from now on."""
        if self._home == os.getpid():
            return
        self._home = os.getpid()
        self.residency = ResidencyMap(len(payload_bytes_N))
        self.slots = EntryNames(self.keys.namespace, self.residency)
        self._capacity = Capacity(self.capacity_bytes, self.residency)
        self._size_bytes_N = self.entry_bytes(payload_bytes_N)
        self._per_process(-1)
        if self.disk is not None:
            self.disk.enter_rank(payload_bytes_N)

    def enter_worker(self, worker: int) -> None:
        """Prepares the process that fetches, before each of its batches; cheap if nothing changed.

        ``worker`` is the DataLoader's worker id, or -1 in the training process.
        """
        if self._pid != os.getpid() or self._worker != worker:
            self._per_process(worker)
        if self.disk is not None:
            self.disk.enter_worker(worker)

    def for_thread(self, number: int) -> SampleCache:
        """Returns the same cache with counters and departures of its own, for one thread of a loader."""
        other = copy.copy(self)
        if other.disk is not None:
            other.disk = copy.copy(other.disk)
        other.enter_worker(number)
        return other

    @property
    def size_bytes_N(self) -> npt.NDArray[np.int64]:
        """Returns (N,) what each sample would occupy in the store; only in the training process."""
        assert self._size_bytes_N is not None, "sizes do not travel to workers"
        return self._size_bytes_N

    @property
    def capacity_bytes(self) -> int:
        """Returns what the entries of this data set may occupy in the store; `resize` may allow less for the moment."""
        return self._capacity.total_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, num_bytes: int) -> None:
        self._capacity = Capacity(num_bytes, self.residency)

    @property
    def allowed_bytes(self) -> int:
        """Returns what `resize` has left of `capacity_bytes`; the same on every rank."""
        return self._capacity.allowed_bytes

    @property
    def quota_bytes(self) -> int:
        """Returns this job's share of `capacity_bytes` while other jobs use the cache, too."""
        return self._capacity.quota_bytes

    @quota_bytes.setter
    def quota_bytes(self, num_bytes: int) -> None:
        self._capacity.share(num_bytes)

    @property
    def admission(self) -> Admission:
        """Returns this process's departures and arrivals."""
        if self._admission is None:
            self._admission = Admission(
                self.store,
                self.slots,
                self.residency,
                self.ledger,
                cached_format=self._cached_format,
                largest_bytes=self._largest_bytes,
            )
        return self._admission

    @property
    def _fetch(self) -> Fetch:
        if self._fetcher is None:
            self._fetcher = Fetch(
                self.store, self.slots, self.residency, self.ledger, self._breaker, self.admission, self._cached_format
            )
        return self._fetcher

    def entry_bytes(self, payload_bytes: Any) -> Any:
        """Returns what payloads occupy in the store, with header, key and allocator rounding.

        ``payload_bytes`` is one length or an array of them; the result has its shape.
        """
        key_length = self.slots.key_length
        if np.ndim(payload_bytes) == 0:
            return self.store.stored_bytes(key_length, int(payload_bytes) + HEADER_BYTES)
        lengths, inverse = np.unique(np.asarray(payload_bytes), return_inverse=True)
        sizes = np.array(
            [self.store.stored_bytes(key_length, int(n) + HEADER_BYTES) for n in lengths.tolist()], dtype=np.int64
        )
        return sizes[inverse]

    # ── the training process ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def policy(self) -> CachePolicy | None:
        """Returns the policy; None until a sampler (or `use_policy`) brings one."""
        return self._policy

    def use_policy(self, policy_class: type[CachePolicy]) -> None:
        """Starts a policy with nothing resident."""
        self._policy = policy_class(self.size_bytes_N, self.residency.capacity_bytes)

    def find_residents(self) -> Indices:
        """Returns what the store holds in this job's slots, ascending, and sets the shared counter by it; empty if it
        fails.

        One rank calls it while no rank fetches: at the start, on resume, after a disturbance. It scans the keys of each
        slot. After an incomplete answer the cache `needs_count` again, because a node that comes back brings its
        entries unannounced.
        """
        self.needs_count = True
        if not self._breaker.answers():
            return EMPTY
        try:
            answers = {slot: self._found_in(slot) for slot in self.residency.owned_slots}
            by_slot = {slot: found for slot, (found, _) in answers.items()}
            self.empty_slots = [slot for slot, found in by_slot.items() if not len(found)]
            is_right = self.admission.recount(sum(int(self.size_bytes_N[found].sum()) for found in by_slot.values()))
            self.needs_count = not (is_right and all(is_whole for _, is_whole in answers.values()))
        except StoreError as error:
            self._fetch.failed(error)
            return EMPTY
        self._breaker.store_took(0.0, 1)  # a scan's length says nothing of a batch's
        return np.unique(np.concatenate(list(by_slot.values())))

    def _found_in(self, slot: int) -> tuple[Indices, bool]:
        """Returns the samples whose entries are in a slot, ascending, and whether all nodes of a cluster answered."""
        keys, is_whole = self.slots.of(slot), True
        found: list[int] = []
        try:
            found.extend(index for key in self.store.scan(keys.prefix) if (index := keys.index_of(key)) is not None)
        except StoreUnavailableError:  # comes last, after the entries of the other nodes
            if not found:
                raise
            is_whole = False
        resident = np.array(sorted(found), dtype=np.int64)
        return resident[resident < len(self.residency.flag_N)], is_whole

    def inherit(self, slot: int) -> None:
        """Takes over the entries of a job that has left, in a slot that is this job's now. One rank calls it, at any
        time.

        Raises StoreError if the store failed; `find_residents` finds later what was not counted.
        """
        found, _ = self._found_in(slot)
        SharedCounter(self.store, self.slots.of(slot), COUNTER).put(0)
        if len(found):
            SharedCounter(self.store, self.slots.keys, COUNTER).add(int(self.size_bytes_N[found].sum()))
            self.residency.held_N[found] = 1
        self.needs_count = True

    def use_slots(self, owned: Sequence[int], others: Sequence[int]) -> None:
        """Sets the slots that this job owns (it writes to the first) and the others, which it only reads. After a move
        to a new first slot nothing is held or owed."""
        moved = self.residency.owned_slots[0] != owned[0]
        self.residency.set_slots(owned, others)
        if moved:
            self.residency.held_N[:] = 0
            self.residency.begin_generation()

    def adopt(self, resident: Indices, *, remove_refused: bool) -> None:
        """Starts the policy from these residents, the same on every rank; the one rank with ``remove_refused`` removes
        those that do not fit."""
        assert self._policy is not None
        self.use_policy(type(self._policy))
        refused = self._policy.adopt(resident)
        self.residency.begin_generation()
        if remove_refused:
            self.remove(refused)

    def resize(self, allowed_bytes: int, rank: int, world_size: int) -> int:
        """Makes the capacity smaller, or large again: the least useful samples leave; returns how many. All ranks call
        it after the same batch; each removes every ``world_size``-th of the samples that leave."""
        self._capacity.allow(allowed_bytes)
        if self._policy is None or self.residency.is_shared:  # the next batch of `Sharing` frees the space
            return 0
        leaving = self._policy.resize(self.residency.capacity_bytes)
        self.residency.withdraw(leaving)
        mine = leaving[rank::world_size]
        self.ledger.add(yielded=len(mine))
        if len(mine):
            self.remove(mine)
        return len(leaving)

    def begin_epoch(self, plan: EpochPlan, *, remove_leaving: bool) -> None:
        """Lets the policy plan an epoch; the one rank with ``remove_leaving`` removes the samples that have no further
        use."""
        assert self._policy is not None
        self.at_epoch_begin = self.residency.totals()
        leaving = self._policy.begin_epoch(plan)
        if remove_leaving and len(leaving):
            self.remove(leaving)

    def decide(self, index_G: Indices) -> Verdict:
        """Returns the policy's verdict on one global batch, the same on every rank; `post` comes next."""
        assert self._policy is not None
        return self._policy.access_many(index_G)

    def post(
        self,
        verdict: Verdict,
        index_G: Indices,
        positions: Indices | slice,
        rank: int,
        world_size: int,
        *,
        near_G: Bools | None = None,
        ending: bool = False,
    ) -> None:
        """Writes a verdict to the residency map, just before this rank's part of the batch is fetched.

        ``positions`` are this rank's in the global batch; it removes every ``world_size``-th of the victims. ``near_G``
        and ``ending`` are as for `ResidencyMap.post`.
        """
        near_B = None if near_G is None else near_G[positions]
        self.residency.post(
            index_G[positions], verdict.hit_B[positions], verdict.stay_B[positions], near_B, ending=ending
        )
        if len(verdict.victims):
            self.remove(verdict.victims[rank::world_size])

    def remove(self, departures: Indices) -> None:
        """Removes entries now, or owes it while the breaker is open."""
        self.admission.catch_up()
        self.admission.owe(departures.tolist())
        if self._breaker.is_open:
            return
        try:
            self.admission.settle({})
        except StoreError as error:
            self._fetch.failed(error)

    # ── the process that fetches ────────────────────────────────────────────────────────────────────────────────────

    def fetch_many(self, indices: Sequence[int], read_origin: ReadOrigin) -> tuple[list[Any], list[bool]]:
        """Returns the payloads of a batch: planned hits from the store in one round, all others from the origin in one
        call.

        Args:
            indices: Sample indices, in batch order; repeats are read once.
            read_origin: Reads the samples that it is given.

        Returns:
            Payloads in order (an exception object if the origin could not read one), and for each whether it was a hit.
        """
        if self.disk is not None:
            return fetch_through(self._fetch, self.disk._fetch, self.ledger, self.disk.ledger, indices, read_origin)
        before = self.ledger["cache_reads"], self.ledger["cache_bytes"]
        outcome = self._fetch.many(indices, read_origin)
        if self.store.medium == "disk":
            now = self.ledger["cache_reads"], self.ledger["cache_bytes"]
            self.ledger.add(disk_hits=now[0] - before[0], disk_bytes=now[1] - before[1])
        return outcome

    def will_keep(self, indices: Sequence[int]) -> Bools:
        """Returns (B,) whether memory or the disk may take in a sample that is read from the origin now."""
        tiers = (self,) if self.disk is None else (self, self.disk)
        kept_B = np.zeros(len(indices), dtype=bool)
        for residency in (tier.residency for tier in tiers):
            kept_B |= (residency.flag_N[list(indices)] & STAY > 0) if residency.planned else True
        return kept_B

    def count_origin(self, num_reads: int, num_bytes: int) -> None:
        """Counts reads of the origin and their bytes; each reader of the origin calls it."""
        self.ledger.add(origin_reads=num_reads, origin_bytes=num_bytes)

    def count_near(self, num_samples: int, num_bytes: int) -> None:
        """Counts samples that are in no tier of this cache, and that their source had on this machine's disk."""
        self.ledger.add(hits=num_samples, misses=-num_samples, disk_hits=num_samples, disk_bytes=num_bytes)

    def close(self) -> None:
        """Closes the store. Safe to call twice."""
        self._breaker.close()
        self.store.close()
        if self.disk is not None:
            self.disk.close()


def held_bytes_of(cache: SampleCache) -> int:
    """Returns what the entries occupy by the shared counter, 0 if the store does not say."""
    try:
        return cache.admission.counted_bytes()
    except (StoreError, ValueError):
        return 0


def _ask(store: Store, keys: SampleKeys) -> None:
    """Asks a question that is cheap and reaches several nodes of a cluster."""
    store.get_many([keys.counter_key(f"nothing-{number}") for number in range(_QUESTION_KEYS)])
