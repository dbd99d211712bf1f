"""Forecasts an epoch of a recorded run with more cache or more workers, for ``shade simulate``.

Reads come from the simulator, which replays the run's own orders through its own policy. Seconds come from
`shade.report.forecast`, which scales one measured epoch; its slowest part decides. A run that was stopped after an
epoch or two has not yet shown what its later epochs draw: its own sampling mode draws them here, from the scores it
ended with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from shade.cli.tables import table
from shade.policy.simulator import simulate
from shade.policy.trace import Trace
from shade.report.forecast import EpochForecast, MeasuredEpoch, forecast, measure, workers_of
from shade.report.rows import load_run
from shade.report.style import human_bytes, percent
from shade.sampling import MODES, Scores

ENOUGH_EPOCHS: Final = 4
"""Recorded epochs that suffice without drawn ones: two that warm up, and two that do not."""
_DRAWN: Final = 6
"""Epochs drawn; the first does not count, because it meets the recorded epochs' cache."""
_SETTINGS: Final = {"unbiased": ("keep",), "pads": ("replication_factor",)}


def what_if(directory: Path, trace: Trace, add_cache: int | None, add_workers: int | None) -> Iterator[str]:
    """Yields lines of text about more cache or more workers; with neither given, about a choice of sizes.

    Raises `DataError` if the run has no finished epoch, and `ConfigError` if it has no cache to enlarge.
    """
    run = load_run(directory)
    measured, capacity = measure(run)
    yield f"Measured: {_cell(measured.num_samples, measured.origin_reads, measured.seconds)}"
    steady, skip = prolong(trace, run.plan)
    policy = policy_of(run.plan)
    now = workers_of(run.plan)
    cases = _cases(capacity, now, trace.data_set_bytes, add_cache, add_workers)
    rows = [("a later epoch", "hits", "reads", "seconds", "samples/s", "time", "waits for")]
    first: EpochForecast | None = None
    advice: list[str] = []
    for name, num_bytes, num_workers in cases:
        after = predict(steady, skip, policy, num_bytes, measured, num_workers)
        change = "" if first is None else f"{after.seconds / first.seconds - 1:+.1%}"
        first = first or after
        hits = percent(1 - after.origin_reads / after.num_samples)
        speed = (f"{after.origin_reads:,.0f}", f"{after.seconds:,.2f}", f"{after.samples_per_second:,.0f}")
        rows.append((name, hits, *speed, change, after.bottleneck))
        advice += [after.advice] if after.advice not in advice else []
    yield ""
    yield from table(rows, "<>>>>><").splitlines()
    yield ""
    if add_cache and capacity + add_cache > trace.data_set_bytes:
        left = human_bytes(max(0, trace.data_set_bytes - capacity))
        yield f"{human_bytes(add_cache)} more is not needed: {left} more hold all {human_bytes(trace.data_set_bytes)}."
    yield from advice


def _cases(
    capacity: int, workers: int, whole: int, add_cache: int | None, add_workers: int | None
) -> list[tuple[str, int, int]]:
    """Returns name, cache and workers of each case; no cache is larger than the whole data set."""
    cases = [("as it is", capacity, workers)]
    if add_cache is None and add_workers is None:
        cases += [("twice the cache", 2 * capacity, workers)] if 2 * capacity < whole else []
        cases += [("all of it cached", whole, workers)] if capacity < whole else []
        hands = max(2, 2 * workers)
        return [*cases, (f"{hands} workers", capacity, hands)]
    more, hands = min(capacity + (add_cache or 0), max(whole, capacity)), workers + (add_workers or 0)
    size = "all of it cached" if more == whole else f"{human_bytes(more - capacity)} more cache"
    grown = bool(add_cache) and more > capacity
    cases += [(size, more, workers)] if grown else []
    cases += [(f"{add_workers} more workers", capacity, hands)] if add_workers else []
    cases += [("both", more, hands)] if grown and add_workers else []
    return cases


def predict(
    steady: Trace, skip_epochs: int, policy: str, capacity_bytes: int, measured: MeasuredEpoch, num_workers: int
) -> EpochForecast:
    """Forecasts an epoch with this cache and these workers, from a trace without its first `skip_epochs`."""
    result = simulate(steady, policy, capacity_bytes)
    reads, samples = result.origin_reads[skip_epochs:], result.accesses[skip_epochs:]
    return forecast(
        measured, num_samples=float(samples.mean()), origin_reads=float(reads.mean()), num_workers=num_workers
    )


def prolong(trace: Trace, plan: dict[str, Any]) -> tuple[Trace, int]:
    """Returns a trace that ends with steady epochs, and the number of epochs to leave out at its start.

    A short recording gets further epochs, drawn here by the run's own sampling mode.
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
    """Returns the cache policy of a run."""
    return str(plan.get("policy") or MODES.get(str(plan.get("sampling") or "unbiased")).default_policy)


def _cell(samples: float, reads: float, seconds: float) -> str:
    return f"{samples:,.0f} samples an epoch in {seconds:,.2f} s, {samples / seconds:,.0f}/s; {reads:,.0f} origin reads"
