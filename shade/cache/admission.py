"""Room: how entries leave the store and come into it, so that their bytes never exceed the capacity.

The capacity is kept by a shared counter in the store: whoever wants to admit reserves first, whoever removes gives
back afterwards, so ranks and workers that run ahead of each other cannot overshoot together. What finds no room waits
in hand for the departures of a slower neighbour and is declined at last. Races, as stories:

1. A removes, B admits. A unlinks, then lowers the counter; B raises it before it writes. Between the two the counter is
   above the truth, never below: B waits a batch, nothing overshoots.
2. A and B admit the same sample. Both reserve; the second ``add`` finds the key present and gives its room back.
3. The server is full, for somebody else's sake. It refuses to count as well: A declines what it wanted to admit, keeps
   in mind what it has to give back, and reads go on.
4. A dies, or the store fails A, between reserving and writing. The counter stays too high: capacity is lost, not
   exceeded, until `SampleCache.find_residents` counts afresh.
5. Somebody overwrites one of our entries. It keeps the room it had, and is repaired in place (`SampleCache`).
6. Somebody flushes the store between A's reservation and A's write. What A writes then is not counted until the next
   count: at most one batch a process beyond the capacity. Nothing but a lock could close this one.
7. The capacity shrinks while A has reserved by the old one. A writes it: at most a batch a process too much, until
   departures or the next count.

Two to four round trips a batch that changes something, none for a batch that does not.

A number of bytes that all processes of all jobs share, kept in the store, and outliving the node that it is on.

In a cluster a counter lies on one node. Were that node lost, nobody could reserve room any more, and a cache that has
two thirds of its entries left would take in nothing. So the number is kept on up to three nodes: `add` adds to all of
them in one round, and what the first of them says that answers is what counts. While the first is there it alone
decides, so that two who add at the same moment see one after the other; a node that comes back empty or late is put
right by the next `put`. On a single server there is one copy, and none of this.

Invariant: while no node is lost, `add` is atomic across clients.
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
"""How long the last batches of an epoch wait for room, once only: what reading again costs that finds none, but at
least a few times what a neighbour is late on a quick origin, and at most what nobody notices at an epoch's end."""
PAUSE_SECONDS = 0.005
WAITING_BYTES = 64 * 2**20
"""How much a process keeps in hand for want of room in the store; beyond it the oldest are declined."""
COUNTER = "used-bytes"


