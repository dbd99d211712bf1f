"""Maps density to the progress of one step, which no measurement of the link shows.

A controller needs a `Curve`: progress over density, in steps that exchange everything. By default it is a power law; a
profile of ``shade tune`` has a measured one (`shade.control.profile`). A wrong curve costs speed at staleness 0, never
correctness. Invariant: progress never falls when density grows, and is above 0.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from shade.errors import ConfigError

DEFAULT_EXPONENT: Final = 0.1
"""Ten times the density is worth 1.26 times the steps: measured from once to 1.9 times (decision 0018)."""


@dataclass(frozen=True)
class Curve:
    """Progress of a step at some densities: log-log linear between them, constant outside.

    Args:
        densities: Ascending, each above 0 and at most 1.
        progress: Progress of a step there; above 0. Dips are noise and are filled.

    Raises:
        ConfigError: An argument is not as described.
    """

    densities: tuple[float, ...]
    progress: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = list(pairwise(self.densities))
        if not self.densities or len(self.densities) != len(self.progress):
            raise ConfigError.of("as many densities as values, at least one", self.densities, "give points of a curve")
        if any(low >= high for low, high in pairs) or not 0 < self.densities[0] <= self.densities[-1] <= 1:
            raise ConfigError.of("ascending densities, 0 < density ≤ 1", self.densities, "sort them, each once")
        if not all(math.isfinite(value) and value > 0 for value in self.progress):
            raise ConfigError.of("progress above 0", self.progress, "leave out what did not train")
        best, filled = 0.0, []
        for value in self.progress:
            best = max(best, value)
            filled.append(best)
        object.__setattr__(self, "progress", tuple(filled))

    def at(self, density: float) -> float:
        """Returns the progress of one step, above 0 and never less than at a smaller density."""
        above = bisect.bisect_right(self.densities, density)
        if above in (0, len(self.densities)):
            return self.progress[min(above, len(self.densities) - 1)]
        low, high = self.densities[above - 1], self.densities[above]
        share = math.log(density / low) / math.log(high / low)
        return float(self.progress[above - 1] ** (1 - share) * self.progress[above] ** share)


def power(exponent: float = DEFAULT_EXPONENT) -> Curve:
    """Returns the curve density ** exponent, from a density of 1e-5 to 1; raises `ConfigError` outside 0 to 1.

    With exponent 0 density does not matter; with 1 half the density makes half the progress.
    """
    if not 0 <= exponent <= 1:
        raise ConfigError.of("an exponent from 0 to 1", exponent, f"leave it at {DEFAULT_EXPONENT}")
    return Curve((1e-5, 1.0), (float(1e-5**exponent), 1.0))
