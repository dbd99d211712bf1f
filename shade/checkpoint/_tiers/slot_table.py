"""Says where everything of a snapshot lies in the cluster's memory: the table of slots, the keys, the servers.

docs/format.md §7 lists the keys. The tag alone decides which server holds a key. Small values (table, record, dirty
bit, manifest) lie on every server; chunks and parity are spread. Tags are chosen from the cluster at the moment when a
slot is claimed, and are stored in the table with it, so a cluster that is rearranged later only redirects the reader.

`SlotRecords` reads and writes the small values. A read takes the newest, or the first correct, of several answers. That
a record or a dirty bit is gone is believed only of a server that answers: a slot is reused because of it. A write must
reach every server, or it raises.
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

import msgspec

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Commit
from shade.errors import ConfigError, CorruptCheckpointError, StoreUnavailableError
from shade.store.base import Store
from shade.store.keys import placement_tags
from shade.types import Bytes

_DIGEST_LENGTH: Final = 32


@dataclass(frozen=True)
class SlotLayout:
    """How the chunks of a slot are spread over servers."""

    tags: tuple[str, ...]
    """One tag per server."""
    replicas: int
    """Further copies of each chunk, each on another server."""
    num_data: int = 0
    """k: chunks that share parity; 0 without parity."""
    num_parity: int = 0
    """r: parity pieces for them."""
    grouped: bool = False
    """Whether the copies of a chunk lie in a group of servers that hold copies only for each other."""

    @property
    def is_sound(self) -> bool:
        """Returns whether every piece has a server."""
        return 0 <= self.replicas < len(self.tags) and 0 <= self.num_parity <= self.num_data * 256

    @property
    def num_copies(self) -> int:
        """Number of ways to get a chunk: its copies, or itself and one reconstruction through each parity row."""
        return 1 + max(self.replicas, self.num_parity)

    @property
    def survives(self) -> int:
        """Number of servers, whichever they are, that may be lost at once without loss of a chunk."""
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
        """Raises ConfigError if two copies would lie on one server, or the parity would survive no loss."""
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
        """Returns the tags of a chunk: its own, then those of its replicas."""
        if self.num_parity:
            stripe, member = divmod(number, self.num_data)
            return [self._tag(rank, stripe, member)]
        home = (rank + number) % len(self.tags)
        first, length = self._group(home)
        return [self.tags[first + (home - first + copy) % length] for copy in range(1 + self.replicas)]

    def _group(self, home: int) -> tuple[int, int]:
        """Returns the first server and the length of the group that a server belongs to (Gemini, SOSP 2023, §4)."""
        # With m copies, a snapshot is lost when m servers that hold the same chunk are lost. If copies lay on the m
        # servers from a chunk's home on, almost any m neighbours would do; of groups of m there are only N / m.
        num_servers, num_copies = len(self.tags), 1 + self.replicas
        if not self.grouped:
            return 0, num_servers
        last = num_servers // num_copies - 1
        group = min(home // num_copies, last)
        first = group * num_copies
        return first, num_servers - first if group == last else num_copies

    def parity_tag(self, rank: int, stripe: int, row: int) -> str:
        """Returns the tag of a parity piece."""
        return self._tag(rank, stripe, self.num_data + row)

    def _tag(self, rank: int, stripe: int, piece: int) -> str:
        return self.tags[(rank + stripe * (self.num_data + self.num_parity) + piece) % len(self.tags)]

    def num_stripes(self, num_chunks: int) -> int:
        """Returns the number of stripes of a shard; 0 without parity."""
        return -(-num_chunks // self.num_data) if self.num_parity else 0


@dataclass(frozen=True)
class Slot:
    """One claim of a slot."""

    number: int
    generation: int
    step: int
    layout: SlotLayout
    shard_bytes: tuple[int, ...]
    """Stored length of each rank's shard; empty after the slot was emptied."""

    @property
    def location(self) -> str:
        """Name of the location in the `Tier` interface."""
        return f"slot-{self.number}.{self.generation}"


