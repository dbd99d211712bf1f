"""Forecasts an epoch of a recorded run with other reads, other workers or no cache, by scaling one measured epoch.

Loading is the sum of its stages (origin, cache, decode, transform), shared by all workers of all ranks. A stage costs
what it did per read, hit or sample, times how many there would be::

    load  = (origin·reads' + cache·hits' + (decode + transform)·samples') / workers'      at least  cpu seconds / CPUs
    epoch = max(load, step·samples')   with workers;   load + step·samples'   without

With nothing changed, the forecast is the measurement. With another cache, reads come from the simulator, which replays
the run's own orders. It assumes that the storage serves more workers as fast as these (`EpochForecast.advice`).

References:
    Seneca, FAST 2026, for the closed form; Mohan et al., VLDB 2021, for predicting from measured rates (DS-Analyzer).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shade.errors import ConfigError, DataError
from shade.report.rows import EpochSummary, Run
from shade.report.style import percent

if TYPE_CHECKING:
    from shade.policy.trace import Trace

STAGES: Final = ("origin", "cache", "decode", "transform")
_ON_CPU: Final = ("decode", "transform")
ENOUGH_EPOCHS: Final = 4
"""Recorded epochs that suffice without drawn ones: two that warm up, and two that do not."""
_DRAWN: Final = 6
"""Epochs drawn; the first does not count, because it meets the recorded epochs' cache."""
_SETTINGS: Final = {"unbiased": ("keep",), "pads": ("replication_factor",)}


@dataclass(frozen=True)
class MeasuredEpoch:
    """What one epoch of a run came to, all ranks together."""

    num_samples: float
    """Samples used in the epoch."""
    origin_reads: float
    cache_reads: float
    seconds: float
    """Wall clock, validation included."""
    step_seconds: float
    """Time in which the script had a batch in hand: mean over ranks."""
    busy_seconds: Mapping[str, float]
    """Stage → time spent in it, summed over all workers of all ranks."""
    num_ranks: int
    num_workers: int
    """Workers of a rank; 0: it loads between its steps."""
    num_cpus: int
    """CPUs of all machines together."""


@dataclass(frozen=True)
class EpochForecast:
    """An epoch that was not run."""

    num_samples: float
    origin_reads: float
    seconds: float
    shares: Mapping[str, float]
    """Stage → share of the loading time; together 1, or empty if loading costs nothing."""
    load_seconds: float
    step_seconds: float
    num_workers: int
    is_cpu_bound: bool
    """Whether more workers would find no CPU to run on."""

    @property
    def samples_per_second(self) -> float:
        """Returns the throughput of all ranks together."""
        return self.num_samples / self.seconds

    @property
    def bottleneck(self) -> str:
        """Returns what the epoch waits for, and its share of the loading."""
        if self._takes_turns:
            return "loading and step in turns"
        if self.step_seconds >= self.load_seconds:
            return "the step"
        return f"{self._slowest} ({percent(self.shares[self._slowest])})"

    @property
    def advice(self) -> str:
        """Returns a sentence that says what would help against the bottleneck."""
        if self._takes_turns:
            return "Loading and step take turns: with a worker they run side by side."
        if self.step_seconds >= self.load_seconds:
            return "The step: loading keeps up, and neither more cache nor more workers would help."
        if self._slowest == "origin":
            return "Origin: fewer reads help most; more workers, if the storage has more to give."
        if self._slowest == "cache":
            return "Cache: a nearer or larger server; more workers hide it."
        stage = self._slowest.capitalize()
        if self.is_cpu_bound:
            return f"{stage}: all CPUs are busy; fewer pixels or more CPUs help, cache and workers do not."
        return f"{stage}: more workers."

    @property
    def _takes_turns(self) -> bool:
        return not self.num_workers and min(self.load_seconds, self.step_seconds) > 0.05 * self.seconds

    @property
    def _slowest(self) -> str:
        return max(self.shares, key=lambda name: self.shares[name])


