"""How soon does a model reach an error, where the training data lie on slow storage?

Question
    An epoch that uses half of the samples, over a cache that knows which, reads less. How much sooner does the model
    get there than with epochs over everything and a cache as others have it? And how much of that is importance, how
    much the cache's plan, and how much would a shorter training have saved alone?

Method
    The letters of `bench_importance`, with clean and with wrong labels, as JPEG files behind `scripts/slowfs` (20 ms an
    open, 25 MB/s for all readers together). Model, optimiser, learning rate and schedule are those of that benchmark,
    8 epochs, batches of 128; ShadeLoader with two workers, one thread trains; the cache holds 20 % of the data set.

    uniform, LRU             every sample in every epoch; the cache is a page cache's
    uniform, static          the cache keeps what it got first (MinIO): the best there is for such epochs
    uniform, as many steps   the same with fewer steps, as many as the next two take, its schedule shortened
    random                   `unbiased` with keep 0.5 and equal losses for all samples, planned cache
    unbiased                 the same with the losses as they are

    An epoch notes its wall time, without the validation after it, and the error on 7,618 letters of typefaces never
    seen. Time to a target is when a run reaches it and stays below. Each seed fixes initial weights and draws; all ways
    of a cell run, in an order that changes, before the next seed begins.

The rule, written before the first result
    The targets are the mean error with which `uniform, LRU` ends, and 0.5 and 1 points above it. A figure is the median
    of the seeds, "never" where more than half of them do not get there. How many times sooner is the ratio of medians,
    to `uniform, LRU` and to `uniform, static`. The project's aim is 2 and 1.3, at the target of 0.5 points above.

Command
    python benchmarks/bench_time_to_accuracy.py              50 minutes on two idle cores; shows what is left
    python benchmarks/bench_time_to_accuracy.py --minutes 20 the next 20 minutes of it
    python benchmarks/bench_time_to_accuracy.py --report     the table of what there is
    A training is a line in time_to_accuracy.jsonl, added as it ends; the same command goes on where it was stopped.

Figures: benchmarks/results/time_to_accuracy.md and .png, written by these commands.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import importance_tasks
import numpy as np
import torch
from bench_importance import BATCH, DATA, EPOCHS, RESULTS, TUNED_WHOLE, best_rate, load, schedule, steps_of
from bench_slow_storage import slow
from importance_ways import Setting
from measures import Log, commit, publish, standard_error
from PIL import Image
from tasks.glyphs import SIDE
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeLoader, ShadeSampler

CELLS = ("glyphs", "glyphs, wrong labels")
SEEDS = range(5)
KEEP, SHARE, WORKERS = 0.5, 0.2, 2
SLOW = ("20ms", "25MB/s")
ABOVE = (0.0, 0.5, 1.0)
"""Points of error above the end of the base."""
BASE, STATIC = "uniform, LRU", "uniform, static"


class Way(NamedTuple):
    """What a run does otherwise than the others."""

    sampler: dict[str, Any]
    policy: str | None
    has_losses: bool = True
    """Whether the sampler learns the losses; else that all are equal."""
    is_shorter: bool = False
    """Whether it takes only as many steps as an `unbiased` one."""


UNBIASED = {"mode": "unbiased", "keep": KEEP}
WAYS = {
    BASE: Way({"mode": "uniform"}, "lru"),
    STATIC: Way({"mode": "uniform"}, "static"),
    "uniform, as many steps": Way({"mode": "uniform"}, "static", is_shorter=True),
    "random": Way(UNBIASED, None, has_losses=False),
    "unbiased": Way(UNBIASED, None),
}


class Epoch(NamedTuple):
    """One epoch of a run."""

    seconds: float
    """Loading and training."""
    error: float
    """In %, after it."""
    reads: float
    """Of the origin, per sample of the data set."""


def write_pictures(cell: importance_tasks.Cell, folder: Path) -> None:
    """Writes the training pictures, a folder a class."""
    for row, (picture_1HW, label) in enumerate(zip(cell.train_x, cell.train_y.tolist(), strict=True)):
        path = folder / f"{label:02d}" / f"{row:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * picture_1HW[0]).round().byte().numpy()).save(path, quality=95)


def train(cell: importance_tasks.Cell, way: Way, seed: int, rate: float, pictures: Path) -> Iterator[Epoch]:
    """Trains one model; yields each epoch."""
    torch.manual_seed(seed)
    model = cell.make_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True)
    dataset = ShadeDataset(
        ImageFolder(str(pictures)),
        cache="local://",
        working_set_fraction=SHARE,
        policy=way.policy,
        transform=transforms.Compose([transforms.Resize((SIDE, SIDE)), transforms.ToTensor()]),
    )
    sampler = ShadeSampler(dataset, batch_size=BATCH, seed=seed, epochs=EPOCHS, **way.sampler)
    loader = ShadeLoader(dataset, BATCH, sampler=sampler, num_workers=WORKERS)
    shorter = steps_of(Setting(len(dataset), BATCH, seed, EPOCHS, KEEP))
    limit, steps = shorter if way.is_shorter else sampler.total_steps(EPOCHS), 0
    for epoch in range(EPOCHS):
        if steps == limit:
            break
        before, began = dataset.stats()["origin_reads"], time.perf_counter()
        sampler.set_epoch(epoch)
        for picture_B3HW, label_B, indices in loader:
            optimiser.param_groups[0]["lr"] = rate * schedule(steps / limit)
            losses_B, _ = importance_tasks.sample_losses(model(picture_B3HW[:, :1]), label_B)
            optimiser.zero_grad()
            (losses_B * sampler.weights(indices)).mean().backward()
            optimiser.step()
            sampler.report(indices, losses_B if way.has_losses else torch.ones_like(losses_B))
            steps += 1
            if steps == limit:
                break
        seconds = time.perf_counter() - began
        reads = (dataset.stats()["origin_reads"] - before) / len(dataset)
        yield Epoch(seconds, cell.error(model), reads)
    del loader
    sampler.close()
    dataset.close()


def run(log: Log, minutes: float | None) -> None:
    """Trains what is missing, and adds a row after each."""
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    tuned = load(RESULTS / "importance.jsonl")
    cells = {name: importance_tasks.load(name, DATA) for name in CELLS}
    done = {(row["cell"], row["way"], row["seed"]) for row in log.rows}
    wanted = [
        (cell, way, seed)
        for cell in CELLS
        for seed in SEEDS
        for way in random.Random(f"{seed} {cell}").sample(list(WAYS), len(WAYS))
        if (cell, way, seed) not in done
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in {cell for cell, _, _ in wanted}:
            write_pictures(cells[name], Path(folder) / name)
        began = time.monotonic()
        with slow(Path(folder), *SLOW) as mount:
            for number, (name, way, seed) in enumerate(wanted, 1):
                rate = cells[name].rates[best_rate(tuned, name, *TUNED_WHOLE)]
                course = list(train(cells[name], WAYS[way], seed, rate, mount / name))
                log.add({"cell": name, "way": way, "seed": seed, "commit": commit(), "course": course})
                took, left = sum(each.seconds for each in course), len(wanted) - number
                minutes_left = left * (time.monotonic() - began) / number / 60
                print(
                    f"{name}, {way}, seed {seed}: {took:.0f} s, {course[-1].error:.2f} %; {minutes_left:.0f} min left",
                    file=sys.stderr,
                    flush=True,
                )
                if time.monotonic() > until:
                    return


Courses = dict[str, list[list[Epoch]]]
"""By way: the courses of the seeds."""


def courses_of(log: Log, cell: str) -> Courses:
    """Returns the courses of the seeds of a cell that all ways have."""
    rows = {(row["way"], row["seed"]): row for row in log.rows if row["cell"] == cell}
    whole = [seed for seed in SEEDS if all((way, seed) in rows for way in WAYS)]
    return {way: [[Epoch(*each) for each in rows[way, seed]["course"]] for seed in whole] for way in WAYS}


def seconds_to(course: list[Epoch], target: float) -> float:
    """Returns the wall time after which the error stays at most at the target; infinite if it never does."""
    reached, passed = math.inf, 0.0
    for epoch in course:
        passed += epoch.seconds
        reached = math.inf if epoch.error > target else min(reached, passed)
    return reached


def table(courses: Courses) -> list[str]:
    """Returns the table of a cell."""
    base = statistics.fmean(course[-1].error for course in courses[BASE])
    targets = [base + above for above in ABOVE]
    to = {
        way: [statistics.median(seconds_to(course, target) for course in runs) for target in targets]
        for way, runs in courses.items()
    }
    heads = " | ".join(f"seconds to {target:.2f} %" for target in targets)
    lines = [f"| way | {heads} | whole run, s | origin reads / N | error at the end, % |", "|---" * 7 + "|"]
    for way, runs in courses.items():
        reached = [
            "never" if math.isinf(mine) else f"{mine:.1f} ({first / mine:.2f}, {second / mine:.2f})"
            for mine, first, second in zip(to[way], to[BASE], to[STATIC], strict=True)
        ]
        seconds = statistics.median(sum(each.seconds for each in course) for course in runs)
        reads = statistics.fmean(sum(each.reads for each in course) for course in runs)
        ends = [course[-1].error for course in runs]
        end = f"{statistics.fmean(ends):.2f} ± {standard_error(ends):.2f}"
        lines.append(f"| {way} | {' | '.join(reached)} | {seconds:.1f} | {reads:.2f} | {end} |")
    return lines


def plot(found: dict[str, Courses], path: Path) -> None:
    """Draws the error against wall time: every seed thin, their medians thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(11, 4.5), layout="constrained", squeeze=False)
    colours = ("tab:orange", "tab:brown", "tab:grey", "tab:green", "tab:blue")
    for axis, (cell, courses) in zip(axes[0], found.items(), strict=True):
        for colour, (way, runs) in zip(colours, courses.items(), strict=True):
            times = [np.cumsum([each.seconds for each in course]) for course in runs]
            errors = [[each.error for each in course] for course in runs]
            for seconds, error in zip(times, errors, strict=True):
                axis.plot(seconds, error, color=colour, linewidth=0.5, alpha=0.5)
            axis.plot(np.median(times, axis=0), np.median(errors, axis=0), color=colour, linewidth=2, label=way)
        end = statistics.fmean(course[-1].error for course in courses[BASE])
        axis.set(title=cell, xlabel="seconds of loading and training", ylim=(end - 1, end + 12), xlim=(0, None))
    axes[0][0].set_ylabel("error on unknown typefaces, %")
    axes[0][0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="stop after so long; the next call goes on")
    parser.add_argument("--report", action="store_true", help="only write the table of what there is")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for time_to_accuracy.jsonl, .md and .png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    log = Log(options.out / "time_to_accuracy.jsonl")
    if not options.report:
        run(log, options.minutes)
    found = {cell: courses for cell in CELLS if (courses := courses_of(log, cell))[BASE]}
    commits = ", ".join(dict.fromkeys(row["commit"] for row in log.rows))
    lines = [
        "Medians of the seeds. In brackets: how many times sooner than `uniform, LRU`, and than `uniform, static`.",
        f"torch {torch.__version__}, one thread trains; commits {commits}.",
    ]
    for cell, courses in found.items():
        lines += ["", f"## {cell}, {len(courses[BASE])} seeds", "", *table(courses)]
    publish("time_to_accuracy", "Time to an error from slow storage, letters", lines, options.out)
    if found:
        plot(found, options.out / "time_to_accuracy.png")


if __name__ == "__main__":
    main()
