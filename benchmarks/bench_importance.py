"""Does the loss say which samples to use? Put so that the answer may be no.

Question
    An epoch may use a share of the samples, `keep`. Does it matter which? A *random* share with the same weights reads
    as much, and a shorter training on everything takes as many steps; a way to choose is worth something only if it
    beats both.

Method
    Five cells (`importance_tasks`): letters of typefaces never seen, with clean labels, with a long tail of 100 : 1,
    and with 10 % wrong labels; text, as a language model in bits a byte, and classified with a long tail. All are away
    from their ceiling, and their validation sets have more than 8,000 samples. The ways are those of `importance_ways`.
    8 epochs; warm-up over a tenth of the run, then a cosine to 0; batches of 128. Each seed fixes initial weights and
    every draw for all ways alike, so differences are paired. The error is that of the last epoch: no best-of.

The rule, written before the first result
    1. In each cell, `uniform` and *random* at keep 0.5 get the learning rate, of three, with the lowest mean error over
       the seeds 100 and 101, which are not used again. A way that knows no `keep` takes uniform's rate, any other takes
       random's: the bases are tuned, and no way is tuned to beat them.
    2. Then seeds 0 … 9. A way *wins* a cell at a `keep` if its error is below that of *random* at the same `keep`, at
       equal reads, by two standard errors of the paired difference.
    3. The default is the way with the lowest error at keep 0.5 relative to `uniform`, the mean over the five cells, if
       it wins a cell; ties within one standard error go to the way that is the default today.
    4. If no way wins a cell at all, the default is `uniform`, and `keep` is described as training less.
    5. `uniform, as many steps` is the second basis: a way that does not beat it in a cell is said there to save
       nothing that a shorter training would not.
    6. `gradient norm, from the loss` was added when seeds 0 to 3 at keep 0.5 were known, because `gradient norm` did
       well on them and needs the logits. It is judged by the same rule.

Command
    python benchmarks/bench_importance.py              about 5 hours on two cores; it shows the time left, and
                                                       a run that was stopped continues with the same command
    python benchmarks/bench_importance.py --minutes 30 the next half hour of it
    python benchmarks/bench_importance.py --report     the table of what there is

Figures: benchmarks/results/importance.jsonl, a line a training, and importance.md, written by these commands.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import importance_tasks
import torch
from importance_ways import KEPT, WHOLE_RUN, Setting
from measures import commit, processors, standard_error

from shade.sampling import MODES

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / ".cache"
RESULTS = Path(__file__).parent / "results"
EPOCHS, BATCH, WARM_UP = 8, 128, 0.1
KEEPS = (0.5, 0.7)
SEEDS = range(10)
TUNING_SEEDS = (100, 101)
BASE, RANDOM, SHORTER = "uniform", "random", "uniform, as many steps"
TUNED_WHOLE, TUNED_KEPT = (BASE, 1.0), (RANDOM, min(KEEPS))


class Training(NamedTuple):
    """One training, by name."""

    cell: str
    way: str
    keep: float
    """1 for ways that know none."""
    rate: int
    """Which of the cell's three learning rates."""
    seed: int


class Result(NamedTuple):
    """The outcome of one."""

    error: float
    steps: int
    cpu_seconds: float


Results = dict[Training, Result]


def wanted(results: Results) -> Iterator[Training]:
    """Yields the trainings that are missing, in the order in which they are run: all tuning, then a seed at a time; the
    larger `keep` comes last."""
    tuning = [
        Training(cell, *basis, rate, seed)
        for seed in TUNING_SEEDS
        for cell in importance_tasks.CELLS
        for basis in (TUNED_WHOLE, TUNED_KEPT)
        for rate in range(3)
    ]
    yield from (training for training in tuning if training not in results)
    if all(training in results for training in tuning):
        whole = [(way, 1.0, TUNED_WHOLE) for way in WHOLE_RUN]
        least, *more = [[(way, keep, TUNED_KEPT) for way in KEPT] for keep in KEEPS]
        for ways in (whole + least, *more):
            for seed, cell, (way, keep, basis) in itertools.product(SEEDS, importance_tasks.CELLS, ways):
                training = Training(cell, way, keep, best_rate(results, cell, *basis), seed)
                if training not in results:
                    yield training