def forecast(
    measured: MeasuredEpoch, *, num_samples: float, origin_reads: float, num_workers: int, cached: bool = True
) -> EpochForecast:
    """Scales a measured epoch to so many samples, of which the origin reads some and the cache the others, with
    ``num_workers`` ≥ 0 a rank. ``cached=False``: without a cache. Raises `ConfigError` for a negative number of
    workers, or an epoch without a sample."""
    if num_workers < 0:
        raise ConfigError.of("workers ≥ 0", num_workers, "take fewer away")
    if measured.num_samples <= 0 or measured.seconds <= 0:
        raise ConfigError.of("an epoch with a sample", measured.num_samples, "let the run finish an epoch")
    was = _Model(measured, measured.num_samples, measured.origin_reads, measured.num_workers)
    would = _Model(measured, num_samples, origin_reads, num_workers, cached=cached)
    unexplained = measured.seconds - was.seconds
    seconds = would.seconds + unexplained if unexplained >= 0 else would.seconds * measured.seconds / was.seconds
    loading = (would.shares, would.load_seconds, would.step_seconds)
    return EpochForecast(num_samples, origin_reads, seconds, *loading, num_workers, would.is_cpu_bound)


class _Model:
    """An epoch in which every worker is busy until the loading is done, while steps are taken beside it."""

    def __init__(
        self,
        measured: MeasuredEpoch,
        num_samples: float,
        origin_reads: float,
        num_workers: int,
        *,
        cached: bool = True,
    ) -> None:
        scale = num_samples / measured.num_samples
        cache_reads = max(0.0, num_samples - origin_reads)
        factors = dict.fromkeys(STAGES, scale)
        factors["origin"] = origin_reads / measured.origin_reads if measured.origin_reads else 0.0
        if not cached:
            factors["cache"] = 0.0
        elif measured.cache_reads:  # else all that is known of the cache is what it cost to fill it
            factors["cache"] = cache_reads / measured.cache_reads
        busy = {stage: measured.busy_seconds.get(stage, 0.0) * factors[stage] for stage in STAGES}
        total, on_cpu = sum(busy.values()), sum(busy[stage] for stage in _ON_CPU)
        self.shares: Mapping[str, float] = {stage: part / total for stage, part in busy.items()} if total else {}
        processes_then = measured.num_ranks * max(1, measured.num_workers)
        processes = measured.num_ranks * max(1, num_workers)
        # A worker that waits for a CPU is busy in the books: what it did was less, by how crowded it was.
        cpu_seconds = on_cpu * min(1.0, measured.num_cpus / processes_then)
        self.load_seconds = max((total - on_cpu + cpu_seconds) / processes, cpu_seconds / measured.num_cpus)
        self.is_cpu_bound = processes >= measured.num_cpus
        self.step_seconds = measured.step_seconds * scale
        beside = max(self.load_seconds, self.step_seconds)
        self.seconds = beside if num_workers else self.load_seconds + self.step_seconds


def workers_of(plan: Mapping[str, Any]) -> int:
    """Returns the workers of each rank."""
    return int(plan["workers"]) if isinstance(plan.get("workers"), int) else 2


