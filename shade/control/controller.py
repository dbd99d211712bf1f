"""Decides from measurements how much of the gradient all ranks send, and how many samples each rank computes.

*Density.* A step takes the slowest rank's compute and the exchange, whose bytes are proportional to the density. The
controller chooses the density between floor and ceiling with the most progress (`shade.control.curve`) per expected
second (`shade.control.link_cost`).
With staleness 1 the exchange runs beside the next compute, with staleness 0 after it.

*Batches* are proportional to the samples that each rank computes in a second (`split`), and the global batch stays the
same: the optimizer's step, its noise and its learning rate keep their meaning.

A decision must change something by more than `HYSTERESIS_FRACTION`, is made only after the last one has taken effect,
and takes effect `LEAD_STEPS` later, when every rank has it. The same reports give the same decisions, also after a
resume. Decision 0018 has the measurements behind the constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Final, TypeAlias

from shade.control.curve import Curve, power
from shade.control.link_cost import LinkCost
from shade.control.smoothing import Slope, Smoothed
from shade.errors import ConfigError
from shade.types import Decision, StepReport

Limits: TypeAlias = tuple[int, int]
"""Least and most samples of one rank."""

FLOOR, CEILING = 0.0005, 0.10
"""Least and greatest density. Below, error feedback returns most of a gradient too late; above, the indices cost as
much as a dense exchange, and a user with such a link needs no sparse one."""
OVERLAP: Final = 6.0
"""Compute c beside exchange e takes (c^6 + e^6)^(1/6): the longer one if they differ much, 1.12 of either if equal."""
HYSTERESIS_FRACTION: Final = 0.10
PAUSE: Final = 2.0
"""A step of this many times the expected compute contained an evaluation, and says nothing about density."""
LEAD_STEPS: Final = 2
"""Steps from the newest reported one to the one at which a decision takes effect."""
LEAST_REPORTS: Final = 3
"""Complete steps before the first decision, and before compute is compared with density: the first steps compile,
allocate and connect."""
_MOST_OPEN: Final = 16
"""Incomplete steps that are kept; an older one will not be completed, because its missing reports were dropped."""
_CANDIDATES: Final = 120
"""Densities to choose from, each 4.5 % above the one before: finer than the hysteresis."""


class Controller:
    """Chooses density and batches for one run; lives on rank 0, and the exchange carries its decisions to the others.

    Args:
        world_size: Ranks that report.
        density: The density at the start of the run.
        staleness: The engine's, 0 or 1.
        curve: Progress of a step over density.
        floor: Least density; a profile's, if there is one.
        batch_sizes: Samples of each rank at the start; empty to leave batches alone.
        batch_limits: Least and most samples of each rank; empty for a quarter of its first batch to the global batch.

    Raises:
        ConfigError: An argument is out of range.
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
            raise ConfigError.of(f"{world_size} batch sizes", batch_sizes, "give one for each rank, or none")
        self.density = density
        self.batch_sizes = tuple(batch_sizes)
        self.num_ignored = 0
        """Reports with impossible values (negative, not finite) or of an unknown rank. Not 0: a clock is broken."""
        self._world_size = world_size
        self._staleness = staleness
        self._curve = curve or power()
        self._floor, self._ceiling = floor, max(CEILING, floor)
        ratio = self._ceiling / floor
        steps = [number / _CANDIDATES for number in range(_CANDIDATES)]
        densities = [*(floor * ratio**step for step in steps), self._ceiling]
        self._candidates: list[tuple[float, float]] = [(each, self._curve.at(each)) for each in densities]
        """Densities, and the progress of a step at each."""
        # A rank that is only disturbed for a moment must not lose all its samples.
        self._limits = tuple(batch_limits) or tuple((-(-size // 4), sum(batch_sizes)) for size in batch_sizes)
        if self.batch_sizes:
            split(sum(self.batch_sizes), [1.0] * world_size, self._limits)
        self._open: dict[int, dict[int, StepReport]] = {}
        self._newest_step = -1
        self._effective_step = 0
        self._reset_measurements()

    def _reset_measurements(self) -> None:
        self._num_steps = 0
        self._link = LinkCost()
        self._bytes_per_density: float | None = None
        self._seconds_per_sample = [Smoothed() for _ in range(self._world_size)]
        self._compute_seconds = [Smoothed() for _ in range(self._world_size)]
        """Both corrected to a density of 0."""
        self._seconds_per_density = Slope()
        self._num_samples_W: list[int] = []
        """Batches of the last step: other batches change the compute at every density."""

    # ── measurements ────────────────────────────────────────────────────────────────────────────────────────────────

    def observe(self, report: StepReport) -> None:
        """Adds one rank's report of one step; a step is used once all ranks have reported it."""
        if not _is_possible(report) or report.rank >= self._world_size:
            self.num_ignored += 1
            return
        self._newest_step = max(self._newest_step, report.step)
        reports = self._open.setdefault(report.step, {})
        reports[report.rank] = report
        if len(reports) == self._world_size:
            del self._open[report.step]
            self._add_step([reports[rank] for rank in range(self._world_size)])
        while len(self._open) > _MOST_OPEN:
            del self._open[min(self._open)]

    def _add_step(self, step_W: list[StepReport]) -> None:
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
        # Without the time that an early rank waits for a late one: the link does not cause it.
        wall = _slowest_hop_seconds(step_W)
        if num_bytes and wall > 0:
            # The rank that votes last waits for no other.
            self._link.add(wall, num_bytes, min(report.latency_seconds for report in step_W))
            # Bytes that do not shrink with density, of small dense tensors, are measured again at each new density, so
            # a few decisions correct them.
            self._bytes_per_density = num_bytes / density

    def _learn_growth(self, step_W: list[StepReport], density: float) -> None:
        num_samples_W = [report.num_samples for report in step_W]
        if num_samples_W != self._num_samples_W:
            self._num_samples_W = num_samples_W
            self._seconds_per_density.start_level()
        compute = fmean(report.compute_seconds for report in step_W)
        expected = self._compute_at(density, fmean(each.value or 0.0 for each in self._compute_seconds))
        # Compute grows with density where selection and merging use the processor of the model.
        if 0 < compute < PAUSE * expected:
            self._seconds_per_density.add(density, compute)

    @property
    def bandwidth(self) -> float | None:
        """The slowest hop's bandwidth in bytes per second; None before the first measurement."""
        slowness = self._link.seconds_per_byte
        return 1 / slowness if slowness else None

    # ── decisions ───────────────────────────────────────────────────────────────────────────────────────────────────

    def decide(self, step: int) -> Decision | None:
        """Returns a decision for all ranks at the training's current step, or None for no change.

        It has the batches if the controller divides them. The caller must carry it out.
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
        """Returns better batches and the reason, or the present batches and no reason."""
        old = self.batch_sizes
        seconds = [each.value for each in self._seconds_per_sample]
        known = [value for value in seconds if value]
        if not old or len(known) < self._world_size:
            return old, ""
        new = split(sum(old), [1 / value for value in known], self._limits)
        before = max(size * value for size, value in zip(old, known, strict=True))
        after = max(size * value for size, value in zip(new, known, strict=True))
        # A fixed cost a step makes a rank with few samples look slow; each division is measured again, and times
        # converge.
        if after >= before * (1 - HYSTERESIS_FRACTION):
            return old, ""
        slow, fast = known.index(max(known)), known.index(min(known))
        why = f"rank {slow} takes {max(known) / min(known):.2f} times as long for a sample as rank {fast}"
        return new, f"batches {_listed(old)} → {_listed(new)}: {why}"

    def _better_density(self, sizes: tuple[int, ...]) -> tuple[float, str]:
        """Returns a better density and the reason, or the present density and no reason."""
        slowness, bulk = self._link.seconds_per_byte, self._bytes_per_density
        compute = self._expected_compute(sizes)
        if not slowness or not bulk or not compute:
            return self.density, ""
        new = self._best(compute, bulk)
        if abs(new / self.density - 1) <= HYSTERESIS_FRACTION:
            return self.density, ""
        bound = {self._floor: ", the floor", self._ceiling: ", the ceiling"}.get(new, "")
        why = (
            f"density {self.density:.3%} → {new:.3%}{bound}: the slowest hop carries {1e-6 / slowness:.3g} MB/s, "
            f"a step computes {self._compute_at(new, compute):.3g} s and would exchange "
            f"{self._link.fixed_seconds + new * bulk * slowness:.3g} s"
        )
        return new, why

    def _expected_compute(self, sizes: tuple[int, ...]) -> float:
        """Returns the compute seconds of the slowest rank with these batches, at a density of 0."""
        if sizes:
            known = zip(sizes, self._seconds_per_sample, strict=True)
            return max(size * (each.value or 0.0) for size, each in known)
        return max(each.value or 0.0 for each in self._compute_seconds)

    def _best(self, compute_seconds: float, bytes_per_density: float) -> float:
        """Returns the density with the most progress per second."""
        rates = self._link.rates()
        return max(
            (progress / self._seconds_at(density, compute_seconds, density * bytes_per_density, rates), density)
            for density, progress in self._candidates
        )[1]

    def _seconds_at(
        self, density: float, compute_seconds: float, num_bytes: float, rates: Sequence[tuple[float, float]]
    ) -> float:
        """Returns the expected seconds of a step at a density."""
        power = OVERLAP if self._staleness else 1.0
        compute = self._compute_at(density, compute_seconds) ** power
        exchanges = ((self._link.fixed_seconds + num_bytes * each, share) for each, share in rates)
        return math.fsum(share * float((compute + exchange**power) ** (1 / power)) for exchange, share in exchanges)

    def _compute_at(self, density: float, compute_seconds: float) -> float:
        return compute_seconds + density * self._seconds_per_density.value

    # ── lifecycle ───────────────────────────────────────────────────────────────────────────────────────────────────

    def resize(self, world_size: int, batch_sizes: Sequence[int] = (), batch_limits: Sequence[Limits] = ()) -> None:
        """Continues with other ranks: keeps the density and discards the measurements, which describe the old ring."""
        fresh = Controller(
            world_size, density=self.density, staleness=self._staleness, curve=self._curve, floor=self._floor,
            batch_sizes=batch_sizes, batch_limits=batch_limits,
        )  # fmt: skip
        self._world_size, self.batch_sizes, self._limits = world_size, fresh.batch_sizes, fresh._limits
        self._open.clear()
        self._reset_measurements()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as numbers, lists and dicts; a controller that loads it makes the same decisions."""
        return {
            "world_size": self._world_size,
            "density": self.density,
            "batch_sizes": list(self.batch_sizes),
            "num_ignored": self.num_ignored,
            "num_steps": self._num_steps,
            "newest_step": self._newest_step,
            "effective_step": self._effective_step,
            "bytes_per_density": self._bytes_per_density,
            "link": self._link.state_dict(),
            "seconds_per_sample": [each.state_dict() for each in self._seconds_per_sample],
            "compute_seconds": [each.state_dict() for each in self._compute_seconds],
            "seconds_per_density": self._seconds_per_density.state_dict(),
            "num_samples": list(self._num_samples_W),
            "open": [asdict(report) for reports in self._open.values() for report in reports.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state; from a run with another number of ranks, only the density."""
        self.density = float(state["density"])
        if int(state["world_size"]) != self._world_size:
            return
        self.batch_sizes = tuple(map(int, state["batch_sizes"]))
        self.num_ignored, self._num_steps = int(state["num_ignored"]), int(state["num_steps"])
        self._newest_step, self._effective_step = int(state["newest_step"]), int(state["effective_step"])
        bulk = state["bytes_per_density"]
        self._bytes_per_density = None if bulk is None else float(bulk)
        self._link.load_state_dict(state["link"])
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
    """Returns whether every value that the controller uses is possible."""
    counts = (report.step, report.rank, report.num_samples, report.bytes_sent, report.bytes_received)
    seconds = (report.compute_seconds, report.exchange_seconds, report.latency_seconds)
    return min(counts) >= 0 and all(0 <= each < math.inf for each in seconds) and 0 < report.density <= 1


def _slowest_hop_seconds(step_W: list[StepReport]) -> float:
    """Returns how long the exchange took, without the time that early ranks waited in it for the last rank."""
    latest = max(report.compute_seconds for report in step_W)
    shortest = min(report.exchange_seconds for report in step_W)
    alone = (report.exchange_seconds - (latest - report.compute_seconds) for report in step_W)
    return max(shortest, *alone)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def split(total: int, speeds: Sequence[float], limits: Sequence[Limits]) -> tuple[int, ...]:
    """Divides a batch in proportion to speeds, with largest-remainder rounding.

    Args:
        total: Samples in the global batch.
        speeds: Samples per second of each rank, above 0.
        limits: Limits of each rank; what one rank's limits cut off goes to the others.

    Returns:
        Samples for each rank: within the limits, together exactly ``total``; of equal ranks the first gets the odd one.

    Raises:
        ConfigError: No division satisfies the limits.
    """
    if len(speeds) != len(limits) or not all(speed > 0 for speed in speeds):
        raise ConfigError.of("a speed above 0 and limits for each rank", (speeds, limits), "give one of each per rank")
    least, most = sum(low for low, _ in limits), sum(high for _, high in limits)
    if any(not 0 <= low <= high for low, high in limits) or not least <= total <= most:
        raise ConfigError.of(
            f"a batch from {least} to {most}, the sums of the limits", total, "widen the limits or change the batch"
        )
    shares = _shares(total, speeds, limits)
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (sizes[rank] - shares[rank], rank))
    while sum(sizes) < total:
        for rank in by_remainder:
            if sum(sizes) < total and sizes[rank] < limits[rank][1]:
                sizes[rank] += 1
    return tuple(sizes)


def _shares(total: int, speeds: Sequence[float], limits: Sequence[Limits]) -> list[float]:
    """Returns the shares clip(speed * level) at the level where they sum to the total, found by bisection.

    All shares grow with the level, so one exists; a hundred halvings exhaust the precision of a float.
    """
    low, high = 0.0, max(most for _, most in limits) / min(speeds)
    for _ in range(100):
        level = (low + high) / 2
        low, high = (low, level) if sum(_at(level, speeds, limits)) > total else (level, high)
    return _at(low, speeds, limits)


def _at(level: float, speeds: Sequence[float], limits: Sequence[Limits]) -> list[float]:
    return [min(max(speed * level, least), most) for speed, (least, most) in zip(speeds, limits, strict=True)]
