"""Which way to exchange gradients is right, for how many ranks and which link?

Question
    W ranks train together, and each has a link of so many bits per second. What does each way to exchange gradients
    cost in quality, bytes, CPU time and seconds, and from which bandwidth on is another one right?

Rows
    No exchange (each rank trains alone on its part of the data; rank 0's model is judged); DDP; its bf16 hook; its
    PowerSGD hook, rank 4; DiLoCo as torchft has it, with H = 4, which makes 100 outer steps here, and H = 20, which
    makes 20; `GradientEngine`. Two effects are rows of their own: the engine with and without a step of staleness, and
    PowerSGD with and without one. PowerSGD one step late is torch's hook outside of DDP; no library has it, so it is
    never the right choice (`gradient_methods`, `gradient_report.ROWS`).

Tasks
    Letters of typefaces and bytes of text that no training sees (`gradient_tasks`). Quality is the share of letters,
    or next bytes, that are right, in %; a point is one of them. Each task has a narrow network, on which quality is
    measured, and a wide one of the same kind (ResNet-18, a GPT; 11 M parameters), for bytes and times: eight
    trainings of the wide one at once take hours on two cores. Whether quality is the same on the wide one is not shown.

Stages
    tuning   On seed 100, with 4 ranks. A rate is halved and doubled until both neighbours of the best one are worse:
             DDP's first, then each row's, which begins at DDP's. The bf16 hook takes DDP's; DiLoCo takes DDP's inside,
             and its outer rate is tuned.
    bytes    The wide network, one process a rank, no limit on the link; forward and backward are played: gradients of
             real steps, handed out in 0.1 s without using the processor (`gradient_played`), as an accelerator would.
             Bytes are those that rank 0's network interface has counted, per step, sent or received, whichever is more;
             CPU time is that of rank 0's process, less that of the row without exchange. Bytes do not depend on load;
             CPU time does a little, where others use the caches.
    quality  Real trainings, one process a rank over gloo, 400 steps, the same global batch for every W, so the same
             number of samples. Warm-up over a tenth, then a cosine to 0. The last step is judged, no best-of. A seed
             fixes initial weights and the order of samples, so differences to DDP are paired.
    time     The same behind links of 100 Mbit/s and 1 Gbit/s (`scripts/testbed`), in rounds, each in a new order. Needs
             a quiet machine. Eight ranks on two cores have a quarter of a core each: where a row's CPU time times W / 2
             exceeds 0.1 s, its time is that of this machine, not of eight hosts; the column beside it is the ratio to
             the formula, which supposes a core a rank.

The rule, written before the first result
    1. A step takes (1 − h) c + max(h c, x + 8 b / B) seconds: c compute (0.1), x own CPU time, b bytes, B bandwidth in
       bits per second, h the share of the compute beside which the exchange may run: 1 one step late; 2/3, the backward
       pass, for DDP and the engine, which send buckets as they fill; 0 for PowerSGD, which waits for one bucket, and
       for DiLoCo, whose b and x are the mean over H steps. This is generous to DDP (it supposes perfect overlap) and
       hard on the rows that are late (it supposes that x and the link never overlap). x counts for the engine only,
       whose kernels need a processor; the others' work is an accelerator's. (This sentence was added when bytes of
       one network were known and no quality was. Without it DDP's copies through gloo would keep it from ever being
       right below 73 Gbit/s; it is against our rows.)
    2. A row may be the right choice for (task, W) if its quality is at most 1 point below DDP's, the mean over seeds.
    3. Of those that take at most 1.05 of the shortest time, the plainest is right: the first in the order of the rows.
    4. A crossing point is a bandwidth at which the right choice changes, from 1 Mbit/s to 100 Gbit/s. It moves in
       proportion to parameters / c: twice the compute a step, half the bandwidth.
    5. Where no exchange loses less than 1 point to DDP, the table says that the quality there says nothing. No network
       may have more than 1 % of parameters whose gradient is exactly zero in three steps; the table shows the share.

Command
    python benchmarks/bench_gradient.py                   about 2 hours on two quiet cores (estimated); needs root. One
                                                          that was stopped continues with the same command
    python benchmarks/bench_gradient.py --minutes 30      the next half hour of it
    python benchmarks/bench_gradient.py --stages tuning bytes quality    all that does not need a quiet machine
    python benchmarks/bench_gradient.py --report          the table of what there is
    python benchmarks/bench_gradient.py --quick --out /tmp/x             a minute: does it all work?

Figures: benchmarks/results/gradient.jsonl, a line a run, gradient.md and gradient.png, written by these commands.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import gradient_tasks
import torch
from gradient_report import BASE, NONE, ROWS, Lines, best, plot, table, tried
from gradient_testbed import Testbed, pick, prepare, testbed
from measures import Log, commit, machine

RESULTS = Path(__file__).parent / "results"
STAGES = ("tuning", "bytes", "quality", "time")
TUNING_SEED, TUNING_RANKS = 100, 4
FIRST_OUTER_RATE = 0.4
COMPUTE_SECONDS = 0.1
SETTLING_STEPS, MEASURED_STEPS, MEASURED_STEPS_OF_ALL = 4, 12, 6
UNLIMITED = "unlimited"


class Task(NamedTuple):
    """A task in two sizes."""

    narrow: str
    wide: str
    batch: int
    """Samples of all ranks together in a step, of the narrow one."""
    lr: float
    """The learning rate with which DDP's tuning begins."""


