"""A link that changes: does the controller keep up with the best fixed density?

Question
    Two hosts, and a link between them that follows a trace. How soon is the held-out loss where plain DDP's is, with a
    density that the controller sets, and with each of a grid of fixed ones?

Method
    One run for each density of the grid, and one whose density the controller sets, interleaved, the trace beginning
    with the training (`gradient_testbed`, `train_gradient`). Figure: seconds until the held-out loss is, for good,
    where DDP's stands after half, and after three quarters, of its steps; the medians of the rounds.

Bar
    Within 10 % of the best density, chosen in hindsight, and ahead of every other.

Command
    python benchmarks/bench_gradient_varying.py --out benchmarks/results          (an hour; needs root)
    python benchmarks/bench_gradient_varying.py --quick                           (a minute: does it all work?)

    Every run is a line in OUT/gradient_varying.jsonl until the last is done: the same command goes on where it was
    stopped.

Figures: benchmarks/results/gradient_varying.md and gradient_varying.png. Those committed are of a ResNet-18 with
ImageNet's stem, most of whose parameters have no gradient at 32 × 32 pixels; it has the stem for small images now.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gradient_testbed import Rows, Testbed, pick, prepare, testbed
from measures import Kept, machine

TASKS = ("resnet18", "gpt", "vit")
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
TRACE = "20 300mbit\n20 40mbit\n20 100mbit\n20 15mbit\n"
TARGETS = {0.5: "½", 0.75: "¾"}
"""Shares of DDP's steps whose loss the others are to reach."""
BAR = 1.1


