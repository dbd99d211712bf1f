"""`lfu`: the sample with the fewest uses leaves, the least recent of those first.

Uses are counted for every sample ever seen, resident or not ("perfect" LFU). If the draw is uniform all counts are
alike and it behaves as `lru`; skewed draws teach it which samples come often.
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
