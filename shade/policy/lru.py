"""Least recently used: what a page cache or a plain Redis ``allkeys-lru`` would do.

The worst fit for shuffled epochs: a sample survives to its next use only if fewer than the cache's worth of others
come in between, which for two independent shuffles has probability f + (1 - f) ln(1 - f), about f²/2.

Price: as `fifo`.
"""

from __future__ import annotations

from collections.abc import Sequence

from shade.policy.base import POLICIES
from shade.policy.fifo import FIFO


@POLICIES.register("lru")
class LRU(FIFO):
    """A queue in order of use."""

    def _touch(self, index: int) -> Sequence[int]:
        if index in self._queue:
            self._queue.move_to_end(index)
            return ()
        return self._admit(index)
