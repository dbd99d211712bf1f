"""Keeps the books of a run's slots in a store: the table, the records, and what else is small and lies on every server.

Whatever is read may be one server's alone: of several answers the newest, or the first right one, counts, and a server
that is away is as one that has nothing. Whatever is written must reach every server, or it is an error.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from shade.checkpoint.manifest import Commit
from shade.checkpoint.slots import Names, Slot, Table, commit_name, dirty_name, extent_name, hold_name, manifest_name
from shade.errors import CorruptCheckpointError
from shade.store.base import Store
from shade.store.keys import placement_tags
from shade.types import Bytes

TABLE_NAME: Final = "table"


class SlotBook:
    """The books of one run.

    Args:
        store: Where they are kept.
        run: The run id.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self.names = Names(run)
        self._table_keys = {tag: self.names.key(tag, TABLE_NAME) for tag in placement_tags()}

    def table(self) -> tuple[Table, list[str]]:
        """The table, and the tags that it was found under."""
        contents = self._store.get_many(list(self._table_keys.values()))
        found = [tag for tag, content in zip(self._table_keys, contents, strict=True) if content is not None]
        tables = [Table.parse(content) for content in contents if content is not None]
        newest = max((table for table in tables if table is not None), key=lambda t: t.generation, default=Table())
        return newest, found

    def write_table(self, table: Table, old_tags: Sequence[str]) -> None:
        """Writes it to every server of the layout that was taken last; where it was before and is not now, it goes."""
        last = max(table.slots.values(), key=lambda slot: slot.generation)
        self.write(dict.fromkeys(self.names.everywhere(last, TABLE_NAME), table.to_bytes()))
        self._store.delete_many([self._table_keys[tag] for tag in old_tags if tag not in last.layout.tags])

    def committed(self, table: Table) -> dict[int, Commit]:
        """The record of each slot that has one, by number."""
        commits: dict[int, Commit] = {}
        for number, slot in table.slots.items():
            for content in self._store.get_many(self.names.everywhere(slot, commit_name(slot))):
                with contextlib.suppress(CorruptCheckpointError):
                    if content is not None:
                        commits.setdefault(number, Commit.parse(content))
        return commits

    def damaged(self, table: Table, old_tags: Sequence[str], commits: Mapping[int, Commit]) -> list[str]:
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
