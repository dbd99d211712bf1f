"""Admit while there is room, never evict (MinIO in the CoorDL paper).

Already optimal when each epoch uses every sample once: no policy can then hit more often than capacity / data set. It
knows nothing of the future, writes each sample at most once, and is the best choice for a mode that cannot draw ahead.

References:
    Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, §4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from shade.policy.base import POLICIES, CachePolicy


@POLICIES.register("static")
class Static(CachePolicy):
    """Whoever came first stays."""

    def _touch(self, index: int) -> Sequence[int]:
        fits = self.used_bytes + int(self.size_bytes_N[index]) <= self.capacity_bytes
        if fits and not self.resident_N[index]:
            self._enter(index)
        return ()
