"""Implements ``shade simulate``: miss-ratio curves of a recorded run, and what more cache or workers would give."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shade.cli.tables import table
from shade.errors import ConfigError
from shade.installation import install_hint
from shade.report.style import human_bytes, percent

if TYPE_CHECKING:
    from shade.policy.simulator import MissRatioCurves
    from shade.policy.trace import Trace
    from shade.report.forecast import EpochForecast


_EXAMPLES: Final = """\
examples:
  shade simulate runs/20250101-120000
  shade simulate runs/20250101-120000 --add-cache 20GiB --add-workers 4
  shade simulate runs/20250101-120000/trace.npz --capacity 5%,10%,8GiB --policy plan,lru,belady --plot curves.png

hits     share of samples served from the cache
reads/N  origin reads an epoch over the size of the data set: 1.000 is a run without a cache that uses every sample once
time     change of an epoch's seconds against the run as it is; waits for: the slowest part, its share of the loading

Every run records its trace. Scores, order and sizes are those of that run; only the cache is another. One epoch will
do: the next ones are drawn from the scores it ended with. Of a run directory the times are scaled, too: what an epoch
would take, and what it would wait for.
"""


def add(verbs: Any) -> None:
    """Adds ``simulate`` to the command."""
    parser = verbs.add_parser(
        "simulate",
        help="what another policy, more cache or more workers would have saved",
        description="Replays a recorded trace through cache policies, and scales what the run measured.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="a run directory, or a trace.npz")
    parser.add_argument(
        "--capacity", default="10%,20%,40%", help="of the data set or in bytes, as 20%%,8GiB (10%%,20%%,40%%)"
    )
    parser.add_argument("--policy", default="plan,shade,lru,fifo,static", help="names (plan,shade,lru,fifo,static)")
    parser.add_argument("--skip-epochs", type=int, default=1, metavar="N", help="warm-up left out of the figures (1)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves too")
    parser.add_argument("--add-cache", metavar="BYTES", help="what so much more cache would give, as 20GiB")
    parser.add_argument("--add-workers", type=int, metavar="N", help="what so many more workers a rank would give")
    parser.set_defaults(answer=_answer)


def _answer(given: argparse.Namespace) -> int:
    from shade.policy.simulator import miss_ratio_curves
    from shade.policy.trace import Trace
    from shade.store.url import parse_bytes
    from shade.train import TRACE_FILE

    where: Path = given.trace
    trace = Trace.load(where / TRACE_FILE if where.is_dir() else where)
    if trace.num_epochs == 0:
        raise ConfigError.of("a trace with an epoch in it", str(where), "let the run begin an epoch")
    fractions = sorted({_fraction(text.strip(), trace.data_set_bytes) for text in given.capacity.split(",")})
    names = [name.strip() for name in given.policy.split(",")]
    skip_epochs = min(given.skip_epochs, trace.num_epochs - 1) if given.skip_epochs == 1 else given.skip_epochs
    curves = miss_ratio_curves(trace, names, fractions, skip_epochs=skip_epochs)
    if given.plot is not None:
        try:
            plot_curves({where.name: curves}, given.plot)
        except (OSError, ValueError) as error:
            raise ConfigError.of(f"to write --plot {given.plot}", str(error), "name a .png") from None
    skipped = f", the first {skip_epochs} left out" if skip_epochs else ""
    curves_table = format_table(curves, markdown=not sys.stdout.isatty())
    sys.stdout.write(
        f"{trace.num_epochs} epochs{skipped}; {trace.num_samples:,} samples, {human_bytes(trace.data_set_bytes)} in "
        f"all; {trace.global_batch} a step\nf: capacity / data set\n\n{curves_table}\n"
    )
    more = parse_bytes(given.add_cache) if given.add_cache is not None else None
    if where.is_dir() and (where / "metrics.jsonl").exists():
        sys.stdout.write("\n" + "".join(f"{line}\n" for line in what_if(where, trace, more, given.add_workers)))
    elif more is not None or given.add_workers is not None:
        expected = "a run directory, which has times, for --add-cache and --add-workers"
        raise ConfigError.of(expected, str(where), "name it")
    return 0


def what_if(directory: Path, trace: Trace, add_cache: int | None, add_workers: int | None) -> Iterator[str]:
    """Yields lines of text about more cache or more workers; with neither given, about a choice of sizes.

    Raises `DataError` if the run has no finished epoch, and `ConfigError` if it has no cache to enlarge.
    """
    from shade.report.forecast import measure, policy_of, predict, prolong, workers_of
    from shade.report.rows import load_run

    run = load_run(directory)
    measured, capacity = measure(run)
    samples, reads, seconds = measured.num_samples, measured.origin_reads, measured.seconds
    yield (
        f"Measured: {samples:,.0f} samples an epoch in {seconds:,.2f} s, {samples / seconds:,.0f}/s; "
        f"{reads:,.0f} origin reads"
    )
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


def format_table(curves: MissRatioCurves, *, markdown: bool = True) -> str:
    """Returns one line a policy: for each capacity the hit ratio, and origin reads per sample and epoch.

    The hit ratio shows how good the policy is; origin reads are the run's cost, and only they compare sampling modes.
    Without ``markdown`` the table fits the terminal.
    """
    skip = curves.skip_epochs
    rows = [["policy: hits, reads/N", *(f"f={fraction:g}" for fraction in curves.fractions)]]
    for name, results in curves.results.items():
        cells = (f"{percent(r.hit_ratio(skip))}, {r.origin_reads_per_sample(skip):.3f}" for r in results)
        rows.append([name, *cells])
    return table(rows, "<" * len(rows[0]), markdown=markdown).strip("\n")


def plot_curves(curves_by_title: dict[str, MissRatioCurves], path: str | Path) -> None:
    """Draws origin reads per sample over capacity, one panel a title, one line a policy; the suffix says the format.

    Raises `ConfigError` if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError.of(
            "matplotlib, to draw a plot", None, f"{install_hint('report')}, or use the table"
        ) from None
    figure = Figure(figsize=(4.6 * len(curves_by_title), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(curves_by_title), squeeze=False, sharey=True)[0]
    for panel, (title, curves) in zip(panels, curves_by_title.items(), strict=True):
        for rank, (name, results) in enumerate(curves.results.items()):
            reads = [result.origin_reads_per_sample(curves.skip_epochs) for result in results]
            width = 1 + 3 * (1 - rank / len(curves.results))  # equal curves stay visible
            panel.plot(
                curves.fractions, reads, marker="osv^D<>P"[rank % 8], markersize=2 + 1.5 * width, lw=width, label=name
            )
        panel.set(title=title, xlabel="capacity / data set")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("origin reads per sample and epoch")
    panels[0].set_ylim(bottom=0)
    panels[-1].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _fraction(text: str, data_set_bytes: int) -> float:
    from shade.store.url import parse_bytes

    if not text.endswith("%"):
        return parse_bytes(text) / data_set_bytes
    try:
        percentage = float(text[:-1])
    except ValueError:
        percentage = -1.0
    if not 0 <= percentage < float("inf"):
        raise ConfigError.of("capacities such as 20% or 8GiB, separated by commas", text, "write --capacity 10%,8GiB")
    return percentage / 100
