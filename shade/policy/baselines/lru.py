"""`lru`: the sample that was used longest ago leaves, as from a page cache or by Redis' ``allkeys-lru``.

It is the worst fit for shuffled epochs: a sample survives to its next use only if fewer than the cache's worth of
others come in between, which for two independent shuffles has probability f + (1 - f) ln(1 - f), about f²/2.
"""

from __future__ import annotations

from collections.abc import Sequence

from shade.policy.base import POLICIES
from shade.policy.baselines.fifo import FIFO


@POLICIES.register("lru")
class LRU(FIFO):
    """A queue in order of use."""

    def _touch(self, index: int) -> Sequence[int]:
        if index in self._queue:
            self._queue.move_to_end(index)
            return ()
        return self._admit(index)
