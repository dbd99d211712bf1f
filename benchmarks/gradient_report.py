"""The tables and plots of `bench_gradient`, from what it measured: ratios, bars, courses against wall time.

Invariant: everything here can be made again from the .json alone.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

METHODS = {
    "none": "no exchange (floor)",
    "ddp": "DDP, float32",
    "ddp-bf16": "DDP, bf16 hook",
    "powersgd4": "DDP, PowerSGD rank 4",
    "diloco": "shade, DiLoCo, H = 20",
    "hook": "shade, sparse hook",
    "engine": "shade, engine",
}
"""Name for `train_gradient` → name in the tables."""
SPEED_UP_BARS = {"100mbit": 20.0, "500mbit": 8.0}
FLOOR_BAR, ACCURACY_BAR, VARYING_BAR = 1.1, 0.5, 1.1
TARGETS = {0.5: "½", 0.75: "¾"}
"""Shares of DDP's steps whose loss the others are to reach."""
COMPUTE = {"here": "computing on the core that exchanges", "beside": "computing beside it, as an accelerator does"}
PLACE = ("rate", "task", "compute")
Rows = list[dict[str, Any]]


def seconds_to(evals: Rows, target: float, step_seconds: float) -> float | None:
    """When the held-out loss has fallen to the target and stays there; None: never."""
    reached = None
    for row in evals:
        if row["loss"] > target:
            reached = None
        elif reached is None:
            reached = row["step"] * step_seconds
    return reached


def target_of(evals: Rows, share: float = 0.75) -> float:
    """The held-out loss after a share of the steps."""
    return float(next(row["loss"] for row in evals if row["step"] >= share * evals[-1]["step"]))


def looks_of(course: dict[str, Any]) -> Rows:
    """Looks at the same samples: all but the last, which is at more of them."""
    return list(course["evals"][:-1])


def rows_of(result: dict[str, Any]) -> Rows:
    """A row for each rate, task, place of the compute and method: medians of the rounds, and ratios to DDP."""
    found = []
    for rate, task, compute in itertools.product(*(_in_order(result["runs"], name) for name in PLACE)):
        here = [run for run in result["runs"] if tuple(run[name] for name in PLACE) == (rate, task, compute)]
        courses = result["courses"][task]

        def median(method: str, name: str, here: Rows = here) -> float:
            return statistics.median(run[name] for run in here if run["method"] == method)

        ddp, floor = median("ddp", "step_seconds"), median("none", "step_seconds")
        end = courses["ddp"]["evals"][-1]["accuracy"]
        targets = {share: target_of(courses["ddp"]["evals"], share) for share in TARGETS}
        base = {share: seconds_to(looks_of(courses["ddp"]), target, ddp) for share, target in targets.items()}
        for method, told in courses.items():
            seconds = median(method, "step_seconds")
            runs = [run for run in here if run["method"] == method]
            to_loss = {share: seconds_to(looks_of(told), target, seconds) for share, target in targets.items()}
            points = [100 * (told["evals"][-1]["accuracy"] - end)]
            points += seeded(result, task) if method == "engine" else []
            same = [
                abs(one - other)
                for run in runs
                if compute == "here"  # what is played has losses of no meaning
                for one, other in zip(run["losses"], told["steps"][: told["evals"][0]["step"]], strict=False)
            ]
            row = {
                "rate": rate, "task": task, "compute": compute, "method": method, "step_seconds": seconds,
                "spread": [run["step_seconds"] for run in runs], "speed_up": ddp / seconds,
                "over_floor": seconds / floor, "to_loss": to_loss,
                "sooner": {share: _ratio(base[share], taken) for share, taken in to_loss.items()},
                "points": statistics.mean(points) if method != "none" else None, "each_points": points,
                "accuracy": told["evals"][-1]["accuracy"], "loss_difference": max(same, default=0.0),
                "bytes": median(method, "step_bytes_sent") + median(method, "step_bytes_received"),
            }  # fmt: skip
            row["meets"] = verdict(row) if method == "engine" else None
            found.append(row)
    return found


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def seeded(result: dict[str, Any], task: str) -> list[float]:
    """Points that the engine is above DDP with each further seed."""
    right = {(row["seed"], row["method"]): row["accuracy"] for row in result["finals"] if row["task"] == task}
    return [100 * (right[seed, "engine"] - right[seed, "ddp"]) for seed in sorted({seed for seed, _ in right})]


