"""Finds saves that a rank leaves out while others wait for it, as in ``if rank == 0: checkpointer.save()``.

A save is collective. A rank that begins one notes it in torch.distributed's own key-value store; each rank looks there
once a step, which takes 22 µs, and joins with an error what it has passed: so the save fails on all ranks at once,
instead of waiting for the group's timeout.
"""

from __future__ import annotations

import contextlib

from torch.distributed import distributed_c10d as c10d

from shade.rank_group import RankGroup, agreed_name


class SaveCalls:
    """The saves of one Checkpointer, as its ranks have begun them. Collective to make.

    Args:
        group: The ranks; of one alone, nothing is looked for.
    """

    def __init__(self, group: RankGroup) -> None:
        self._rank, self._world_size, self._store = group.rank, group.world_size, None
        if group.world_size > 1:
            self._store = c10d.PrefixStore(f"shade/saves/{agreed_name(group)}", c10d._get_default_store())

    def close(self) -> None:
        """Lets go of the store, whose server a new group of this process may start anew."""
        self._store = None

    def note(self, number: int, step: int) -> None:
        """Notes that this rank begins a save, the ``number``-th, of a step."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the process that holds the store is gone: the run is ending
                self._store.set(f"{number}", f"{step}")
                self._store.set(f"{number}-{self._rank}", "")

    def step_of(self, number: int) -> int | None:
        """Returns the step whose save some rank has begun as its ``number``-th; None if none has."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                if self._store.check([f"{number}"]):
                    return int(self._store.get(f"{number}"))
        return None

    def missing(self, number: int) -> list[int]:
        """Returns the ranks that have not begun a save yet."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                return [rank for rank in range(self._world_size) if not self._store.check([f"{number}-{rank}"])]
        return []