@dataclass(frozen=True)
class SlotTable:
    """All slots of a run, as the last claim left them."""

    generation: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    """By number."""

    def with_slot(self, number: int, step: int, layout: SlotLayout, shard_bytes: tuple[int, ...]) -> SlotTable:
        """Returns the table after the next claim."""
        # The generation is in the names of what makes a snapshot exist: a record of an earlier claim that reappears on
        # a server that was down has a name that is never read.
        generation = self.generation + 1
        slot = Slot(number, generation, step, layout, shard_bytes)
        return SlotTable(generation, {**self.slots, number: slot})

    def emptied(self, number: int) -> SlotTable:
        """Returns the table after the content of a slot was removed."""
        slot = self.slots[number]
        return self.with_slot(number, slot.step, slot.layout, ())

    def without(self, number: int) -> SlotTable:
        """Returns the table without a slot."""
        kept = {other: slot for other, slot in self.slots.items() if other != number}
        return replace(self, generation=self.generation + 1, slots=kept)

    def find(self, location: str) -> Slot | None:
        """Returns the slot of that location, or None if it was claimed again since."""
        return next((slot for slot in self.slots.values() if slot.location == location), None)

    def to_bytes(self) -> bytes:
        """Returns JSON, preceded by its digest."""
        body = {"generation": self.generation, "slots": [asdict(slot) for slot in self.slots.values()]}
        content = json.dumps(body, separators=(",", ":")).encode()
        return digest_of(content).encode() + content

    @classmethod
    def parse(cls, content: bytes) -> SlotTable | None:
        """Reads a table; returns None for anything else."""
        body = content[_DIGEST_LENGTH:]
        if digest_of(body).encode() != content[:_DIGEST_LENGTH]:
            return None
        try:
            generation, slots = msgspec.convert([*json.loads(body).values()], tuple[int, list[Slot]])
        except (ValueError, AttributeError, RecursionError):
            return None
        are_sound = all(slot.layout.is_sound for slot in slots)
        return cls(generation, {slot.number: slot for slot in slots}) if are_sound else None


class SlotNames:
    """Builds the keys of one run; characters of its id that mean something to Redis are percent-encoded."""

    def __init__(self, run: str) -> None:
        self._prefix = f"shade:checkpoint:{quote(run, safe='')}:"

    def key(self, tag: str, name: str) -> str:
        """Returns a key on the server that owns the tag."""
        return f"{self._prefix}{{{tag}}}{name}"

    def chunk(self, slot: Slot, rank: int, number: int, copy: int = 0) -> str:
        """Returns the key of one copy of a chunk."""
        return self.key(slot.layout.copy_tags(rank, number)[copy], f"chunk:{slot.number}:{rank}:{number}")

    def parity(self, slot: Slot, rank: int, stripe: int, row: int) -> str:
        """Returns the key of a parity piece."""
        tag = slot.layout.parity_tag(rank, stripe, row)
        return self.key(tag, f"parity:{slot.number}:{rank}:{stripe}:{row}")

    def everywhere(self, slot: Slot, name: str) -> list[str]:
        """Returns the keys of a small value, one per server."""
        return [self.key(tag, name) for tag in slot.layout.tags]

    def content(self, slot: Slot, rank: int, first: int, end: int) -> Iterator[str]:
        """Yields the keys of all copies of the chunks from ``first`` to before ``end``, and of parity begun there."""
        layout = slot.layout
        for number in range(first, end):
            for copy in range(1 + layout.replicas):
                yield self.chunk(slot, rank, number, copy)
        for stripe in range(layout.num_stripes(first), layout.num_stripes(end)):
            for row in range(layout.num_parity):
                yield self.parity(slot, rank, stripe, row)


def commit_name(slot: Slot) -> str:
    """Returns the name of the commit record."""
    return f"commit:{slot.number}.{slot.generation}"


def dirty_name(slot: Slot) -> str:
    """Returns the name of the dirty bit."""
    return f"dirty:{slot.number}.{slot.generation}"


def hold_name(slot: Slot) -> str:
    """Returns the name of the flusher's hold: the snapshot is not overtaken while it exists."""
    return f"hold:{slot.number}.{slot.generation}"


def manifest_name(slot: Slot, rank: int) -> str:
    """Returns the name of a rank's manifest."""
    return f"manifest:{slot.number}:{rank}"


def extent_name(slot: Slot, rank: int) -> str:
    """Returns the name of the upper bound of a rank's number of chunks."""
    return f"extent:{slot.number}:{rank}"


TABLE_NAME: Final = "table"


