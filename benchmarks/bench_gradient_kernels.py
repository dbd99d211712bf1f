"""What picking from a gradient costs and what it catches: every compressor, against adding and against torch.topk.

Question How close does a compressor come to ``e += g``, the least that error feedback can cost, and how much of the
energy of the exact top-k does it catch, step after step, under error feedback?

Method Time: a bucket of 25 M float32 (100 MB), density 1 %. Gradient and residual are normal noise and stay the same,
so that every way does the same work in every round. Rounds are interleaved: each way once a round, in an order drawn
anew. One thread each, ours and PyTorch's, because buckets are what threads are for. Ratios are medians of the ratio to
``e += g`` of the same round, with quartiles. "choose" is `Compressor.select`: sample, pass and, where there is too
much, putting back. "compress" is `ErrorFeedback.compress`: the same, rounded, and what rounding lost put into the
residual.

    Quality: a million elements, rows of different scale, 60 steps of each kind of gradient through error feedback.
    Energy is the sum of squares of what was picked over that of the exact top-k of the same sum and count; for lines
    also over that of the best lines. The smallest from the tenth step on is shown, and the least and greatest count
    over the wanted.

Command
    python benchmarks/bench_gradient_kernels.py --out benchmarks/results
    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= python benchmarks/bench_gradient_kernels.py      (as without AVX-512)

Figures
    benchmarks/results/gradient-kernels.md and .json

Explanation Adding in place moves three streams: two in, one out. So does a pass: the rest goes to a second buffer, but
past the caches, so nothing is fetched before it is overwritten. What is left is the sample and what is done with the K
picked. Exact top-k costs a partition of K elements more, not of D.

    A threshold catches what top-k would at its count, because what is over a threshold is the top-k; the sample only
    decides the count. Lines catch all that lines can, and less than elements: how much less depends on how alike
    neighbours are.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from measures import commit

from shade.gradient._compress.compressor import COMPRESSORS, Key
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._kernels.lines import aligned_zeros

SIZE, DENSITY, QUALITY_SIZE, QUALITY_STEPS, SEED = 25_000_000, 0.01, 1_000_000, 60, 0
FLOOR, TORCH = "e += g", "error feedback + torch.topk"
KINDS = ("stationary", "decaying", "bursty", "lasting", "independent")


class Bucket:
    """A gradient, a residual, and all the ways to pick from their sum."""

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(SEED)
        self.gradient_D, self.residual_D, self.sum_D = (aligned_zeros(size) for _ in range(3))
        rng.standard_normal(dtype=np.float32, out=self.gradient_D)
        rng.standard_normal(dtype=np.float32, out=self.residual_D)
        self.rest_D = aligned_zeros(size)
        self.step = 0

    def add(self) -> None:
        """The floor."""
        np.add(self.sum_D, self.gradient_D, out=self.sum_D)

    def torch_topk(self) -> None:
        """What one writes first: add, top-k of the magnitudes, gather, zero."""
        gradient_D, sum_D = torch.from_numpy(self.gradient_D), torch.from_numpy(self.sum_D)
        sum_D.add_(gradient_D)
        places_K = torch.topk(sum_D.abs(), round(DENSITY * len(sum_D)), sorted=False).indices
        sum_D[places_K].clone()
        sum_D[places_K] = 0

    def chooser(self, name: str) -> Callable[[], None]:
        """One compressor."""
        compressor = COMPRESSORS.get(name)()

        def choose() -> None:
            self.step += 1
            key = Key(SEED, self.step, 0)
            compressor.select(self.gradient_D, self.residual_D, self.rest_D, DENSITY, key)

        return choose

    def feedback(self, name: str, quantiser: str) -> Callable[[], None]:
        """A whole step of error feedback, which is undone before the next, so that all are alike."""
        memory = ErrorFeedback(len(self.gradient_D), COMPRESSORS.get(name)(), QUANTISERS.get(quantiser)())
        memory.residual_D[:] = self.residual_D

        def compress() -> None:
            self.step += 1
            if self.step > 1 and memory._is_undoable:
                memory.undo()
            memory.compress(self.gradient_D, DENSITY, Key(SEED, self.step, 0))

        return compress


def measure(size: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    bucket = Bucket(size)
    ways: dict[str, Callable[[], None]] = {FLOOR: bucket.add, TORCH: bucket.torch_topk}
    for name in ("threshold-v", "threshold-v16", "topk", "random-k"):
        ways[f"{name}, choose"] = bucket.chooser(name)
    for name, quantiser in (("threshold-v", "bf16"), ("threshold-v", "int8"), ("threshold-v16", "bf16")):
        ways[f"{name}, compress to {quantiser}"] = bucket.feedback(name, quantiser)
    took: dict[str, list[float]] = {name: [] for name in ways}
    rng = np.random.default_rng(SEED)
    for round_number in range(num_rounds + 1):
        bucket.sum_D[:] = bucket.residual_D
        for name in rng.permutation(list(ways)):
            if name == TORCH and round_number > 5:
                continue  # it is slow, and its spread small beside the distance
            begun = time.perf_counter()
            ways[name]()
            if round_number:  # the first touches memory for the first time
                took[name].append(time.perf_counter() - begun)
    return took


def stream(kind: str) -> Iterator[np.ndarray]:
    """Gradients of one kind, step by step."""
    rng = np.random.default_rng(SEED)
    row_D = np.exp(1.5 * rng.standard_normal(QUALITY_SIZE // 500)).repeat(500).astype(np.float32)
    if kind == "independent":
        row_D[:] = 1
    lasting_D = rng.standard_normal(QUALITY_SIZE, dtype=np.float32) * row_D
    for step in range(QUALITY_STEPS):
        gradient_D = rng.standard_normal(QUALITY_SIZE, dtype=np.float32) * row_D
        if kind == "decaying":
            gradient_D *= np.float32(0.95**step)
        elif kind == "bursty":
            start = int(rng.integers(QUALITY_SIZE - 5000))
            gradient_D[start : start + 5000] *= np.float32(30)
            gradient_D *= np.float32(rng.choice([0.01, 1.0, 20.0]))
        elif kind == "lasting":
            gradient_D = np.float32(0.3) * gradient_D + lasting_D
        yield gradient_D


def judge(name: str, kind: str) -> dict[str, float]:
    """The least share of the possible energy, and the range of counts."""
    memory = ErrorFeedback(QUALITY_SIZE, COMPRESSORS.get(name)(), QUANTISERS.get("none")())
    shares, line_shares, counts = [], [], []
    for step, gradient_D in enumerate(stream(kind)):
        squares_D = (memory.residual_D + gradient_D).astype(np.float64) ** 2
        picked = memory.compress(gradient_D, DENSITY, Key(SEED, step, 0))
        caught = float((picked.values_K.astype(np.float64) ** 2).sum())
        shares.append(caught / np.partition(squares_D, -picked.count)[-picked.count :].sum())
        lines_L = squares_D.reshape(-1, 16).sum(axis=1)
        line_shares.append(caught / np.partition(lines_L, -(picked.count // 16))[-(picked.count // 16) :].sum())
        counts.append(picked.count / (DENSITY * QUALITY_SIZE))
    return {
        "energy_of_topk": min(shares[10:]),
        "energy_of_best_lines": min(line_shares[10:]),
        "least_count": min(counts),
        "greatest_count": max(counts),
    }


def time_table(took: dict[str, list[float]]) -> list[str]:
    """Medians and ratios."""
    lines = [
        "| way | median ms | min ms | × `e += g` | quartiles | × faster than torch.topk |",
        "|---|---|---|---|---|---|",
    ]
    for name, seconds in took.items():
        ratios = [one / floor for one, floor in zip(seconds, took[FLOOR], strict=False)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        faster = statistics.median(took[TORCH]) / statistics.median(seconds)
        lines.append(
            f"| {name} | {1e3 * statistics.median(seconds):.1f} | {1e3 * min(seconds):.1f} | {middle:.2f} | "
            f"{low:.2f} … {high:.2f} | {faster:.0f} |"
        )
    return lines


def quality_table(quality: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Energy and counts."""
    lines = [
        "| compressor | gradients | energy / top-k | energy / best lines | count / wanted |",
        "|---|---|---|---|---|",
    ]
    for name, kinds in quality.items():
        for kind, found in kinds.items():
            by_line = f"{found['energy_of_best_lines']:.3f}" if name == "threshold-v16" else ""
            lines.append(
                f"| {name} | {kind} | {found['energy_of_topk']:.3f} | {by_line} | "
                f"{found['least_count']:.2f} … {found['greatest_count']:.2f} |"
            )
    return lines


