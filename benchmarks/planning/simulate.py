"""What failures would have cost a training, by strategy and interval: a replay of a trace of preemptions.

Command
    python benchmarks/planning/simulate.py --trace spot.csv --costs costs.json
        compares all strategies that restore bit for bit, each at its best interval
    python benchmarks/planning/simulate.py --trace spot.csv --costs costs.json --strategy overlap,copy --every 10,100
        compares two strategies at two intervals
    python benchmarks/planning/simulate.py --trace spot.csv --state 1.5GB --step 0.5s --persist-to /mnt/ckpt
        measures the costs on this machine first; --save-costs keeps them
    python benchmarks/planning/simulate.py --mtbf 2h --length 30d --make-trace spot.csv --costs costs.json
        writes a synthetic trace and replays it

The trace is a CSV file, a line an event:

  time_seconds,kind,down_seconds
  1830.5,machine,120
  4000,process,0
  86400,end,

kind is what failed: process (a trainer), machine (with its memory), cluster (all memory). down_seconds is the time
until as many machines were available again. Without kind every event is a machine, without down_seconds a spare is
available, without end the last event ends the trace.

The costs come from a file that --save-costs wrote, or are measured on this machine: copies and hashes in memory, writes
to --persist-to, transfers to --store. The replay is exact; nothing is drawn at random. kept + lost + saving +
recovering + down is the length of the trace. expected is the closed form for failures at random times. Strategies that
do not restore bit for bit are left out unless they are named.

exit code: 0; 2 the command could not be carried out
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from measure import Costs, codec_cost, memory_rates, storage_rates, store_rates
from predict import Prediction, interval_steps, predict
from replay import Habit, PreemptionTrace, plot, replay, replay_all, rows

from shade.checkpoint._strategies import STRATEGIES, StrategyConfig
from shade.cli.tables import size, table
from shade.errors import ConfigError, ShadeError
from shade.storage import open_volume
from shade.store import open_store
from shade.store.url import parse_bytes

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PASS_FRACTION: Final = 0.9
"""Part of a step that is forward and backward, if no run has measured it: an optimizer's step is short."""
_WEIGHTS: Final = 2**22
"""Numbers that a codec is measured on."""
_POINTS: Final = 24
"""Intervals per line of the plot, from a fifth of the best one to five times it."""


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([smhd]?)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"expected a time such as 0.5s, 30m, 2h or 7d, got {text!r}")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"expected a share such as 2%, got {text!r}")
    return float(match[1]) / 100


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    parser = argparse.ArgumentParser(
        prog="simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    failures = parser.add_argument_group("failures")
    failures.add_argument("--trace", type=Path, metavar="FILE", help="preemptions, as CSV")
    failures.add_argument(
        "--mtbf", type=_seconds, metavar="TIME", help="or a synthetic one: mean time between failures"
    )
    failures.add_argument(
        "--length", type=_seconds, default="30d", metavar="TIME", help="length of a synthetic trace (30d)"
    )
    failures.add_argument("--down", type=_seconds, default=0.0, metavar="TIME", help="down time after each failure (0)")
    failures.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the synthetic trace (0)")
    failures.add_argument("--make-trace", type=Path, metavar="FILE", help="write the synthetic trace")
    run = parser.add_argument_group("training and hardware")
    run.add_argument("--costs", type=Path, metavar="FILE", help="costs that --save-costs wrote")
    run.add_argument("--state", metavar="BYTES", help="size of the state, as 1.5GB, to measure the costs now")
    run.add_argument("--step", type=_seconds, metavar="TIME", help="time of a training step")
    run.add_argument("--persist-to", metavar="URL", help="durable storage: a path, s3://bucket/path, …")
    run.add_argument("--store", metavar="URL", help="a cluster's memory, as redis+cluster://host:7000")
    run.add_argument("--save-costs", type=Path, metavar="FILE", help="write the measured costs")
    asked = parser.add_argument_group("alternatives")
    asked.add_argument("--strategy", metavar="NAMES", help="separated by commas (all that restore bit for bit)")
    asked.add_argument("--codec", metavar="NAME", help="codec of the chunks (that of each strategy)")
    asked.add_argument("--every", metavar="STEPS", help="intervals, separated by commas (the best of each strategy)")
    asked.add_argument("--budget", type=_share, default=0.05, metavar="SHARE", help="time that saving may add (5%%)")
    asked.add_argument("--plot", type=Path, metavar="FILE.png", help="plot the goodput over the interval")
    return parser


def compare(given: argparse.Namespace) -> None:
    """Prints a table of strategies and intervals, the best first, and writes the files that were asked for."""
    trace = _trace(given)
    costs = _costs(given)
    predictions = _predictions(given.strategy, given.codec, costs)
    mtbf, step = trace.mtbf_seconds, costs.step_seconds
    asked = _numbers(given.every) if given.every else []
    best = {name: interval_steps(each, step, given.budget, mtbf) for name, each in predictions.items()}
    habits = [
        Habit(name, prediction, step, every)
        for name, prediction in predictions.items()
        for every in asked or [best[name]]
    ]
    outcomes = replay_all(trace, habits)
    sys.stdout.write(f"{_about(trace, costs)}\n\n")
    cells = rows(outcomes, mtbf)
    sys.stdout.write(table(cells, "<" + ">" * (len(cells[0]) - 1)))
    if given.plot is not None:
        curves = {}
        for name, prediction in predictions.items():
            middle = min(best[name], max(1, math.ceil(trace.length_seconds / step)))
            every_steps = sorted({max(1, round(middle * 5 ** (2 * at / (_POINTS - 1) - 1))) for at in range(_POINTS)})
            curves[name] = [replay(trace, Habit(name, prediction, step, every)) for every in every_steps]
        plot(curves, given.plot)


def _trace(given: argparse.Namespace) -> PreemptionTrace:
    if (given.trace is None) == (given.mtbf is None):
        got = "both" if given.trace is not None else "neither"
        raise ConfigError.of("a --trace, or --mtbf for a synthetic one", got, "name one of them")
    if given.trace is not None:
        return PreemptionTrace.load(given.trace)
    made = PreemptionTrace.synthetic(given.mtbf, given.length, given.seed, down_seconds=given.down)
    if given.make_trace is not None:
        _write(given.make_trace, made.to_csv())
    return made


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError.of("a file that can be written", f"{path}: {error}", "name another") from error


def _costs(given: argparse.Namespace) -> Costs:
    if given.costs is not None:
        return Costs.load(given.costs)
    if given.state is None or given.step is None:
        cure = "name a file that --save-costs wrote, or give the size of the state and the time of a step"
        raise ConfigError.of("--costs, or --state and --step", None, cure)
    costs = _measured(given)
    if given.save_costs is not None:
        costs.save(given.save_costs)
    return costs


def _measured(given: argparse.Namespace) -> Costs:
    memory = memory_rates()
    send = fetch = write = None
    commit = 0.0
    if given.store is not None:
        with open_store(given.store) as store:
            send, fetch = store_rates(store)
    if given.persist_to is not None:
        with open_volume(given.persist_to) as volume:
            write, commit = storage_rates(volume)
    return Costs(
        state_bytes=parse_bytes(given.state),
        step_seconds=given.step,
        pass_seconds=_PASS_FRACTION * given.step,
        copy_rate=memory.copy,
        burst_rate=memory.burst,
        hash_rate=memory.hashing,
        send_rate=send,
        fetch_rate=fetch,
        write_rate=write,
        commit_seconds=commit,
    )


def _predictions(names: str | None, codec: str | None, costs: Costs) -> dict[str, Prediction]:
    """Predicts the named strategies, or all that restore bit for bit and whose codec has been measured."""
    if names is not None:
        found = {name.strip(): STRATEGIES.get(name.strip()).config for name in names.split(",")}
    else:
        found = _exact_strategies()
    chosen = {name: config.agreed(codec=codec) for name, config in found.items()}
    if codec is not None and codec not in ("none", *costs.codecs):
        costs = dataclasses.replace(costs, codecs={**costs.codecs, codec: codec_cost(codec, _weights())})
    known = {"none", *costs.codecs} if names is None else {config.codec for config in chosen.values()}
    return {name: predict(costs, config) for name, config in chosen.items() if config.codec in known}


def _exact_strategies() -> dict[str, StrategyConfig]:
    """Returns the configs, by name, of the strategies that restore bit for bit; a class with two names comes once."""
    found: dict[type[object], tuple[str, StrategyConfig]] = {}
    for name in STRATEGIES:
        strategy = STRATEGIES.get(name)
        if strategy.config.is_exact:
            found.setdefault(strategy, (name, strategy.config))
    return dict(found.values())


def _weights() -> memoryview:
    """Returns numbers distributed like the weights of a network, and as hard to compress."""
    return np.random.default_rng(0).normal(0, 0.02, _WEIGHTS).astype(np.float32).view(np.uint8).data


def _numbers(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ConfigError.of("numbers of steps ≥ 1, separated by commas", text, "write --every 10,100")
    return found


def _about(trace: PreemptionTrace, costs: Costs) -> str:
    kinds = {kind: sum(each.kind == kind for each in trace.failures) for kind in ("process", "machine", "cluster")}
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "none"
    rates = {
        "copy": costs.copy_rate, "hash": costs.hash_rate, "send": costs.send_rate, "write": costs.write_rate
    }  # fmt: skip
    return (
        f"{trace.length_seconds / 86400:.2f} days, {len(trace.failures)} failures ({counts}), one in "
        f"{trace.mtbf_seconds / 3600:.2f} h\n"
        f"state {size(costs.state_bytes)}, step {costs.step_seconds:.3f} s; "
        + ", ".join(f"{name} {size(rate)}/s" for name, rate in rates.items() if rate is not None)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    try:
        compare(build_parser().parse_args(argv))
    except ShadeError as error:
        sys.stderr.write(f"simulate: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
