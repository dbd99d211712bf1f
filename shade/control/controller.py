"""Decides from what was measured how much of the gradient all ranks send, and how many samples each computes.

Density. A step on all ranks takes the slowest rank's compute and the exchange. The exchange takes density times the
bytes that a density of 1 would be, over the bandwidth: all three measured. Of all densities from floor to ceiling, the
one with the most progress per second (`shade.control.curve`):

* staleness 1, the exchange of a step runs beside the next compute: the step takes the longer of the two. Both jitter,
  and who is late makes the step late, so two that are equally long take more than either: see `OVERLAP`. The curve's
  steepness a decides how much of the compute the exchange fills, ``(a / (1 - a)) ** (1 / OVERLAP)``; 0.58 at a = 0.1.
* staleness 0, one after the other: the step takes the sum, and the exchange gets a / (1 - a) of the compute.

Bandwidth is bytes over wall time of the slowest hop. A rank that is early waits in the collective for one that is late;
that is not the link's fault and is taken off. What does not shrink with density (small dense tensors, latency) is seen
as less bandwidth; as it is measured again at each new density, a few decisions settle it. Compute may grow with
density, if choosing and merging take from the processor that the model computes on; how much shows when it changes.

Batches go by the samples that each rank computes in a second (`shade.control.split`); the global batch stays. What a
step costs whatever its batch makes few samples look slow; each division is measured again, and they close in on equal
times. That a rank which is only disturbed does not lose all its samples on the way, limits see to.

A decision is made when it changes something by more than `HYSTERESIS_FRACTION`, only after the last one has taken
effect, and takes effect `LEAD_STEPS` later: by then every rank has it. Arithmetic on reports, no clock, no randomness:
the same reports give the same decisions, also after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Final

from shade.control.curve import Curve, power
from shade.control.smoothing import Slope, Smoothed
from shade.control.split import Limits, split
from shade.errors import ConfigError
from shade.types import Decision, StepReport

FLOOR, CEILING = 0.0005, 0.10
"""Densities between which it chooses. Below, error feedback brings back most of a gradient too late; above, the indices
cost as much as a dense exchange, and a user on such a link needs no sparse one."""
OVERLAP: Final = 4.0
"""Compute c beside exchange e takes (c^4 + e^4)^(1/4): where one is long as it, where they are equal 1.19 of either."""
HYSTERESIS_FRACTION: Final = 0.10
PAUSE: Final = 2.0
"""Times the compute that is expected: a step of that length had an evaluation in it, and says nothing of density."""
LEAD_STEPS: Final = 2
"""From the newest step that anybody reported to the one that a decision takes effect at."""
LEAST_REPORTS: Final = 3
"""Whole steps before the first decision, and before compute says anything of density: the first ones compile, allocate
and connect."""
_MOST_OPEN: Final = 16
"""Steps of which some ranks have reported and some have not; older ones are given up: their reports were dropped."""
_CANDIDATES: Final = 120
"""From floor to ceiling, each 4.5 % above the one before: finer than the hysteresis."""


class Controller:
    """One run's controller; lives on rank 0, whose decisions the others get with the exchange.

    Args:
        world_size: Ranks that report.
        density: That the run begins with.
        staleness: 0 or 1, as the engine's.
        curve: What a step is worth at a density.
        floor: Least density; a profile's, where there is one.
        batch_sizes: Samples for each rank at the beginning; empty: batches are left alone.
        batch_limits: Least and most of each rank; empty: from a quarter of its first batch to the global one.

    Raises:
        ConfigError: One of them is out of range.
    """

    def __init__(
        self,
        world_size: int,
        *,
        density: float,
        staleness: int = 1,
        curve: Curve | None = None,
        floor: float = FLOOR,
        batch_sizes: Sequence[int] = (),
        batch_limits: Sequence[Limits] = (),
    ) -> None:
        if world_size < 1 or staleness not in (0, 1):
            raise ConfigError.of("at least 1 rank and staleness 0 or 1", (world_size, staleness), "pass the engine's")
        if not (0 < density <= 1 and 0 < floor <= 1):
            raise ConfigError.of("0 < density ≤ 1, and the floor too", (density, floor), "write 0.01 for 1 %")
        if batch_sizes and (len(batch_sizes) != world_size or min(batch_sizes) < 0):
            raise ConfigError.of(f"{world_size} batch sizes", batch_sizes, "give one of each rank, or none")
        self.density = density
        self.batch_sizes = tuple(batch_sizes)
        self.num_ignored = 0
        """Reports that cannot be true (negative, not finite) or are of no rank. Not 0: a clock is broken."""
        self._world_size = world_size
        self._staleness = staleness
        self._curve = curve or power()
        self._floor, self._ceiling = floor, max(CEILING, floor)
        ratio = self._ceiling / floor
        steps = [place / _CANDIDATES for place in range(_CANDIDATES)]
        self._densities: list[float] = [*(floor * ratio**step for step in steps), self._ceiling]
        self._limits = tuple(batch_limits) or tuple((-(-size // 4), sum(batch_sizes)) for size in batch_sizes)
        if self.batch_sizes:
            split(sum(self.batch_sizes), [1.0] * world_size, self._limits)
        self._open: dict[int, dict[int, StepReport]] = {}
        self._newest_step = -1
        self._effective_step = 0
        self._forget()

    def _forget(self) -> None:
        self._num_steps = 0
        self._seconds_per_byte = Smoothed()
        self._bytes_per_density: float | None = None
        self._seconds_per_sample = [Smoothed() for _ in range(self._world_size)]
        self._compute_seconds = [Smoothed() for _ in range(self._world_size)]
        """Both as they would be at a density of 0."""
        self._seconds_per_density = Slope()
        self._num_samples_W: list[int] = []
        """Of the last step: with other batches compute lies higher or lower, whatever the density."""

    # ── what is measured ────────────────────────────────────────────────────────────────────────────────────────────

    def observe(self, report: StepReport) -> None:
        """Takes in what one rank tells of one step; when all ranks have told of it, it counts."""
        if not _is_possible(report) or report.rank >= self._world_size:
            self.num_ignored += 1
            return
        self._newest_step = max(self._newest_step, report.step)
        told = self._open.setdefault(report.step, {})
        told[report.rank] = report
        if len(told) == self._world_size:
            del self._open[report.step]
            self._take_in([told[rank] for rank in range(self._world_size)])
        while len(self._open) > _MOST_OPEN:
            del self._open[min(self._open)]

    def _take_in(self, step_W: list[StepReport]) -> None:
        self._num_steps += 1
        if self._num_steps == 1:
            return
        density = max(report.density for report in step_W)
        if self._num_steps > LEAST_REPORTS:
            self._learn_growth(step_W, density)
        growth = density * self._seconds_per_density.value
        for report, per_sample, compute in zip(step_W, self._seconds_per_sample, self._compute_seconds, strict=True):
            alone = max(0.0, report.compute_seconds - growth)
            compute.add(alone)
            if report.num_samples:
                per_sample.add(alone / report.num_samples)
        num_bytes = max(max(report.bytes_sent, report.bytes_received) for report in step_W)
        wall = _slowest_hop_seconds(step_W)
        if num_bytes and wall > 0:
            self._seconds_per_byte.add(wall / num_bytes)
            self._bytes_per_density = num_bytes / density

    def _learn_growth(self, step_W: list[StepReport], density: float) -> None:
        num_samples_W = [report.num_samples for report in step_W]
        if num_samples_W != self._num_samples_W:
            self._num_samples_W = num_samples_W
            self._seconds_per_density.start_level()
        compute = fmean(report.compute_seconds for report in step_W)
        expected = self._compute_at(density, fmean(each.value or 0.0 for each in self._compute_seconds))
        if 0 < compute < PAUSE * expected:
            self._seconds_per_density.add(density, compute)

    @property
    def bandwidth(self) -> float | None:
        """Of the slowest hop, in bytes per second; None while nothing is known."""
        slowness = self._seconds_per_byte.value
        return 1 / slowness if slowness else None

    # ── what to do ──────────────────────────────────────────────────────────────────────────────────────────────────

    def decide(self, step: int) -> Decision | None:
        """Whether anything shall change.

        Args:
            step: That the training is at.

        Returns:
            For all ranks, with their batches, changed or not, if it divides them; None: all stays. It is taken as
            carried out.
        """
        now = max(step, self._newest_step)
        if self._num_steps < LEAST_REPORTS or now < self._effective_step:
            return None
        sizes, why_sizes = self._better_sizes()
        density, why_density = self._better_density(sizes)
        if not why_sizes and not why_density:
            return None
        self.density, self.batch_sizes, self._effective_step = density, sizes, now + LEAD_STEPS
        reason = "; ".join(filter(None, (why_density, why_sizes)))
        return Decision(density, sizes, self._effective_step, reason)

    def _better_sizes(self) -> tuple[tuple[int, ...], str]:
        """The batches as they are and no reason, or better ones and why."""
        old = self.batch_sizes
        seconds = [each.value for each in self._seconds_per_sample]
        known = [value for value in seconds if value]
        if not old or len(known) < self._world_size:
            return old, ""
        new = split(sum(old), [1 / value for value in known], self._limits)
        before = max(size * value for size, value in zip(old, known, strict=True))
        after = max(size * value for size, value in zip(new, known, strict=True))
        if after >= before * (1 - HYSTERESIS_FRACTION):
            return old, ""
        slow, fast = known.index(max(known)), known.index(min(known))
        told = f"rank {slow} takes {max(known) / min(known):.2f} times as long for a sample as rank {fast}"
        return new, f"batches {_words(old)} → {_words(new)}: {told}"

    def _better_density(self, sizes: tuple[int, ...]) -> tuple[float, str]:
        """The density as it is and no reason, or a better one and why."""
        slowness, bulk = self._seconds_per_byte.value, self._bytes_per_density
        compute = self._expected_compute(sizes)
        if not slowness or not bulk or not compute:
            return self.density, ""
        new = self._best(compute, bulk * slowness)
        if abs(new / self.density - 1) <= HYSTERESIS_FRACTION:
            return self.density, ""
        bound = {self._floor: ", the floor", self._ceiling: ", the ceiling"}.get(new, "")
        told = (
            f"density {self.density:.3%} → {new:.3%}{bound}: the slowest hop carries {1e-6 / slowness:.3g} MB/s, "
            f"a step computes {self._compute_at(new, compute):.3g} s and would exchange {new * bulk * slowness:.3g} s"
        )
        return new, told

    def _expected_compute(self, sizes: tuple[int, ...]) -> float:
        """Of the slowest rank with these batches, at a density of 0."""
        if sizes:
            known = zip(sizes, self._seconds_per_sample, strict=True)
            return max(size * (each.value or 0.0) for size, each in known)
        return max(each.value or 0.0 for each in self._compute_seconds)

    def _best(self, compute_seconds: float, exchange_seconds: float) -> float:
        """The density with most progress per second, if density 1 takes so long to exchange."""
        return max((self._rate(each, compute_seconds, exchange_seconds), each) for each in self._densities)[1]

    def _rate(self, density: float, compute_seconds: float, exchange_seconds: float) -> float:
        """Progress per second at a density."""
        compute, exchange = self._compute_at(density, compute_seconds), density * exchange_seconds
        power = OVERLAP if self._staleness else 1.0
        return self._curve.at(density) / float((compute**power + exchange**power) ** (1 / power))

    def _compute_at(self, density: float, compute_seconds: float) -> float:
        return compute_seconds + density * self._seconds_per_density.value

    # ── a life ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def resize(self, world_size: int, batch_sizes: Sequence[int] = (), batch_limits: Sequence[Limits] = ()) -> None:
        """Goes on with other ranks: the density stays, all measurements are of a ring that is no more.

        Args:
            world_size: Ranks that report from now on.
            batch_sizes: As for a new controller.
            batch_limits: As for a new controller.
        """
        fresh = Controller(
            world_size, density=self.density, staleness=self._staleness, curve=self._curve, floor=self._floor,
            batch_sizes=batch_sizes, batch_limits=batch_limits,
        )  # fmt: skip
        self._world_size, self.batch_sizes, self._limits = world_size, fresh.batch_sizes, fresh._limits
        self._open.clear()
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts; what follows from them is what would have followed."""
        return {
            "world_size": self._world_size,
            "density": self.density,
            "batch_sizes": list(self.batch_sizes),
            "num_ignored": self.num_ignored,
            "num_steps": self._num_steps,
            "newest_step": self._newest_step,
            "effective_step": self._effective_step,
            "bytes_per_density": self._bytes_per_density,
            "seconds_per_byte": self._seconds_per_byte.state_dict(),
            "seconds_per_sample": [each.state_dict() for each in self._seconds_per_sample],
            "compute_seconds": [each.state_dict() for each in self._compute_seconds],
            "seconds_per_density": self._seconds_per_density.state_dict(),
            "num_samples": list(self._num_samples_W),
            "open": [asdict(report) for told in self._open.values() for report in told.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it back; from a run with another number of ranks only the density."""
        self.density = float(state["density"])
        if int(state["world_size"]) != self._world_size:
            return
        self.batch_sizes = tuple(map(int, state["batch_sizes"]))
        self.num_ignored, self._num_steps = int(state["num_ignored"]), int(state["num_steps"])
        self._newest_step, self._effective_step = int(state["newest_step"]), int(state["effective_step"])
        bulk = state["bytes_per_density"]
        self._bytes_per_density = None if bulk is None else float(bulk)
        self._seconds_per_byte.load_state_dict(state["seconds_per_byte"])
        for each, saved in zip(self._seconds_per_sample, state["seconds_per_sample"], strict=True):
            each.load_state_dict(saved)
        for each, saved in zip(self._compute_seconds, state["compute_seconds"], strict=True):
            each.load_state_dict(saved)
        self._seconds_per_density.load_state_dict(state["seconds_per_density"])
        self._num_samples_W = list(map(int, state["num_samples"]))
        self._open.clear()
        for saved in state["open"]:
            report = StepReport(**saved)
            self._open.setdefault(report.step, {})[report.rank] = report


def _is_possible(report: StepReport) -> bool:
    """Whether all that is reckoned with can be true."""
    counts = (report.step, report.rank, report.num_samples, report.bytes_sent, report.bytes_received)
    seconds = (report.compute_seconds, report.exchange_seconds)
    return min(counts) >= 0 and all(0 <= each < math.inf for each in seconds) and 0 < report.density <= 1


def _slowest_hop_seconds(step_W: list[StepReport]) -> float:
    """How long the exchange took, without the time that early ranks waited in it for the last."""
    latest = max(report.compute_seconds for report in step_W)
    shortest = min(report.exchange_seconds for report in step_W)
    alone = (report.exchange_seconds - (latest - report.compute_seconds) for report in step_W)
    return max(shortest, *alone)


def _words(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