def main() -> None:
    """Measures, prints, and writes where told to."""
    parser = argparse.ArgumentParser(description="gradient compressors: time and energy")
    parser.add_argument("--size", type=int, default=SIZE, help="elements of the bucket")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="folder for gradient-kernels.{md,json}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    took = measure(args.size, args.rounds)
    print("\n".join(time_table(took)), flush=True)
    quality = {
        name: {kind: judge(name, kind) for kind in KINDS}
        for name in ("topk", "threshold-v", "threshold-v16", "random-k")
    }
    print("\n" + "\n".join(quality_table(quality)))
    if args.out is None:
        return
    about = {
        "command": f"python benchmarks/bench_gradient_kernels.py --size {args.size} --rounds {args.rounds}",
        "commit": commit(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, "
        f"torch {torch.__version__}",
        "seconds": round(time.perf_counter() - started),
    }
    page = [
        "# Picking from a gradient",
        "",
        f"`{about['command']}`, commit `{about['commit']}`, {about['machine']}, {about['seconds']} s. Method and "
        "explanation: the docstring of `benchmarks/bench_gradient_kernels.py`.",
        "",
        f"## Time, {args.size:,} elements, density {DENSITY:.0%}, one thread",
        "",
        *time_table(took),
        "",
        f"## Quality, {QUALITY_SIZE:,} elements, {QUALITY_STEPS} steps, density {DENSITY:.0%}",
        "",
        *quality_table(quality),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gradient-kernels.md").write_text("\n".join(page) + "\n")
    numbers = {"about": about, "seconds": took, "quality": quality}
    (args.out / "gradient-kernels.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"\nwritten to {args.out}/gradient-kernels.md and .json")


if __name__ == "__main__":
    main()
