"""The two things that are tuned, global batch and density, as a square of logarithms, and a first look over it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shade.errors import ConfigError


class Point(NamedTuple):
    """What one evaluation tries."""

    batch: int
    """Global, in samples."""
    density: float
    """Kept fraction of the gradient."""


@dataclass(frozen=True)
class Space:
    """Where to look.

    Args:
        batches: Least and greatest global batch, in samples.
        densities: Least and greatest density.
        batch_multiple: Batches are multiples of it, as of the number of ranks.

    Raises:
        ConfigError: There is nothing between.
    """

    batches: tuple[int, int]
    densities: tuple[float, float]
    batch_multiple: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.densities[0] <= self.densities[1] <= 1:
            raise ConfigError.of("0 < least density ≤ greatest ≤ 1", self.densities, "write 0.0005:0.1")
        if self.batch_multiple < 1 or not 0 < self._steps[0] <= self._steps[1]:
            got = (self.batches, self.batch_multiple)
            raise ConfigError.of("multiples between the least batch and the greatest", got, "widen --batch")

    @property
    def _steps(self) -> tuple[int, int]:
        return -(-self.batches[0] // self.batch_multiple), self.batches[1] // self.batch_multiple

    def point(self, across: float, up: float) -> Point:
        """The point at a place of the unit square, rounded to what can be tried.

        Args:
            across: 0 is the least batch, 1 the greatest.
            up: The same of density.

        Returns:
            Inside the space; densities to three digits, so that a line of a log says which it was.
        """
        low, high = self._steps
        batch = min(max(round(low * (high / low) ** across), low), high) * self.batch_multiple
        least, most = self.densities
        density = float(f"{least * (most / least) ** up:.3g}")
        return Point(batch, min(max(density, least), most))

    def unit(self, point: Point) -> tuple[float, float]:
        """The place of a point in the unit square."""
        low, high = (step * self.batch_multiple for step in self._steps)
        return _share(point.batch, low, high), _share(point.density, *self.densities)

    def first(self, num: int, seed: int) -> list[Point]:
        """Points to begin with: a Latin hypercube, every row and every column of a num × num grid once.

        Args:
            num: How many.
            seed: Of rows, columns and places within.

        Returns:
            The points.
        """
        draw = np.random.default_rng([seed, 0])
        across, up = ((draw.permutation(num) + draw.random(num)) / num for _ in range(2))
        return [self.point(float(x), float(y)) for x, y in zip(across, up, strict=True)]


def _share(value: float, low: float, high: float) -> float:
    return 0.5 if low == high else math.log(value / low) / math.log(high / low)
