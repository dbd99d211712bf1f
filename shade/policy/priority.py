"""The base of `shade` and `belady`: every sample has a key, and a newcomer must beat all that it would displace.

The residents' keys lie in a min-heap that is repaired lazily: an entry may be out of date, but each resident has at
least one entry that is not above its key, so the top of the heap, once brought up to date, is the minimum. A key that
grows needs nothing; a subclass whose key falls pushes a new entry (`_lower`).

Price: O(log residents) an admission; stale entries are swept when the heap is rebuilt, once an epoch.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from typing_extensions import override

from shade.policy.base import CachePolicy
from shade.types import Indices

Key: TypeAlias = tuple[float, int]
"""Worth of a sample and, among equals, whose turn it is to leave: the smaller goes first. Remaining ties go by index,
so every rank agrees. Only worth admits a newcomer: an equal does not displace."""


class PriorityPolicy(CachePolicy):
    """Keeps the samples with the highest keys."""

    _heap: list[tuple[Key, int]]

    @abstractmethod
    def _key(self, index: int) -> Key:
        """Returns the present key of a sample."""

    def _restart(self, kept: Indices) -> None:
        self._heap = [(self._key(index), index) for index in kept.tolist()]
        heapq.heapify(self._heap)

    @override
    def _least_useful_first(self) -> Indices:
        ranked = sorted((self._key(index), index) for index in np.flatnonzero(self.resident_N).tolist())
        return np.array([index for _, index in ranked], dtype=np.int64)

    def _rebuild(self) -> None:
        """Rebuilds the heap, after many keys have changed."""
        self._restart(np.flatnonzero(self.resident_N))

    def _lower(self, index: int) -> None:
        """Tells the heap that the key of a resident has fallen."""
        heapq.heappush(self._heap, (self._key(index), index))

    def _lowest(self) -> tuple[Key, int]:
        """Returns the resident with the lowest key; there must be one."""
        while True:
            key, index = self._heap[0]
            if not self.resident_N[index]:
                heapq.heappop(self._heap)
            # A stale entry: put the present key in its place and look again.
            elif key != (key_now := self._key(index)):
                heapq.heapreplace(self._heap, (key_now, index))
            else:
                return key, index

    def _admit(self, index: int) -> Sequence[int]:
        """Admits a non-resident if it fits after evicting only samples with lower keys; else changes nothing."""
        room_for_others = self.capacity_bytes - int(self.size_bytes_N[index])
        if room_for_others < 0:
            return ()
        key = self._key(index)
        displaced: list[tuple[Key, int]] = []
        while self.used_bytes > room_for_others:
            lowest = self._lowest()
            if lowest[0][0] >= key[0]:
                # Not worth it: undo the evictions of this attempt.
                for entry in displaced:
                    self._enter(entry[1])
                    heapq.heappush(self._heap, entry)
                return ()
            self._leave(lowest[1])
            displaced.append(lowest)
        self._enter(index)
        heapq.heappush(self._heap, (key, index))
        return [victim for _, victim in displaced]
