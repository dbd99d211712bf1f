"""Says where everything of a snapshot lies in the cluster's memory: the table of slots, the names, the servers.

::

    shade:checkpoint:<run>:{<tag>}table                    every slot: number, generation, step, layout
                                  commit:<slot>.<gen>      the commit record
                                  dirty:<slot>.<gen>       there while the snapshot lies nowhere but in memory
                                  extent:<slot>:<rank>     how many chunks of that rank may be there
                                  manifest:<slot>:<rank>
                                  chunk:<slot>:<rank>:<number>
                                  parity:<slot>:<rank>:<stripe>:<row>

The tag alone decides which server holds a key. The first five are small and lie on every server; chunks and parity are
dealt out. The tags are chosen from the cluster as it is when a slot is taken, and are noted in the table with it, so
that a cluster rearranged later only forwards the reader. The table is looked for under every tag that could have been
chosen (`placement_tags`, one batch of 256 small reads); of several the one with the highest generation counts.

Each taking of a slot has a generation of its own, which is in the names of what makes a snapshot count. So whatever of
an earlier taking comes to light again, on a server that was away, is a record that nobody looks for.

Keeps the books of a run's slots in a store: the table, the records, and what else is small and lies on every server.

Whatever is read may be one server's alone: of several answers the newest, or the first right one, counts, and a server
that is away is as one that has nothing. Whatever is written must reach every server, or it is an error.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final
from urllib.parse import quote

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Commit
from shade.errors import ConfigError, CorruptCheckpointError
from shade.store.base import Store
from shade.store.keys import placement_tags
from shade.types import Bytes

_DIGEST_LENGTH: Final = 32


@dataclass(frozen=True)
class SlotLayout:
    """How the chunks of a slot are spread."""

    tags: tuple[str, ...]
    """One a server; P of them."""
    replicas: int
    """Further copies of each chunk, each on another server."""
    num_data: int = 0
    """k: chunks that share parity; 0 without parity."""
    num_parity: int = 0
    """r: pieces of parity for them."""
    grouped: bool = False
    """Whether the copies of a chunk lie in a group of servers that hold copies for each other alone. (Tables written
    before there were groups do not say, and have none.)"""

    @property
    def num_copies(self) -> int:
        """Ways to come by a chunk: its copies, or itself and one reconstruction through each row of parity."""
        return 1 + max(self.replicas, self.num_parity)

    @property
    def survives(self) -> int:
        """How many servers may be lost at once, whichever they are, without loss of a chunk."""
        if not self.num_parity:
            return self.replicas
        num_servers, num_pieces = len(self.tags), self.num_data + self.num_parity
        whole, rest = divmod(num_pieces, num_servers)
        lost = 0
        for num_lost in range(1, num_servers + 1):  # the fullest servers first
            lost += whole + (num_lost <= rest)
            if lost > self.num_parity:
                return num_lost - 1
        return num_servers

    def check(self) -> None:
        """Refuses what the servers cannot do.

        Raises:
            ConfigError: Two copies would lie on one server, or the parity would survive no loss.
        """
        num_servers = len(self.tags)
        if self.replicas >= num_servers:
            expected = f"fewer replicas than the store has servers ({num_servers})"
            raise ConfigError.of(
                expected, self.replicas, "add servers, or ask for fewer copies: two on one are no help"
            )
        if self.num_parity and not self.survives:
            shown = f"({self.num_data}, {self.num_parity}) on {num_servers} servers"
            expected = "parity that survives the loss of a server"
            raise ConfigError.of(expected, shown, "the pieces of a stripe share servers: add servers, or raise r")

    def copy_tags(self, rank: int, number: int) -> list[str]:
        """Where a chunk lies: itself, then its replicas."""
        if self.num_parity:
            stripe, member = divmod(number, self.num_data)
            return [self._tag(rank, stripe, member)]
        home = (rank + number) % len(self.tags)
        first, length = self._group(home)
        return [self.tags[first + (home - first + copy) % length] for copy in range(1 + self.replicas)]

    def _group(self, home: int) -> tuple[int, int]:
        """First server and length of the group that a server is in.

        With m copies a snapshot is lost when m servers are that hold the same chunk. Were each chunk's copies on the m
        servers from its home on, almost any m neighbours would do; of groups of m there are N / m. So Gemini places
        them (SOSP 2023, §4), the last group taking the servers that are left over. Every server is home to as many
        chunks, and keeps as many copies, as every other.
        """
        num_servers, num_copies = len(self.tags), 1 + self.replicas
        if not self.grouped:
            return 0, num_servers
        last = num_servers // num_copies - 1
        group = min(home // num_copies, last)
        first = group * num_copies
        return first, num_servers - first if group == last else num_copies

    def parity_tag(self, rank: int, stripe: int, row: int) -> str:
        """Where a piece of parity lies."""
        return self._tag(rank, stripe, self.num_data + row)

    def _tag(self, rank: int, stripe: int, piece: int) -> str:
        return self.tags[(rank + stripe * (self.num_data + self.num_parity) + piece) % len(self.tags)]

    def num_stripes(self, num_chunks: int) -> int:
        """Of a shard; 0 without parity."""
        return -(-num_chunks // self.num_data) if self.num_parity else 0


@dataclass(frozen=True)
class Slot:
    """One taking of a slot."""

    number: int
    generation: int
    step: int
    layout: SlotLayout
    shard_bytes: tuple[int, ...]
    """Stored length of each rank's shard; empty once it was emptied."""

    @property
    def place(self) -> str:
        """As `Tier` has it."""
        return f"slot-{self.number}.{self.generation}"


