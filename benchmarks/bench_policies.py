"""What each cache policy would read from the origin: three ways of drawing epochs, three capacities, eight policies.

Method
    The sampling modes draw 12 epochs of N = 50,000 samples of 100 kB, with a global batch of 256; the simulator replays
    them through the policies' own code against an empty cache. Hit ratios leave out the first 3 epochs. Capacity is a
    fraction f of the data set's bytes. Everything is a function of the seed: there is no spread to report but the
    times'. The draws:

    uniform    every sample once an epoch, shuffled.
    pads       N draws with replacement, in proportion to log(j + 10), j the rank of a fixed loss in a batch of 64.
    unbiased   without replacement, mean inclusion 0.7, in proportion to sqrt(loss) within 0.3 … 1; the losses are
               lognormal (sigma 1) and drift from epoch to epoch with a correlation of 0.9; two full epochs first.

    The plan's cost is measured apart: `plan.begin_epoch` for 1.28 M samples in its most expensive case, a first epoch
    in which everybody is a candidate, and in its steady state, 5 times each.

Command
    python benchmarks/bench_policies.py --n 50000 --out benchmarks/results

Figures
    benchmarks/results/policies.md (tables), policies.png (curves), policies.json (all counts).

Explanation
    uniform: `static`, `shade` (without scores it is `static`), `plan` and both Beladys hit exactly f. No policy can do
    better when each sample comes once an epoch. `lru` and `lfu` hit f + (1 - f) ln(1 - f), `fifo` a little more.

    pads: a with-replacement draw repeats samples within an epoch. Belady, which seeks such repeats, hits far more than
    any policy that knows importance only; `shade` adds about three points to `lru` at f = 0.2, because log-rank weights
    differ by a factor of 1.86 at most. `plan` looks for repeats across the boundary only, so it lies between: it is
    not meant for this mode, which does not draw ahead.

    unbiased: `plan` equals `belady-1` read for read and reads about half a data set an epoch at f = 0.2, where the
    best policy that does not know the next epoch, `shade`, reads 0.03 N more and `static` 0.06 N more. The whole
    future (`belady`) is worth nothing beyond that. `lfu` learns the drifting losses from counts, too slowly.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import tracemalloc
from pathlib import Path

import numpy as np
from measures import commit

from shade.cli.simulation import format_table, plot_curves
from shade.policy import EpochPlan
from shade.policy.plan import PlanPolicy
from shade.policy.simulator import MissRatioCurves, miss_ratio_curves
from shade.policy.trace import Trace
from shade.sampling import MODES, SamplingMode, Scores

POLICY_NAMES = ("lru", "fifo", "lfu", "static", "shade", "plan", "belady-1", "belady")
FRACTIONS = (0.1, 0.2, 0.4)
NUM_EPOCHS, SKIP_EPOCHS, GLOBAL_BATCH, SAMPLE_BYTES, SEED = 12, 3, 256, 100_000, 0
IMAGENET = 1_280_000


def uniform_trace(num_samples: int) -> Trace:
    """Shuffles."""
    mode = MODES.get("uniform")(num_samples, GLOBAL_BATCH, SEED)
    return trace_of(mode, [None] * NUM_EPOCHS)


def pads_trace(num_samples: int) -> Trace:
    """SHADE's log-rank weights over a loss that never changes."""
    loss_rank_N = np.random.default_rng(SEED).permutation(num_samples) * 64 // num_samples
    mode = MODES.get("pads")(num_samples, GLOBAL_BATCH, SEED)
    return trace_of(mode, [np.log(loss_rank_N + 10).astype(np.float32)] * NUM_EPOCHS)


def unbiased_trace(num_samples: int) -> Trace:
    """Horvitz–Thompson draws by losses that drift."""
    rng = np.random.default_rng(SEED)
    log_loss_N = rng.standard_normal(num_samples)
    scores = []
    for _ in range(NUM_EPOCHS):
        scores.append(np.exp(log_loss_N).astype(np.float32))
        log_loss_N = 0.9 * log_loss_N + np.sqrt(1 - 0.9**2) * rng.standard_normal(num_samples)
    mode = MODES.get("unbiased")(num_samples, GLOBAL_BATCH, SEED)
    return trace_of(mode, scores)


def trace_of(mode: SamplingMode, scores: list) -> Trace:
    """Draws each epoch from the scores of the epoch before if the mode draws ahead, else from its own."""
    orders = []
    for epoch in range(NUM_EPOCHS):
        score_N = scores[max(epoch - 1, 0) if mode.draws_ahead else epoch]
        known = None if score_N is None else Scores(score_N, np.ones(len(score_N), dtype=bool))
        orders.append(mode.draw(epoch, known).order_K)
    sizes = np.full(mode.num_samples, SAMPLE_BYTES, dtype=np.int64)
    return Trace(sizes, tuple(orders), GLOBAL_BATCH, tuple(scores) if scores[0] is not None else ())


