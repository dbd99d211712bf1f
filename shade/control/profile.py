"""The result of ``shade tune``: the quality that a training reaches with a global batch and a density, as JSON.

A profile is a grid of expected quality over batch and density, the evaluations that it was fitted to, and the settings
of the search. The controller reads `Profile.floor`, the density below which the quality falls by more than is allowed,
and `Profile.curve`, the progress of one step: with h the relative shortfall of the quality, training needs
``1 + 50 h`` times as many samples, and the progress is the inverse. Reading one runs nothing and needs no library.

References:
    Lim et al., "Accelerating Model Training in Multi-cluster Environments with Consumer-grade GPUs", SIGCOMM 2024:
    the form ``(1 + 50 h) / throughput``. Ours is relative, so that it holds for losses and percentages alike.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from shade.control.curve import Curve
from shade.errors import ConfigError
from shade.process import replacing
from shade.telemetry import jsonable

FORMAT: Final = "shade-profile-1"
SHORTFALL_COST: Final = 50.0
"""Samples that a shortfall costs: a quality that is 2 % worse means twice as much training."""
ALLOWED_SHORTFALL_FRACTION: Final = 0.02
"""Default loss of quality that a low density may cause, as a fraction of the best quality."""


@dataclass(frozen=True)
class Profile:
    """Quality over global batch and density.

    Args:
        batches: The grid's batches, ascending, in samples.
        densities: The grid's densities, ascending.
        quality: Expected quality; a row for each batch, a column for each density.
        is_loss: Whether less is better.
        evaluations: What was measured: ``batch``, ``density``, ``quality`` or a failure; for people and plots.
        settings: Command, seed and so on; for people.

    Raises:
        ConfigError: The grid is not valid.
    """

    batches: tuple[int, ...]
    densities: tuple[float, ...]
    quality: tuple[tuple[float, ...], ...]
    is_loss: bool
    evaluations: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for axis, least in ((self.batches, 1.0), (self.densities, 0.0)):
            ascending = all(low < high for low, high in pairwise(axis))
            if not axis or not ascending or axis[0] < least or axis[0] <= 0 or not math.isfinite(axis[-1]):
                raise ConfigError.of("an ascending axis of batches and one of densities", axis, "run shade tune again")
        if self.densities[-1] > 1:
            raise ConfigError.of("densities of at most 1", self.densities[-1], "run shade tune again")
        shape = [len(row) for row in self.quality]
        if shape != [len(self.densities)] * len(self.batches):
            raise ConfigError.of("a row a batch and a column a density", shape, "run shade tune again")
        if not all(math.isfinite(value) for row in self.quality for value in row):
            raise ConfigError.of("a finite quality everywhere", "a value that is not finite", "run shade tune again")

    def expected(self, batch: float, density: float) -> float:
        """Returns the expected quality in the metric's unit, interpolated in logarithms; outside the grid, its
        edge's."""
        row, along = _place(self.batches, batch)
        column, across = _place(self.densities, density)
        below = min(row + 1, len(self.batches) - 1)
        right = min(column + 1, len(self.densities) - 1)
        top = self.quality[row][column] * (1 - across) + self.quality[row][right] * across
        bottom = self.quality[below][column] * (1 - across) + self.quality[below][right] * across
        return top * (1 - along) + bottom * along

    def shortfall(self, batch: float, density: float) -> float:
        """Returns how much worse the quality is than the grid's best, as a fraction of the best; at least 0."""
        values = [value for row in self.quality for value in row]
        best = min(values) if self.is_loss else max(values)
        unit = max(abs(best), max(values) - min(values)) or 1.0
        worse = self.expected(batch, density) - best
        return max(0.0, (worse if self.is_loss else -worse) / unit)

    def floor(self, batch: int, allowed_fraction: float = ALLOWED_SHORTFALL_FRACTION) -> float:
        """Returns the grid's least density that costs at most the allowed quality, against this batch's best density.

        No density from there up to the best one costs more. The allowed cost is a fraction of the best quality; raises
        `ConfigError` if it is negative.
        """
        if not allowed_fraction >= 0:
            raise ConfigError.of("an allowed shortfall of 0 or more", allowed_fraction, "write 0.02 for 2 %")
        shortfalls = [self.shortfall(batch, density) for density in self.densities]
        limit = min(shortfalls) + allowed_fraction + 1e-12
        best = shortfalls.index(min(shortfalls))
        too_sparse = [position for position in range(best) if shortfalls[position] > limit]
        return self.densities[too_sparse[-1] + 1 if too_sparse else 0]

    def curve(self, batch: int) -> Curve:
        """Returns the progress of a step over density at this global batch, for a controller."""
        progress = (1 / (1 + SHORTFALL_COST * self.shortfall(batch, density)) for density in self.densities)
        return Curve(self.densities, tuple(progress))

    def best_batch(self) -> int:
        """Returns the batch of the grid with the best expected quality at any density."""
        return min(self.batches, key=lambda batch: min(self.shortfall(batch, each) for each in self.densities))

    # ── the file ────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile, whole or not at all; raises `ConfigError` if the file cannot be written."""
        try:
            with replacing(Path(path)) as beside:
                beside.write_text(json.dumps({"format": FORMAT, **jsonable(asdict(self))}, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError.of("a path for a profile", f"{path}: {error.strerror}", "name another") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads what `save` wrote; raises `ConfigError` if the file cannot be read or is no profile."""
        try:
            found = json.loads(Path(path).read_bytes())
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                raise ValueError(f"it is not {FORMAT}")
            return cls(
                tuple(int(batch) for batch in found["batches"]),
                tuple(float(density) for density in found["densities"]),
                tuple(tuple(float(value) for value in row) for row in found["quality"]),
                bool(found["is_loss"]),
                tuple(dict(each) for each in found.get("evaluations", ())),
                dict(found.get("settings") or {}),
            )
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            what = f"{os.fspath(path)}: {' '.join(str(error).split())}"
            raise ConfigError.of("a profile of shade tune", what, "make one with shade tune") from None


def _place(axis: tuple[float, ...] | tuple[int, ...], value: float) -> tuple[int, float]:
    """Returns the index of the axis point below the value, and the fraction of the way to the next, in logarithms."""
    inside = min(max(value, axis[0]), axis[-1])
    position = max(min(bisect.bisect_right(axis, inside) - 1, len(axis) - 2), 0)
    if len(axis) == 1:
        return 0, 0.0
    return position, math.log(inside / axis[position]) / math.log(axis[position + 1] / axis[position])
