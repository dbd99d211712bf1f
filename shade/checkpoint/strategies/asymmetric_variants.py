"""AsymCheck by its parts: what each of its modules brings shows where the others are left out, as in the paper.

``asymmetric-naive`` copies a little in every window, too, but the same in each; ``asymmetric-S`` as much as the window
has time for (asymmetric snapshotting); ``asymmetric-S+O`` also writes what has been copied, in batches of the best
length (optimal flushing). ``asymmetric`` is all of it that restores every bit. (Decision 0027.)
"""

from __future__ import annotations

from collections.abc import Sequence

from shade.checkpoint.strategies.asymmetric import Asymmetric
from shade.checkpoint.strategies.base import STRATEGIES, Terms


@STRATEGIES.register("asymmetric-naive")
class AsymmetricNaive(Asymmetric):
    """Equal partitions."""

    terms = Terms()

    def _shares(self, windows: Sequence[float]) -> list[float]:
        """See `Asymmetric`."""
        return [1.0] * len(windows)


@STRATEGIES.register("asymmetric-S")
class AsymmetricSnapshot(Asymmetric):
    """Partitions by time; nothing else."""

    terms = Terms()


@STRATEGIES.register("asymmetric-S+O")
class AsymmetricSnapshotFlush(Asymmetric):
    """Partitions by time, written in batches."""

    terms = Terms(streams=True, batches=True)
