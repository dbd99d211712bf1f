"""SampleCache: a store of bytes and a policy become a cache of samples. A store failure is a miss, never a crash.

Two sides, one object. In the *training process* the policy walks the global order of the epoch and posts, batch by
batch, which samples are in the cache and which shall stay there (`begin_epoch`, `dispatch`). In the *process that
fetches* (a DataLoader worker, or the same one) `fetch_many` acts on it: one round to the store for the planned hits,
one call to the origin for all the rest, then departures, and only then arrivals.

The capacity is a promise in bytes; `shade.cache.admission` keeps it. An entry that fails its checksum is a miss, and is
repaired in place: it has its room already. Jobs that use the cache at the same time share it by slots:
`shade.cache.job_registry` says how, and `shade.cache.sharing` decides in the policy's place while they do.

Invariant: `fetch_many` returns the origin's bytes for every sample, whatever the store does.

Legend: B batch · G global batch · N data set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.cache.admission import COUNTER, Admission, SharedCounter
from shade.cache.breaker import Breaker
from shade.cache.entry import HEADER_BYTES
from shade.cache.fetch import Fetch, ReadOrigin
from shade.cache.job_registry import EntryNames
from shade.cache.ledger import Ledger
from shade.cache.residency_map import ResidencyMap
from shade.errors import StoreError, StoreUnavailableError
from shade.policy.base import EMPTY, CachePolicy, EpochPlan, Verdict
from shade.store.base import Store
from shade.store.keys import SampleKeys
from shade.types import Bools, Indices

_QUESTION_KEYS = 8


class SampleCache:
    """The cache of one data set, as seen from one rank.

    Args:
        store: Where the bytes lie.
        namespace: Fingerprint of the data set's content: other data under the same index never collides.
        payload_bytes_N: int64 (N,), the length of each sample's payload (an estimate will do where it is not known).
        capacity_bytes: What the entries of this data set may occupy in the store, allocator rounding included.
        form: How payloads are encoded, see `shade.cache.entry`.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        payload_bytes_N: npt.NDArray[np.int64],
        capacity_bytes: int,
        cached_format: int,
    ) -> None:
        self.store = store
        self.keys = SampleKeys(namespace)
        """Those of slot 0: what a job that is alone uses."""
        self.residency = ResidencyMap(len(payload_bytes_N))
        self.slots = EntryNames(namespace, self.residency)
        self.capacity_bytes = capacity_bytes
        self._cached_format = cached_format
        self._size_bytes_N: npt.NDArray[np.int64] | None = self.entry_bytes(payload_bytes_N)
        self._largest_bytes = int(self.size_bytes_N.max())
        self._policy: CachePolicy | None = None
        self.empty_slots: list[int] = []
        """Of this job's, as `find_residents` found them last."""
        self.needs_count = False
        """Whether own slots may hold entries that no count has met: another job's, or those of nodes that were away."""
        self._per_process(-1)

    def _per_process(self, worker: int) -> None:
        self._pid, self._worker = os.getpid(), worker
        self.ledger: Ledger = self.residency.ledger(worker)
        self._breaker = Breaker(self.residency, self._probe_store)
        self._admission: Admission | None = None
        self._fetcher: Fetch | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "store",
            "_capacity_bytes",
            "_allowed_bytes",
            "_quota_bytes",
            "keys",
            "slots",
            "residency",
            "_cached_format",
            "_largest_bytes",
        )
        return {name: self.__dict__[name] for name in kept} | {"_size_bytes_N": None, "_policy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._per_process(-1)

    def enter_worker(self, worker: int) -> None:
        """Called in the process that fetches, before its first batch; cheap when nothing changed.

        Args:
            worker: DataLoader worker id, or -1 in the training process.
        """
        if self._pid != os.getpid() or self._worker != worker:
            self._per_process(worker)

    @property
    def size_bytes_N(self) -> npt.NDArray[np.int64]:
        """(N,) what each sample would occupy in the store. Known in the training process only."""
        assert self._size_bytes_N is not None, "sizes do not travel to workers"
        return self._size_bytes_N

    @property
    def capacity_bytes(self) -> int:
        """What the entries of this data set may occupy in the store; for the moment it may be less: see `resize`."""
        return self._capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, num_bytes: int) -> None:
        self._capacity_bytes = self._allowed_bytes = self._quota_bytes = self.residency.capacity_bytes = int(num_bytes)

    @property
    def allowed_bytes(self) -> int:
        """What `resize` has left of `capacity_bytes`; the same on every rank."""
        return self._allowed_bytes

    @property
    def quota_bytes(self) -> int:
        """This job's share of `capacity_bytes`, while other jobs use the cache, too."""
        return self._quota_bytes

    @quota_bytes.setter
    def quota_bytes(self, num_bytes: int) -> None:
        self._quota_bytes = int(num_bytes)
        self.residency.capacity_bytes = min(self._quota_bytes, self._allowed_bytes)

    @property
    def admission(self) -> Admission:
        """This process's departures and arrivals."""
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
        """What payloads of these lengths occupy in the store, header, key and allocator rounding included.

        Args:
            payload_bytes: One length, or an array of them.

        Returns:
            Bytes, in the shape of the argument.
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
        """What steers the residents; None until a sampler (or `use_policy`) brings one."""
        return self._policy

    def use_policy(self, policy_class: type[CachePolicy]) -> None:
        """Takes a policy into service, with nothing resident.

        Args:
            policy_class: From `shade.policy.POLICIES`.
        """
        self._policy = policy_class(self.size_bytes_N, self.residency.capacity_bytes)

    def find_residents(self) -> Indices:
        """What the store really holds in this job's slots, and puts the shared counter right by it.

        Called by one rank, while none fetches: at start, on resume, after a disturbance. One scan of the keys a slot.
        What was not answered in full `needs_count` again: a node that is back has what it had, and nobody notices.

        Returns:
            Sample indices, ascending; empty when the store does not answer.
        """
        self.needs_count = True
        if not self._breaker.answers():
            return EMPTY
        try:
            told = {slot: self._found_in(slot) for slot in self.residency.owned_slots}
            by_slot = {slot: found for slot, (found, _) in told.items()}
            self.empty_slots = [slot for slot, found in by_slot.items() if not len(found)]
            is_right = self.admission.recount(sum(int(self.size_bytes_N[found].sum()) for found in by_slot.values()))
            self.needs_count = not (is_right and all(is_whole for _, is_whole in told.values()))
        except StoreError as error:
            self._fetch.failed(error)
            return EMPTY
        self._breaker.store_took(0.0, 1)  # a scan's length says nothing of a batch's
        return np.unique(np.concatenate(list(by_slot.values())))

    def _found_in(self, slot: int) -> tuple[Indices, bool]:
        """The samples whose entries lie in a slot, ascending; of a cluster, on those nodes that answer; if all did."""
        keys, is_whole = self.slots.of(slot), True
        found: list[int] = []
        try:
            found.extend(index for key in self.store.scan(keys.prefix) if (index := keys.index_of(key)) is not None)
        except StoreUnavailableError:  # comes last: what the other nodes hold has been told
            if not found:
                raise
            is_whole = False
        resident = np.array(sorted(found), dtype=np.int64)
        return resident[resident < len(self.residency.flag_N)], is_whole

    def inherit(self, slot: int) -> None:
        """Takes in what a job that has left kept in a slot that is this job's now. Called by one rank, at any time.

        Args:
            slot: Which.

        Raises:
            StoreError: The store failed; what was not counted is found by `find_residents`.
        """
        found, _ = self._found_in(slot)
        SharedCounter(self.store, self.slots.of(slot), COUNTER).put(0)
        if len(found):
            SharedCounter(self.store, self.slots.keys, COUNTER).add(int(self.size_bytes_N[found].sum()))
            self.residency.held_N[found] = 1
        self.needs_count = True

    def use_slots(self, owned: Sequence[int], others: Sequence[int]) -> None:
        """Sets the slots of this job and of others (`shade.cache.job_registry`); in a new home nothing is held or owed.

        Args:
            owned: This job's; it writes in the first.
            others: Into which it looks.
        """
        moved = self.residency.owned_slots[0] != owned[0]
        self.residency.set_slots(owned, others)
        if moved:
            self.residency.held_N[:] = 0
            self.residency.begin_generation()

    def adopt(self, resident: Indices, *, remove_refused: bool) -> None:
        """Starts the policy from these residents; every rank must be given the same.

        Args:
            resident: Sample indices.
            remove_refused: True on the one rank that shall remove what does not fit.
        """
        assert self._policy is not None
        self.use_policy(type(self._policy))
        refused = self._policy.adopt(resident)
        self.residency.begin_generation()
        if remove_refused:
            self.remove(refused)

    def resize(self, allowed_bytes: int, rank: int, world_size: int) -> int:
        """Makes the capacity smaller, or large again: the least useful yield. On all ranks after the same batch.

        Args:
            allowed_bytes: From now on; more than `capacity_bytes` counts as that.
            rank: This rank; of the samples that leave it removes every ``world_size``-th.
            world_size: W.

        Returns:
            Samples that left.
        """
        self._allowed_bytes = max(0, min(int(allowed_bytes), self.capacity_bytes))
        self.quota_bytes = self._quota_bytes
        if (
            self._policy is None or self.residency.is_shared
        ):  # sharing makes the room that is wanted with the next batch
            return 0
        leaving = self._policy.resize(self.residency.capacity_bytes)
        self.residency.withdraw(leaving)
        mine = leaving[rank::world_size]
        self.ledger.add(yielded=len(mine))
        if len(mine):
            self.remove(mine)
        return len(leaving)

    def begin_epoch(self, plan: EpochPlan, *, remove_leaving: bool) -> None:
        """Lets the policy plan an epoch.

        Args:
            plan: What is known of it.
            remove_leaving: True on the one rank that shall remove samples of no further use.
        """
        assert self._policy is not None
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
        places: Indices | slice,
        rank: int,
        world_size: int,
        *,
        near_G: Bools | None = None,
        ending: bool = False,
    ) -> None:
        """Writes a verdict to the residency map, just before this rank's part of the batch is fetched.

        Args:
            verdict: From `decide`.
            index_G: The whole global batch, in order.
            places: This rank's places in it.
            rank: This rank; it removes every ``world_size``-th of the victims.
            world_size: W.
            near_G: Which samples belong to servers on this machine; None if that is not known.
            ending: Whether this is one of the last batches of the epoch.
        """
        near_B = None if near_G is None else near_G[places]
        self.residency.post(index_G[places], verdict.hit_B[places], verdict.stay_B[places], near_B, ending=ending)
        if len(verdict.victims):
            self.remove(verdict.victims[rank::world_size])

    def remove(self, departures: Indices) -> None:
        """Removes entries, or owes it until the store may be asked again."""
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
        """The payloads of a batch: planned hits from the store in one round, all others from the origin in one call.

        Args:
            indices: Sample indices, in batch order; repeats are read once.
            read_origin: Reads the samples it is given.

        Returns:
            Payloads in order (an exception object where the origin could not read the sample), and for each whether
            it was a hit.
        """
        return self._fetch.many(indices, read_origin)

    def count_origin(self, num_reads: int, num_bytes: int) -> None:
        """Whoever reads the origin says so here: reads and bytes as a counting origin would see them."""
        self.ledger.add(origin_reads=num_reads, origin_bytes=num_bytes)

    def _probe_store(self) -> None:
        """A question that costs nothing and reaches several nodes of a cluster."""
        self.store.get_many([self.keys.counter_key(f"nothing-{number}") for number in range(_QUESTION_KEYS)])

    def close(self) -> None:
        """Closes the store. Safe to call twice."""
        self._breaker.close()
        self.store.close()
