"""Admits while there is space and never evicts (MinIO in the CoorDL paper).

Optimal if each epoch uses every sample once: then no policy can hit more often than capacity / data set. It knows
nothing of the future, writes each sample at most once, and is the best choice for a mode that cannot draw ahead.

References:
    Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, §4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from shade.policy.base import POLICIES, CachePolicy


@POLICIES.register("static")
class Static(CachePolicy):
    """Keeps the first samples."""

    def _touch(self, index: int) -> Sequence[int]:
        fits = self.used_bytes + int(self.size_bytes_N[index]) <= self.capacity_bytes
        if fits and not self.resident_N[index]:
            self._enter(index)
        return ()
