"""Gives what is attached the state of a snapshot: found, read, checked, loaded, and its memory given back.

Which snapshot it is, and that every rank takes the same, is `recover`'s; what fits and what does not is `Contents`'.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from shade.checkpoint.contents import Contents
from shade.checkpoint.group import Group
from shade.checkpoint.reader import Reader
from shade.checkpoint.recover import Recovered, Restored, recover

logger = logging.getLogger("shade.checkpoint")


def bring_back(
    reader: Reader, group: Group, contents: Contents, step: int | None, only: Sequence[str] | None
) -> tuple[Restored, Recovered | None]:
    """Loads a snapshot. Collective.

    Args:
        reader: Of the tiers.
        group: The ranks.
        contents: What is attached.
        step: Of the snapshot; None: the newest that is whole.
        only: Names of what to load; None: everything.

    Returns:
        What was loaded; and the snapshot, None where there is none.

    Raises:
        CheckpointError: As `recover`, and as `Contents.load`; nothing was changed.
    """
    begun = time.monotonic()
    found = recover(reader, group, only, step, contents.forgettable)
    if found is None:
        return Restored(0, 0), None
    record = found.record
    names = contents.names if only is None else list(only)
    if group.rank >= record.world_size and "random" in names:
        names.remove("random")  # nobody's before: a rank that is new keeps the generators that it was seeded with
    contents.load(found.tree, found.tensors, names, found.trees)
    for arena, manifest in found.arenas:
        for name, entry in manifest.tensors.items():
            if contents.forgettable(name):
                arena.forget(entry.start, entry.stop)
    seconds = time.monotonic() - begun
    logger.info(
        "restored step %d from %s: %.1f MB in %.2f s",
        *(record.step, ", ".join(found.tiers), record.num_bytes / 1e6, seconds),
    )
    tiers = tuple(found.tiers)
    return Restored(record.step, contents.epoch, tiers, seconds, record.num_bytes, found.bounds), found