class Plan(NamedTuple):
    """How much of it is measured."""

    tasks: dict[str, Task]
    ranks: tuple[int, ...] = (2, 4, 8)
    rows: tuple[str, ...] = tuple(ROWS)
    seeds: int = 3
    steps: int = 400
    samples: int = 4096
    """Held out, that judge."""
    rates: tuple[str, ...] = ("100mbit", "1gbit")
    rounds: int = 2


WHOLE = Plan(
    {
        "glyphs": Task("glyphs", "glyphs-wide", 64, 0.05),
        "text": Task("text", "text-wide", 32, 2e-3),
    }
)
QUICK = Plan(
    {"made": Task("gpt", "gpt", 8, 1e-3)},
    (2,), (NONE, BASE, "powersgd late", "engine"), seeds=1, steps=8, samples=64,
    rates=("100mbit",), rounds=1,
)  # fmt: skip


class Run(NamedTuple):
    """One run, by what it depends on."""

    stage: str
    task: str
    ranks: int
    row: str
    rate: str
    """The bandwidth of the links, as scripts/testbed takes it."""
    number: int
    """Seed, or round."""
    lr: float
    """0 where nothing is learnt."""
    outer_lr: float
    """0 for rows that have none."""


def of(line: dict[str, Any]) -> Run:
    """Returns the run of a line."""
    return Run(*(line[name] for name in Run._fields))


def _tuning(lines: Lines, task: str, row: str, lr: float) -> Iterator[Run]:
    """Yields trainings of a row until both neighbours of its best rate are worse. It looks at lines as they grow."""
    is_outer = row.startswith("diloco")
    rates = (lr, FIRST_OUTER_RATE if is_outer else 0.0)
    while True:
        yield Run("tuning", task, TUNING_RANKS, row, UNLIMITED, TUNING_SEED, *rates)
        inner, outer = best(lines, task, row)
        near = [(inner, outer * by) if is_outer else (inner * by, outer) for by in (0.5, 2.0)]
        missing = [each for each in near if each not in tried(lines, task, row)]
        if not missing:
            return
        rates = missing[0]


def wanted(lines: Lines, plan: Plan, stages: Sequence[str]) -> Iterator[Run]:
    """Yields the runs that are missing, in the order in which they are run. It looks at the lines as they grow.

    Args:
        lines: Of the runs so far; runs are added to them meanwhile.
        plan: How much is measured.
        stages: Those that are.
    """
    for stage in (stage for stage in STAGES if stage in stages):
        for run in _runs(stage, lines, plan):
            if all(of(line) != run for line in lines):
                yield run


def _runs(stage: str, lines: Lines, plan: Plan) -> Iterator[Run]:
    if stage == "tuning":
        for row, (name, task) in product((BASE, *plan.rows), plan.tasks.items()):
            if row != "ddp-bf16":
                yield from _tuning(lines, name, row, task.lr if row == BASE else best(lines, name, BASE)[0])
    elif stage == "quality":
        for seed, ranks, row, name in product(range(plan.seeds), plan.ranks, plan.rows, plan.tasks):
            yield Run(stage, name, ranks, row, UNLIMITED, seed, *best(lines, name, row))
    elif stage == "bytes":
        for ranks, name, row in product(plan.ranks, plan.tasks, plan.rows):
            yield Run(stage, name, ranks, row, UNLIMITED, 0, 0.0, 0.0)
    else:
        for number in range(plan.rounds):
            places = list(product(plan.tasks, plan.ranks, plan.rates, plan.rows))
            for name, ranks, rate, row in random.Random(number).sample(places, len(places)):
                yield Run(stage, name, ranks, row, rate, number, 0.0, 0.0)


