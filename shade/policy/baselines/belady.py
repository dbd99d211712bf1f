"""`belady`: the sample needed latest leaves, or is not admitted (MIN with bypass): the bound of all other policies.

`belady` sees every epoch of a recorded trace. With equal sizes no policy gets more hits; with mixed sizes it is a good
rule but no bound, because the exact optimum is a knapsack. `belady-1` sees the rest of this epoch and the next one, as
a running job can, and so measures what one epoch of lookahead is worth; `plan` reaches the same hits on traces without
duplicates. A heap over the residents: some microseconds an access.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shade.policy.base import EMPTY, POLICIES, EpochPlan
from shade.policy.priority import Key, PriorityPolicy
from shade.types import Indices, Order

NEVER = 2**62
"""The position of a next use that the known orders do not hold."""


@POLICIES.register("belady")
class Belady(PriorityPolicy):
    """Sees all the future in the plan."""

    needs_next_order = True
    offline = True

    def __init__(self, size_bytes_N: npt.NDArray[np.int64], capacity_bytes: int) -> None:
        self._next_use = [NEVER] * len(size_bytes_N)
        self._next_use_after: list[int] = []
        self._cursor = 0
        super().__init__(size_bytes_N, capacity_bytes)

    def _key(self, index: int) -> Key:
        return -self._next_use[index], 0

    @override
    def begin_epoch(self, plan: EpochPlan) -> Indices:
        """Looks up every next use in the orders of the plan; no sample leaves."""
        orders = [plan.rest_K, *(o for o in (plan.next_order_K, *plan.later_orders) if o is not None)]
        starts = np.cumsum([0, *map(len, orders)])
        first_use_N = np.full(len(self.resident_N), NEVER, dtype=np.int64)
        # Backwards, so that an earlier use overwrites a later one.
        for order, start in reversed(list(zip(orders[1:], starts[1:-1], strict=True))):
            note_first_uses(first_use_N, order, int(start))
        self._next_use_after = next_uses(plan.rest_K, first_use_N).tolist()
        note_first_uses(first_use_N, plan.rest_K, 0)
        self._next_use = first_use_N.tolist()
        self._cursor = 0
        self._rebuild()
        return EMPTY

    def _touch(self, index: int) -> Sequence[int]:
        self._next_use[index] = self._next_use_after[self._cursor]
        self._cursor += 1
        if self.resident_N[index]:
            self._lower(index)
            return ()
        return self._admit(index)


@POLICIES.register("belady-1")
class BeladyOne(Belady):
    """Sees one epoch ahead, as a job that draws one epoch ahead does."""

    offline = False


def note_first_uses(first_use_N: npt.NDArray[np.int64], order_K: Order, start: int) -> None:
    """Writes where each sample is first accessed in ``order_K``, counted from ``start``, into ``first_use_N``."""
    first_use_N[order_K[::-1]] = np.arange(start, start + len(order_K))[::-1]


def next_uses(order_K: Order, later_first_use_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns (K,) where each access's sample is accessed next: in this epoch, else as ``later_first_use_N`` says."""
    next_K = later_first_use_N[order_K]
    by_sample = np.argsort(order_K, kind="stable")
    again = order_K[by_sample[1:]] == order_K[by_sample[:-1]]
    next_K[by_sample[:-1][again]] = by_sample[1:][again]
    return next_K
