"""Simulates a training over a changing link, step by step, to compare a controller with fixed densities.

A step is a compute, as long as the slowest rank's, and an exchange of density times a number of bytes. With staleness 0
the next step begins when the exchange has ended, so a step takes the sum. With staleness 1 it begins at once and only
the step after it waits, so a step takes the longer of the two. The `Link` is bytes per second over wall time. A step
during an outage therefore lasts as long as the outage, and a slow run gets less of a good hour than a fast one.

The result is the time to a given progress, the sum of the steps' progress at their densities (`shade.control.curve`).
Runs that stop at the same progress are equally good, and the shorter is better. All fixed densities can be tried on the
same link; the best of them is the reference for a controller, which does not know the link in advance.

Reports are as late as in reality: a step's own come when it has ended, those of other ranks one step later.

Not simulated: the time to compress beside the model, bytes that do not depend on density, lost packets.
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
    """Bandwidth over time: rate ``i`` holds from ``starts[i]`` to ``starts[i + 1]``, the last one from then on.

    Args:
        starts: Seconds, ascending, from 0.
        rates: Bytes per second, above 0.

    Raises:
        ConfigError: An argument is not as described.
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
        """Returns when a transfer ends.

        Args:
            begin_seconds: When it begins.
            num_bytes: Its size.

        Returns:
            Seconds, at least `begin_seconds`.
        """
        now, left = begin_seconds, num_bytes
        place = max(bisect.bisect_right(self.starts, now) - 1, 0)
        while place + 1 < len(self.starts) and left > self.rates[place] * (self.starts[place + 1] - now):
            left -= self.rates[place] * (self.starts[place + 1] - now)
            place += 1
            now = self.starts[place]
        return now + left / self.rates[place]


def random_walk(seed: int, rate: float, *, num_segments: int, segment_seconds: float, spread: float = 0.25) -> Link:
    """Returns a link whose rate changes by a random factor in each segment, from a tenth to ten times the first rate.

    Args:
        seed: Seed of the walk.
        rate: Bytes per second at first.
        num_segments: Number of segments.
        segment_seconds: Length of each.
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
    """Returns a link that repeats the same rates, each for its number of seconds."""
    starts, now = [], 0.0
    for _ in range(num_rounds):
        for length in seconds:
            starts.append(now)
            now += length
    return Link(tuple(starts), tuple(rates) * num_rounds)


@dataclass(frozen=True)
class Cluster:
    """The ranks that train."""

    seconds_per_sample: tuple[float, ...]
    """For each rank."""
    batch_sizes: tuple[int, ...]
    """For each rank, at the start."""
    bytes_per_density: float
    """Bytes of one exchange with density 1, over the slowest hop."""
    staleness: int = 1
    seconds_per_density: float = 0.0
    """How much longer compute is at density 1, where selection and merging use the model's processor."""
    latency_seconds: float = 0.0
    """Seconds of an exchange of no bytes."""
    noise_fraction: float = 0.0
    """Greatest random deviation of compute and bandwidth of each step."""


@dataclass
class Outcome:
    """The result of a run."""

    seconds: float
    """Until the goal was reached."""
    num_steps: int = 0
    decisions: list[Decision] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)
    """Density of each step."""


def play(
    cluster: Cluster, link: Link, curve: Curve, goal: float, *, density: float, control: Controller | None = None,
    seed: int = 0,
) -> Outcome:  # fmt: skip
    """Simulates steps until the goal is reached.

    Args:
        cluster: The ranks.
        link: The link between them.
        curve: The true progress of a step; the controller may assume another.
        goal: Sum of progress.
        density: The density at the start.
        control: Gets each step's reports and makes decisions; None keeps the density.
        seed: Seed of the noise.

    Returns:
        The result.
    """
    draw = random.Random(seed)
    outcome = Outcome(0.0)
    sizes, waiting, reports = cluster.batch_sizes, list[Decision](), deque[StepReport]()
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
        before, received = received, link.finish(start, num_bytes * off()) + cluster.latency_seconds
        begin = received if cluster.staleness == 0 else max(computed, before)
        progress += curve.at(density)
        outcome.densities.append(density)
        if control is not None:
            for rank, (size, compute) in enumerate(zip(sizes, compute_W, strict=True)):
                wall = received - start + max(compute_W) - compute
                moved = int(num_bytes)
                waited = begin - computed
                reports.append(
                    StepReport(
                        step,
                        rank,
                        size,
                        compute,
                        0.0,
                        wall,
                        cluster.latency_seconds,
                        waited,
                        moved,
                        moved,
                        density,
                        gradient_norm=1.0,
                    )
                )
            while reports and reports[0].step < step - cluster.staleness:
                control.observe(reports.popleft())
            made = control.decide(step + 1)
            if made is not None:
                waiting.append(made)
                outcome.decisions.append(made)
        step += 1
    outcome.seconds, outcome.num_steps = received, step
    return outcome