def best_rate(results: Results, cell: str, way: str, keep: float) -> int:
    """Returns the rate that the tuning seeds choose for a basis."""

    def mean(rate: int) -> float:
        error = statistics.fmean(results[Training(cell, way, keep, rate, seed)].error for seed in TUNING_SEEDS)
        return math.inf if math.isnan(error) else error

    return min(range(3), key=mean)


def num_wanted() -> int:
    """Returns how many trainings the whole takes."""
    ways = len(WHOLE_RUN) + len(KEEPS) * len(KEPT)
    return len(importance_tasks.CELLS) * (2 * 3 * len(TUNING_SEEDS) + ways * len(SEEDS))


@cache
def _cell(name: str) -> importance_tasks.Cell:
    return importance_tasks.load(name, DATA)


def train(training: Training) -> Result:
    """Trains, on one core, and returns its outcome."""
    torch.set_num_threads(1)
    began = time.process_time()
    cell = _cell(training.cell)
    torch.manual_seed(training.seed)
    model = cell.make_model()
    momentum = {"momentum": 0.9, "nesterov": True} if cell.optimiser is torch.optim.SGD else {}
    optimiser = cell.optimiser(model.parameters(), lr=0.0, **momentum)
    at = Setting(len(cell.train_x), BATCH, training.seed, EPOCHS, training.keep)
    way = (WHOLE_RUN | KEPT)[training.way](at)
    steps, limit = 0, steps_of(at) if training.way == SHORTER else None
    for epoch in range(EPOCHS):
        order_K, weight_N = way.epoch(epoch)
        in_epoch = len(order_K) // BATCH
        for step in range(in_epoch):
            if steps == limit:
                break
            done = steps / limit if limit else (epoch + step / in_epoch) / EPOCHS
            optimiser.param_groups[0]["lr"] = cell.rates[training.rate] * schedule(done)
            rows = torch.from_numpy(order_K[step * BATCH : (step + 1) * BATCH])
            losses, norms = cell.losses(model, rows)
            loss = losses if weight_N is None else losses * torch.from_numpy(weight_N[rows.numpy()])
            optimiser.zero_grad()
            loss.mean().backward()
            optimiser.step()
            way.report(rows.numpy(), losses.detach().numpy(), norms.numpy())
            steps += 1
    return Result(cell.error(model), steps, time.process_time() - began)


