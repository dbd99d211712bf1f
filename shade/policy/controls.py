"""Policies to compare with: `fifo` and `lru` evict by age, `lfu` by use, `belady` by foresight; `static` never evicts.

If every sample is used once an epoch, `fifo` (the sample admitted longest ago leaves) does no better than `lru`: by
the time a sample comes round again, about N others were admitted. `lru` is what a page cache or Redis' ``allkeys-lru``
does, and the worst fit for shuffled epochs: a sample survives to its next use only if fewer than the cache's worth of
others come in between, which for two independent shuffles has probability f + (1 - f) ln(1 - f), about f²/2. Price:
one ordered dict, O(1) an access.

`lfu` evicts the sample with the fewest uses so far, the least recent of those first. Uses are counted for every sample
ever seen, resident or not ("perfect" LFU), and a newcomer is always admitted. If the draw is uniform all counts are
alike and it behaves as `lru`; skewed draws teach it which samples come often. Price: one ordered dict for each
distinct count.

`static` (MinIO in the CoorDL paper) admits while there is space. It is optimal if each epoch uses every sample once,
knows nothing of the future, writes each sample at most once, and is the best choice for a mode that cannot draw ahead.

`belady` is MIN with bypass, the bound that the others are compared with: the sample needed latest leaves, or is not
admitted. It sees every epoch of a recorded trace; with equal sizes no policy gets more hits, with mixed sizes it is a
good rule but no bound: the exact optimum is a knapsack. `belady-1` sees the rest of this epoch and the next one, as a
running job can, and so measures what one epoch of lookahead is worth; `plan` reaches the same hits on traces without
duplicates, planning once an epoch instead of deciding access by access. Price: a heap over the residents and two
integers an access; some microseconds an access.

References:
    Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, §4.1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shade.policy.base import EMPTY, POLICIES, CachePolicy, EpochPlan
from shade.policy.priority import Key, PriorityPolicy
from shade.types import Indices, Order

NEVER = 2**62
"""The position of a next use that the known orders do not hold."""


@POLICIES.register("fifo")
class FIFO(CachePolicy):
    """A queue in order of admission."""

    _queue: OrderedDict[int, None]
    """Residents; the next to leave comes first."""

    def _restart(self, kept: Indices) -> None:
        self._queue = OrderedDict.fromkeys(kept.tolist())

    def _touch(self, index: int) -> Sequence[int]:
        if index in self._queue:
            return ()
        return self._admit(index)

    def _admit(self, index: int) -> Sequence[int]:
        """Puts ``index`` last, after evicting from the front until it fits."""
        room_for_others = self.capacity_bytes - int(self.size_bytes_N[index])
        if room_for_others < 0:
            return ()
        victims = []
        while self.used_bytes > room_for_others:
            victim, _ = self._queue.popitem(last=False)
            self._leave(victim)
            victims.append(victim)
        self._queue[index] = None
        self._enter(index)
        return victims

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the residents in queue order."""
        return {"resident": np.fromiter(self._queue, dtype=np.int64, count=len(self._queue))}


@POLICIES.register("lru")
class LRU(FIFO):
    """A queue in order of use."""

    def _touch(self, index: int) -> Sequence[int]:
        if index in self._queue:
            self._queue.move_to_end(index)
            return ()
        return self._admit(index)


@POLICIES.register("static")
class Static(CachePolicy):
    """Keeps the first samples."""

    def _touch(self, index: int) -> Sequence[int]:
        fits = self.used_bytes + int(self.size_bytes_N[index]) <= self.capacity_bytes
        if fits and not self.resident_N[index]:
            self._enter(index)
        return ()


@POLICIES.register("lfu")
class LFU(CachePolicy):
    """Residents in buckets of equal count; within a bucket in order of use."""

    _buckets: dict[int, OrderedDict[int, None]]
    """Count → residents with that count, least recent first; no bucket is empty."""

    def __init__(self, size_bytes_N: npt.NDArray[np.int64], capacity_bytes: int) -> None:
        self._uses = [0] * len(size_bytes_N)
        super().__init__(size_bytes_N, capacity_bytes)

    def _restart(self, kept: Indices) -> None:
        self._buckets = {}
        for index in kept.tolist():
            self._buckets.setdefault(self._uses[index], OrderedDict())[index] = None

    def _touch(self, index: int) -> Sequence[int]:
        uses = self._uses[index]
        self._uses[index] = uses + 1
        victims: list[int] = []
        if self.resident_N[index]:
            bucket = self._buckets[uses]
            del bucket[index]
            if not bucket:
                del self._buckets[uses]
        else:
            room_for_others = self.capacity_bytes - int(self.size_bytes_N[index])
            if room_for_others < 0:
                return ()
            while self.used_bytes > room_for_others:
                victims.append(self._pop_least_used())
            self._enter(index)
        self._buckets.setdefault(uses + 1, OrderedDict())[index] = None
        return victims

    def _pop_least_used(self) -> int:
        """Evicts one sample."""
        # Few distinct counts: a plain minimum beats a heap.
        fewest = min(self._buckets)
        bucket = self._buckets[fewest]
        victim, _ = bucket.popitem(last=False)
        if not bucket:
            del self._buckets[fewest]
        self._leave(victim)
        return victim

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the residents, fewest uses first and least recent first, and every sample's count."""
        in_order = [index for uses in sorted(self._buckets) for index in self._buckets[uses]]
        return {"resident": np.array(in_order, dtype=np.int64), "uses": np.array(self._uses, dtype=np.int64)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._uses = np.asarray(state["uses"]).tolist()
        super().load_state_dict(state)


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
