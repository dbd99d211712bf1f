"""Says what the entries of a data set may occupy: what the user gave, less what is lent and what other jobs may keep.

Three numbers, because three parties change them. The smaller of the last two is in force, and is written to the
residency map, where the workers of this rank read it.
"""

from __future__ import annotations

from shade.cache.residency_map import ResidencyMap


class Capacity:
    """The capacity of one rank's cache.

    Args:
        total_bytes: What the user gave.
        residency: Gets the number of bytes that is in force.
    """

    def __init__(self, total_bytes: int, residency: ResidencyMap) -> None:
        self._residency = residency
        self.total_bytes = self.allowed_bytes = self.quota_bytes = int(total_bytes)
        self._apply()

    def allow(self, num_bytes: int) -> None:
        """Lends the rest of the total to snapshots, or takes it back."""
        self.allowed_bytes = max(0, min(int(num_bytes), self.total_bytes))
        self._apply()

    def share(self, num_bytes: int) -> None:
        """Sets this job's part of the total, while other jobs use the cache too."""
        self.quota_bytes = int(num_bytes)
        self._apply()

    def _apply(self) -> None:
        self._residency.capacity_bytes = min(self.quota_bytes, self.allowed_bytes)
