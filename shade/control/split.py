"""Divides the global batch so that all ranks finish together: each gets what it computes per second, in whole samples.

Largest-remainder rounding, within each rank's limits (least and most samples). The sum stays to the sample: the
optimizer's step, its noise and its learning rate mean what they meant before. The weighted mean of the gradients
(`Header.weight` on the wire) makes the result that of one big batch, however it is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from shade.errors import ConfigError

Limits: TypeAlias = tuple[int, int]
"""Least and most samples of one rank."""


def split(total: int, speeds: Sequence[float], limits: Sequence[Limits]) -> tuple[int, ...]:
    """Divides a batch in proportion to speeds.

    Args:
        total: Samples in the global batch.
        speeds: Samples per second of each rank, above 0.
        limits: For each rank; a rank that is cut off by its limits leaves the rest to the others.

    Returns:
        Samples for each rank: within the limits, together exactly ``total``; of equals the first gets the odd one.

    Raises:
        ConfigError: No division keeps within the limits.
    """
    if len(speeds) != len(limits) or not all(speed > 0 for speed in speeds):
        raise ConfigError.of("a speed above 0 and limits for each rank", (speeds, limits), "give one of each per rank")
    least, most = sum(low for low, _ in limits), sum(high for _, high in limits)
    if any(not 0 <= low <= high for low, high in limits) or not least <= total <= most:
        raise ConfigError.of(f"a batch from {least} to {most}, as the limits say", total, "widen limits or change it")
    shares = _shares(total, speeds, limits)
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (sizes[rank] - shares[rank], rank))
    while sum(sizes) < total:
        for rank in by_remainder:
            if sum(sizes) < total and sizes[rank] < limits[rank][1]:
                sizes[rank] += 1
    return tuple(sizes)


def _shares(total: int, speeds: Sequence[float], limits: Sequence[Limits]) -> list[float]:
    """Shares clip(speed * level), with the level at which they come to the total, by bisection.

    All grow with the level, so there is one; a hundred halvings leave nothing of the interval.
    """
    low, high = 0.0, max(most for _, most in limits) / min(speeds)
    for _ in range(100):
        level = (low + high) / 2
        low, high = (low, level) if sum(_at(level, speeds, limits)) > total else (level, high)
    return _at(low, speeds, limits)


def _at(level: float, speeds: Sequence[float], limits: Sequence[Limits]) -> list[float]:
    return [min(max(speed * level, least), most) for speed, (least, most) in zip(speeds, limits, strict=True)]
