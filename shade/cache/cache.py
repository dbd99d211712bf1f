"""SampleCache: a store of bytes and a policy become a cache of samples. A store failure is a miss, never a crash.

Two sides, one object. In the *training process* the policy walks the global order of the epoch and posts, batch by
batch, which samples are in the cache and which shall stay there (`begin_epoch`, `dispatch`). In the *process that
fetches* (a DataLoader worker, or the same one) `fetch_many` acts on it: one round to the store for the planned hits,
one call to the origin for all the rest, then departures, and only then arrivals.

The capacity is a promise in bytes. It is kept by a shared counter in the store: whoever wants to admit first reserves
room there, so ranks and workers that run ahead of each other cannot overshoot together. What finds no room waits for
the departures of a slower neighbour and is declined at last. Races, as stories:

1. A removes, B admits. A unlinks, then lowers the counter; B raises it before it writes. Between the two the counter is
   above the truth, never below: B waits a batch, nothing overshoots.
2. A and B admit the same sample. Both reserve; the second ``add`` finds the key present and gives its room back.
3. A dies between reserving and writing. The counter stays too high, capacity is lost, not exceeded; `reconcile` at the
   next start (or after a disturbance) sets it right from what the store really holds.

Invariant: `fetch_many` returns the origin's bytes for every sample, whatever the store does.

Legend: B batch · G global batch · N data set.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.cache.board import LOOK, STAY, Board
from shade.cache.breaker import Breaker
from shade.cache.entry import HEADER_BYTES, seal, unseal
from shade.cache.ledger import Ledger
from shade.errors import CorruptEntryError, StoreError
from shade.policy.base import CachePolicy, EpochWindow
from shade.store.base import Store
from shade.store.keys import SampleKeys
from shade.types import Indices

logger = logging.getLogger("shade.cache")

WAITING_BYTES = 64 * 2**20
"""How much a process keeps in hand for want of room in the store; beyond it the oldest are declined."""

ReadOrigin = Callable[[list[int]], list[Any]]
"""Payload by sample index, in order: bytes, or the exception that stands for a sample that could not be read."""


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
        self.capacity_bytes = int(capacity_bytes)
        self.keys = SampleKeys(namespace)
        self._counter_key = self.keys.counter_key("used-bytes")
        self.board = Board(len(payload_bytes_N))
        self._form = form
        self._size_bytes_N: npt.NDArray[np.int64] | None = self.entry_bytes(payload_bytes_N)
        self._policy: CachePolicy | None = None
        self._per_process()

    def _per_process(self) -> None:
        self._pid = os.getpid()
        self._worker = -1
        self.ledger: Ledger = self.board.ledger(-1)
        self._breaker = Breaker(self.board)
        self._owed: set[str] = set()
        self._waiting: dict[int, bytes] = {}
        self._static_full = False

    def __getstate__(self) -> dict[str, Any]:
        kept = ("store", "capacity_bytes", "keys", "board", "_form", "_counter_key")
        return {name: self.__dict__[name] for name in kept} | {"_size_bytes_N": None, "_policy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._per_process()

    def enter_worker(self, worker: int) -> None:
        """Called in the process that fetches, before its first batch; cheap when nothing changed.

        Args:
            worker: DataLoader worker id, or -1 in the training process.
        """
        if self._pid != os.getpid() or self._worker != worker:
            self._per_process()
            self._worker = worker
            self.ledger = self.board.ledger(worker)

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
        assert self._size_bytes_N is not None, "policies belong to the training process"
        self._policy = policy_class(self._size_bytes_N, self.capacity_bytes)

    def find_residents(self) -> Indices:
        """What the store really holds of this data set, and puts the shared counter right by it.

        Called by one rank, while none fetches: at start, on resume, after a disturbance. One scan of the keys.

        Returns:
            Sample indices, ascending; empty when the store does not answer.
        """
        assert self._size_bytes_N is not None
        try:
            found = {self.keys.index_of(key) for key in self.store.scan(self.keys.prefix)}
            found.discard(None)
            resident = np.array(sorted(i for i in found if i is not None), dtype=np.int64)
            resident = resident[resident < len(self._size_bytes_N)]
            self.store.delete_many([self._counter_key])
            self.store.increment(self._counter_key, int(self._size_bytes_N[resident].sum()))
        except StoreError as error:
            self._failed(error)
            return np.empty(0, dtype=np.int64)
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
        if remove_refused:
            self._remove(self.keys.many(refused.tolist()))

    def begin_epoch(self, window: EpochWindow, *, remove_leaving: bool) -> None:
        """Lets the policy plan an epoch.

        Args:
            window: What is known of it.
            remove_leaving: True on the one rank that shall remove samples of no further use.
        """
        assert self._policy is not None
        leaving = self._policy.begin_epoch(window)
        if remove_leaving and len(leaving):
            self._remove(self.keys.many(leaving.tolist()))

    def dispatch(self, index_G: Indices, mine: slice, rank: int, world_size: int) -> None:
        """Posts the verdict on one global batch, just before this rank's share of it is fetched.

        Args:
            index_G: The whole global batch, in order, the same on every rank.
            mine: This rank's share.
            rank: This rank; of the victims it removes every ``world_size``-th.
            world_size: W.
        """
        assert self._policy is not None
        verdict = self._policy.access_many(index_G)
        self.board.post(index_G[mine], verdict.hit_B[mine], verdict.stay_B[mine])
        if len(verdict.victims):
            self._remove(self.keys.many(verdict.victims[rank::world_size].tolist()))

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
        found = self._look_up(unique_B[(flag_B & LOOK) > 0].tolist(), planned)
        absent = [index for index in unique_B.tolist() if index not in found]
        read = self._read(absent, read_origin) if absent else {}
        stays = (flag_B & STAY) > 0
        self._settle(
            departures=[i for i in unique_B[~stays].tolist() if i in found] if planned else [],
            arrivals={i: read[i] for i in unique_B[stays].tolist() if i in read and not isinstance(read[i], Exception)},
        )
        num_misses, num_repeats = len(absent), len(index_B) - len(unique_B)
        self.ledger.add(samples=len(index_B), hits=len(index_B) - num_misses, misses=num_misses, duplicates=num_repeats)
        payloads = {**found, **read}
        fresh = set(absent)
        hits = []
        for index in indices:
            hits.append(index not in fresh)
            fresh.discard(index)
        return [payloads[index] for index in indices], hits

    def _look_up(self, wanted: list[int], planned: bool) -> dict[int, memoryview]:
        if not wanted:
            return {}
        if not self._breaker.allows():
            self.ledger.add(skipped=len(wanted))
            return {}
        begun = time.perf_counter_ns()
        try:
            entries = self.store.get_many(self.keys.many(wanted))
        except StoreError as error:
            self._failed(error)
            self.ledger.add(cache_nanoseconds=time.perf_counter_ns() - begun)
            return {}
        found: dict[int, memoryview] = {}
        rotten: list[int] = []
        for index, entry in zip(wanted, entries, strict=True):
            if entry is not None:
                try:
                    found[index] = unseal(index, entry, self._form)
                except CorruptEntryError:
                    rotten.append(index)
        took = time.perf_counter_ns() - begun
        self._breaker.store_took(took / 1e9, len(wanted))
        self.ledger.add(
            cache_nanoseconds=took,
            cache_reads=len(found),
            cache_bytes=sum(map(len, found.values())),
            corrupt=len(rotten),
            surprises=(len(wanted) - len(found) - len(rotten)) if planned else 0,
        )
        if rotten:
            logger.debug("dropping damaged entries of samples %s", rotten)
            self._remove(self.keys.many(rotten))
        return found

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

    # ── departures, then arrivals ───────────────────────────────────────────────────────────────────────────────────

    def _settle(self, departures: list[int], arrivals: dict[int, Any]) -> None:
        if self._static_full and not self.board.planned:
            arrivals = {}
        if not departures and not arrivals and not self._owed and not self._waiting:
            return
        begun = time.perf_counter_ns()
        if departures or self._owed:
            self._remove(self.keys.many(departures))
        if arrivals or self._waiting:
            self._admit(arrivals)
        self.ledger.add(cache_nanoseconds=time.perf_counter_ns() - begun)

    def _remove(self, keys: list[str]) -> None:
        """Removes entries and gives their room back; what cannot be removed now is owed, and tried next time."""
        self._owed.update(keys)
        if not self._owed or self.board.open_until > 0:
            return
        doomed = list(self._owed)
        try:
            lengths = [length for length in self.store.delete_many(doomed) if length >= 0]
            self._owed.clear()
            if lengths:
                freed = sum(self.entry_bytes(length - HEADER_BYTES) for length in lengths)
                self.store.increment(self._counter_key, -freed)
                self.ledger.add(evicted=len(lengths))
        except StoreError as error:
            self._failed(error)

    def _admit(self, arrivals: dict[int, Any]) -> None:
        """Reserves room, writes what has room, keeps the rest in hand."""
        if self.board.open_until > 0:
            self.ledger.add(declined=len(arrivals) + len(self._waiting))
            self._waiting.clear()
            return
        for index in [i for i in self._waiting if not self.board.flag_N[i] & STAY]:
            del self._waiting[index]
        self._waiting.update({index: seal(index, payload, self._form) for index, payload in arrivals.items()})
        sizes = {index: self.entry_bytes(len(entry) - HEADER_BYTES) for index, entry in self._waiting.items()}
        wanted = sum(sizes.values())
        try:
            used = self.store.increment(self._counter_key, wanted)
            excess, admitted = used - self.capacity_bytes, dict(self._waiting)
            for index in reversed(self._waiting):
                if excess <= 0:
                    break
                excess -= sizes[index]
                del admitted[index]
            entries = {key: admitted[i] for key, i in zip(self.keys.many(list(admitted)), admitted, strict=True)}
            written = dict(zip(admitted, self.store.add_many(entries), strict=True)) if entries else {}
            kept = sum(sizes[index] for index, ok in written.items() if ok)
            if kept < wanted:
                self.store.increment(self._counter_key, kept - wanted)
        except StoreError as error:
            self._failed(error)
            self.ledger.add(declined=len(self._waiting))
            self._waiting.clear()
            return
        num_admitted = sum(written.values())
        self.ledger.add(
            admitted=num_admitted,
            admitted_bytes=sum(len(admitted[i]) - HEADER_BYTES for i, ok in written.items() if ok),
            declined=len(written) - num_admitted,
        )
        for index in admitted:
            del self._waiting[index]
        self._decline_excess()

    def _decline_excess(self) -> None:
        if self._waiting and not self.board.planned:
            self._static_full = True
            self.ledger.add(declined=len(self._waiting))
            self._waiting.clear()
        held = sum(map(len, self._waiting.values()))
        while held > WAITING_BYTES:
            oldest = next(iter(self._waiting))
            held -= len(self._waiting.pop(oldest))
            self.ledger.add(declined=1)

    def _failed(self, error: StoreError) -> None:
        self.ledger.add(store_errors=1)
        self._breaker.store_failed(error)

    def close(self) -> None:
        """Closes the store. Safe to call twice."""
        self.store.close()
