"""Looks entries up: in this job's slots, and in those of the jobs that share the cache; checks every one.

One round to the store a batch, whoever's entry it is. What this job holds and finds damaged is to be repaired or
removed by it; what another job holds is that job's to mend, and a plain miss here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from shade.cache.board import NEAR, Board
from shade.cache.entry import unseal
from shade.cache.ledger import Ledger
from shade.cache.slots import Slots
from shade.errors import CorruptEntryError
from shade.store.base import Store

logger = logging.getLogger("shade.cache")


@dataclass
class Looked:
    """What became of one look-up."""

    found: dict[int, memoryview] = field(default_factory=dict)
    """Payload by sample index."""
    own: set[int] = field(default_factory=set)
    """Of those found, the ones that are in this job's slots."""
    damaged: list[int] = field(default_factory=list)
    """Samples of this job whose entries failed their check, where it writes."""
    failed: bool = False


def look_up(
    store: Store, slots: Slots, board: Board, ledger: Ledger, form: int, *, own: list[int], elsewhere: list[int]
) -> tuple[Looked, list[int]]:
    """Asks for a batch.

    Args:
        store: Where the entries lie.
        slots: Their names.
        board: What this rank holds: entries that are gone are struck off.
        ledger: Counts.
        form: How payloads are encoded.
        own: Samples to look for in this job's slots.
        elsewhere: Samples to look for in those of other jobs.

    Returns:
        What was found, and the samples of ``own`` whose entries are to be removed, being damaged in a slot that this
        job has taken over.

    Raises:
        StoreError: The store failed.
    """
    places = slots.places(own, elsewhere)
    looked, spoilt = Looked(), []
    owned = board.owned_slots
    num_corrupt = 0
    for (index, slot), entry in zip(places, store.get_many(slots.names(places)), strict=True):
        if entry is None or index in looked.found:
            continue
        try:
            looked.found[index] = unseal(index, entry, form)
        except CorruptEntryError as error:
            logger.debug("%s", error)
            num_corrupt += 1
            if slot == owned[0]:
                looked.damaged.append(index)
            elif slot in owned:
                spoilt.append(index)
            continue
        if slot in owned:
            looked.own.add(index)
    looked.damaged = [index for index in looked.damaged if index not in looked.found]
    lost = []
    if board.planned:  # when jobs share, of that which this rank brought in
        held_N, shared = board.held_N, board.is_shared
        here = looked.own.union(looked.damaged)
        lost = [index for index in own if index not in here and (held_N[index] or not shared)]
        held_N[lost] = 0
    ledger.add(
        cache_reads=len(looked.found),
        cache_bytes=sum(map(len, looked.found.values())),
        corrupt=num_corrupt,
        surprises=len(lost),
        borrowed=len(looked.found) - len(looked.own),
        near_hits=int(np.count_nonzero(board.flag_N[list(looked.found)] & NEAR)) if looked.found else 0,
    )
    return looked, spoilt
