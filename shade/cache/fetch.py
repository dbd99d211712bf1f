"""Fetches a batch, in a DataLoader worker or in the training process itself.

One round to the store looks for samples in this job's slots and in those of jobs that share the cache, and checks every
entry. One call to the origin reads the rest. Then come departures, and arrivals last. A store that fails makes a batch
slower and nothing else. With a disk below memory, what one `Fetch` calls the origin is another one: `fetch_through`.

Legend: B batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shade.cache.admission import Admission
from shade.cache.breaker import Breaker
from shade.cache.entry import unseal
from shade.cache.job_registry import EntryNames
from shade.cache.ledger import Ledger
from shade.cache.residency_map import LOOK, NEAR, STAY, ResidencyMap
from shade.errors import CorruptEntryError, StoreError
from shade.store.base import Store
from shade.types import Indices

logger = logging.getLogger("shade.cache")

ReadOrigin = Callable[[list[int]], list[Any]]
"""Returns payloads in the order of the indices: bytes, or the exception that reading one raised."""


@dataclass
class LookUp:
    """The outcome of one look-up."""

    found: dict[int, memoryview] = field(default_factory=dict)
    """Payload by sample index."""
    own: set[int] = field(default_factory=set)
    """Found samples that are in this job's slots."""
    damaged: list[int] = field(default_factory=list)
    """Samples of this job whose entries failed their check in the slot where it writes."""
    failed: bool = False