class Admission:
    """One process's departures and arrivals.

    Args:
        store: Where the entries lie.
        slots: Their names; this job writes in the first of its slots, and removes from all of them.
        board: Says who shall stay, and what all entries may occupy together, allocator rounding included.
        ledger: This process's row.
        form: How payloads are encoded.
        largest_bytes: What one may occupy: the largest that the policy plans with.
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
        """Spent waiting for room, in all: a neighbour's slowness and not the store's."""

    @property
    def _counter(self) -> SharedCounter:
        keys = self._slots.keys
        return self._counters.setdefault(keys.namespace, SharedCounter(self._store, keys, COUNTER))

    def catch_up(self) -> None:
        """Forgets what was owed or held for a plan that is no more: the residents were counted afresh since."""
        if self._generation != self._residency.generation:
            self._generation, self._full, self._gave_up = self._residency.generation, False, False
            self._owed.clear()
            self._unreturned_bytes = 0
            self.decline(0)

    @property
    def is_unfinished(self) -> bool:
        """Whether departures or arrivals of earlier batches are still to be done."""
        return bool(self._owed or self._waiting)

    def size_bytes(self, payload_bytes: int) -> int:
        """What an entry with so many bytes of payload occupies in the store."""
        return self._store.stored_bytes(self._slots.key_length, payload_bytes + HEADER_BYTES)

    def owe(self, departures: Iterable[int]) -> None:
        """Notes samples that shall leave with the next `settle`."""
        self._owed.update(dict.fromkeys(departures))

    def decline(self, num_arrivals: int) -> None:
        """Counts arrivals that are not even tried, and lets go of those that wait."""
        self._ledger.add(declined=num_arrivals + len(self._waiting))
        self._waiting.clear()

    def counted_bytes(self) -> int:
        """What the entries occupy by the shared counter: those that are about to leave included.

        Returns:
            Bytes, allocator rounding included.

        Raises:
            StoreError: The store does not answer.
            ValueError: Under its name there is something else.
        """
        return self._counter.value()

    def recount(self, used_bytes: int) -> bool:
        """Sets the counter to what the entries really occupy; while nobody else admits or removes.

        Args:
            used_bytes: The truth.

        Returns:
            Whether the counter says so now, wherever it is kept.

        Raises:
            StoreError: The store failed. The counter is as it was, or right; so it is on a server that is full.
        """
        return self._counter.put(used_bytes)

    def repair(self, payloads: Mapping[int, Any], others: Mapping[int, Any]) -> tuple[int, int]:
        """Puts damaged entries right. They have their room already, whatever their length is now.

        Args:
            payloads: What the origin has, by sample index, of those that stay: written over the damage.
            others: The same of those that go (an exception object where the origin could not read it).

        Returns:
            Entries written, and the room in bytes of those that are gone.

        Raises:
            StoreError: The store failed.
        """
        written = []
        if payloads:
            keys = self._slots.keys.many(list(payloads))
            entries = [seal(index, payload, self._cached_format) for index, payload in payloads.items()]
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
        """Departures first; then reserves room, writes what has room, keeps the rest in hand.

        Args:
            arrivals: Payload by sample index.
            freed_bytes: Room of entries that are gone already, to be given back.

        Returns:
            Entries written.

        Raises:
            StoreError: The store failed. What was to leave is still owed, what was to arrive is declined.
        """
        if self._full and not self._residency.planned:
            arrivals = {}
        if self._owed:
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

        The room is about to come: by plan, departures of other workers and ranks have paid for it. If it does not come
        (a reservation was lost with its process), it is waited for once and no more, and no longer than it is worth.
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
        """Seals what arrives; lets go of what waited and is not wanted any more."""
        for index in [i for i in self._waiting if not self._residency.flag_N[i] & STAY]:
            del self._waiting[index]
        for index, payload in arrivals.items():
            if self.size_bytes(len(payload)) <= min(self._largest_bytes, self._residency.capacity_bytes):
                self._waiting[index] = seal(index, payload, self._cached_format)
            else:
                self._ledger.add(declined=1)

    def _admit(self, freed_bytes: int) -> int:
        """Writes those in hand that find room; how many were written."""
        sizes = {index: self.size_bytes(len(entry) - HEADER_BYTES) for index, entry in self._waiting.items()}
        wanted = sum(sizes.values())
        excess = self._counter.add(wanted - freed_bytes) - self._residency.capacity_bytes
        chosen = dict(self._waiting)
        for index in reversed(self._waiting):
            if excess <= 0:
                break
            excess -= sizes[index]
            del chosen[index]
        entries = dict(zip(self._slots.keys.many(list(chosen)), chosen.values(), strict=True))
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
"""Of the slots: of any three nodes or more with equal shares, at least two have a copy."""


class SharedCounter:
    """The number.

    Args:
        store: Where.
        keys: Of the data set that it belongs to.
        name: Its own.
    """

    def __init__(self, store: Store, keys: SampleKeys, name: str) -> None:
        self._store, self._keys, self._name = store, keys, name
        self._found: list[str] = []

    def _copies(self) -> list[str]:
        """Their keys; the first one decides."""
        if not self._found:
            self._found = [self._keys.counter_key(self._name)]
            if len(self._store.placement()) > 1:
                tags = placement_tags()
                chosen = [tags[int(len(tags) * part)] for part in _COPIES_AT]
                self._found = [self._keys.counter_key(f"{self._name}:{{{tag}}}") for tag in chosen]
        return self._found

    def add(self, num_bytes: int) -> int:
        """Adds.

        Args:
            num_bytes: May be negative.

        Returns:
            What it is now.

        Raises:
            StoreError: No copy could be counted on.
        """
        outcomes = self._store.increment_many(self._copies(), num_bytes)
        for outcome in outcomes:
            if isinstance(outcome, int):
                return outcome
        failure = outcomes[0]
        assert isinstance(failure, StoreError)
        raise failure

    def value(self) -> int:
        """Reads it.

        Returns:
            What it is; 0 where there is none yet.

        Raises:
            StoreError: The store does not answer.
            ValueError: Under its name there is something else.
        """
        return next((int(copy) for copy in self._store.get_many(self._copies()) if copy is not None), 0)

    def put(self, num_bytes: int) -> bool:
        """Sets it, whatever it was; while nobody else adds. A server without memory for it keeps what it had.

        Args:
            num_bytes: The truth.

        Returns:
            Whether every copy took it; one that is back later, or has room again, says what it said before.

        Raises:
            StoreError: The store does not answer.
        """
        return all(self._store.set_many(dict.fromkeys(self._copies(), b"%d" % num_bytes)))
