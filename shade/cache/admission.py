"""Admission: removes entries from the store and writes new ones, so that their bytes never exceed the capacity.

A shared counter in the store keeps the capacity: a process reserves before it writes and gives back after it has
removed, so ranks and workers that run ahead of each other cannot overshoot together. An arrival without space waits in
memory for the departures of a slower process, and is declined in the end. Two to four round trips for a batch that
changes something, none for others.

The counter may be above the truth, never below, with two exceptions that only a lock could close: the store is flushed,
or the capacity shrinks, between a reservation and its write. Each costs at most one batch a process beyond the
capacity, until departures or the next count. Invariant: while no node is lost, ``add`` is atomic across clients.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from shade.cache.entry import HEADER_BYTES, seal
from shade.cache.job_registry import EntryNames
from shade.cache.ledger import Ledger
from shade.cache.residency_map import STAY, ResidencyMap
from shade.errors import StoreError, StoreFullError
from shade.store.base import Store
from shade.store.keys import SampleKeys, placement_tags

LEAST_PATIENCE_SECONDS, MOST_PATIENCE_SECONDS = 0.05, 0.5
"""Bounds of the one wait for space in an epoch's last batches. It lasts as long as reading the arrivals again would; at
least a few times the delay of a process on a fast origin, and at most what an epoch's end can bear unnoticed."""
PAUSE_SECONDS = 0.005
WAITING_BYTES = 64 * 2**20
"""Arrivals that a process keeps in memory for want of space; beyond it the oldest are declined."""
COUNTER = "used-bytes"


