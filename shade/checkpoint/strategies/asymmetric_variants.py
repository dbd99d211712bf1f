"""AsymCheck by its parts: what each of its modules brings shows where the others are left out, as in the paper.

``asymmetric-naive`` copies a little in every window, too, but the same in each; ``asymmetric-S`` as much as the window
has time for (asymmetric snapshotting); ``asymmetric-S+O`` also writes what has been copied, in batches of the best
length (optimal flushing). All copy beside the training, whatever it leaves them; `asymmetric` looks before. (Decisions
0020, 0027.)
"""

from __future__ import annotations

from collections.abc import Sequence

from shade.checkpoint.strategies.asymmetric import Asymmetric
from shade.checkpoint.strategies.base import STRATEGIES, Terms


class _Beside(Asymmetric):
    """Never lets the training wait while it can do otherwise."""

    is_ablation = True

    def _stands_still(self) -> bool:
        """See `Asymmetric`."""
        return False


@STRATEGIES.register("asymmetric-naive")
class AsymmetricNaive(_Beside):
    """Equal partitions."""

    terms = Terms()

    def _shares(self, windows: Sequence[float]) -> list[float]:
        """See `Asymmetric`."""
        return [1.0] * len(windows)


@STRATEGIES.register("asymmetric-S")
class AsymmetricSnapshot(_Beside):
    """Partitions by time; nothing else."""

    terms = Terms()


@STRATEGIES.register("asymmetric-S+O")
class AsymmetricSnapshotFlush(_Beside):
    """Partitions by time, written in batches."""

    terms = Terms(streams=True, batches=True)
