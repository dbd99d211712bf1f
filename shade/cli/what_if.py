"""The second half of ``shade simulate``: an epoch of this run with more cache, or with more workers.

Reads come from the simulator, which walks the run's own orders through its own policy; seconds come from
`shade.policy.forecast`, which scales what the run measured. A run that was stopped after an epoch or two has not shown
yet what its later epochs draw: they are drawn here, by the run's own sampling mode from the scores it ended with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from shade.cli.tables import table
from shade.errors import ConfigError, DataError
from shade.policy.forecast import STAGES, EpochForecast, MeasuredEpoch, forecast
from shade.policy.simulator import simulate
from shade.policy.trace import Trace
from shade.report.rows import EpochSummary, Run, load_run
from shade.report.text import human_bytes
from shade.sampling import MODES, Scores

ENOUGH_EPOCHS: Final = 4
"""Recorded epochs from which on nothing is drawn here: two that warm up, and two that do not."""
_DRAWN: Final = 6
"""Epochs drawn; the first of them is left out, for it still meets what the recorded ones left in the cache."""
_SETTINGS: Final = {"unbiased": ("keep",), "pads": ("replication_factor",)}


def lines(directory: Path, trace: Trace, add_cache: int | None, add_workers: int | None) -> Iterator[str]:
    """Yields what more cache, or more workers, would change.

    Args:
        directory: The run directory.
        trace: Of the run.
        add_cache: Bytes more of cache, or None for a choice of sizes.
        add_workers: Workers more of a rank, or None.

    Yields:
        Lines of text.

    Raises:
        DataError: The run has no finished epoch.
        ConfigError: It has no cache to enlarge, or its settings are not known.
    """
    run = load_run(directory)
    measured, capacity = measure(run)
    yield f"Measured: {_cell(measured.num_samples, measured.origin_reads, measured.seconds)}"
    steady, skip = prolong(trace, run.plan)
    policy = policy_of(run.plan)
    now = workers_of(run.plan)
    cases: list[tuple[str, int, int]] = [("as it is", capacity, now)]
    if add_cache is None and add_workers is None:
        whole = trace.data_set_bytes
        cases += [(f"twice the cache ({human_bytes(2 * capacity)})", 2 * capacity, now)] if 2 * capacity < whole else []
        cases += [
            (f"all of it cached ({human_bytes(whole)})", whole, now),
            (f"{max(2, 2 * now)} workers", capacity, max(2, 2 * now)),
        ]
    else:
        more, hands = capacity + (add_cache or 0), now + (add_workers or 0)
        cases += [(f"{human_bytes(add_cache)} more cache ({human_bytes(more)})", more, now)] if add_cache else []
        cases += [(f"{add_workers} more workers ({hands})", capacity, hands)] if add_workers else []
        cases += [("both", more, hands)] if add_cache and add_workers else []
    rows = [("a later epoch", "hits", "reads", "seconds", "samples/s", "what it waits for")]
    first: EpochForecast | None = None
    for name, num_bytes, num_workers in cases:
        after = predict(steady, skip, policy, num_bytes, measured, num_workers)
        change = "" if first is None else f"  ({_change(after.seconds, first.seconds)})"
        first = first or after
        hits = f"{1 - after.origin_reads / after.num_samples:.1%}"
        speed = (f"{after.origin_reads:,.0f}", f"{after.seconds:,.2f}", f"{after.samples_per_second:,.0f}")
        rows.append((name, hits, *speed, f"{after.bottleneck}{change}"))
    yield ""
    yield from table(rows, "<>>>><").splitlines()


def predict(
    steady: Trace, skip_epochs: int, policy: str, capacity_bytes: int, measured: MeasuredEpoch, num_workers: int
) -> EpochForecast:
    """One epoch with this cache and these workers.

    Args:
        steady: A trace with epochs that are like those to come.
        skip_epochs: How many at its start are not.
        policy: Name of the cache policy.
        capacity_bytes: Of the cache.
        measured: An epoch of the run.
        num_workers: Of a rank.

    Returns:
        The forecast.
    """
    result = simulate(steady, policy, capacity_bytes)
    reads, samples = result.origin_reads[skip_epochs:], result.accesses[skip_epochs:]
    return forecast(
        measured, num_samples=float(samples.mean()), origin_reads=float(reads.mean()), num_workers=num_workers
    )


def prolong(trace: Trace, plan: dict[str, Any]) -> tuple[Trace, int]:
    """A trace whose last epochs are like those to come.

    Args:
        trace: Recorded.
        plan: ``run.json``.

    Returns:
        The trace, longer by epochs drawn here where few were recorded, and how many to leave out at its start.
    """
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
    """The cache policy of a run."""
    return str(plan.get("policy") or MODES.get(str(plan.get("sampling") or "unbiased")).default_policy)


def workers_of(plan: dict[str, Any]) -> int:
    """Workers of each of its ranks."""
    return int(plan["workers"]) if isinstance(plan.get("workers"), int) else 2


def measure(run: Run) -> tuple[MeasuredEpoch, int]:
    """An epoch as the run had them: the mean of its later half, for the first ones fill the cache.

    Args:
        run: With an epoch.

    Returns:
        The epoch, and the cache's capacity in bytes.

    Raises:
        DataError: Its rows do not tell what their epochs took.
        ConfigError: It had no cache.
    """
    later = [each for each in run.epochs if each.epoch_seconds and each.counts.get("samples")]
    later = later[len(later) // 2 :]
    if not later or any(each.step_seconds is None or not each.busy_seconds for each in later):
        raise DataError.of("epochs with their times", str(run.directory), "record a run with this version")
    capacity = later[-1].capacity_bytes
    if not capacity:
        raise ConfigError.of("a run with a cache", str(run.directory), "run it with --cache local:// -wss 0.1")
    nodes = run.plan.get("nodes")
    return MeasuredEpoch(
        num_samples=_mean(later, "samples"),
        origin_reads=_mean(later, "origin_reads"),
        cache_reads=_mean(later, "cache_reads"),
        seconds=sum(each.epoch_seconds or 0.0 for each in later) / len(later),
        step_seconds=sum(each.step_seconds or 0.0 for each in later) / len(later),
        busy_seconds={s: sum(each.busy_seconds.get(s, 0.0) for each in later) / len(later) for s in STAGES},
        num_ranks=max(each.ranks for each in later),
        num_workers=workers_of(run.plan),
        num_cpus=(later[-1].num_cpus or 1) * (nodes if isinstance(nodes, int) else 1),
    ), int(capacity)


def _mean(epochs: list[EpochSummary], name: str) -> float:
    return float(np.mean([each.counts.get(name, 0) for each in epochs]))


def _cell(samples: float, reads: float, seconds: float) -> str:
    return f"{samples:,.0f} samples an epoch in {seconds:,.2f} s, {samples / seconds:,.0f}/s; {reads:,.0f} origin reads"


def _change(after: float, before: float) -> str:
    return f"{after / before - 1:+.0%} time"