class Admission:
    """One process's departures from the store and arrivals in it.

    This job writes to the first of its ``slots``, and removes from all of them. ``largest_bytes`` is the largest entry
    that the policy plans with, allocator rounding included.
    """

    def __init__(
        self,
        store: Store,
        slots: EntryNames,
        residency: ResidencyMap,
        ledger: Ledger,
        *,
        cached_format: int,
        largest_bytes: int,
    ) -> None:
        self._store, self._slots, self._residency, self._ledger, self._cached_format = (
            store,
            slots,
            residency,
            ledger,
            cached_format,
        )
        self._largest_bytes = largest_bytes
        self._counters: dict[str, SharedCounter] = {}
        self._owed: dict[int, None] = {}
        self._waiting: dict[int, bytes] = {}
        self._unreturned_bytes = 0
        self._full = self._gave_up = False
        self._generation = residency.generation
        self.waited_seconds = 0.0
        """Spent waiting for space, in all: caused by a slower process and not by the store."""

    @property
    def _counter(self) -> SharedCounter:
        keys = self._slots.keys
        return self._counters.setdefault(keys.namespace, SharedCounter(self._store, keys, COUNTER))

    def catch_up(self) -> None:
        """Drops what was owed or waiting under an older plan, after the residents were counted again."""
        if self._generation != self._residency.generation:
            self._generation, self._full, self._gave_up = self._residency.generation, False, False
            self._owed.clear()
            self._unreturned_bytes = 0
            self.decline(0)

    @property
    def is_unfinished(self) -> bool:
        """Returns whether departures or arrivals of earlier batches are still to be done."""
        return bool(self._owed or self._waiting)

    def size_bytes(self, payload_bytes: int) -> int:
        """Returns what an entry with a payload of that length occupies in the store."""
        return self._store.stored_bytes(self._slots.key_length, payload_bytes + HEADER_BYTES)

    def owe(self, departures: Iterable[int]) -> None:
        """Marks samples whose entries leave with the next `settle`."""
        self._owed.update(dict.fromkeys(departures))

    def decline(self, num_arrivals: int) -> None:
        """Counts arrivals that are not even tried, and drops those that wait."""
        self._ledger.add(declined=num_arrivals + len(self._waiting))
        self._waiting.clear()

    def hold(self, arrivals: Mapping[int, Any]) -> None:
        """Keeps arrivals in memory, for the next `settle`."""
        self._take_in_hand(arrivals)
        self._decline_excess()

    def counted_bytes(self) -> int:
        """Returns what the entries occupy by the shared counter, allocator rounding and pending departures included.

        Raises StoreError if the store does not answer, and ValueError if the counter's key holds something else.
        """
        return self._counter.value()

    def recount(self, used_bytes: int) -> bool:
        """Sets the counter to what the entries occupy, while no process admits or removes; returns whether all copies
        took it.

        Raises StoreError if the store failed; the counter is then as it was, or right.
        """
        return self._counter.put(used_bytes)

    def repair(self, payloads: Mapping[int, Any], others: Mapping[int, Any]) -> tuple[int, int]:
        """Repairs damaged entries, which keep the space that they had; returns the entries written, and the bytes that
        the removed ones had occupied. Raises StoreError.

        ``payloads`` are the origin's, by sample index, of samples that stay; ``others`` those of samples that leave (an
        exception object if the origin could not read one).
        """
        written = []
        if payloads:
            keys = self._slots.keys.many(list(payloads))
            entries = [seal(index, payload, self._cached_format) for index, payload in payloads.items()]
            # A damaged entry keeps the space that it has, so nothing is reserved for it.
            written = self._store.set_many(dict(zip(keys, entries, strict=True)))
        lengths = self._store.delete_many(self._slots.keys.many(list(others))) if others else []
        self._ledger.add(evicted=sum(length >= 0 for length in lengths))
        freed_bytes = sum(
            self.size_bytes(len(payload))
            for payload, length in zip(others.values(), lengths, strict=True)
            if length >= 0 and not isinstance(payload, Exception)
        )
        return sum(written), freed_bytes

    def settle(self, arrivals: Mapping[int, Any], freed_bytes: int = 0) -> int:
        """Removes departures; then reserves space, writes the arrivals that have it, and keeps the others in memory.
        Returns how many entries were written; ``freed_bytes`` are given back for entries that are removed already.

        Raises StoreError if the store failed: departures are then still owed, arrivals declined.
        """
        if self._full and not self._residency.planned:
            arrivals = {}
        if self._owed:
            # Removed first, counted afterwards: in between the counter is too high, so others wait a batch and none
            # overshoots.
            lengths = self._store.delete_many(self._slots.owned_names(list(self._owed)))
            self._residency.held_N[list(self._owed)] = 0
            self._owed.clear()
            gone = [length for length in lengths if length >= 0]
            freed_bytes += sum(self.size_bytes(length - HEADER_BYTES) for length in gone)
            self._ledger.add(evicted=len(gone))
        self._take_in_hand(arrivals)
        freed_bytes += self._unreturned_bytes
        self._unreturned_bytes = 0
        try:
            if not self._waiting:
                if freed_bytes:
                    self._counter.add(-freed_bytes)
                return 0
            written = self._admit(freed_bytes)
            if self._waiting and self._residency.ending and not self._gave_up:
                written += self._wait_for_room()
        except StoreFullError:
            # A server that is full of other data refuses to count as well: what is owed to the counter waits, reads go
            # on.
            self._unreturned_bytes += freed_bytes
            self.decline(0)
            return 0
        except BaseException:
            self.decline(0)
            raise
        self._decline_excess()
        return written

    def _wait_for_room(self) -> int:
        """Tries again for a moment: near the epoch's end this process may get no further batch to do it with.

        By plan, departures of other workers and ranks have paid for the space. If it does not come (a reservation was
        lost with its process), the process waits once and never again, and no longer than the wait is worth.
        """
        num_written, begun = 0, time.monotonic()
        again_seconds = len(self._waiting) * self._residency.origin_seconds
        patience_seconds = min(max(again_seconds, LEAST_PATIENCE_SECONDS), MOST_PATIENCE_SECONDS)
        while self._waiting and time.monotonic() < begun + patience_seconds:
            time.sleep(PAUSE_SECONDS)
            num_written += self._admit(0)
        self.waited_seconds += time.monotonic() - begun
        self._gave_up = bool(self._waiting)
        return num_written

    def _take_in_hand(self, arrivals: Mapping[int, Any]) -> None:
        """Seals the arrivals, and drops waiting ones that no longer stay."""
        for index in [i for i in self._waiting if not self._residency.flag_N[i] & STAY]:
            del self._waiting[index]
        for index, payload in arrivals.items():
            if self.size_bytes(len(payload)) <= min(self._largest_bytes, self._residency.capacity_bytes):
                self._waiting[index] = seal(index, payload, self._cached_format)
            else:
                self._ledger.add(declined=1)

    def _admit(self, freed_bytes: int) -> int:
        """Writes the waiting entries that find space; returns how many."""
        sizes = {index: self.size_bytes(len(entry) - HEADER_BYTES) for index, entry in self._waiting.items()}
        wanted = sum(sizes.values())
        # Reserved before the write. If this process dies in between, capacity is lost, not exceeded, until the next
        # count.
        excess = self._counter.add(wanted - freed_bytes) - self._residency.capacity_bytes
        chosen = dict(self._waiting)
        for index in reversed(self._waiting):
            if excess <= 0:
                break
            excess -= sizes[index]
            del chosen[index]
        entries = dict(zip(self._slots.keys.many(list(chosen)), chosen.values(), strict=True))
        # Of two processes that admit one sample both reserve; the second finds the key present and gives its bytes
        # back.
        written = dict(zip(chosen, self._store.add_many(entries), strict=True)) if entries else {}
        kept = sum(sizes[index] for index, ok in written.items() if ok)
        if kept < wanted:
            try:
                self._counter.add(kept - wanted)
            except StoreFullError:
                self._unreturned_bytes = wanted - kept
        num_written = sum(written.values())
        self._residency.held_N[[index for index, ok in written.items() if ok]] = 1
        self._ledger.add(
            admitted=num_written,
            admitted_bytes=sum(len(chosen[index]) - HEADER_BYTES for index, ok in written.items() if ok),
            declined=len(written) - num_written,
        )
        for index in written:
            del self._waiting[index]
        return num_written

    def _decline_excess(self) -> None:
        if self._waiting and not self._residency.planned:
            self._full = True
            self.decline(0)
        held = sum(map(len, self._waiting.values()))
        while held > WAITING_BYTES:
            held -= len(self._waiting.pop(next(iter(self._waiting))))
            self._ledger.add(declined=1)


