"""Does strategy="auto" choose well, and does it keep to its budget?

Question
    With an overhead budget and a failure rate, how much more of a run's time is lost with what the autopilot chooses
    than with the best strategy at the best interval? And does saving ever cost more than the budget?

Method
    Every candidate is measured by bench_strategies (rows are shared with it: strategies.jsonl), so for each the cost of
    a snapshot and its landing are known. A restore is the same code for all of them, so its time is one figure a model:
    the median. The *exhaustive best* is the least loss over all candidates and a grid of intervals a twentieth apart,
    within the budget. Then the autopilot trains the same model in a process of its own, knowing nothing. Its strategy
    and its interval at the end are judged by the same measured costs; and so is, beside it, what it really flew in the
    second half, save by save, trials included.

    Failures are taken to come every minute: so a flight of minutes has as many saves, and as many trials, as one
    of hours has otherwise.

    lost        share of the time that does not end up as training, saves and failures together, by the exact formula
                (shade.checkpoint._pacing.schedule); the mean time between failures is --mtbf.
    ratio       lost with the autopilot's choice, over lost with the exhaustive best. The bar: 1.10 on 5 of 6 models.
    flown       the same of the saves of the second half, in the mean.
    overhead    the flight from its second save on, trials included, over as many of its quiet steps, less 1. A step is
                quiet if no save was under way in it; they lie between the others, so that the machine's drift hits both
                alike. The bar: --budget and half a point.
    once        seconds that the flight until then took longer than quiet steps: buffers are made, the probe runs.

Command
    python benchmarks/bench_autopilot.py --size base --rounds 1 --out benchmarks/results
        after bench_strategies, whose rows it takes; half an hour; goes on where it was interrupted
    python benchmarks/bench_autopilot.py --size tiny --model gpt2
        for a look
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_strategies
import strategy_models
from measures import commit, in_child, processors
from shade.cli._checkpoint.predict import Prediction
from strategy_methods import METHODS
from strategy_report import Report
from strategy_run import FIRST_STEPS, Training

from shade import Checkpointer
from shade.checkpoint._pacing.schedule import goodput
from shade.checkpoint._strategies.auto import candidates

FLOWN = "autopilot.jsonl"
STEP_OF_GRID = 1.05
MOST_OF_MTBF = 3.0
"""No interval is longer than so many times the time between failures."""


# ── one flight, in a process of its own ─────────────────────────────────────────────────────────────────────────────


def fly(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains with the autopilot."""
    training = Training(METHODS["none"], given.model, given.size, given.data)
    nothing = METHODS["none"](training.model, training.optimizer, folder)
    every = f"{100 * given.budget:g}% mtbf {given.mtbf:g}s"
    with Checkpointer(persist_to=str(folder), strategy="auto", every=every) as checkpointer:
        checkpointer.attach(model=training.model, optimizer=training.optimizer)
        for _ in range(FIRST_STEPS):
            training.step(nothing)
        saved, seconds, quiet, flown = [], [], [], []
        for number in range(given.steps):
            was_busy = checkpointer._saver.is_busy
            begun = time.perf_counter()
            training.step(nothing)
            is_saved = checkpointer.step()
            if is_saved:
                saved.append(number)
                flown.append(checkpointer._strategy.chosen)
            seconds.append(time.perf_counter() - begun)
            if not was_busy and not is_saved:
                quiet.append(number)
        report, chosen = checkpointer._strategy.report, checkpointer._strategy.chosen
    found = {"report": report, "chosen": chosen, "every": saved[-1] - saved[-2]}
    return found | {"seconds": seconds, "quiet": quiet, "saved": saved, "flown": flown}


def flight(given: argparse.Namespace, model: str, place: Path) -> dict[str, Any]:
    """The figures of one flight."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        return in_child(fly, argparse.Namespace(**vars(given), model=model), Path(folder))


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(line: Any, recovery: float) -> Any:
    """What the table knows of a method, as a prediction is written."""
    stall = min(line.stall_p50, max(line.cost, 0.0))
    return Prediction(
        stall_seconds=stall,
        drag_seconds=max(0.0, line.cost - stall),
        kept_seconds=line.memory or line.durable,
        committed_seconds=None,
        durable_seconds=line.durable,
        recover_own_seconds=recovery,
        recover_cluster_seconds=None,
        recover_storage_seconds=recovery,
        stored_bytes=0,
    )


def share_kept(prediction: Prediction, every_steps: int, step: float, mtbf: float) -> float:
    """Goodput of a strategy's saves at an interval."""
    cost = prediction.cost_seconds
    lag, recovery = prediction.safe_seconds - cost, prediction.recover_seconds
    return goodput(every_steps * step, cost, mtbf, lag_seconds=lag, recover_seconds=recovery)


def exhaustive(known: dict[str, Prediction], step: float, given: argparse.Namespace) -> Any:
    """The name, the interval and the goodput of the best of all candidates at all intervals within the budget."""
    found = []
    for name, prediction in known.items():
        every = 1.0
        while every * step < MOST_OF_MTBF * given.mtbf:
            steps = max(1, round(every))
            cost, work = prediction.cost_seconds, steps * step
            if cost <= given.budget * work and work + cost >= prediction.safe_seconds:
                found.append((name, steps, share_kept(prediction, steps, step, given.mtbf)))
            every = max(every * STEP_OF_GRID, every + 1)
    return max(found, key=lambda each: each[-1])


