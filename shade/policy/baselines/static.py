"""`static`: admits while there is space and never evicts (MinIO in the CoorDL paper).

It is optimal if each epoch uses every sample once, writes each sample at most once, and is the best choice for a
sampling mode that cannot draw ahead.

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
