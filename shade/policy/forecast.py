"""Forecasts an epoch with another cache or other workers by scaling one measured epoch; its slowest part decides.

An epoch is loading and stepping, side by side. Loading is the sum of its stages (origin, cache, decode, transform),
shared by all workers of all ranks. A stage costs what it did per read, hit or sample, times how many there would be.
Decoding and transforming are arithmetic, and the CPUs bound how much of that fits into a second::

    load  = (origin·reads' + cache·hits' + (decode + transform)·samples') / workers'      at least  cpu seconds / CPUs
    epoch = max(load, step·samples')   with workers;   load + step·samples'   without

What the model does not explain of the measurement (workers that start, validation, the last batch) is added as it was,
or scales the result if the model is slower than the truth: with nothing changed, the forecast is the measurement.

It assumes that the storage serves more workers as fast as it served these (`bottleneck` says where that matters), and
that a smaller share of misses costs a smaller share of the time, which holds while a batch has more misses than one
round of parallel reads.

References:
    Seneca, FAST 2026, for a closed-form throughput that is the minimum over the stages; Mohan et al.,
    "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, for predicting from measured rates (DS-Analyzer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shade.errors import ConfigError

STAGES: Final = ("origin", "cache", "decode", "transform")
_ON_CPU: Final = ("decode", "transform")


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
        """Says in words what the epoch waits for, and so what would help."""
        if not self.num_workers and min(self.load_seconds, self.step_seconds) > 0.05 * self.seconds:
            return "loading and stepping take turns: a worker would do one beside the other"
        if self.step_seconds >= self.load_seconds:
            return "the step: loading keeps up, and neither more cache nor more workers would help"
        stage = max(self.shares, key=lambda name: self.shares[name])
        share = f"{self.shares[stage]:.0%} of the loading"
        if stage == "origin":
            return f"the origin, {share}: fewer reads help most; more workers if the storage has more to give"
        if stage == "cache":
            return f"the cache, {share}: a nearer or larger server; more workers hide it"
        if self.is_cpu_bound:
            return f"the CPUs, {stage} {share}: neither cache nor workers help, fewer pixels or more CPUs would"
        return f"{stage}, {share}: more workers"


def forecast(measured: MeasuredEpoch, *, num_samples: float, origin_reads: float, num_workers: int) -> EpochForecast:
    """Scales a measured epoch.

    Args:
        measured: The epoch.
        num_samples: How many samples the epoch would use.
        origin_reads: How many of them would be read from the origin; the others come from the cache.
        num_workers: Workers of a rank, ≥ 0.

    Returns:
        The forecast.

    Raises:
        ConfigError: A negative number of workers, or an epoch without a sample.
    """
    if num_workers < 0:
        raise ConfigError.of("workers ≥ 0", num_workers, "take fewer away")
    if measured.num_samples <= 0 or measured.seconds <= 0:
        raise ConfigError.of("an epoch with a sample", measured.num_samples, "let the run finish an epoch")
    was = _Model(measured, measured.num_samples, measured.origin_reads, measured.num_workers)
    would = _Model(measured, num_samples, origin_reads, num_workers)
    unexplained = measured.seconds - was.seconds
    seconds = would.seconds + unexplained if unexplained >= 0 else would.seconds * measured.seconds / was.seconds
    loading = (would.shares, would.load_seconds, would.step_seconds)
    return EpochForecast(num_samples, origin_reads, seconds, *loading, num_workers, would.is_cpu_bound)


class _Model:
    """An epoch in which every worker is busy until the loading is done, while steps are taken beside it."""

    def __init__(self, measured: MeasuredEpoch, num_samples: float, origin_reads: float, num_workers: int) -> None:
        scale = num_samples / measured.num_samples
        cache_reads = max(0.0, num_samples - origin_reads)
        factors = dict.fromkeys(STAGES, scale)
        factors["origin"] = origin_reads / measured.origin_reads if measured.origin_reads else 0.0
        if measured.cache_reads:  # else all that is known of the cache is what it cost to fill it
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