_COPIES_AT: Final = (1 / 6, 1 / 2, 5 / 6)
"""Fractions of the slots: of any three or more nodes with equal shares, at least two hold a copy."""


class SharedCounter:
    """A number of bytes that all processes of all jobs share, kept in the store; it outlives the node that it is on."""

    def __init__(self, store: Store, keys: SampleKeys, name: str) -> None:
        self._store, self._keys, self._name = store, keys, name
        self._found: list[str] = []

    def _copies(self) -> list[str]:
        """Returns the keys of the copies; the first one decides."""
        if not self._found:
            self._found = [self._keys.counter_key(self._name)]
            if len(self._store.placement()) > 1:
                tags = placement_tags()
                # On one node alone the counter would be lost with it, and a cache with two thirds of its entries left
                # would admit nothing.
                chosen = [tags[int(len(tags) * part)] for part in _COPIES_AT]
                self._found = [self._keys.counter_key(f"{self._name}:{{{tag}}}") for tag in chosen]
        return self._found

    def add(self, num_bytes: int) -> int:
        """Adds bytes, which may be negative; returns the new value. Raises StoreError if no copy could be changed."""
        outcomes = self._store.increment_many(self._copies(), num_bytes)
        # While the first copy lives it alone decides, so two that add at once are served one after the other. A copy
        # that comes back late is corrected by the next `put`.
        for outcome in outcomes:
            if isinstance(outcome, int):
                return outcome
        failure = outcomes[0]
        assert isinstance(failure, StoreError)
        raise failure

    def value(self) -> int:
        """Returns the value, 0 if there is none yet.

        Raises StoreError if the store does not answer, and ValueError if its key holds something else.
        """
        return next((int(copy) for copy in self._store.get_many(self._copies()) if copy is not None), 0)

    def put(self, num_bytes: int) -> bool:
        """Sets the value, while no process adds; returns whether every copy took it.

        A server without memory for it keeps the old value, and so does a node that is away. Raises StoreError if the
        store does not answer.
        """
        return all(self._store.set_many(dict.fromkeys(self._copies(), b"%d" % num_bytes)))
