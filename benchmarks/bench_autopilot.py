"""Does strategy="auto" choose well, and does it keep to its budget?

Question
    With an overhead budget and a failure rate, how much more of a run's time is lost with what the autopilot chooses
    than with the best strategy at the best interval? And does saving ever cost more than the budget?

Method
    Every candidate is measured as in bench_strategies (rows are shared with it: strategies.jsonl), so for each the cost
    of a snapshot, its landing and its recovery are known. The *exhaustive best* is the least loss over all candidates
    and a grid of intervals a twentieth apart, within the budget. Then the autopilot trains the same model in a process
    of its own, knowing nothing, beside a training without saves of as many steps. What it has settled on, strategy and
    interval, is judged by the same measured costs.

    lost        share of the time that does not end up as training, saves and failures together, by the exact formula
                (shade.checkpoint.autopilot.interval); the mean time between failures is --mtbf.
    ratio       lost with the autopilot's choice, over lost with the exhaustive best. The bar: 1.10 on 5 of 6 models.
    overhead    the autopilot's whole run, trials included, over the training without saves, less 1. The bar: --budget
                and half a point.

Command
    python benchmarks/bench_autopilot.py --size base --rounds 3 --out benchmarks/results
        hours; goes on where it was interrupted
    python benchmarks/bench_autopilot.py --size tiny --model gpt2
        for a look
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_strategies
import strategy_models
from measures import commit, in_child
from strategy_methods import METHODS
from strategy_report import Report
from strategy_run import Training

from shade import Checkpointer
from shade.checkpoint.autopilot.choose import judge
from shade.checkpoint.autopilot.pilot import candidates
from shade.checkpoint.autopilot.predict import Prediction

FLOWN = "autopilot.jsonl"
STEP_OF_GRID = 1.05


# ── one flight, in a process of its own ─────────────────────────────────────────────────────────────────────────────


def fly(kind: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains with the autopilot, or without any save."""
    idle = METHODS["none"]
    training = Training(idle, given.model, given.size, given.data)
    nothing = idle(training.model, training.optimizer, folder)
    with contextlib.ExitStack() as stack:
        checkpointer = None
        if kind == "auto":
            every = f"{100 * given.budget:g}% mtbf {given.mtbf:g}s"
            checkpointer = stack.enter_context(Checkpointer(persist_to=str(folder), strategy="auto", every=every))
            checkpointer.attach(model=training.model, optimizer=training.optimizer)
        training.step(nothing)
        saved, flown, steps = [], [], []
        for number in range(given.steps):
            begun = time.perf_counter()
            training.step(nothing)
            if checkpointer is not None and checkpointer.step():
                saved.append(number)
                flown.append(checkpointer._strategy.chosen)
            steps.append(time.perf_counter() - begun)
        report = "" if checkpointer is None else checkpointer._strategy.report
        chosen = "" if checkpointer is None else checkpointer._strategy.chosen
    return {"steps": steps, "saved": saved, "flown": flown, "report": report, "chosen": chosen}


def flight(kind: str, given: argparse.Namespace, model: str, place: Path) -> dict[str, Any]:
    """The figures of one flight."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        return in_child(fly, kind, argparse.Namespace(**vars(given), model=model), Path(folder))


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(line: Any) -> Any:
    """What the table knows of a method, as a prediction is written."""
    stall = min(line.stall_p50, max(line.cost, 0.0))
    return Prediction(
        stall_seconds=stall,
        drag_seconds=max(0.0, line.cost - stall),
        kept_seconds=line.memory or line.durable,
        committed_seconds=None,
        durable_seconds=line.durable,
        recover_own_seconds=line.recovery,
        recover_cluster_seconds=None,
        recover_storage_seconds=line.recovery,
        stored_bytes=0,
    )


def exhaustive(lines: list[Any], step: float, given: argparse.Namespace) -> Any:
    """The best of all candidates at all intervals within the budget."""
    found = []
    for line in lines:
        prediction, every = measured(line), 1.0
        while every < 1e6:
            steps = max(1, round(every))
            choice = judge(line.method, prediction, steps, step, given.mtbf)
            if choice.overhead <= given.budget and steps * step + prediction.cost_seconds >= prediction.landed_seconds:
                found.append(choice)
            every = max(every * STEP_OF_GRID, every + 1)
    return max(found, key=lambda choice: choice.goodput)


def verdict(
    model: str, lines: list[Any], quiet: list[dict[str, Any]], flights: list[dict[str, Any]], given: Any
) -> Any:
    """One model's row."""
    step = statistics.median(each for run in quiet for each in run["steps"])
    by_name = {line.method: line for line in lines}
    best = exhaustive(lines, step, given)
    rows = []
    for run, beside in zip(flights, quiet, strict=True):
        intervals = [later - earlier for earlier, later in zip(run["saved"], run["saved"][1:], strict=False)]
        every = round(statistics.median(intervals[-5:]))
        chosen = judge(run["chosen"], measured(by_name[run["chosen"]]), every, step, given.mtbf)
        rows.append(
            {
                "chosen": run["chosen"],
                "every": every,
                "ratio": (1 - chosen.goodput) / (1 - best.goodput),
                "overhead": sum(run["steps"]) / sum(beside["steps"]) - 1,
                "num_saves": len(run["saved"]),
            }
        )
    return {"model": model, "step": step, "best": best.strategy, "best_every": best.every_steps, "runs": rows}