class Fetch:
    """One process's way to its samples."""

    def __init__(
        self,
        store: Store,
        slots: EntryNames,
        residency: ResidencyMap,
        ledger: Ledger,
        breaker: Breaker,
        admission: Admission,
        cached_format: int,
    ) -> None:
        self._store, self._slots, self._residency, self._ledger = store, slots, residency, ledger
        self._breaker, self._admission, self._cached_format = breaker, admission, cached_format

    def many(self, indices: Sequence[int], read_origin: ReadOrigin) -> tuple[list[Any], list[bool]]:
        """Does what `SampleCache.fetch_many` says."""
        index_B = np.fromiter(indices, dtype=np.int64, count=len(indices))
        unique_B = index_B if len(set(indices)) == len(indices) else np.array(list(dict.fromkeys(indices)))
        planned, shared = self._residency.planned, self._residency.is_shared
        flag_B = self._residency.flag_N[unique_B] if planned else np.full(len(unique_B), LOOK | STAY, dtype=np.uint8)
        wanted = unique_B[(flag_B & LOOK) > 0].tolist()
        staying = set(unique_B[(flag_B & STAY) > 0].tolist())
        elsewhere = self._elsewhere(unique_B, flag_B)

        self._admission.catch_up()
        is_slow = False
        asking = bool(wanted or elsewhere or staying or self._admission.is_unfinished) and self._breaker.allows()
        begun = time.perf_counter_ns()
        looked = self._look_up(wanted, elsewhere) if (wanted or elsewhere) and asking else LookUp()
        looking_up = time.perf_counter_ns() - begun
        if wanted and not asking:
            self._ledger.add(skipped=len(wanted))
        if looked.failed:
            asking = False
        elif asking and (wanted or elsewhere):
            is_slow = self._breaker.store_took(looking_up / 1e9, len(looked.found))
            asking = not self._breaker.is_open

        found = looked.found
        if planned:
            held_N = self._residency.held_N
            self._admission.owe(i for i in looked.own if i not in staying and (held_N[i] or not shared))
        absent = [index for index in unique_B.tolist() if index not in found]
        read = self._read(absent, read_origin) if absent else {}

        begun = time.perf_counter_ns()
        fresh = {i: read[i] for i in absent if i in staying and not isinstance(read[i], Exception)}
        if planned and not shared:  # a policy that plans for this job alone counts on an entry of its own
            fresh |= {i: payload for i, payload in found.items() if i in staying and i not in looked.own}
        if asking and is_slow and planned and not self._residency.ending:
            self._admission.hold(fresh)  # one more slow round would delay this batch again
        elif asking:
            self._write(looked.damaged, read, fresh)
        elif fresh:
            self._admission.decline(len(fresh))
        self._ledger.add(
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

    def offer(self, payloads: Mapping[int, Any]) -> None:
        """Writes what a faster tier had of this batch, and removes what leaves here, as planned. While other jobs use
        this tier, nothing is written that it does not ask for itself."""
        residency = self._residency
        self._ledger.add(samples=len(payloads))
        if not residency.planned or not payloads:
            return
        index_B = np.fromiter(payloads, dtype=np.int64, count=len(payloads))
        flag_B = residency.flag_N[index_B]
        here_B = residency.held_N[index_B] > 0 if residency.is_shared else (flag_B & LOOK) > 0
        arriving_B = (flag_B & STAY > 0) & ~here_B & (not residency.is_shared)
        fresh = {index: payloads[index] for index in index_B[arriving_B].tolist()}
        self._admission.catch_up()
        self._admission.owe(index_B[here_B & (flag_B & STAY == 0)].tolist())
        if not fresh and not self._admission.is_unfinished:
            return
        if not self._breaker.allows():
            self._admission.decline(len(fresh))
            return
        self._write([], {}, fresh)

    def _elsewhere(self, unique_B: Indices, flag_B: Any) -> list[int]:
        """Returns what to look for in other jobs' slots: everything while jobs share, else what the own plan does not
        hold."""
        if not self._residency.other_slots:
            return []
        return list((unique_B if self._residency.is_shared else unique_B[(flag_B & LOOK) == 0]).tolist())

    def _look_up(self, own: list[int], elsewhere: list[int]) -> LookUp:
        """Looks for samples in this job's slots and elsewhere, checks their entries, and strikes off what is gone."""
        lookups, owned = self._slots.lookups(own, elsewhere), self._residency.owned_slots
        try:
            entries = self._store.get_many(self._slots.names(lookups))
        except StoreError as error:
            self.failed(error)
            return LookUp(failed=True)
        looked, spoilt, num_corrupt = LookUp(), [], 0
        for (index, slot), entry in zip(lookups, entries, strict=True):
            if entry is None or index in looked.found:
                continue
            try:
                looked.found[index] = unseal(index, entry, self._cached_format, is_checked=self._store.checks_values)
            except CorruptEntryError as error:
                logger.debug("%s", error)
                num_corrupt += 1
                if slot == owned[0]:
                    looked.damaged.append(index)
                elif slot in owned:
                    spoilt.append(index)  # damaged in a slot that this job took over
                continue
            if slot in owned:
                looked.own.add(index)
        looked.damaged = [index for index in looked.damaged if index not in looked.found]
        lost = []
        if self._residency.planned:  # when jobs share, of that which this rank brought in
            held_N, shared = self._residency.held_N, self._residency.is_shared
            here = looked.own.union(looked.damaged)
            lost = [index for index in own if index not in here and (held_N[index] or not shared)]
            held_N[lost] = 0
        self._ledger.add(
            cache_reads=len(looked.found),
            cache_bytes=sum(map(len, looked.found.values())),
            corrupt=num_corrupt,
            surprises=len(lost),
            borrowed=len(looked.found) - len(looked.own),
            near_hits=int(np.count_nonzero(self._residency.flag_N[list(looked.found)] & NEAR)) if looked.found else 0,
        )
        self._admission.owe(spoilt)
        return looked

    def _write(self, damaged: list[int], read: dict[int, Any], fresh: dict[int, Any]) -> None:
        """Repairs, removes and admits. The breaker gets the time of this, without the wait for others."""
        begun, waited_seconds, before = time.perf_counter_ns(), self._admission.waited_seconds, self._changes()
        has_work = bool(damaged or fresh) or self._admission.is_unfinished
        num_written = self._settle(damaged, read, fresh)
        if num_written is not None and has_work:
            took = (time.perf_counter_ns() - begun) / 1e9 + waited_seconds - self._admission.waited_seconds
            num_removed, num_bytes = (now - then for now, then in zip(self._changes(), before, strict=True))
            self._breaker.store_wrote(took, num_written + num_removed, num_bytes)

    def _changes(self) -> tuple[int, int]:
        """Returns the entries that were removed so far, and the bytes that were admitted."""
        return self._ledger["evicted"], self._ledger["admitted_bytes"]

    def _settle(self, damaged: list[int], read: dict[int, Any], fresh: dict[int, Any]) -> int | None:
        """Repairs, removes and admits; returns how many entries were written, or None if the store failed."""
        freed_bytes = num_repaired = 0
        try:
            if damaged:
                repairs = {index: fresh.pop(index) for index in damaged if index in fresh}
                others = {index: read[index] for index in damaged if index not in repairs and index in read}
                num_repaired, freed_bytes = self._admission.repair(repairs, others)
            return num_repaired + self._admission.settle(fresh, freed_bytes)
        except StoreError as error:
            self.failed(error)
            return None

    def _read(self, absent: list[int], read_origin: ReadOrigin) -> dict[int, Any]:
        begun = time.perf_counter_ns()
        payloads = read_origin(absent)
        took = time.perf_counter_ns() - begun
        self._breaker.origin_took(took / 1e9, len(absent))
        self._ledger.add(origin_nanoseconds=took)
        return dict(zip(absent, payloads, strict=True))

    def failed(self, error: StoreError) -> None:
        """Counts a round that the store did not answer, and opens the breaker."""
        self._ledger.add(store_errors=1)
        self._breaker.store_failed(error)


def fetch_through(
    memory: Fetch, disk: Fetch, ledger: Ledger, below: Ledger, indices: Sequence[int], read_origin: ReadOrigin
) -> tuple[list[Any], list[bool]]:
    """Fetches a batch from memory, then from the disk, then from the origin. ``ledger`` is memory's and counts all;
    ``below`` is the disk's own."""
    from_disk: dict[int, int] = {}
    before = {name: below[name] for name in ("origin_nanoseconds", "store_errors")}

    def read_below(absent: list[int]) -> list[Any]:
        begun = time.perf_counter_ns()
        payloads, hits = disk.many(absent, read_origin)
        here = time.perf_counter_ns() - begun - (below["origin_nanoseconds"] - before["origin_nanoseconds"])
        from_disk.update(
            {index: len(payload) for index, payload, hit in zip(absent, payloads, hits, strict=True) if hit}
        )
        ledger.add(
            hits=len(from_disk),
            misses=-len(from_disk),
            disk_hits=len(from_disk),
            disk_bytes=sum(from_disk.values()),
            cache_nanoseconds=here,
            origin_nanoseconds=-here,
        )
        return payloads

    payloads, hits = memory.many(indices, read_below)
    had = {index: payload for index, payload, hit in zip(indices, payloads, hits, strict=True) if hit}
    absent = {index for index, hit in zip(indices, hits, strict=True) if not hit}
    disk.offer({index: payload for index, payload in had.items() if index not in absent})
    ledger.add(disk_errors=below["store_errors"] - before["store_errors"])
    return payloads, [hit or index in from_disk for index, hit in zip(indices, hits, strict=True)]
