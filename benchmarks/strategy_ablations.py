"""What is each module of `asymmetric` worth? Strategies that leave out a part, registered for `bench_strategies`.

All copy in the background, without regard to idle cores. AsymCheck (DAC 2026, §3); decisions 0020 and 0027.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from shade.checkpoint._strategies.asymmetric import Asymmetric
from shade.checkpoint._strategies.base import STRATEGIES, StrategyConfig


class _Background(Asymmetric):
    """A variant that always copies in the background."""

    @override
    def _stands_still(self) -> bool:
        return False


@STRATEGIES.register("asymmetric-naive")
class AsymmetricNaive(_Background):
    """A variant with equal partitions."""

    config = StrategyConfig()

    @override
    def _shares(self, windows: Sequence[float]) -> list[float]:
        return [1.0] * len(windows)


@STRATEGIES.register("asymmetric-S")
class AsymmetricSnapshot(_Background):
    """A variant with partitions by time and no batches."""

    config = StrategyConfig()


@STRATEGIES.register("asymmetric-S+O")
class AsymmetricSnapshotFlush(_Background):
    """A variant with partitions by time, written in batches."""

    config = StrategyConfig(streams=True, batches=True)


ABLATIONS: list[type[Asymmetric]] = [AsymmetricNaive, AsymmetricSnapshot, AsymmetricSnapshotFlush]
"""All of them."""