def course(bed: Testbed, given: argparse.Namespace, task: str, *flags: str) -> dict[str, Any]:
    """The whole schedule, with no limit on the link."""
    look = ["--eval-every", str(max(4, given.steps // 20)), "--eval-samples", str(given.eval_samples)]
    bed("rate", "unlimited")
    rows = bed.run(2, "--task", task, "--steps", str(given.steps), *look, *flags)
    return {"evals": [{name: row[name] for name in ("step", "loss")} for row in pick(rows, "eval")]}


def steered(bed: Testbed, given: argparse.Namespace, trace: Path, task: str, *flags: str) -> dict[str, Any]:
    """The whole schedule, while the link follows the trace."""
    look = ["--eval-every", str(max(1, given.steps // 40)), "--eval-samples", str(min(512, given.eval_samples))]
    plain = ["--task", task, "--method", "engine", "--steps", str(given.steps), *look, *given.flags]
    rows = bed.run(2, *plain, *flags, trace=trace)
    return {
        "evals": [{name: row[name] for name in ("step", "loss", "seconds")} for row in pick(rows, "eval")],
        "steps": [{name: row[name] for name in ("seconds", "density")} for row in pick(rows, "step")],
    }


def measure(given: argparse.Namespace, kept: Kept) -> dict[str, Any]:
    """The controller and each fixed density, round by round, over the same trace; DDP's course gives the target."""
    runs = []
    with testbed(2) as bed, tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        trace.write_text(given.trace.read_text() if given.trace else TRACE)
        targets = {}
        for task in given.tasks:
            key = f"target: {task}, {given.steps} steps, {given.eval_samples} samples"
            evals = kept(key, partial(course, bed, given, task, "--method", "ddp"))["evals"]
            targets[task] = {share: target_of(evals, share) for share in TARGETS}
            losses = ", ".join(f"{loss:.4f}" for loss in targets[task].values())
            print(f"targets: {task}: {losses}", file=sys.stderr, flush=True)
        compiling = argparse.Namespace(**vars(given) | {"steps": 4})  # which the first run of all would pay for
        steered(bed, compiling, trace, given.tasks[0], "--controller")
        ways = {f"density {density:g}": ["--density", f"{density:g}"] for density in given.densities}
        ways["controller"] = ["--controller"]
        places = [(task, way) for task in given.tasks for way in ways]
        for number in range(given.rounds):
            for task, way in random.Random(number).sample(places, len(places)):
                key = f"round {number}: {task}, {way}, {given.steps}, {trace.read_text()!r}, {given.flags}"
                found = kept(key, partial(steered, bed, given, trace, task, *ways[way]))
                runs.append({"task": task, "way": way} | found)
                seconds = found["steps"][-1]["seconds"]
                print(f"round {number}: {task}, {way}: {seconds:.1f} s", file=sys.stderr, flush=True)
        return {"about": about(given, kept), "trace": trace.read_text(), "targets": targets, "runs": runs}


def target_of(evals: Rows, share: float) -> float:
    """The held-out loss after a share of the steps."""
    return float(next(row["loss"] for row in evals if row["step"] >= share * evals[-1]["step"]))


def reached_after(evals: Rows, target: float) -> float:
    """Seconds until the held-out loss is at the target for good; infinite if never."""
    reached = float("inf")
    for row in evals:
        if row["loss"] > target:
            reached = float("inf")
        elif reached == float("inf"):
            reached = row["seconds"]
    return reached


def table(result: dict[str, Any]) -> str:
    """Markdown: a row for each way, the fastest to the last target first."""
    lines = []
    for task, targets in result["targets"].items():
        found = [_medians(result["runs"], task, target) for target in targets.values()]
        heads = [f"to loss {target:.4f} ({TARGETS[float(share)]})" for share, target in targets.items()]
        lines += [
            "",
            f"## {task}: seconds to the held-out loss that DDP has after some of its steps",
            "",
            "| way | " + "".join(f"{head} | best fixed / it | " for head in heads).rstrip(),
            "|---|" + "---|---|" * len(heads),
        ]
        for way in sorted(found[-1], key=found[-1].__getitem__):
            cells = []
            for seconds in found:
                fixed = sorted(each for name, each in seconds.items() if name != "controller")
                is_met = seconds[way] <= BAR * fixed[0] and all(seconds[way] < each for each in fixed[1:])
                met = "" if way != "controller" else " (bar met)" if is_met else " (**bar missed**)"
                cells.append(f"{seconds[way]:.1f}{met} | {fixed[0] / seconds[way]:.2f}")
            lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _medians(runs: Rows, task: str, target: float) -> dict[str, float]:
    """Seconds to the target, of each way."""
    seconds: dict[str, list[float]] = {}
    for run in runs:
        if run["task"] == task:
            seconds.setdefault(run["way"], []).append(reached_after(run["evals"], target))
    return {way: statistics.median(each) for way, each in seconds.items()}


def plot(result: dict[str, Any], path: Path) -> None:
    """Held-out loss and density against wall time, a row for each task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(result["targets"])
    ways = sorted({run["way"] for run in result["runs"]})
    figure, axes = pyplot.subplots(len(tasks), 2, figsize=(12, 4 * len(tasks)), squeeze=False, layout="constrained")
    for row, task in zip(axes, tasks, strict=True):
        for number, way in enumerate(ways):
            run = next((run for run in result["runs"] if (run["task"], run["way"]) == (task, way)), None)
            if run is None:
                continue
            style = {"linewidth": 1.0, "color": f"C{number}"}
            if way == "controller":
                style = {"linewidth": 2.5, "color": "black"}
            evals, steps = run["evals"], run["steps"]
            row[0].plot([e["seconds"] for e in evals], [e["loss"] for e in evals], label=way, **style)
            row[1].plot([s["seconds"] for s in steps], [s["density"] for s in steps], **style)
        row[0].set(title=task, xlabel="seconds", ylabel="held-out loss", yscale="log")
        row[1].set(title=task, xlabel="seconds", ylabel="density", yscale="log")
    axes[0][0].legend()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def about(given: argparse.Namespace, kept: Kept) -> str:
    """Commits, machine and versions."""
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return (
        f"commit {kept.commits}, {given.rounds} rounds, schedules of {given.steps} steps, torch {torch.__version__}, "
        f"{machine()}, TCP with {control}, ours with {' '.join(given.flags)}"
    )


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of a whole schedule")
    parser.add_argument("--eval-samples", type=int, default=1024, help="held out, of each look")
    parser.add_argument("--compressor", default="threshold-v")
    parser.add_argument("--quick", action="store_true", help="one network, few steps: shows that it works, no figures")
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES, help="the grid")
    parser.add_argument("--trace", type=Path, help="lines `seconds rate`; default: one of four rates")
    parser.add_argument("--out", type=Path, help="folder for the .json, .md and .png")
    return parser


def main() -> None:
    """Measures, prints, writes."""
    given = build_parser().parse_args()
    prepare()
    given.flags = ["--compressor", given.compressor, "--density", "0.03", "--correction"]
    if given.quick:
        given.tasks, given.rounds, given.densities, given.steps, given.eval_samples = ["gpt"], 1, [0.01], 8, 128
    kept = Kept(given.out / "gradient_varying.jsonl" if given.out else None)
    result = measure(given, kept)
    text = f"# A varying link\n\n{result['about']}\n{table(result)}\n"
    print(text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "gradient_varying.json").write_text(json.dumps(result) + "\n")
        (given.out / "gradient_varying.md").write_text(text)
        plot(result, given.out / "gradient_varying.png")
        kept.done()


if __name__ == "__main__":
    main()