@dataclass(frozen=True)
class SlotTable:
    """All slots of a run, as the last taking left them."""

    generation: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    """By number."""

    def with_slot(self, number: int, step: int, layout: SlotLayout, shard_bytes: tuple[int, ...]) -> SlotTable:
        """After the next taking."""
        generation = self.generation + 1
        slot = Slot(number, generation, step, layout, shard_bytes)
        return SlotTable(generation, {**self.slots, number: slot})

    def emptied(self, number: int) -> SlotTable:
        """After what a slot held was removed."""
        slot = self.slots[number]
        return self.with_slot(number, slot.step, slot.layout, ())

    def without(self, number: int) -> SlotTable:
        """After a slot was given up."""
        kept = {other: slot for other, slot in self.slots.items() if other != number}
        return replace(self, generation=self.generation + 1, slots=kept)

    def find(self, place: str) -> Slot | None:
        """The slot of that place, unless it was taken again since."""
        return next((slot for slot in self.slots.values() if slot.place == place), None)

    def to_bytes(self) -> bytes:
        """JSON behind its own digest."""
        body = {"generation": self.generation, "slots": [asdict(slot) for slot in self.slots.values()]}
        content = json.dumps(body, separators=(",", ":")).encode()
        return digest_of(content).encode() + content

    @classmethod
    def parse(cls, content: bytes) -> SlotTable | None:
        """Reads one; None for anything else."""
        body = content[_DIGEST_LENGTH:]
        if digest_of(body).encode() != content[:_DIGEST_LENGTH]:
            return None
        fields = json.loads(body)
        slots = {}
        for each in fields["slots"]:
            layout = SlotLayout(**{**each["layout"], "tags": tuple(each["layout"]["tags"])})
            slot = Slot(**{**each, "layout": layout, "shard_bytes": tuple(each["shard_bytes"])})
            slots[slot.number] = slot
        return cls(fields["generation"], slots)


class SlotNames:
    """The keys of one run.

    Args:
        run: Its id; what could mean something to Redis is percent-encoded.
    """

    def __init__(self, run: str) -> None:
        self._prefix = f"shade:checkpoint:{quote(run, safe='')}:"

    def key(self, tag: str, name: str) -> str:
        """On the server that owns the tag."""
        return f"{self._prefix}{{{tag}}}{name}"

    def chunk(self, slot: Slot, rank: int, number: int, copy: int = 0) -> str:
        """One copy of a chunk."""
        return self.key(slot.layout.copy_tags(rank, number)[copy], f"chunk:{slot.number}:{rank}:{number}")

    def parity(self, slot: Slot, rank: int, stripe: int, row: int) -> str:
        """One piece of parity."""
        tag = slot.layout.parity_tag(rank, stripe, row)
        return self.key(tag, f"parity:{slot.number}:{rank}:{stripe}:{row}")

    def everywhere(self, slot: Slot, name: str) -> list[str]:
        """A small thing, on every server."""
        return [self.key(tag, name) for tag in slot.layout.tags]

    def content(self, slot: Slot, rank: int, first: int, end: int) -> Iterator[str]:
        """All copies of the chunks from ``first`` to before ``end``, and the parity that belongs to no earlier one."""
        layout = slot.layout
        for number in range(first, end):
            for copy in range(1 + layout.replicas):
                yield self.chunk(slot, rank, number, copy)
        for stripe in range(layout.num_stripes(first), layout.num_stripes(end)):
            for row in range(layout.num_parity):
                yield self.parity(slot, rank, stripe, row)


def commit_name(slot: Slot) -> str:
    """Of the commit record."""
    return f"commit:{slot.number}.{slot.generation}"


def dirty_name(slot: Slot) -> str:
    """Of the dirty bit."""
    return f"dirty:{slot.number}.{slot.generation}"


def hold_name(slot: Slot) -> str:
    """Of the flusher's wish that the snapshot stay until it is in storage."""
    return f"hold:{slot.number}.{slot.generation}"


def manifest_name(slot: Slot, rank: int) -> str:
    """Of a rank's manifest."""
    return f"manifest:{slot.number}:{rank}"