def plan_cost(*, steady: bool) -> dict[str, list[float]]:
    """Seconds and traced megabytes of one plan for 1.28 M samples, five times."""
    rng = np.random.default_rng(SEED)
    order_K, next_order_K, after_K = (rng.permutation(IMAGENET)[: int(0.7 * IMAGENET)] for _ in range(3))
    cost: dict[str, list[float]] = {"seconds": [], "megabytes": []}
    for _ in range(5):
        policy = PlanPolicy(np.full(IMAGENET, SAMPLE_BYTES), IMAGENET * SAMPLE_BYTES // 5)
        if steady:
            policy.begin_epoch(EpochPlan(0, order_K, next_order_K))
            policy.access_many(order_K)
            plan = EpochPlan(1, next_order_K, after_K)
        else:
            plan = EpochPlan(0, rng.permutation(IMAGENET), np.arange(IMAGENET))
        started = time.perf_counter()
        policy.begin_epoch(plan)
        cost["seconds"].append(round(time.perf_counter() - started, 3))
    policy._restart(np.flatnonzero(policy.resident_N))
    tracemalloc.start()
    policy.begin_epoch(plan)
    cost["megabytes"].append(round(tracemalloc.get_traced_memory()[1] / 1e6))
    tracemalloc.stop()
    return cost


def as_numbers(curves: MissRatioCurves) -> dict:
    """All counts."""
    return {
        name: [
            {
                "fraction": fraction,
                "hit_ratio": round(result.hit_ratio(curves.skip_epochs), 6),
                "origin_reads_per_sample": round(result.origin_reads_per_sample(curves.skip_epochs), 6),
                "accesses": result.accesses.tolist(),
                "hits": result.hits.tolist(),
                "peak_resident_bytes": int(result.peak_resident_bytes.max()),
            }
            for fraction, result in zip(curves.fractions, results, strict=True)
        ]
        for name, results in curves.results.items()
    }


def main() -> None:
    """Runs it all."""
    parser = argparse.ArgumentParser(description="cache policies on three kinds of epochs")
    parser.add_argument("--n", type=int, default=50_000, help="samples in the data set")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder for policies.{md,json,png}"
    )
    args = parser.parse_args()
    started = time.perf_counter()
    curves = {}
    for name, make in (("uniform", uniform_trace), ("pads", pads_trace), ("unbiased", unbiased_trace)):
        curves[name] = miss_ratio_curves(make(args.n), POLICY_NAMES, FRACTIONS, skip_epochs=SKIP_EPOCHS)
        print(f"\n{name}\n{format_table(curves[name])}", flush=True)
    seconds = time.perf_counter() - started
    cost = {"first epoch": plan_cost(steady=False), "steady": plan_cost(steady=True)}

    about = {
        "command": f"python benchmarks/bench_policies.py --n {args.n} --out {args.out}",
        "commit": commit(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "seconds": round(seconds),
    }
    numbers = {"about": about, "plan_cost": cost, "curves": {name: as_numbers(curve) for name, curve in curves.items()}}
    lines = [
        "# Cache policies by simulation",
        "",
        f"`{about['command']}`, commit `{about['commit']}`, {about['machine']}, {about['seconds']} s. Method and "
        "explanation: the docstring of `benchmarks/bench_policies.py`.",
        "",
        f"N = {args.n:,}, {NUM_EPOCHS} epochs, the first {SKIP_EPOCHS} left out; reads/N: origin reads per sample of "
        "the data set and epoch.",
    ]
    for name, curve in curves.items():
        lines += ["", f"## {name}", "", format_table(curve)]
    lines += [
        "",
        "## Cost of a plan for 1.28 M samples, f = 0.2",
        "",
        "| case | seconds, min … max of 5 | peak MB |",
        "|---|---|---|",
    ]
    for case, figures in cost.items():
        low, high = min(figures["seconds"]), max(figures["seconds"])
        lines.append(f"| {case} | {low:.2f} … {high:.2f} | {figures['megabytes'][0]:.0f} |")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "policies.md").write_text("\n".join(lines) + "\n")
    (args.out / "policies.json").write_text(json.dumps(numbers, indent=1) + "\n")
    plot_curves({f"{name} epochs": curve for name, curve in curves.items()}, args.out / "policies.png")
    print(f"\n{seconds:.0f} s; written to {args.out}/policies.md, .json, .png")


if __name__ == "__main__":
    main()