def steps_of(at: Setting) -> int:
    """Returns how many steps a run takes that keeps a share of the samples."""
    mode = MODES.get("unbiased")(at.num_samples, at.batch, at.seed, keep=at.keep, epochs=at.epochs)  # type: ignore[call-arg]
    return sum(mode.num_drawn(epoch) // at.batch for epoch in range(at.epochs))


def schedule(done: float) -> float:
    """Returns the share of the learning rate at a share of the run."""
    return done / WARM_UP if done < WARM_UP else (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2


def load(path: Path) -> Results:
    """Reads the results so far."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        training = Training(*(row[name] for name in Training._fields))
        results[training] = Result(*(row[name] for name in Result._fields))
    return results


def run(path: Path, jobs: int, minutes: float | None) -> None:
    """Trains what is missing, ``jobs`` at a time, and writes a line after each."""
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    for name in importance_tasks.CELLS:
        _cell(name)  # before the fork: prepared once, and shared
    results, began, done, version = load(path), time.monotonic(), 0, commit()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        while batch := list(itertools.islice(wanted(results), 10 * jobs)):
            for training, result in zip(batch, pool.imap(train, batch), strict=True):
                with path.open("a") as file:
                    file.write(json.dumps(training._asdict() | result._asdict() | {"commit": version}) + "\n")
                results[training], done = result, done + 1
                left = (num_wanted() - len(results)) * (time.monotonic() - began) / done / 3600
                print(f"{', '.join(map(str, training))}: {result.error:.3f}   ({left:.1f} h left)", flush=True)
                if time.monotonic() > until:
                    pool.terminate()
                    return


def report(results: Results) -> str:
    """Returns the table: each way's error, paired with random at equal reads, in every cell."""
    found: Errors = defaultdict(dict)
    reads: dict[tuple[str, float], list[float]] = defaultdict(list)
    for training, result in results.items():
        if training.seed in SEEDS:
            found[training[:3]][training.seed] = result.error
            reads[training.way, training.keep].append(result.steps)
    lines = [__doc__.split("\n", 1)[0], "", f"{processors()}; torch {torch.__version__}; {commit()}", ""]
    whole = {(way, keep): _is_whole(found, way, keep) for way, keep in reads}
    full = statistics.fmean(reads[BASE, 1.0]) if reads[BASE, 1.0] else math.nan
    lines += ["| way | keep | samples used | " + " | ".join(importance_tasks.CELLS) + " |", "|---" * 8 + "|"]
    for way, keep in sorted((key for key in reads if whole[key]), key=lambda key: -key[1]):
        used = EPOCHS * statistics.fmean(reads[way, keep]) / full
        cells = [_shown(found[cell, way, keep], found[cell, RANDOM, keep]) for cell in importance_tasks.CELLS]
        lines.append(f"| {way} | {keep:g} | {used:.1f} N | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Error (%, or bits a byte), mean of {len(SEEDS)} seeds; in brackets the paired difference to random at",
    ]
    lines += ["equal reads ± its standard error; bold: below it by two standard errors."]
    for keep in sorted({keep for key, keep in reads if not whole[key, keep]}):
        lines += ["", f"keep {keep:g} is not finished, and not shown."]
    shown = [key for key in whole if whole[key]]
    for keep in KEEPS:
        lines += ["", *_verdict(found, shown, keep)]
    return "\n".join(lines).rstrip() + "\n"


Errors = dict[tuple[str, str, float], dict[int, float]]
"""By cell, way and keep: the error of each seed."""


def _is_whole(found: Errors, way: str, keep: float) -> bool:
    return all(set(SEEDS) <= set(found[cell, way, keep]) for cell in importance_tasks.CELLS)


def _verdict(found: Errors, keys: list[tuple[str, float]], keep: float) -> list[str]:
    """Returns a table of errors relative to `uniform`, the mean over the cells; the rule's third point asks for the one
    at keep 0.5."""
    if (BASE, 1.0) not in keys or ("loss", keep) not in keys:
        return []

    def relative(way: str, kept: float) -> list[float]:
        cells = importance_tasks.CELLS
        return [
            statistics.fmean(found[cell, way, kept][seed] / found[cell, BASE, 1.0][seed] for cell in cells)
            for seed in SEEDS
        ]

    mine = {way: relative(way, kept) for way, kept in keys if kept in (1.0, keep)}
    lines = [
        f"| way, keep {keep:g} | error / that of uniform, mean of the cells | difference to loss |",
        "|---" * 3 + "|",
    ]
    for way, of_S in sorted(mine.items(), key=lambda item: statistics.fmean(item[1])):
        by, error = _paired([one - other for one, other in zip(of_S, mine["loss"], strict=True)])
        lines.append(f"| {way} | {statistics.fmean(of_S):.4f} | {by:+.4f} ± {error:.4f} |")
    return lines


def _paired(differences: list[float]) -> tuple[float, float]:
    """Returns the mean of at least two differences, and its standard error."""
    return statistics.fmean(differences), standard_error(differences)


def _shown(mine: dict[int, float], base: dict[int, float]) -> str:
    if not mine:
        return "–"
    mean = statistics.fmean(mine.values())
    differences = [mine[seed] - base[seed] for seed in mine if seed in base]
    if len(differences) < 2 or mine is base:
        return f"{mean:.3f}"
    by, error = _paired(differences)
    text = f"{mean:.3f} ({by:+.3f} ± {error:.3f})"
    return f"**{text}**" if by < -2 * error else text


def main(argv: list[str]) -> int:
    """Trains and reports; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time (default: 2)")
    parser.add_argument("--minutes", type=float, help="stop after so long; the next call goes on")
    parser.add_argument("--report", action="store_true", help="only write the table of what there is")
    options: Any = parser.parse_args(argv)
    path = RESULTS / "importance.jsonl"
    if not options.report:
        run(path, options.jobs, options.minutes)
    (RESULTS / "importance.md").write_text(report(load(path)))
    print(f"wrote {RESULTS / 'importance.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
