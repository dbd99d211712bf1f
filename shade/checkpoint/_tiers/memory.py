"""Keeps snapshots in the memory of the cluster, in slots that are reused in turn and protected by copies or parity.

`slot_table` says where everything lies. A slot is *dirty* while its snapshot is not in storage; only the flusher clears
the bit. `slot_choice` chooses the slot that the next snapshot takes, and `capacity` decides before anything changes
whether the snapshot fits.

Chunks go through a few threads, each with its own connections: SET from the caller's memory to the socket without a
copy, GET from the socket into the caller's memory (`Store.get_many_into`). Small values go to every server, and the
first correct one counts. A write needs every server: if one is down, `prepare` refuses and the caller saves elsewhere.
A read uses the servers that answer.

Invariant: a location in `held` was complete on every server when its record was written, and nothing of an earlier
snapshot in that slot can be found. With `SlotLayout.survives` ≥ 1 this holds after the loss of that many servers.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import ClassVar, Final, TypeVar

import numpy as np
from typing_extensions import override

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, Commit, Manifest
from shade.checkpoint._tiers.capacity import check_capacity, spare_bytes
from shade.checkpoint._tiers.erasure import ErasureCode, Stripe, parity_of
from shade.checkpoint._tiers.slot_choice import SlotChoice
from shade.checkpoint._tiers.slot_table import (
    TABLE_NAME,
    Slot,
    SlotLayout,
    SlotRecords,
    commit_name,
    dirty_name,
    extent_name,
    hold_name,
    manifest_name,
)
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import ConfigError, StoreError
from shade.store.base import Store
from shade.types import Bytes

T = TypeVar("T")
_DAMAGED: Final = b" damaged"


class MemoryTier(Tier):
    """Stores the snapshots of one run in a store.

    Args:
        store: The store; the caller closes it. Its timeout bounds each wait for progress, not a transfer. A server that
            serves many ranks at once makes each of them wait, so allow seconds.
        run: The run id.
        num_slots: ≥ 2: one is written while another holds the newest snapshot. More slots let storage lag longer.
        replicas: Further copies of each chunk on other servers: as many servers may be lost.
        parity: ``(k, r)`` instead of replicas: r parity pieces for every k chunks; any r pieces may be lost.
        flushed: True if a flusher moves snapshots to storage: a dirty slot is then kept where possible.
        num_threads: Connections per server for large values, at most.
        in_flight: Snapshots that may be between `prepare` and `commit` at once.

    Raises:
        ConfigError: An argument is invalid, or the store has too few servers.
        StoreUnavailableError: The store does not answer.
    """

    name: ClassVar[str] = "cluster memory"

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        num_slots: int = 2,
        replicas: int = 0,
        parity: tuple[int, int] | None = None,
        flushed: bool = False,
        num_threads: int = 4,
        in_flight: int = 1,
    ) -> None:
        if num_slots < 2:
            raise ConfigError.of("2 slots or more", num_slots, "one is written while another holds the newest snapshot")
        if replicas < 0 or (replicas and parity):
            shown = f"replicas={replicas}, parity={parity}"
            raise ConfigError.of("replicas ≥ 0, or parity, not both", shown, "leave one of them out")
        if parity:
            ErasureCode(*parity)
        self.store, self.run = store, run
        self._replicas, self._parity = replicas, parity or (0, 0)
        self._flushed = flushed
        self._records = SlotRecords(store, run)
        self._choice = SlotChoice(self._records, num_slots, flushed=flushed)
        self._slots: dict[str, Slot] = {}
        self._commits: dict[str, Commit] = {}
        self._num_threads, self._in_flight = num_threads, in_flight
        self._table_lock = threading.Lock()  # held while the table is read, changed and written
        self._pending: dict[str, int] = {}
        """Slot numbers by location, oldest first: claimed here and not committed yet."""
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="shade-memory-tier")
        layout = self._layout()
        self.survives = layout.survives
        """Number of servers that may be lost at once without loss of a snapshot, with the servers of now."""
        self.num_copies = layout.num_copies

    def _layout(self) -> SlotLayout:
        layout = SlotLayout(tuple(self.store.placement()), self._replicas, *self._parity, grouped=True)
        layout.check()
        return layout

    # ------------------------------------------------------------------------------------------------ writing

    @override
    def prepare(self, step: int, shard_bytes: Sequence[int]) -> str:
        # "Full" also means that every slot waits for the flusher.
        with self._table_lock:
            while len(self._pending) >= self._in_flight:  # the oldest one failed without a call of discard()
                del self._pending[next(iter(self._pending))]
            layout, (table, tags) = self._layout(), self._records.table()
            # Before anything changes: a snapshot that does not fit must not cost the one whose slot it would take.
            number, reused = self._choice.to_reuse(table, self._pending)
            check_capacity(self.store, layout, shard_bytes, reused, self._num_threads * CHUNK_BYTES)
            for slot in reused:
                self._records.erase_record(slot)
                kept_ranks = len(shard_bytes) if slot.number == number and slot.layout == layout else 0
                self._records.erase_content(slot, range(kept_ranks, len(slot.shard_bytes)))
                table = table if slot.number == number else table.without(slot.number)
            table = table.with_slot(number, step, layout, tuple(shard_bytes))
            self._records.write_table(table, tags)
            self._pending[table.slots[number].location] = number
            return table.slots[number].location

    def spare_bytes(self, shard_bytes: Sequence[int]) -> int | None:
        """Returns the bytes that the servers have left after such a snapshot, or as they are; see `spare_bytes`."""
        reused = self._choice.to_reuse(self._records.table()[0], self._pending)[1] if shard_bytes else []
        return spare_bytes(self.store, self._layout(), shard_bytes, reused, self._num_threads * CHUNK_BYTES)

    @override
    def put(self, location: str, shard: Shard) -> None:
        # What ``shard.chunks`` yields must stay unchanged until this returns.
        slot, manifest = self._claimed_slot(location), shard.manifest
        num_chunks, extent = len(manifest.chunks), extent_name(slot, manifest.rank)
        before = self._records.extent(slot, manifest.rank)
        if before > num_chunks:
            self.store.delete_many(list(self._records.names.content(slot, manifest.rank, num_chunks, before)))
        # Raised before the chunks are written, so that all of them are found when the slot is erased later.
        if before != num_chunks:
            self._records.write_everywhere(slot, extent, b"%d" % num_chunks)
        group = max(1, slot.layout.num_data)
        chunks = iter(shard.chunks)
        stripes: Iterator[tuple[int, list[Bytes]]] = enumerate(iter(lambda: list(islice(chunks, group)), []))
        self._run_in_threads(lambda part: self._put_stripe(slot, manifest, *part), stripes)
        self._records.write_everywhere(slot, manifest_name(slot, manifest.rank), manifest.to_bytes())

    def _put_stripe(self, slot: Slot, manifest: Manifest, stripe: int, chunks: Sequence[Bytes]) -> None:
        """Writes one chunk and its replicas, or k chunks and their parity, to all their servers at the same time."""
        first = stripe * max(1, slot.layout.num_data)
        items: dict[str, Bytes] = {
            self._records.names.chunk(slot, manifest.rank, first + member, copy): chunk
            for member, chunk in enumerate(chunks)
            for copy in range(1 + slot.layout.replicas)
        }
        if slot.layout.num_parity:
            for row, content in enumerate(parity_of(slot.layout, chunks)):
                items[self._records.names.parity(slot, manifest.rank, stripe, row)] = content
        self._records.write(items)

    @override
    def commit(self, location: str, record: Commit) -> None:
        slot = self._claimed_slot(location)
        if self._flushed:
            self._records.write_everywhere(slot, dirty_name(slot), b"%d" % record.step)
        try:
            self._records.write_everywhere(slot, commit_name(slot), record.to_bytes())
        except StoreError:
            with contextlib.suppress(StoreError):
                self._records.erase_record(slot)
            raise
        self._pending.pop(location, None)

    @override
    def discard(self, location: str) -> None:
        self._pending.pop(location, None)
        with self._table_lock:
            table, tags = self._records.table()
            slot = table.find(location)
            if slot is not None:
                self._records.erase_record(slot)
                self._records.erase_content(slot, range(len(slot.shard_bytes)))
                self._records.write_table(table.emptied(slot.number), tags)

    # ------------------------------------------------------------------------------------------------ dirty bits

    def dirty(self) -> list[tuple[str, Commit]]:
        """Returns the location and record of each snapshot that is not in storage yet, oldest first."""
        table, tags = self._records.table()
        self._slots = {slot.location: slot for slot in table.slots.values()}
        commits = self._records.committed(table)
        self.damaged = self._records.damaged(table, tags, commits)
        found = [(table.slots[number], commit) for number, commit in commits.items()]
        found = [(slot, commit) for slot, commit in found if self._records.has(slot, dirty_name(slot))]
        return [(slot.location, commit) for slot, commit in sorted(found, key=lambda each: each[1].sequence)]

    def is_dirty(self, location: str) -> bool:
        """Returns whether that snapshot is not in storage yet."""
        slot = self._find(location)
        return slot is not None and self._records.has(slot, dirty_name(slot))

    def note_damage(self, location: str) -> None:
        """Notes on a dirty bit that the snapshot cannot be flushed: who has it whole elsewhere may repair it."""
        slot = self._find(location)
        if slot is not None and self._records.has(slot, dirty_name(slot)):
            self._records.write_everywhere(slot, dirty_name(slot), b"%d%s" % (slot.step, _DAMAGED))

    def is_damaged(self, location: str) -> bool:
        """Returns whether `note_damage` was called of that snapshot since it was written or repaired."""
        slot = self._find(location)
        return slot is not None and self._records.has(slot, dirty_name(slot), _DAMAGED)

    def mark_clean(self, location: str, step: int) -> None:
        """Clears the dirty bit and the hold: the snapshot is in storage, or is given up. A slot that holds another step
        by now is left unchanged."""
        table, _ = self._records.table()
        slot = table.find(location)  # from the current table: a store that came back empty restarts its generations
        if slot is not None and slot.step == step:
            for name in (dirty_name(slot), hold_name(slot)):
                self.store.delete_many(self._records.names.everywhere(slot, name))

    def is_complete(self) -> bool:
        """Returns whether every server answers, so that what was not found is not there."""
        try:
            self._records.check_complete()
        except StoreError:
            return False
        return True

    def hold(self, location: str) -> None:
        """Asks `prepare` not to overtake a dirty snapshot until it is clean or `release_hold` is called."""
        slot = self._find(location)
        if slot is not None:
            self._records.write_everywhere(slot, hold_name(slot), b"1")

    def release_hold(self, location: str) -> None:
        """Takes `hold` back."""
        slot = self._find(location)
        if slot is not None:
            self.store.delete_many(self._records.names.everywhere(slot, hold_name(slot)))

    # ------------------------------------------------------------------------------------------------ reading

    @override
    def held(self, known: Mapping[str, Commit] | None = None) -> Mapping[str, Commit]:
        table, tags = self._records.table()
        commits = self._records.committed(table)
        self.damaged = self._records.damaged(table, tags, commits)
        self._slots = {slot.location: slot for slot in table.slots.values()}
        self._commits = {table.slots[number].location: commit for number, commit in commits.items()}
        copies = [self._slots[location].layout.num_copies for location in self._commits]
        self.num_copies = max([self._layout().num_copies, *copies])
        return dict(self._commits)

    @override
    def read_manifest(self, location: str, rank: int, copy: int = 0) -> bytes | None:
        # Every server has one: returns the first that matches the record, starting from number ``copy``.
        slot = self._find(location)
        if slot is None:
            return None
        keys = self._records.names.everywhere(slot, manifest_name(slot, rank))
        start = copy % len(keys)
        found = [content for content in self.store.get_many(keys[start:] + keys[:start]) if content is not None]
        record = self._commits.get(location)
        if record is not None and rank < record.world_size:
            found.sort(key=lambda content: digest_of(content) != record.manifests[rank])
        return found[0] if found else None

    @override
    def read_chunks(
        self, location: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0
    ) -> list[Bytes | None]:
        ends = np.cumsum([manifest.chunks[number].num_bytes for number in numbers]).tolist()
        memory = np.empty(ends[-1] if ends else 0, np.uint8).data  # one allocation: the kernel uses huge pages
        buffers = [memory[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        found = self.read_chunks_into(location, manifest, numbers, buffers, copy)
        return [buffer if is_there else None for buffer, is_there in zip(buffers, found, strict=True)]

    @override
    def read_chunks_into(
        self, location: str, manifest: Manifest, numbers: Sequence[int], buffers: Sequence[memoryview], copy: int = 0
    ) -> list[bool]:
        # Straight from the socket: half the time of reading and copying. Copy 0 is the chunk; the others are its
        # replicas, or its reconstructions through each parity row.
        slot = self._find(location)
        found = dict.fromkeys(numbers, False)
        if slot is None:
            return list(found.values())
        copy %= slot.layout.num_copies
        into = dict(zip(numbers, buffers, strict=True))

        def fetch(number: int) -> None:
            key = self._records.names.chunk(slot, manifest.rank, number, copy)
            (found[number],) = self.store.get_many_into({key: into[number]})

        def rebuild(stripe: int) -> None:
            pieces = Stripe(self.store, self._records.names, slot, manifest, stripe, {})
            for number in (number for number in into if number // slot.layout.num_data == stripe):
                content = pieces.rebuild(number, copy - 1)
                if content is not None:
                    into[number][:] = content.data
                    found[number] = True

        if copy and slot.layout.num_parity:
            self._run_in_threads(rebuild, sorted({number // slot.layout.num_data for number in numbers}))
        else:
            self._run_in_threads(fetch, numbers)
        return [found[number] for number in numbers]

    @override
    def repair(self, location: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        # What lies on every server is written again too, for a server that came back empty.
        table, _ = self._records.table()
        slot = table.find(location)
        record = self._records.committed(table).get(slot.number) if slot else None
        if slot is None or record is None:
            raise StoreError(f"expected a snapshot in {location}, got none; it was replaced by a newer one")
        is_dirty = self._records.has(slot, dirty_name(slot))
        self._records.write_everywhere(slot, extent_name(slot, manifest.rank), b"%d" % len(manifest.chunks))
        self._records.write_everywhere(slot, manifest_name(slot, manifest.rank), manifest.to_bytes())
        if slot.layout.num_parity:
            stripes = sorted({number // slot.layout.num_data for number in damaged})
            self._run_in_threads(lambda stripe: self._repair_stripe(slot, manifest, stripe, damaged), stripes)
        else:
            self._run_in_threads(lambda number: self._put_stripe(slot, manifest, number, [damaged[number]]), damaged)
        if is_dirty:
            self._records.write_everywhere(slot, dirty_name(slot), b"%d" % record.step)
        self._records.write_everywhere(slot, commit_name(slot), record.to_bytes())
        # add, not set: a newer table may have been written by a concurrent prepare().
        self.store.add_many(dict.fromkeys(self._records.names.everywhere(slot, TABLE_NAME), table.to_bytes()))

    def _repair_stripe(self, slot: Slot, manifest: Manifest, number: int, damaged: Mapping[int, Bytes]) -> None:
        """Writes a stripe again with its parity; if another of its chunks is lost, only the given chunks."""
        stripe = Stripe(self.store, self._records.names, slot, manifest, number, damaged)
        chunks = stripe.data()
        if chunks is not None:
            self._put_stripe(slot, manifest, number, chunks)
        else:
            keys = {n: self._records.names.chunk(slot, manifest.rank, n) for n in stripe.numbers if n in damaged}
            self._records.write({key: damaged[n] for n, key in keys.items()})

    def time_write(self, num_bytes: int) -> float:
        """Returns the seconds that writing a value of that length takes; the value is removed again."""
        return self._records.time_write(num_bytes)

    @override
    def close(self) -> None:
        # The store stays open.
        self._pool.shutdown()

    def _find(self, location: str) -> Slot | None:
        """Returns the slot from the last table that was read, else from the current one."""
        if location not in self._slots:
            table, _ = self._records.table()
            self._slots |= {slot.location: slot for slot in table.slots.values()}
        return self._slots.get(location)

    def _claimed_slot(self, location: str) -> Slot:
        """Returns the slot that `prepare` claimed; raises StoreError if the table does not have it any more."""
        table, _ = self._records.table()
        slot = table.find(location)
        if slot is None:
            cure = "was the store emptied, or does another process save under this run id?"
            raise StoreError(f"expected {location} of run {self.run!r} to be ours, got a table without it; {cure}")
        return slot

    def _run_in_threads(self, action: Callable[[T], object], items: Iterable[T]) -> None:
        """Runs the action for each item in a few threads; the first failure is raised after the running ones end."""
        pending: deque[Future[object]] = deque()
        try:
            for item in items:
                if len(pending) >= 2 * self._num_threads:
                    pending.popleft().result()
                pending.append(self._pool.submit(action, item))
            while pending:
                pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            wait(pending)