def table(found: list[Any], given: argparse.Namespace) -> str:
    """Markdown."""
    lines = [
        f"budget {100 * given.budget:g} %, a failure in {given.mtbf:g} s, {given.steps} steps a flight",
        "",
        "| model | step | exhaustive best | autopilot | lost / best's | overhead | saves |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        runs = each["runs"]
        names = ", ".join(sorted({f"{run['chosen']} every {run['every']}" for run in runs}))
        lines.append(
            f"| {each['model']} | {each['step']:.3f} s | {each['best']} every {each['best_every']} | {names} | "
            f"{statistics.median(run['ratio'] for run in runs):.3f} | "
            f"{100 * statistics.median(run['overhead'] for run in runs):+.2f} % | "
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
    parser.add_argument("--rounds", type=int, default=3, metavar="NUM")
    parser.add_argument("--steps", type=int, default=600, metavar="NUM", help="of a flight (600)")
    parser.add_argument("--budget", type=float, default=0.05, metavar="SHARE", help="that saving may add (0.05)")
    parser.add_argument("--mtbf", type=float, default=1800.0, metavar="SECONDS", help="between failures (1800)")
    parser.add_argument("--every", type=int, default=5, metavar="K", help="of the candidates' runs (5)")
    parser.add_argument("--saves", type=int, default=4, metavar="NUM", help="of the candidates' runs (4)")
    parser.add_argument("--data", type=Path, help="real text or images; made up otherwise")
    parser.add_argument("--out", type=Path, help="folder for rows and results")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    return parser.parse_args()


def main() -> None:
    """Command line."""
    given = parse()
    given.models, given.store = given.models or list(strategy_models.MODELS), False
    for model in given.models:
        strategy_models.build(model, given.size, on_meta=True)  # imports what it needs, for all runs at once
    names = ["none", *candidates()]
    log = bench_strategies.Runs(None if given.out is None else given.out / bench_strategies.ROWS)
    flights = bench_strategies.Runs(None if given.out is None else given.out / FLOWN)
    common = {"size": given.size, "steps": given.steps, "budget": given.budget, "mtbf": given.mtbf}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        bench_strategies.run_all(given, names, log, Path(folder))
        for number in range(given.rounds):
            for model in given.models:
                for kind in ("none", "auto"):
                    key = {"round": number, "model": model, "method": kind, **common}
                    if not flights.has(key):
                        flights.add(key | {"commit": commit()} | flight(kind, given, model, Path(folder)))
                        print(f"round {number}: {model}: {kind} has flown", file=sys.stderr, flush=True)
    report = Report(log.of(bench_strategies.setting(given)), bench_strategies.setting(given))
    found = []
    for model in given.models:
        lines = [line for line in report.lines[model] if line.method in names and not line.failed]
        rows = {
            kind: [row for row in flights.of(common) if (row["model"], row["method"]) == (model, kind)]
            for kind in ("none", "auto")
        }
        found.append(verdict(model, lines, rows["none"], rows["auto"], given))
    text = f"{report.about()}\n\n{table(found, given)}"
    print(text)
    if given.out is not None:
        (given.out / "autopilot.md").write_text(text)
        (given.out / "autopilot.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
