"""Keeps snapshots in the memory of the cluster: slots used in turn, each on all servers, copied or coded against loss.

What lies where is in `slots`. A snapshot that storage has not got yet makes its slot *dirty*; only the flusher takes
that bit away. `MemoryTier.prepare` takes a clean slot, or, where storage is slower than the saves, the oldest dirty one
that no flusher holds: a newer snapshot is committed already, and training does not wait for a disk. It never takes the
newest, nor one that another in memory builds on. The log says once that some are overtaken.

Large values go through a few threads, each with connections of its own: SET from the caller's memory to the socket
without a copy, GET from the socket into the caller's memory (`Store.get_many_into`). Small ones go to every server, and
the first right one counts. Writing wants every server: with one away there is no room here, and the caller saves
elsewhere; reading takes what is left.

Invariant: a place that `held` names was whole when its record was written, on every server; of what it held before
nothing can be found any more. With `SlotLayout.survives` ≥ 1 that is still so when as many servers are gone.

Whether a snapshot fits into the cluster's memory, before anything there is changed for it.

The servers know how full they are; what a snapshot occupies follows from its length, its layout and the allocator's
rounding. Counted in is what is under way at once: a server reads a large value into a buffer of its own, which is as
long and counts as memory in use. The fullest server decides. Price: one INFO a save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import ClassVar, Final, TypeVar

import numpy as np

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, Commit, Manifest
from shade.checkpoint._tiers.erasure import ErasureCode, Stripe, parity_of
from shade.checkpoint._tiers.slot_table import (
    TABLE_NAME,
    Slot,
    SlotLayout,
    SlotRecords,
    SlotTable,
    commit_name,
    dirty_name,
    extent_name,
    hold_name,
    manifest_name,
    needed_slots,
)
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import ConfigError, StoreError, StoreFullError, StoreUnavailableError
from shade.store.base import NodeStats, Store
from shade.types import Bytes

T = TypeVar("T")
logger = logging.getLogger("shade.checkpoint")


class MemoryTier(Tier):
    """Snapshots of one run in a store.

    Args:
        store: Where; it stays the caller's to close. Its timeout bounds each wait for progress, not a transfer; a
            server that serves many ranks at once makes each of them wait, so give it seconds.
        run: The run id.
        num_slots: ≥ 2: while one is written, another holds the newest snapshot. More let storage be slower for longer.
        replicas: Further copies of each chunk, on other servers: so many may be lost.
        parity: ``(k, r)`` instead of replicas: r pieces of parity for every k chunks, any r pieces may be lost.
        flushed: True where a flusher takes snapshots to storage: then none is overwritten before that.
        num_threads: Connections a server at the most, for large values.
        in_flight: Snapshots that may be on their way from `prepare` to `commit` at once.

    Raises:
        ConfigError: Arguments that cannot be, or that this store has too few servers for.
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
        self._num_slots, self._replicas, self._parity = num_slots, replicas, parity or (0, 0)
        self._flushed = flushed
        self._book = SlotRecords(store, run)
        self._slots: dict[str, Slot] = {}
        self._commits: dict[str, Commit] = {}
        self._num_threads, self._in_flight = num_threads, in_flight
        self._overtaken = False
        self._turn = threading.Lock()  # held while the table is read, changed and written
        self._on_their_way: dict[str, int] = {}
        """Slots by place, oldest first: taken here, and nobody is told of what is in them yet."""
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="shade-memory-tier")
        layout = self._layout()
        self.survives = layout.survives
        """How many servers may be lost at once without loss of a snapshot, as the store is now."""
        self.num_copies = layout.num_copies

    def _layout(self) -> SlotLayout:
        layout = SlotLayout(tuple(self.store.placement()), self._replicas, *self._parity, grouped=True)
        layout.check()
        return layout

    # ------------------------------------------------------------------------------------------------ writing

    def prepare(self, step: int, shard_bytes: Sequence[int]) -> str:
        """See `Tier`. A store that is full is one without memory for it, or with every slot waiting for the flusher."""
        with self._turn:
            while len(self._on_their_way) >= self._in_flight:  # the oldest has failed, and nobody has said so
                del self._on_their_way[next(iter(self._on_their_way))]
            layout, (table, tags) = self._layout(), self._book.table()
            number, given_up = self._given_up(table)
            check_room(self.store, layout, shard_bytes, given_up, self._num_threads * CHUNK_BYTES)
            for slot in given_up:
                self._book.erase_record(slot)
                kept_ranks = len(shard_bytes) if slot.number == number and slot.layout == layout else 0
                self._book.erase_content(slot, range(kept_ranks, len(slot.shard_bytes)))
                table = table if slot.number == number else table.without(slot.number)
            table = table.with_slot(number, step, layout, tuple(shard_bytes))
            self._book.write_table(table, tags)
            self._on_their_way[table.slots[number].place] = number
            return table.slots[number].place

    def _given_up(self, table: SlotTable) -> tuple[int, list[Slot]]:
        """The slot to take; it, and those beyond the number there may be, in as far as there is something in them."""
        taken = set(self._on_their_way.values())  # before the records are read, lest one be in neither
        commits = self._book.committed(table)
        number = self._choose(table, commits, taken)
        surplus = [n for n in table.slots if n >= self._num_slots and self._is_free(table, n, commits)]
        return number, [table.slots[n] for n in (*surplus, number) if n in table.slots]

    def spare_bytes(self, shard_bytes: Sequence[int]) -> int | None:
        """What the servers would have left with one more such snapshot, or as they are; see `memory_room`."""
        given_up = self._given_up(self._book.table()[0])[1] if shard_bytes else []
        return spare_bytes(self.store, self._layout(), shard_bytes, given_up, self._num_threads * CHUNK_BYTES)

    def _choose(self, table: SlotTable, commits: Mapping[int, Commit], taken: set[int]) -> int:
        """The slot to take: an empty one, else the oldest clean one, else the oldest that nobody is about to save."""
        free = [n for n in range(self._num_slots) if n not in taken and self._is_free(table, n, commits)]
        if not free and commits:
            free = [
                number
                for number in set(range(self._num_slots)) - needed_slots(commits) - taken
                if self._flushed and not self._book.has(table.slots[number], hold_name(table.slots[number]))
            ]
            if free and not self._overtaken:
                self._overtaken = True
                logger.warning("storage is slower than the saves: some leave %s before they are in storage", self.name)
        if not free:
            steps = ", ".join(map(str, sorted(commit.step for commit in commits.values())))
            raise StoreFullError(
                f"expected one of {self._num_slots} slots to be free, got snapshots that are needed or not in storage "
                f"yet in all (steps {steps}): the flusher is behind; save less often, or give it more slots"
            )
        return min(free, key=lambda number: commits[number].sequence if number in commits else -1)

    def _is_free(self, table: SlotTable, number: int, commits: Mapping[int, Commit]) -> bool:
        if number not in commits:
            return True
        slot = table.slots[number]
        return number not in needed_slots(commits) and not (self._flushed and self._book.has(slot, dirty_name(slot)))

    def put(self, place: str, shard: Shard) -> None:
        """See `Tier`. What ``shard.chunks`` yields must stay as it is until this returns."""
        slot, manifest = self._taken(place), shard.manifest
        num_chunks, extent = len(manifest.chunks), extent_name(slot, manifest.rank)
        before = self._book.extent(slot, manifest.rank)
        if before > num_chunks:
            self.store.delete_many(list(self._book.names.content(slot, manifest.rank, num_chunks, before)))
        if before != num_chunks:
            self._book.write_everywhere(slot, extent, b"%d" % num_chunks)
        group = max(1, slot.layout.num_data)
        chunks = iter(shard.chunks)
        stripes: Iterator[tuple[int, list[Bytes]]] = enumerate(iter(lambda: list(islice(chunks, group)), []))
        self._in_threads(lambda part: self._put_stripe(slot, manifest, *part), stripes)
        self._book.write_everywhere(slot, manifest_name(slot, manifest.rank), manifest.to_bytes())

    def _put_stripe(self, slot: Slot, manifest: Manifest, stripe: int, chunks: Sequence[Bytes]) -> None:
        """One chunk and its replicas, or k chunks and their parity: to all their servers at the same time."""
        first = stripe * max(1, slot.layout.num_data)
        items: dict[str, Bytes] = {
            self._book.names.chunk(slot, manifest.rank, first + member, copy): chunk
            for member, chunk in enumerate(chunks)
            for copy in range(1 + slot.layout.replicas)
        }
        if slot.layout.num_parity:
            for row, content in enumerate(parity_of(slot.layout, chunks)):
                items[self._book.names.parity(slot, manifest.rank, stripe, row)] = content
        self._book.write(items)

    def commit(self, place: str, record: Commit) -> None:
        """See `Tier`."""
        slot = self._taken(place)
        if self._flushed:
            self._book.write_everywhere(slot, dirty_name(slot), b"%d" % record.step)
        try:
            self._book.write_everywhere(slot, commit_name(slot), record.to_bytes())
        except StoreError:
            with contextlib.suppress(StoreError):
                self._book.erase_record(slot)
            raise
        self._on_their_way.pop(place, None)

    def discard(self, place: str) -> None:
        """See `Tier`."""
        self._on_their_way.pop(place, None)
        with self._turn:
            table, tags = self._book.table()
            slot = table.find(place)
            if slot is not None:
                self._book.erase_record(slot)
                self._book.erase_content(slot, range(len(slot.shard_bytes)))
                self._book.write_table(table.emptied(slot.number), tags)

    # ------------------------------------------------------------------------------------------------ dirty bits

    def dirty(self) -> list[tuple[str, Commit]]:
        """Each place whose snapshot is not in storage yet, with its record; oldest first."""
        table, _ = self._book.table()
        self._slots = {slot.place: slot for slot in table.slots.values()}
        commits = self._book.committed(table)
        found = [(table.slots[number], commit) for number, commit in commits.items()]
        found = [(slot, commit) for slot, commit in found if self._book.has(slot, dirty_name(slot))]
        return [(slot.place, commit) for slot, commit in sorted(found, key=lambda each: each[1].sequence)]

    def is_dirty(self, place: str) -> bool:
        """Whether that snapshot is not in storage yet."""
        slot = self._find(place)
        return slot is not None and self._book.has(slot, dirty_name(slot))

    def mark_clean(self, place: str, step: int) -> None:
        """Lets the slot be used again: its snapshot is in storage, or is given up.

        Args:
            place: From `dirty`.
            step: Of the snapshot; a slot that holds another one by now is left as it is.
        """
        table, _ = self._book.table()
        slot = table.find(place)  # as it is now: a store that came back empty counts its takings anew
        if slot is not None and slot.step == step:
            for name in (dirty_name(slot), hold_name(slot)):
                self.store.delete_many(self._book.names.everywhere(slot, name))

    def hold(self, place: str) -> None:
        """Asks that a dirty snapshot not be overtaken before it is in storage, until it is clean or let go.

        Args:
            place: From `dirty`.
        """
        slot = self._find(place)
        if slot is not None:
            self._book.write_everywhere(slot, hold_name(slot), b"1")

    def let_go(self, place: str) -> None:
        """Takes `hold` back."""
        slot = self._find(place)
        if slot is not None:
            self.store.delete_many(self._book.names.everywhere(slot, hold_name(slot)))

    # ------------------------------------------------------------------------------------------------ reading

    def held(self) -> Mapping[str, Commit]:
        """See `Tier`."""
        table, tags = self._book.table()
        commits = self._book.committed(table)
        self.damaged = self._book.damaged(table, tags, commits)
        self._slots = {slot.place: slot for slot in table.slots.values()}
        self._commits = {table.slots[number].place: commit for number, commit in commits.items()}
        copies = [self._slots[place].layout.num_copies for place in self._commits]
        self.num_copies = max([self._layout().num_copies, *copies])
        return dict(self._commits)

    def read_manifest(self, place: str, rank: int, copy: int = 0) -> bytes | None:
        """See `Tier`. Every server has one: the first that is as committed, searched from number ``copy`` on."""
        slot = self._find(place)
        if slot is None:
            return None
        keys = self._book.names.everywhere(slot, manifest_name(slot, rank))
        start = copy % len(keys)
        found = [content for content in self.store.get_many(keys[start:] + keys[:start]) if content is not None]
        record = self._commits.get(place)
        if record is not None and rank < record.world_size:
            found.sort(key=lambda content: digest_of(content) != record.manifests[rank])
        return found[0] if found else None

    def read_chunks(self, place: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0) -> list[Bytes | None]:
        """See `Tier`."""
        ends = np.cumsum([manifest.chunks[number].num_bytes for number in numbers]).tolist()
        whole = np.empty(ends[-1] if ends else 0, np.uint8).data  # in one piece: the kernel gives it out in huge pages
        buffers = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        found = self.read_chunks_into(place, manifest, numbers, buffers, copy)
        return [buffer if is_there else None for buffer, is_there in zip(buffers, found, strict=True)]

    def read_chunks_into(
        self, place: str, manifest: Manifest, numbers: Sequence[int], buffers: Sequence[memoryview], copy: int = 0
    ) -> list[bool]:
        """See `Tier`; straight from the socket, half the time of reading and copying. After the chunk itself come its
        replicas, or reconstructions, one through each row of parity."""
        slot = self._find(place)
        found = dict.fromkeys(numbers, False)
        if slot is None:
            return list(found.values())
        copy %= slot.layout.num_copies
        into = dict(zip(numbers, buffers, strict=True))

        def fetch(number: int) -> None:
            key = self._book.names.chunk(slot, manifest.rank, number, copy)
            (found[number],) = self.store.get_many_into({key: into[number]})

        def rebuild(stripe: int) -> None:
            pieces = Stripe(self.store, self._book.names, slot, manifest, stripe, {})
            for number in (number for number in into if number // slot.layout.num_data == stripe):
                content = pieces.rebuild(number, copy - 1)
                if content is not None:
                    into[number][:] = content.data
                    found[number] = True

        if copy and slot.layout.num_parity:
            self._in_threads(rebuild, sorted({number // slot.layout.num_data for number in numbers}))
        else:
            self._in_threads(fetch, numbers)
        return [found[number] for number in numbers]

    def repair(self, place: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        """See `Tier`. What lies on every server is written again too: a server that came back empty gets its share."""
        table, _ = self._book.table()
        slot = table.find(place)
        record = self._book.committed(table).get(slot.number) if slot else None
        if slot is None or record is None:
            raise StoreError(f"expected a snapshot in {place}, got none; it was replaced by a newer one")
        is_dirty = self._book.has(slot, dirty_name(slot))
        self._book.write_everywhere(slot, extent_name(slot, manifest.rank), b"%d" % len(manifest.chunks))
        self._book.write_everywhere(slot, manifest_name(slot, manifest.rank), manifest.to_bytes())
        if slot.layout.num_parity:
            stripes = sorted({number // slot.layout.num_data for number in damaged})
            self._in_threads(lambda stripe: self._mend_stripe(slot, manifest, stripe, damaged), stripes)
        else:
            self._in_threads(lambda number: self._put_stripe(slot, manifest, number, [damaged[number]]), damaged)
        if is_dirty:
            self._book.write_everywhere(slot, dirty_name(slot), b"%d" % record.step)
        self._book.write_everywhere(slot, commit_name(slot), record.to_bytes())
        # Only where it is missing: whoever takes a slot now writes a newer one.
        self.store.add_many(dict.fromkeys(self._book.names.everywhere(slot, TABLE_NAME), table.to_bytes()))

    def _mend_stripe(self, slot: Slot, manifest: Manifest, number: int, damaged: Mapping[int, Bytes]) -> None:
        """Writes the stripe anew, parity and all; where another of its chunks is lost too, only what is at hand."""
        stripe = Stripe(self.store, self._book.names, slot, manifest, number, damaged)
        whole = stripe.data()
        if whole is not None:
            self._put_stripe(slot, manifest, number, whole)
        else:
            keys = {n: self._book.names.chunk(slot, manifest.rank, n) for n in stripe.numbers if n in damaged}
            self._book.write({key: damaged[n] for n, key in keys.items()})

    def time_write(self, num_bytes: int) -> float:
        """Seconds that writing a value of that length takes; it is removed again."""
        return self._book.time_write(num_bytes)

    def close(self) -> None:
        """See `Tier`; the store stays open."""
        self._pool.shutdown()

    def _find(self, place: str) -> Slot | None:
        """The slot as it is known, else as the table has it."""
        if place not in self._slots:
            table, _ = self._book.table()
            self._slots |= {slot.place: slot for slot in table.slots.values()}
        return self._slots.get(place)

    def _taken(self, place: str) -> Slot:
        """The slot that `prepare` took; a StoreError if it is not ours any more."""
        table, _ = self._book.table()
        slot = table.find(place)
        if slot is None:
            cure = "was the store emptied, or does another process save under this run id?"
            raise StoreError(f"expected {place} of run {self.run!r} to be ours, got a table without it; {cure}")
        return slot

    def _in_threads(self, action: Callable[[T], object], items: Iterable[T]) -> None:
        """Does it for each, a few at the same time. The first failure ends it, after those under way have ended."""
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


_KEY_LENGTH: Final = 80
_BUFFERS: Final = 2
"""Copies of a value that a server holds while it comes in."""
_EDGE: Final = 64
"""A server is filled up to this part of its limit: its tables grow in leaps, and its clients' buffers count."""


def needed_bytes(store: Store, layout: SlotLayout, shard_bytes: Sequence[int]) -> int:
    """What a snapshot occupies on all servers together.

    Args:
        store: Knows the allocator's rounding.
        layout: Copies and parity.
        shard_bytes: Length of each rank's shard.

    Returns:
        Bytes, rounding included.
    """
    whole = store.stored_bytes(_KEY_LENGTH, CHUNK_BYTES)
    total = 0
    for size in shard_bytes:
        num_whole, rest = divmod(size, CHUNK_BYTES)
        copies = num_whole * whole + (store.stored_bytes(_KEY_LENGTH, rest) if rest else 0)
        num_parity = layout.num_stripes(num_whole + bool(rest)) * layout.num_parity
        total += copies * (1 + layout.replicas) + num_parity * min(whole, copies)
    return total


def spare_bytes(
    store: Store, layout: SlotLayout, shard_bytes: Sequence[int], given_up: Sequence[Slot], rank_bytes: int
) -> int | None:
    """What a snapshot would leave to others, if it were saved now: the fullest server's, times the servers.

    Args:
        store: The servers.
        layout: Of the snapshot to come.
        shard_bytes: Length of each rank's shard; empty for no snapshot.
        given_up: Slots whose content goes first.
        rank_bytes: What one rank has under way at once.

    Returns:
        Bytes, less what keeps the servers from the very edge; negative: so much is missing. None: they have no limit.
    """
    primaries = [node for node in store.stats().nodes if node.role == "primary" and node.max_bytes]
    num_servers = len(layout.tags)
    uneven = store.stored_bytes(_KEY_LENGTH, CHUNK_BYTES) if shard_bytes and num_servers > 1 else 0
    wanted = needed_bytes(store, layout, shard_bytes) + sum(_BUFFERS * min(size, rank_bytes) for size in shard_bytes)
    wanted += min(sum(shard_bytes), rank_bytes)  # a flusher that reads another one meanwhile
    freed = sum(needed_bytes(store, slot.layout, slot.shard_bytes) for slot in given_up)
    share = (wanted - freed) // num_servers + uneven
    left = [_left_bytes(node) - node.max_bytes // _EDGE - share for node in primaries]
    return num_servers * min(left) if left else None


def _left_bytes(node: NodeStats) -> int:
    return node.max_bytes - node.used_bytes - node.overhead_bytes


def check_room(
    store: Store, layout: SlotLayout, shard_bytes: Sequence[int], given_up: Sequence[Slot], rank_bytes: int
) -> None:
    """Compares what the fullest server has left with its share of a snapshot.

    Args:
        store: The servers.
        layout: Of the snapshot to come.
        shard_bytes: Length of each rank's shard.
        given_up: Slots whose content goes first.
        rank_bytes: What one rank has under way at once.

    Raises:
        StoreFullError: It does not fit.
        StoreUnavailableError: A server does not answer.
    """
    primaries = [node for node in store.stats().nodes if node.role == "primary"]
    num_servers = len(layout.tags)
    if len(primaries) < num_servers:
        raise StoreUnavailableError(f"only {len(primaries)} of {num_servers} servers of {store.url} answer")
    needed = needed_bytes(store, layout, shard_bytes)
    freed = sum(needed_bytes(store, slot.layout, slot.shard_bytes) for slot in given_up)
    under_way = sum(_BUFFERS * min(size, rank_bytes) for size in shard_bytes)
    for node in primaries:
        left = _left_bytes(node) + freed // num_servers
        if node.max_bytes and left < (needed + under_way) // num_servers:
            wanted = (needed + under_way) / num_servers
            raise StoreFullError(
                f"expected room for {wanted / 2**20:.0f} MiB of snapshot on {node.address}, got "
                f"{max(0, left) / 2**20:.0f} MiB; raise its maxmemory or lower what samples may use"
            )