def _in_order(runs: Rows, name: str) -> list[Any]:
    """What the runs have under a name, in an order that no round's luck decides."""
    known = list(COMPUTE)
    return sorted({run[name] for run in runs}, key=lambda each: (known.index(each) if each in known else 0, each))


def verdict(row: dict[str, Any]) -> bool:
    """Whether the bars are met."""
    is_fast = row["speed_up"] >= SPEED_UP_BARS.get(row["rate"], 0.0) or row["over_floor"] <= FLOOR_BAR
    return bool(is_fast and row["points"] >= -ACCURACY_BAR)


def table(result: dict[str, Any]) -> str:
    """Markdown: a part for each rate and task."""
    lines = []
    heads = "".join(f"to loss {name} | DDP / it | " for name in TARGETS.values())
    previous = None
    for row in rows_of(result):
        place = tuple(row[name] for name in PLACE)
        if place != previous:
            setup = result["courses"][row["task"]]["ddp"]["setup"]
            size = f"{setup['parameters'] / 1e6:.1f} M parameters, {setup['flops_per_step'] / 1e9:.1f} GFLOP a step"
            lines += [
                "", f"## {row['task']}, {row['rate']}, {COMPUTE[row['compute']]}", "", f"{size} and rank.", "",
                "| method | step | spread | DDP / it | it / floor | MB a step | " + heads + "right | points |",
                "|---|---|---|---|---|---|" + "---|---|" * len(TARGETS) + "---|---|",
            ]  # fmt: skip
        previous = place
        spread = f"{min(row['spread']):.3f}–{max(row['spread']):.3f}"
        to_loss = ""
        for share, taken in row["to_loss"].items():
            has = taken and row["method"] != "none"
            to_loss += f"{taken:.0f} s | {row['sooner'][share]:.1f} | " if has else "– | – | "
        points = f"{row['points']:+.2f}" if row["points"] is not None else ""
        if len(row["each_points"]) > 1:
            points += f" ({', '.join(f'{each:+.2f}' for each in row['each_points'])})"
        met = {None: "", True: " (bars met)", False: " (**bars missed**)"}[row["meets"]]
        lines.append(
            f"| {METHODS[row['method']]}{met} | {row['step_seconds']:.3f} s | {spread} | {row['speed_up']:.1f} | "
            f"{row['over_floor']:.2f} | {row['bytes'] / 1e6:.2f} | {to_loss}"
            f"{100 * row['accuracy']:.2f} % | {points} |"
        )
    worst = max(row["loss_difference"] for row in rows_of(result))
    lines += ["", f"Largest difference between a slow run's losses and the same steps of the long run: {worst:.2g}."]
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Held-out loss against wall time, a panel for each task and rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows_of(result) if row["compute"] == "here"]
    tasks, rates = list(result["courses"]), list(dict.fromkeys(row["rate"] for row in rows))
    figure, axes = pyplot.subplots(
        len(tasks), len(rates), figsize=(6 * len(rates), 4 * len(tasks)), squeeze=False, layout="constrained"
    )
    for row in rows:
        axis = axes[tasks.index(row["task"])][rates.index(row["rate"])]
        evals = looks_of(result["courses"][row["task"]][row["method"]])
        if row["method"] != "none":
            seconds = [each["step"] * row["step_seconds"] for each in evals]
            axis.plot(seconds, [each["loss"] for each in evals], label=METHODS[row["method"]])
            axis.set(title=f"{row['task']}, {row['rate']}", xlabel="seconds", ylabel="held-out loss")
            axis.set(xscale="log", yscale="log")
    axes[0][0].legend()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def reached_after(evals: Rows, target: float) -> float:
    """Seconds until the held-out loss is at the target for good; infinite if never."""
    reached = float("inf")
    for row in evals:
        if row["loss"] > target:
            reached = float("inf")
        elif reached == float("inf"):
            reached = row["seconds"]
    return reached


def table_varying(result: dict[str, Any]) -> str:
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
                is_met = seconds[way] <= VARYING_BAR * fixed[0] and all(seconds[way] < each for each in fixed[1:])
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


def plot_varying(result: dict[str, Any], path: Path) -> None:
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
