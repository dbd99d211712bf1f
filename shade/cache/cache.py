"""SampleCache: a store of bytes and a policy become a cache of samples. A store failure is a miss, never a crash.

Two sides, one object. In the *training process* the policy walks the global order of the epoch and posts, batch by
batch, which samples are in the cache and which shall stay there (`begin_epoch`, `dispatch`). In the *process that
fetches* (a DataLoader worker, or the same one) `fetch_many` acts on it: one round to the store for the planned hits,
one call to the origin for all the rest, then departures, and only then arrivals.

The capacity is a promise in bytes; `shade.cache.room` keeps it. An entry that fails its checksum is a miss, and is
repaired in place: it has its room already.

Invariant: `fetch_many` returns the origin's bytes for every sample, whatever the store does.

Legend: B batch · G global batch · N data set.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.cache.board import LOOK, STAY, Board
from shade.cache.breaker import Breaker
from shade.cache.entry import HEADER_BYTES, unseal
from shade.cache.ledger import Ledger
from shade.cache.room import Room
from shade.errors import CorruptEntryError, StoreError
from shade.policy.base import EMPTY, CachePolicy, EpochWindow
from shade.store.base import Store
from shade.store.keys import SampleKeys
from shade.types import Indices

logger = logging.getLogger("shade.cache")

_QUESTION_KEYS = 8

ReadOrigin = Callable[[list[int]], list[Any]]
"""Payload by sample index, in order: bytes, or the exception that stands for a sample that could not be read."""


@dataclass
class _Looked:
    """What became of one look-up."""

    found: dict[int, memoryview] = field(default_factory=dict)
    """Payload by sample index."""
    damaged: list[int] = field(default_factory=list)
    """Samples whose entries failed their check."""
    failed: bool = False


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
        form: int,
    ) -> None:
        self.store = store
        self.keys = SampleKeys(namespace)
        self.board = Board(len(payload_bytes_N))
        self.capacity_bytes = capacity_bytes
        self._form = form
        self._size_bytes_N: npt.NDArray[np.int64] | None = self.entry_bytes(payload_bytes_N)
        self._largest_bytes = int(self.size_bytes_N.max())
        self._policy: CachePolicy | None = None
        self._per_process(-1)

    def _per_process(self, worker: int) -> None:
        self._pid, self._worker = os.getpid(), worker
        self.ledger: Ledger = self.board.ledger(worker)
        self._breaker = Breaker(self.board, self._ask_store)
        self._room: Room | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = ("store", "_capacity_bytes", "keys", "board", "_form", "_largest_bytes")
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
        self._capacity_bytes = self.board.capacity_bytes = int(num_bytes)

    @property
    def room(self) -> Room:
        """This process's departures and arrivals."""
        if self._room is None:
            self._room = Room(
                self.store,
                self.keys,
                self.board,
                self.ledger,
                form=self._form,
                largest_bytes=self._largest_bytes,
            )
        return self._room

    def entry_bytes(self, payload_bytes: Any) -> Any:
        """What payloads of these lengths occupy in the store, header, key and allocator rounding included.

        Args:
            payload_bytes: One length, or an array of them.

        Returns:
            Bytes, in the shape of the argument.
        """
        key_length = self.keys.key_length
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
        self._policy = policy_class(self.size_bytes_N, self.board.capacity_bytes)

    def find_residents(self) -> Indices:
        """What the store really holds of this data set, and puts the shared counter right by it.

        Called by one rank, while none fetches: at start, on resume, after a disturbance. One scan of the keys.

        Returns:
            Sample indices, ascending; empty when the store does not answer or is being left alone.
        """
        if not self._breaker.allows():
            return EMPTY
        try:
            found = [self.keys.index_of(key) for key in self.store.scan(self.keys.prefix)]
            resident = np.array(sorted(i for i in found if i is not None), dtype=np.int64)
            resident = resident[resident < len(self.size_bytes_N)]
            self.room.recount(int(self.size_bytes_N[resident].sum()))
        except StoreError as error:
            self._failed(error)
            return EMPTY
        self._breaker.store_took(0.0, 1)  # a scan's length says nothing of a batch's
        return resident

    def adopt(self, resident: Indices, *, remove_refused: bool) -> None:
        """Starts the policy from these residents; every rank must be given the same.

        Args:
            resident: Sample indices.
            remove_refused: True on the one rank that shall remove what does not fit.
        """
        assert self._policy is not None
        self.use_policy(type(self._policy))
        refused = self._policy.adopt(resident)
        self.board.begin_generation()
        if remove_refused:
            self._remove(refused)

    def resize(self, allowed_bytes: int, rank: int, world_size: int) -> int:
        """Makes the capacity smaller, or large again: the least useful yield. On all ranks after the same batch.

        Args:
            allowed_bytes: From now on; more than `capacity_bytes` counts as that.
            rank: This rank; of the samples that leave it removes every ``world_size``-th.
            world_size: W.

        Returns:
            Samples that left.
        """
        allowed_bytes = max(0, min(int(allowed_bytes), self.capacity_bytes))
        self.board.capacity_bytes = allowed_bytes
        if self._policy is None:
            return 0
        leaving = self._policy.resize(allowed_bytes)
        self.board.withdraw(leaving)
        mine = leaving[rank::world_size]
        self.ledger.add(yielded=len(mine))
        if len(mine):
            self._remove(mine)
        return len(leaving)

    def begin_epoch(self, window: EpochWindow, *, remove_leaving: bool) -> None:
        """Lets the policy plan an epoch.

        Args:
            window: What is known of it.
            remove_leaving: True on the one rank that shall remove samples of no further use.
        """
        assert self._policy is not None
        leaving = self._policy.begin_epoch(window)
        if remove_leaving and len(leaving):
            self._remove(leaving)

    def dispatch(self, index_G: Indices, mine: slice, rank: int, world_size: int, *, ending: bool = False) -> None:
        """Posts the verdict on one global batch, just before this rank's share of it is fetched.

        Args:
            index_G: The whole global batch, in order, the same on every rank.
            mine: This rank's share.
            rank: This rank; of the victims it removes every ``world_size``-th.
            world_size: W.
            ending: Whether this is one of the last batches of the epoch.
        """
        assert self._policy is not None
        verdict = self._policy.access_many(index_G)
        self.board.post(index_G[mine], verdict.hit_B[mine], verdict.stay_B[mine], ending=ending)
        if len(verdict.victims):
            self._remove(verdict.victims[rank::world_size])

    def _remove(self, departures: Indices) -> None:
        """Removes entries, or owes it until the store may be asked again."""
        self.room.catch_up()
        self.room.owe(departures.tolist())
        if self._breaker.is_open:
            return
        try:
            self.room.settle({})
        except StoreError as error:
            self._failed(error)

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
        index_B = np.fromiter(indices, dtype=np.int64, count=len(indices))
        unique_B = index_B if len(set(indices)) == len(indices) else np.array(list(dict.fromkeys(indices)))
        planned = self.board.planned
        flag_B = self.board.flag_N[unique_B] if planned else np.full(len(unique_B), LOOK | STAY, dtype=np.uint8)
        wanted = unique_B[(flag_B & LOOK) > 0].tolist()
        staying = set(unique_B[(flag_B & STAY) > 0].tolist())

        self.room.catch_up()
        asking = bool(wanted or staying or self.room.is_unfinished) and self._breaker.allows()
        begun = time.perf_counter_ns()
        looked = self._look_up(wanted, planned) if wanted and asking else _Looked()
        looking_up = time.perf_counter_ns() - begun
        if wanted and not asking:
            self.ledger.add(skipped=len(wanted))
        if looked.failed:
            asking = False
        elif asking and self._breaker.is_slow(looking_up / 1e9, len(looked.found)):
            self._breaker.store_took(looking_up / 1e9, len(looked.found))
            asking = False

        found = looked.found
        if planned:
            self.room.owe(index for index in found if index not in staying)
        absent = [index for index in unique_B.tolist() if index not in found]
        read = self._read(absent, read_origin) if absent else {}

        begun = time.perf_counter_ns()
        fresh = {i: read[i] for i in absent if i in staying and not isinstance(read[i], Exception)}
        if asking:
            waited_seconds = self.room.waited_seconds
            num_written = self._settle(looked.damaged, read, fresh)
            if num_written is not None:
                took = looking_up + time.perf_counter_ns() - begun
                waited_seconds -= self.room.waited_seconds
                self._breaker.store_took(took / 1e9 + waited_seconds, len(found) + num_written)
        elif fresh:
            self.room.decline(len(fresh))
        self.ledger.add(
            samples=len(index_B),
            hits=len(index_B) - len(absent),
            misses=len(absent),
            duplicates=len(index_B) - len(unique_B),
            cache_nanoseconds=looking_up + time.perf_counter_ns() - begun,
        )
        payloads, first = {**found, **read}, set(absent)
        hits = []
        for index in indices:
            hits.append(index not in first)
            first.discard(index)
        return [payloads[index] for index in indices], hits

    def _look_up(self, wanted: list[int], planned: bool) -> _Looked:
        try:
            entries = self.store.get_many(self.keys.many(wanted))
        except StoreError as error:
            self._failed(error)
            return _Looked(failed=True)
        looked = _Looked()
        for index, entry in zip(wanted, entries, strict=True):
            if entry is not None:
                try:
                    looked.found[index] = unseal(index, entry, self._form)
                except CorruptEntryError as error:
                    logger.debug("%s", error)
                    looked.damaged.append(index)
        num_found, num_damaged = len(looked.found), len(looked.damaged)
        self.ledger.add(
            cache_reads=num_found,
            cache_bytes=sum(map(len, looked.found.values())),
            corrupt=num_damaged,
            surprises=(len(wanted) - num_found - num_damaged) if planned else 0,
        )
        return looked

    def _settle(self, damaged: list[int], read: dict[int, Any], fresh: dict[int, Any]) -> int | None:
        """Repairs, departures, arrivals; the number of entries written, or None when the store failed."""
        freed_bytes = num_repaired = 0
        try:
            if damaged:
                repairs = {index: fresh.pop(index) for index in damaged if index in fresh}
                others = {index: read[index] for index in damaged if index not in repairs}
                num_repaired, freed_bytes = self.room.repair(repairs, others)
            return num_repaired + self.room.settle(fresh, freed_bytes)
        except StoreError as error:
            self._failed(error)
            return None

    def _read(self, absent: list[int], read_origin: ReadOrigin) -> dict[int, Any]:
        begun = time.perf_counter_ns()
        payloads = read_origin(absent)
        took = time.perf_counter_ns() - begun
        self._breaker.origin_took(took / 1e9, len(absent))
        self.ledger.add(origin_nanoseconds=took)
        return dict(zip(absent, payloads, strict=True))

    def count_origin(self, num_reads: int, num_bytes: int) -> None:
        """Whoever reads the origin says so here: reads and bytes as a counting origin would see them."""
        self.ledger.add(origin_reads=num_reads, origin_bytes=num_bytes)

    def _ask_store(self) -> None:
        """A question that costs nothing and reaches several nodes of a cluster."""
        self.store.get_many([self.keys.counter_key(f"nothing-{number}") for number in range(_QUESTION_KEYS)])

    def _failed(self, error: StoreError) -> None:
        self.ledger.add(store_errors=1)
        self._breaker.store_failed(error)

    def close(self) -> None:
        """Closes the store. Safe to call twice."""
        self._breaker.close()
        self.store.close()