def measure(run: Run) -> tuple[MeasuredEpoch, int]:
    """Returns the mean epoch of the run's later half, since the first epochs fill the cache, and the cache's capacity.

    Raises `DataError` if the rows hold no times, and `ConfigError` if the run had no cache.
    """
    later = _with_times(run.epochs)
    later = later[len(later) // 2 :]
    if not later or any(each.step_seconds is None or not each.busy_seconds for each in later):
        raise DataError.of("epochs with their times", str(run.directory), "record a run with this version")
    capacity = later[-1].capacity_bytes
    if not capacity:
        raise ConfigError.of("a run with a cache", str(run.directory), "run it with --cache local://")
    return _mean_epoch(run, later), int(capacity)


def plain_loading(run: Run) -> tuple[float, EpochForecast | None] | None:
    """Returns what a mean epoch of plain loading reads from the origin in bytes, and that epoch, predicted from all
    epochs of the run: every sample is read and used once, without a cache, by as many workers. The epoch is None if
    the record has no times. Returns None altogether for a run without a cache, or one that read no origin: what a
    read costs is not known then."""
    reads, num_bytes = run.total("origin_reads"), run.total("origin_bytes")
    is_cached = run.plan.get("cache") != "none" or run.plan.get("disk") is not None
    if not run.num_samples or not reads or run.total("hits") is None or not is_cached:
        return None
    whole = (num_bytes or 0) / reads * run.num_samples
    epochs = _with_times(run.epochs)
    if not epochs or any(each.step_seconds is None or not each.busy_seconds for each in epochs):
        return whole, None
    measured, samples = _mean_epoch(run, epochs), float(run.num_samples)
    workers = measured.num_workers
    return whole, forecast(measured, num_samples=samples, origin_reads=samples, num_workers=workers, cached=False)


def _with_times(epochs: Sequence[EpochSummary]) -> list[EpochSummary]:
    return [each for each in epochs if each.epoch_seconds and each.counts.get("samples")]


def _mean_epoch(run: Run, epochs: Sequence[EpochSummary]) -> MeasuredEpoch:
    nodes = run.plan.get("nodes")
    return MeasuredEpoch(
        num_samples=_mean(epochs, "samples"),
        origin_reads=_mean(epochs, "origin_reads"),
        cache_reads=_mean(epochs, "cache_reads"),
        seconds=sum(each.epoch_seconds or 0.0 for each in epochs) / len(epochs),
        step_seconds=sum(each.step_seconds or 0.0 for each in epochs) / len(epochs),
        busy_seconds={s: sum(each.busy_seconds.get(s, 0.0) for each in epochs) / len(epochs) for s in STAGES},
        num_ranks=max(each.ranks for each in epochs),
        num_workers=workers_of(run.plan),
        num_cpus=(epochs[-1].num_cpus or 1) * (nodes if isinstance(nodes, int) else 1),
    )


def _mean(epochs: Sequence[EpochSummary], name: str) -> float:
    return sum(each.counts.get(name, 0) for each in epochs) / len(epochs)


def predict(
    steady: Trace, skip_epochs: int, policy: str, capacity_bytes: int, measured: MeasuredEpoch, num_workers: int
) -> EpochForecast:
    """Forecasts an epoch with this cache and these workers, from a trace without its first `skip_epochs`."""
    from shade.policy.simulator import simulate  # with numpy, which `shade tune --help` must not load

    result = simulate(steady, policy, capacity_bytes)
    reads, samples = result.origin_reads[skip_epochs:], result.accesses[skip_epochs:]
    return forecast(
        measured, num_samples=float(samples.mean()), origin_reads=float(reads.mean()), num_workers=num_workers
    )


def prolong(trace: Trace, plan: dict[str, Any]) -> tuple[Trace, int]:
    """Returns a trace that ends with steady epochs, and the number of epochs to leave out at its start.

    A short recording gets further epochs, drawn here by the run's own sampling mode.
    """
    from shade.sampling import MODES, Scores

    if trace.num_epochs >= ENOUGH_EPOCHS:
        return trace, trace.num_epochs // 2
    name = str(plan.get("sampling") or "unbiased")
    options = {key: plan[key] for key in _SETTINGS.get(name, ()) if plan.get(key) is not None}
    mode = MODES.get(name)(trace.num_samples, trace.global_batch, int(plan.get("seed") or 0), **options)
    known = [score_N for score_N in (*trace.scores, trace.score_after) if score_N is not None]
    scores = Scores(known[-1], known[-1] > 0) if known else None
    begin = max(trace.num_epochs, ENOUGH_EPOCHS)  # beyond the epochs that a mode makes full to warm up
    drawn = [mode.draw(epoch, scores).order_K for epoch in range(begin, begin + _DRAWN)]
    noted = (*(trace.scores or (None,) * trace.num_epochs), *([known[-1] if known else None] * _DRAWN))
    longer = dataclasses.replace(trace, orders=(*trace.orders, *drawn), scores=noted if known else ())
    return longer, trace.num_epochs + 1


def policy_of(plan: dict[str, Any]) -> str:
    """Returns the cache policy of a run."""
    from shade.sampling import MODES

    return str(plan.get("policy") or MODES.get(str(plan.get("sampling") or "unbiased")).default_policy)
