"""Plays a training over a link that changes, step by step, without doing any of it: to see what a controller is worth.

A step is a compute, as long as the slowest rank's, and an exchange of density times so many bytes. With staleness 0 the
next step begins when the exchange has ended, so a step takes the sum. With staleness 1 it begins at once and only the
step after it waits, so it takes the longer of the two. The `Link` is bytes per second over wall time, so that a step
that meets a cut is as long as the cut, as in life, and a slow run sees less of a good hour than a quick one.

What is measured is the time to a given progress: the sum over steps of what each is worth at its density
(`shade.control.curve`). That is the fixed quality of the comparison: runs that stop at the same progress are equally
good, and the shorter is better. A density that is fixed can be tried after the fact, all of them on the same link;
the best of those is what a controller, which does not know the link before, is held against.

Reports are as late as in life: a step's own come when it has ended, those of other ranks one step later.

Left out: the time to compress beside the model, bytes that do not depend on density, losses of single packets.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shade.control.controller import Controller
from shade.control.curve import Curve
from shade.errors import ConfigError
from shade.types import Decision, StepReport


@dataclass(frozen=True)
class Link:
    """Bandwidth over time: rate ``i`` holds from ``starts[i]`` to ``starts[i + 1]``, the last one for ever after.

    Args:
        starts: Seconds, ascending, from 0.
        rates: Bytes per second, above 0.

    Raises:
        ConfigError: They are not that.
    """

    starts: tuple[float, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(early < late for early, late in pairwise(self.starts))
        if not self.starts or self.starts[0] != 0 or not ascending or len(self.rates) != len(self.starts):
            raise ConfigError.of("ascending seconds from 0 and a rate for each", self.starts, "sort the trace")
        if not all(0 < rate < math.inf for rate in self.rates):
            raise ConfigError.of("rates above 0, in bytes per second", self.rates, "write 1 for a link that is cut")

    def finish(self, begin_seconds: float, num_bytes: float) -> float:
        """When a transfer ends.

        Args:
            begin_seconds: When it begins.
            num_bytes: How much it is.

        Returns:
            Seconds, not before it begins.
        """
        now, left = begin_seconds, num_bytes
        place = max(bisect.bisect_right(self.starts, now) - 1, 0)
        while place + 1 < len(self.starts) and left > self.rates[place] * (self.starts[place + 1] - now):
            left -= self.rates[place] * (self.starts[place + 1] - now)
            place += 1
            now = self.starts[place]
        return now + left / self.rates[place]


def random_walk(seed: int, rate: float, *, num_segments: int, segment_seconds: float, spread: float = 0.25) -> Link:
    """A link whose rate wanders, each segment by a factor, between a tenth of the first rate and ten times it.

    Args:
        seed: Of the walk.
        rate: Bytes per second at first.
        num_segments: How many.
        segment_seconds: How long each is.
        spread: Standard deviation of the factor's logarithm.

    Returns:
        The link.
    """
    draw = random.Random(seed)
    rates = [rate]
    for _ in range(num_segments - 1):
        rates.append(min(max(rates[-1] * math.exp(draw.gauss(0.0, spread)), rate / 10), rate * 10))
    return Link(tuple(segment_seconds * place for place in range(num_segments)), tuple(rates))


def alternating(rates: Sequence[float], seconds: Sequence[float], num_rounds: int) -> Link:
    """A link that goes through the same rates again and again: each for so many seconds."""
    starts, now = [], 0.0
    for _ in range(num_rounds):
        for length in seconds:
            starts.append(now)
            now += length
    return Link(tuple(starts), tuple(rates) * num_rounds)


@dataclass(frozen=True)
class Cluster:
    """Who trains."""

    seconds_per_sample: tuple[float, ...]
    """Of each rank."""
    batch_sizes: tuple[int, ...]
    """Of each rank, at the beginning."""
    bytes_per_density: float
    """Of one exchange with density 1, over the slowest hop."""
    staleness: int = 1
    seconds_per_density: float = 0.0
    """By which compute is longer at density 1: where choosing, coding and merging take from the model's processor."""
    noise_fraction: float = 0.0
    """Compute and bandwidth of each step are off by up to so much."""


@dataclass
class Outcome:
    """How it went."""

    seconds: float
    """To the progress that was asked for."""
    num_steps: int = 0
    decisions: list[Decision] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)
    """Of each step."""


def play(
    cluster: Cluster, link: Link, curve: Curve, goal: float, *, density: float, control: Controller | None = None,
    seed: int = 0,
) -> Outcome:  # fmt: skip
    """Trains until the goal is reached.

    Args:
        cluster: Who trains.
        link: Over what.
        curve: What a step is truly worth; the controller may believe in another.
        goal: Sum of progress.
        density: That the run begins with.
        control: Fed with each step's reports and obeyed, or None: the density stays.
        seed: Of the noise.

    Returns:
        How long it took.
    """
    draw = random.Random(seed)
    outcome = Outcome(0.0)
    sizes, waiting, told = cluster.batch_sizes, list[Decision](), deque[StepReport]()
    begin = received = before = 0.0  # of this step's compute; when the last exchange ended, and the one before
    progress, step = 0.0, 0
    while progress < goal:
        while waiting and waiting[0].effective_step <= step:
            decision = waiting.pop(0)
            density, sizes = decision.density, decision.batch_sizes or sizes

        def off() -> float:
            return 1 + cluster.noise_fraction * draw.uniform(-1, 1)

        more = density * cluster.seconds_per_density
        compute_W = [(size * each + more) * off() for size, each in zip(sizes, cluster.seconds_per_sample, strict=True)]
        computed = begin + max(compute_W)
        start = max(computed, received)
        num_bytes = density * cluster.bytes_per_density
        before, received = received, link.finish(start, num_bytes * off())
        begin = received if cluster.staleness == 0 else max(computed, before)
        progress += curve.at(density)
        outcome.densities.append(density)
        if control is not None:
            for rank, (size, compute) in enumerate(zip(sizes, compute_W, strict=True)):
                wall = received - start + max(compute_W) - compute
                moved = int(num_bytes)
                waited = begin - computed
                told.append(
                    StepReport(step, rank, size, compute, 0.0, wall, waited, moved, moved, density, gradient_norm=1.0)
                )
            while told and told[0].step < step - cluster.staleness:
                control.observe(told.popleft())
            made = control.decide(step + 1)
            if made is not None:
                waiting.append(made)
                outcome.decisions.append(made)
        step += 1
    outcome.seconds, outcome.num_steps = received, step
    return outcome
