"""Chooses the slot that the next snapshot takes.

A clean slot comes first. If storage is slower than the saves, the oldest dirty one is overtaken: a newer snapshot is
committed already, and training does not wait for a disk. Never taken are the newest snapshot, the base of another one
in memory, what a flusher holds, and what a save has claimed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._tiers.slot_table import (
    Slot,
    SlotRecords,
    SlotTable,
    commit_name,
    dirty_name,
    hold_name,
    needed_slots,
)
from shade.errors import StoreFullError

logger = logging.getLogger("shade.checkpoint")


class SlotChoice:
    """Chooses among the slots of one run.

    Args:
        records: The records in the slots.
        num_slots: As many are used; those beyond, of a run that had more, are emptied.
        flushed: Whether a flusher moves snapshots to storage: a dirty slot is then kept where possible.
    """

    def __init__(self, records: SlotRecords, num_slots: int, *, flushed: bool) -> None:
        self._records, self._num_slots, self._flushed = records, num_slots, flushed
        self._has_overtaken = False

    def to_reuse(self, table: SlotTable, pending: Mapping[str, int]) -> tuple[int, list[Slot]]:
        """Returns the slot to claim, and the used slots to erase: that one, and clean ones beyond ``num_slots``."""
        # In-flight slots first: read after the records, a slot that commits in between would be in neither.
        claimed = set(pending.values())
        commits = self._records.committed(table)
        number = self._choose(table, commits, claimed)
        surplus = [n for n in table.slots if n >= self._num_slots and self._is_free(table, n, commits)]
        return number, [table.slots[n] for n in (*surplus, number) if n in table.slots]

    def _choose(self, table: SlotTable, commits: Mapping[int, Commit], claimed: set[int]) -> int:
        """Returns the slot to claim: an empty one, else the oldest clean one, else the oldest that is not held."""
        free = [n for n in range(self._num_slots) if n not in claimed and self._is_free(table, n, commits)]
        if not free and commits:
            free = [
                number
                for number in set(range(self._num_slots)) - needed_slots(commits) - claimed
                if self._flushed and not self._records.has(table.slots[number], hold_name(table.slots[number]))
            ]
            if free and not self._has_overtaken:
                self._has_overtaken = True
                logger.warning("storage is slower than the saves: some leave cluster memory before they are in storage")
        if not free:
            steps = ", ".join(map(str, sorted(commit.step for commit in commits.values())))
            raise StoreFullError(
                f"expected one of {self._num_slots} slots to be free, got snapshots that are needed or not in storage "
                f"yet in all (steps {steps}): the flusher is behind; save less often, or give it more slots"
            )

        def cost(number: int) -> float:  # an empty slot, else the oldest snapshot, else one whose record is damaged
            if number in commits:
                return commits[number].sequence
            slot = table.slots.get(number)
            return -1 if slot is None or not self._records.has(slot, commit_name(slot)) else math.inf

        return min(free, key=cost)

    def _is_free(self, table: SlotTable, number: int, commits: Mapping[int, Commit]) -> bool:
        if number not in commits:
            return True
        slot = table.slots[number]
        return number not in needed_slots(commits) and not (self._flushed and self._records.has(slot, dirty_name(slot)))
