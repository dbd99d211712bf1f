"""Simple policies to compare with: `fifo` and `lru` evict by age, `lfu` by use; `static` never evicts.

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

from shade.policy.base import POLICIES, CachePolicy
from shade.types import Indices


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
