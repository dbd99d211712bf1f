"""`fifo`: the sample that was admitted longest ago leaves.

If every sample is used once an epoch it does no better than `lru`: by the time a sample comes round again, about N
others were admitted. One ordered dict, O(1) an access.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
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
