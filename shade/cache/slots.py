"""The names of entries, in the slots of all jobs that share a cache: see `shade.cache.jobs`.

A job writes in its first slot. It owns others, too, once it has taken over what another job left, and it looks into
those of all jobs. Which ones these are is on the board, so that workers follow when it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shade.cache.board import Board
from shade.cache.jobs import MAX_JOBS, slot_keys
from shade.store.keys import SampleKeys


class Slots:
    """One process's view of them.

    Args:
        fingerprint: Of the data set.
        board: Says which slots are whose.
    """

    def __init__(self, fingerprint: str, board: Board) -> None:
        self.fingerprint, self._board = fingerprint, board

    @property
    def keys(self) -> SampleKeys:
        """Of the slot in which this job writes."""
        return self.of(self._board.owned_slots[0])

    @property
    def key_length(self) -> int:
        """Of the longest key in any slot, so that an entry counts the same wherever it lies."""
        return slot_keys(self.fingerprint, MAX_JOBS - 1).key_length

    def of(self, slot: int) -> SampleKeys:
        """Of any slot."""
        return slot_keys(self.fingerprint, slot)

    def owned_names(self, indices: Sequence[int]) -> list[str]:
        """Every name under which this job may have these samples."""
        return [name for slot in self._board.owned_slots for name in self.of(slot).many(indices)]

    def places(self, own: Sequence[int], elsewhere: Sequence[int]) -> list[tuple[int, int]]:
        """Where to look.

        Args:
            own: Samples that may be in this job's slots.
            elsewhere: Samples that may be in those of others.

        Returns:
            (sample index, slot), this job's first.
        """
        board = self._board
        mine = [(index, slot) for slot in board.owned_slots for index in own]
        return mine + [(index, slot) for slot in board.other_slots for index in elsewhere]

    def names(self, places: Iterable[tuple[int, int]]) -> list[str]:
        """The keys of `places`."""
        keys = {slot: self.of(slot) for slot in (*self._board.owned_slots, *self._board.other_slots)}
        return [keys[slot].key(index) for index, slot in places]
