"""A row of the table, and how its figures are taken: in rounds of all ways, so that what disturbs one disturbs all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

HEAD = ["| what | ours | beside | theirs | ours ÷ theirs | target | |", "|---|---|---|---|---|---|---|"]


@dataclass(frozen=True)
class Row:
    """A figure of ours beside a floor or a rival."""

    what: str
    ours: str
    beside: str = "–"
    theirs: str = "–"
    ratio: float | None = None
    most: float | None = None
    """The target: the greatest ratio that meets it; None: there is none."""

    def markdown(self, *, is_gpu: bool) -> str:
        """The row of a table below `HEAD`; only a GPU meets or misses a target."""
        ratio, target, verdict = "–" if self.ratio is None else f"{self.ratio:.3g}", "–", "–"
        if self.ratio is not None and self.most is not None:
            target, verdict = f"≤ {self.most:g}", "met" if self.ratio <= self.most else "missed"
        cells = self.what, self.ours, self.beside, self.theirs, ratio, target, verdict if is_gpu else "stand-in"
        return f"| {' | '.join(cells)} |"


def row(what: str, ours: Sequence[float], beside: str, theirs: Sequence[float], most: float | None = None) -> Row:
    """A row of the seconds of two ways, round by round; the ratio is the median of the rounds' ratios."""
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    return Row(what, told(ours), beside, told(theirs), ratio, most)


def told(seconds: Sequence[float]) -> str:
    """Median and range, in milliseconds."""
    median, least, most = (f"{1e3 * each:.3g}" for each in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{median} ms ({least}–{most}, n = {len(seconds)})"


def rounds(least: int, budget_seconds: float) -> Iterator[int]:
    """Numbers rounds until the budget is spent, and at least so many."""
    ends, number = time.monotonic() + budget_seconds, 0
    while number < least or (time.monotonic() < ends and number < 50):
        yield number
        number += 1


def interleaved(ways: Mapping[str, Callable[[], float]], numbers: Iterable[int]) -> dict[str, list[float]]:
    """The seconds that each way tells, in rounds of all ways, each in an order of its own. The first round warms up and
    is not kept."""
    order, draws = list(ways), random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in numbers:
        draws.shuffle(order)
        for name in order:
            seconds = ways[name]()
            if number:
                found[name].append(seconds)
    return found