class SlotRecords:
    """Reads and writes the small values of one run: table, records, dirty bits."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self.names = SlotNames(run)
        self._table_keys = {tag: self.names.key(tag, TABLE_NAME) for tag in placement_tags()}

    def table(self) -> tuple[SlotTable, list[str]]:
        """Returns the newest table, and the tags under which any table was found."""
        contents = self._store.get_many(list(self._table_keys.values()))
        found = [tag for tag, content in zip(self._table_keys, contents, strict=True) if content is not None]
        tables = [SlotTable.parse(content) for content in contents if content is not None]
        # Searched under every tag that could have been chosen, in one batch: the cluster may have been rearranged
        # since.
        newest = max((table for table in tables if table is not None), key=lambda t: t.generation, default=SlotTable())
        return newest, found

    def write_table(self, table: SlotTable, old_tags: Sequence[str]) -> None:
        """Writes the table to every server of the latest claim's layout, and deletes it elsewhere."""
        last = max(table.slots.values(), key=lambda slot: slot.generation)
        self.write(dict.fromkeys(self.names.everywhere(last, TABLE_NAME), table.to_bytes()))
        self._store.delete_many([self._table_keys[tag] for tag in old_tags if tag not in last.layout.tags])

    def committed(self, table: SlotTable) -> dict[int, Commit]:
        """Returns the commit record of each slot that has a readable one, by number."""
        commits: dict[int, Commit] = {}
        for number, slot in table.slots.items():
            for _ in range(2):  # a record that arrives damaged may lie there undamaged
                contents = [content for content in self._copies(slot, commit_name(slot)) if content is not None]
                for content in contents:
                    with contextlib.suppress(CorruptCheckpointError):
                        commits.setdefault(number, Commit.parse(content))
                if number in commits or not contents:
                    break
        return commits

    def _copies(self, slot: Slot, name: str) -> list[bytes | None]:
        """Returns every server's copy of a small value, or raises StoreUnavailableError if it is not known to be gone.

        A value that no server returns is gone if a server that has the table answers, or if all servers answer.
        """
        keys = self.names.everywhere(slot, name)
        copies = self._store.get_many(keys)
        if all(content is None for content in copies):
            found = self._store.get_many([*keys, *(self._table_keys[tag] for tag in slot.layout.tags)])
            copies = found[: len(keys)]
            if all(content is None for content in found):
                self.check_complete()
        return copies

    def check_complete(self) -> None:
        """Raises StoreUnavailableError unless every server answers."""
        num_servers = len(self._store.placement())
        num_answering = sum(node.role == "primary" for node in self._store.stats().nodes)
        if num_answering < num_servers:
            raise StoreUnavailableError(f"only {num_answering} of {num_servers} servers of {self._store.url} answer")

    def damaged(self, table: SlotTable, old_tags: Sequence[str], commits: Mapping[int, Commit]) -> list[str]:
        """Returns the locations whose record exists and is readable in no copy, or the table itself."""
        rotten = [slot for number, slot in table.slots.items() if number not in commits]
        found = [slot.location for slot in rotten if self.has(slot, commit_name(slot))]
        return found if table.generation or not old_tags else [TABLE_NAME]

    def has(self, slot: Slot, name: str, ending: bytes = b"") -> bool:
        """Returns whether any server has a small value that ends so; raises StoreUnavailableError if that is not
        known."""
        return any(content is not None and content.endswith(ending) for content in self._copies(slot, name))

    def extent(self, slot: Slot, rank: int) -> int:
        """Returns the upper bound of a rank's number of chunks."""
        found = self._store.get_many(self.names.everywhere(slot, extent_name(slot, rank)))
        return max((int(content) for content in found if content is not None and content.isdigit()), default=0)

    def erase_record(self, slot: Slot) -> None:
        """Deletes what makes the slot's snapshot exist."""
        for name in (commit_name(slot), dirty_name(slot), hold_name(slot)):
            self._store.delete_many(self.names.everywhere(slot, name))

    def erase_content(self, slot: Slot, ranks: Iterable[int]) -> None:
        """Deletes some ranks' shards; call `erase_record` first."""
        for rank in ranks:
            self._store.delete_many(list(self.names.content(slot, rank, 0, self.extent(slot, rank))))
            for name in (manifest_name(slot, rank), extent_name(slot, rank)):
                self._store.delete_many(self.names.everywhere(slot, name))

    def write_everywhere(self, slot: Slot, name: str, content: bytes) -> None:
        """Writes a small value to every server; raises as `write` does."""
        self.write(dict.fromkeys(self.names.everywhere(slot, name), content))

    def write(self, items: Mapping[str, Bytes]) -> None:
        """Writes all values; raises StoreUnavailableError or StoreFullError if a server refuses one."""
        for refusal in self._store.refusals(items):
            if refusal is not None:
                raise refusal

    def time_write(self, num_bytes: int) -> float:
        """Writes a value of that length, removes it again, and returns the seconds of the write."""
        key = self.names.key(self._store.placement()[0], f"probe:{secrets.token_hex(8)}")
        content = bytes(num_bytes)
        try:
            begun = time.perf_counter()
            self.write({key: content})
            return time.perf_counter() - begun
        finally:
            self._store.delete_many([key])


def needed_slots(commits: Mapping[int, Commit]) -> set[int]:
    """Returns the slots that must not be claimed: the newest snapshot's, and those that others in memory build on."""
    bases = {commit.base for commit in commits.values() if commit.base is not None}
    newest = max(commits, key=lambda number: commits[number].sequence, default=-1)
    return {number for number, commit in commits.items() if number == newest or (bases and commit.digest in bases)}