def extent_name(slot: Slot, rank: int) -> str:
    """Of the number of chunks that may be there."""
    return f"extent:{slot.number}:{rank}"


TABLE_NAME: Final = "table"


class SlotRecords:
    """The books of one run.

    Args:
        store: Where they are kept.
        run: The run id.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self.names = SlotNames(run)
        self._table_keys = {tag: self.names.key(tag, TABLE_NAME) for tag in placement_tags()}

    def table(self) -> tuple[SlotTable, list[str]]:
        """The table, and the tags that it was found under."""
        contents = self._store.get_many(list(self._table_keys.values()))
        found = [tag for tag, content in zip(self._table_keys, contents, strict=True) if content is not None]
        tables = [SlotTable.parse(content) for content in contents if content is not None]
        newest = max((table for table in tables if table is not None), key=lambda t: t.generation, default=SlotTable())
        return newest, found

    def write_table(self, table: SlotTable, old_tags: Sequence[str]) -> None:
        """Writes it to every server of the layout that was taken last; where it was before and is not now, it goes."""
        last = max(table.slots.values(), key=lambda slot: slot.generation)
        self.write(dict.fromkeys(self.names.everywhere(last, TABLE_NAME), table.to_bytes()))
        self._store.delete_many([self._table_keys[tag] for tag in old_tags if tag not in last.layout.tags])

    def committed(self, table: SlotTable) -> dict[int, Commit]:
        """The record of each slot that has one, by number."""
        commits: dict[int, Commit] = {}
        for number, slot in table.slots.items():
            for content in self._store.get_many(self.names.everywhere(slot, commit_name(slot))):
                with contextlib.suppress(CorruptCheckpointError):
                    if content is not None:
                        commits.setdefault(number, Commit.parse(content))
        return commits

    def damaged(self, table: SlotTable, old_tags: Sequence[str], commits: Mapping[int, Commit]) -> list[str]:
        """What is there and cannot be read in any copy: records, or the table itself."""
        rotten = [slot for number, slot in table.slots.items() if number not in commits]
        found = [slot.place for slot in rotten if self.has(slot, commit_name(slot))]
        return found if table.generation or not old_tags else [TABLE_NAME]

    def has(self, slot: Slot, name: str) -> bool:
        """Whether a small thing is on some server."""
        return any(content is not None for content in self._store.get_many(self.names.everywhere(slot, name)))

    def extent(self, slot: Slot, rank: int) -> int:
        """How many chunks of a rank may be there."""
        found = self._store.get_many(self.names.everywhere(slot, extent_name(slot, rank)))
        return max((int(content) for content in found if content is not None and content.isdigit()), default=0)

    def erase_record(self, slot: Slot) -> None:
        """Makes its snapshot cease to exist."""
        for name in (commit_name(slot), dirty_name(slot), hold_name(slot)):
            self._store.delete_many(self.names.everywhere(slot, name))

    def erase_content(self, slot: Slot, ranks: Iterable[int]) -> None:
        """Removes some ranks' shards; their snapshot must not exist any more."""
        for rank in ranks:
            self._store.delete_many(list(self.names.content(slot, rank, 0, self.extent(slot, rank))))
            for name in (manifest_name(slot, rank), extent_name(slot, rank)):
                self._store.delete_many(self.names.everywhere(slot, name))

    def write_everywhere(self, slot: Slot, name: str, content: bytes) -> None:
        """Writes a small thing to every server; raises as `write`."""
        self.write(dict.fromkeys(self.names.everywhere(slot, name), content))

    def write(self, items: Mapping[str, Bytes]) -> None:
        """Writes all of it.

        Args:
            items: Values by key.

        Raises:
            StoreUnavailableError: A server is away.
            StoreFullError: A server has no memory left.
        """
        for refusal in self._store.refusals(items):
            if refusal is not None:
                raise refusal

    def time_write(self, num_bytes: int) -> float:
        """Writes a value, and removes it again.

        Args:
            num_bytes: Its length.

        Returns:
            Seconds that writing took.

        Raises:
            StoreUnavailableError: A server is away.
            StoreFullError: A server has no memory left.
        """
        key = self.names.key(self._store.placement()[0], f"probe:{secrets.token_hex(8)}")
        content = bytes(num_bytes)
        try:
            begun = time.perf_counter()
            self.write({key: content})
            return time.perf_counter() - begun
        finally:
            self._store.delete_many([key])


def needed_slots(commits: Mapping[int, Commit]) -> set[int]:
    """Slots that must not be taken: the newest snapshot's, and of those that others in memory build on."""
    bases = {commit.base for commit in commits.values() if commit.base is not None}
    newest = max(commits, key=lambda number: commits[number].sequence, default=-1)
    return {number for number, commit in commits.items() if number == newest or (bases and commit.digest in bases)}