def flags_of(run: Run, plan: Plan) -> list[str]:
    """Returns what `train_gradient` is started with."""
    task, flags = plan.tasks[run.task], [*ROWS[run.row].flags]
    if run.outer_lr:
        flags += ["--outer-lr", str(run.outer_lr)]
    if run.stage in ("tuning", "quality"):
        flags += ["--task", task.narrow, "--batch-size", str(task.batch // run.ranks), "--lr", str(run.lr)]
        return [*flags, "--steps", str(plan.steps), "--seed", str(run.number), "--eval-samples", str(plan.samples)]
    measured = MEASURED_STEPS_OF_ALL if run.row in (BASE, "ddp-bf16") else MEASURED_STEPS
    if run.row == "diloco 20":
        measured = 20
    flags += ["--task", task.wide, "--played", str(COMPUTE_SECONDS), "--eval-samples", "0", "--steps", "400"]
    return [*flags, "--stop-after", str(SETTLING_STEPS + measured)]


def measure(bed: Testbed, run: Run, plan: Plan) -> dict[str, Any]:
    """Runs one, and returns its figures."""
    bed("rate", run.rate)
    rows = bed.run(run.ranks, *flags_of(run, plan))
    found = {name: rows[0][name] for name in ("parameters", "without_gradient")}
    found |= {name: value for name, value in rows[-1].items() if name.startswith("step")}
    for row in pick(rows, "eval"):
        found |= {name: row[name] for name in ("loss", "accuracy")}
    return found


def run_all(log: Log, plan: Plan, stages: Sequence[str], minutes: float | None) -> None:
    """Runs what is missing, and writes a line after each."""
    until, version = math.inf if minutes is None else time.monotonic() + 60 * minutes, commit()
    if plan is not QUICK:
        gradient_tasks.load_glyphs(), gradient_tasks.load_text()  # before the ranks are forked: loaded once
    with testbed(max(*plan.ranks, TUNING_RANKS)) as bed:
        for run in wanted(log.rows, plan, stages):
            if time.monotonic() > until:
                return
            began = time.monotonic()
            found = measure(bed, run, plan)
            log.add(run._asdict() | found | {"commit": version})
            told = (
                f"{100 * found['accuracy']:.2f} %" if "accuracy" in found else f"{found['step_seconds']:.3f} s a step"
            )
            print(f"{', '.join(map(str, run))}: {told}   ({time.monotonic() - began:.0f} s)", flush=True)


def report(log: Log, out: Path) -> None:
    """Writes the table and the plot of what there is."""
    commits = ", ".join(dict.fromkeys(line["commit"] for line in log.rows))
    head = [
        "# Exchange of gradients among 2, 4 and 8 ranks",
        "",
        f"commit {commits}, torch {torch.__version__}, {machine()}",
    ]
    text = "\n".join([*head, "", table(log.rows, COMPUTE_SECONDS)])
    print(text)
    (out / "gradient.md").write_text(text.rstrip() + "\n")
    if any(line["stage"] == "bytes" for line in log.rows):
        plot(log.rows, COMPUTE_SECONDS, out / "gradient.png")


def main(argv: list[str]) -> int:
    """Measures, prints, writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--tasks", nargs="+", choices=list(WHOLE.tasks), help="default: all")
    parser.add_argument("--minutes", type=float, help="stop after so long; the next call goes on")
    parser.add_argument("--report", action="store_true", help="only write the table of what there is")
    parser.add_argument("--quick", action="store_true", help="another task, few steps: shows that it works, no figures")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the .jsonl, .md and .png")
    options: Any = parser.parse_args(argv)
    prepare()
    options.out.mkdir(parents=True, exist_ok=True)
    log = Log(options.out / "gradient.jsonl")
    if not options.report:
        plan = QUICK if options.quick else WHOLE
        if options.tasks:
            plan = plan._replace(tasks={name: WHOLE.tasks[name] for name in options.tasks})
        run_all(log, plan, options.stages, options.minutes)
    report(log, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