def verdict(model: str, lines: list[Any], flights: list[dict[str, Any]], given: Any) -> Any:
    """One model's row."""
    recovery = statistics.median(line.recovery for line in lines)
    known = {line.method: measured(line, recovery) for line in lines}
    step = statistics.median(run["seconds"][number] for run in flights for number in run["quiet"])
    best, best_every, most_kept = exhaustive(known, step, given)

    def ratio(name: str, every: int) -> float:
        """Lost with a strategy at an interval, over lost with the best."""
        return float((1 - share_kept(known[name], every, step, given.mtbf)) / (1 - most_kept))

    rows = []
    for run in flights:
        intervals = [later - earlier for earlier, later in itertools.pairwise(run["saved"])]
        flown = list(map(ratio, run["flown"], intervals))  # after the last save there is no interval
        quiet = statistics.mean(run["seconds"][number] for number in run["quiet"])
        begin = run["saved"][1]
        before, after = run["seconds"][:begin], run["seconds"][begin:]
        rows.append(
            {
                "chosen": run["chosen"],
                "every": run["every"],
                "ratio": ratio(run["chosen"], run["every"]),
                "flown": statistics.mean(flown[len(flown) // 2 :]),
                "overhead": sum(after) / (quiet * len(after)) - 1,
                "once": sum(before) - quiet * len(before),
                "num_saves": len(run["saved"]),
            }
        )
    return {"model": model, "step": step, "best": best, "best_every": best_every, "runs": rows}


def table(found: list[Any], given: argparse.Namespace) -> str:
    """Markdown."""
    lines = [
        f"budget {100 * given.budget:g} %, a failure in {given.mtbf:g} s, {given.steps} steps a flight",
        "",
        "| model | step | exhaustive best | autopilot | lost / best's | as flown | overhead | once | saves |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        runs = each["runs"]
        names = ", ".join(sorted({f"{run['chosen']} every {run['every']}" for run in runs}))
        lines.append(
            f"| {each['model']} | {each['step']:.3f} s | {each['best']} every {each['best_every']} | {names} | "
            f"{statistics.median(run['ratio'] for run in runs):.3f} | "
            f"{statistics.median(run['flown'] for run in runs):.3f} | "
            f"{100 * statistics.median(run['overhead'] for run in runs):+.2f} % | "
            f"{statistics.median(run['once'] for run in runs):.1f} s | "
            f"{statistics.median(run['num_saves'] for run in runs):.0f} |"
        )
    near = sum(statistics.median(run["ratio"] for run in each["runs"]) <= 1.10 for each in found)
    most = max(statistics.median(run["overhead"] for run in each["runs"]) for each in found)
    lines += ["", f"within 10 % of the best on {near} of {len(found)}; largest overhead {100 * most:.2f} %"]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Does the autopilot choose well; see the top of the file.")
    parser.add_argument("--model", action="append", dest="models", help="may be repeated (all six)")
    parser.add_argument("--size", default="base", help="tiny, base or large (base)")
    parser.add_argument("--rounds", type=int, default=1, metavar="NUM", help="of flights (1)")
    parser.add_argument("--steps", type=int, default=300, metavar="NUM", help="of a flight (300)")
    parser.add_argument("--budget", type=float, default=0.05, metavar="SHARE", help="that saving may add (0.05)")
    parser.add_argument("--mtbf", type=float, default=60.0, metavar="SECONDS", help="between failures (60)")
    parser.add_argument("--every", type=int, default=2, metavar="K", help="of the candidates' turns (2)")
    parser.add_argument("--saves", type=int, default=3, metavar="NUM", help="of the candidates' turns (3)")
    parser.add_argument("--data", type=Path, help="real text or images; made up otherwise")
    parser.add_argument("--out", type=Path, help="folder for rows and results")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    return parser.parse_args()


def main() -> None:
    """Command line."""
    given = parse()
    given.models, given.store, given.candidates = given.models or list(strategy_models.MODELS), False, False
    for model in given.models:
        strategy_models.build(model, given.size, on_meta=True)  # imports what it needs, for all runs at once
    names = ["none", *candidates()]
    log = bench_strategies.Runs(None if given.out is None else given.out / bench_strategies.ROWS)
    flights = bench_strategies.Runs(None if given.out is None else given.out / FLOWN)
    common = {"size": given.size, "steps": given.steps, "budget": given.budget, "mtbf": given.mtbf}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        bench_strategies.run_all(given, names, log, Path(folder))
        for number, model in itertools.product(range(given.rounds), given.models):
            key = {"round": number, "model": model, "method": "auto", **common}
            if not flights.has(key):
                made = {"commit": commit(), "processors": processors()}
                flights.add(key | made | flight(given, model, Path(folder)))
                print(f"round {number}: {model}: flown", file=sys.stderr, flush=True)
    report = Report(log.of(bench_strategies.setting(given)), bench_strategies.setting(given))
    found = []
    for model in given.models:
        lines = [line for line in report.lines[model] if line.method in names and not line.failed]
        rows = [row for row in flights.of(common) if row["model"] == model]
        found.append(verdict(model, lines, rows, given))
    text = f"{report.about()}\n\n{table(found, given)}"
    print(text)
    if given.out is not None:
        (given.out / "autopilot.md").write_text(text)
        (given.out / "autopilot.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
