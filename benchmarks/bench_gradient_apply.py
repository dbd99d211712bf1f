"""What the receiving side of a sparse gradient costs: unpack, merge, step; against PyTorch's dense step.

Question
    Is a step on the elements that came as much cheaper than the dense one as they are fewer, although momentum and
    decay of all the others are made up for exactly? What do merge and message add?

Method
    25 million float32 parameters in one bucket, 1 % touched, drawn anew for each of several gradients so that memory is
    cold; a step of each way in every round, in a new random order; ratios are medians of the rounds' ratios, so that
    what else the machine does hits both alike. Ours runs on one thread, in one call, as in the engine; PyTorch's fused
    dense step on one thread and on all.

    touched      The loop over the touched elements alone, their lines caught up exactly (`shade.gradient._kernels`).
    in lines     The same over as many elements in whole cache lines, as threshold-v16 picks them.
    apply        All of `SparseOptimizer.apply`: that, the tables, and the part of the sweep that keeps every element
                 within ``flush_every`` steps.
    flush        Bringing all lines up to date at once, as before an evaluation.
    frozen       What is often published instead: touched elements only, momentum of the others frozen. Not the same
                 training; here as the floor that memory sets.

    Merge: four ranks' parts of 62,500 elements each, against torch.unique and index_add over the same. Message: 250,000
    elements, indices coded and values in bf16. All of these on one thread.

Command
    python benchmarks/bench_gradient_apply.py --out benchmarks/results           (a minute or two)

Reading
    A touched element costs its lines of memory, 64 bytes an array, there and back; the dense step reads everything, but
    in a stream. So ratios grow where memory answers slowly: beside other programs, both medians rise and their ratio
    swings. Figures: benchmarks/results/gradient-apply.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from measures import commit

from shade._lazy import compiled
from shade.gradient._comm.message import MessageHeader, pack, unpack
from shade.gradient._comm.sparse_all_reduce import merge
from shade.gradient._compress.bucket import Bucket
from shade.gradient._compress.compressor import Sparse
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._kernels import step_loops as loops
from shade.gradient._kernels.lanes import fetch
from shade.gradient._kernels.lines import aligned_zeros
from shade.gradient._optim.base import SparseOptimizer
from shade.gradient.optim import SparseAdamW, SparseSGD

ROOT = Path(__file__).resolve().parent.parent
SIZE, DENSITY, NUM_GRADIENTS = 25_000_000, 0.01, 4
FLUSH_EVERY = (1, 4, 16)
BARS = {"sgd": 0.15, "adamw": 0.2, "merge": 1.0}
BYTES_BAR = 3.5
_U64 = np.uint64
Way = Callable[[], Any]


@compiled
def frozen_sgd(x: Any, b: Any, indices: Any, values: Any, momentum: Any, rate: Any) -> None:
    """Touched elements only, whatever momentum the others have."""
    last = indices.size - 1
    for k in range(indices.size):
        ahead = _U64(indices[min(k + 64, last)])
        fetch(x, ahead)
        fetch(b, ahead)
        index = _U64(indices[k])
        b[index] = momentum * b[index] + values[k]
        x[index] -= rate * b[index]


def gradients(count: int = NUM_GRADIENTS, density: float = DENSITY, unit: int = 1) -> list[Sparse]:
    """Random ones, of elements or of lines of so many."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        picked = np.flatnonzero(rng.random(SIZE // unit, dtype=np.float32) < density)
        indices = (picked[:, None] * unit + np.arange(unit)).reshape(-1).astype(np.uint32)
        made.append(Sparse(indices, 0.01 * rng.standard_normal(len(indices), dtype=np.float32), SIZE))
    return made


def measure(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each way in each round; the first round warms up."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in random.sample(list(ways), len(ways)):
            begun = time.perf_counter()
            ways[name]()
            if number:
                took[name].append(1000 * (time.perf_counter() - begun))
    return took


def dense(cls: type[torch.optim.Optimizer], **settings: Any) -> Way:
    """PyTorch's fused step, on as many threads as it has."""
    parameter = torch.nn.Parameter(0.1 * torch.randn(SIZE))
    parameter.grad = 0.01 * torch.randn(SIZE)
    optimizer = cls([parameter], fused=True, **settings)
    return optimizer.step


def applied(cls: type[SparseOptimizer], given: list[Sparse], **settings: Any) -> Way:
    """All of ours, one gradient after the other."""
    bucket = Bucket([torch.nn.Parameter(0.1 * torch.randn(SIZE))])
    optimizer, turn = cls(bucket.parameters, **settings), itertools.count()
    return lambda: optimizer.apply(bucket, given[next(turn) % len(given)])


class Alone:
    """The loops without an optimizer around them, on memory of their own."""

    def __init__(self, given: list[Sparse]) -> None:
        rng = np.random.default_rng(1)
        self.x, self.m, self.v = (aligned_zeros(SIZE) for _ in range(3))
        for array in (self.x, self.m, self.v):
            rng.standard_normal(SIZE, dtype=np.float32, out=array)
        np.square(self.m, out=self.v)
        self.last_L, self.step = np.zeros(SIZE // 16, dtype=np.uint32), 0
        self.given = given
        self.table_4F, self.table_6F = np.full((4, 1024), 1e-6, np.float32), np.full((6, 1024), 1e-6, np.float32)
        self.table_4F[3] = self.table_6F[:2] = 0.5
        self.table_6F[5] = 0.0  # nothing is as small as epsilon
        row = (0.9, 0.1, 0.999, 0.001, 0.0, 0.001, 1.0, 1e-8, 0.0)
        self.rows_F9 = np.tile(np.array(row, dtype=np.float32), (1024, 1))

    def next(self) -> Sparse:
        """The next gradient."""
        self.step += 1
        return self.given[self.step % len(self.given)]

    def frozen_sgd(self) -> None:
        """The floor."""
        given = self.next()
        frozen_sgd(self.x, self.m, given.indices_K, given.values_K, np.float32(0.9), np.float32(1e-3))

    def sgd(self) -> None:
        """Touched elements, their lines caught up."""
        given, rate, one = self.next(), np.float32(1e-3), np.float32(1)
        loops.apply_linear(
            self.x, self.m, self.last_L, given.indices_K, given.values_K, self.step, self.table_4F, rate, one
        )

    def flush_sgd(self) -> None:
        """All lines."""
        self.step += 1
        loops.sweep_linear(self.x, self.m, self.last_L, 0, len(self.last_L), self.step, self.table_4F)

    def adamw(self) -> None:
        """Touched elements, their lines caught up."""
        given = self.next()
        places = (given.indices_K, given.values_K)
        loops.apply_adam(self.x, self.m, self.v, self.last_L, *places, self.step, self.table_6F, self.rows_F9, False)

    def flush_adamw(self) -> None:
        """All lines."""
        self.step += 1
        whole = (0, len(self.last_L))
        loops.sweep_adam(self.x, self.m, self.v, self.last_L, *whole, self.step, self.table_6F, self.rows_F9, False)


def step_ways(kind: str, given: list[Sparse], in_lines: list[Sparse]) -> dict[str, Way]:
    """All ways of one optimizer; the first is what the others are compared with."""
    alone, beside = Alone(given), Alone(in_lines)
    if kind == "sgd":
        settings: dict[str, Any] = {"lr": 0.001, "momentum": 0.9}
        ours: type[SparseOptimizer] = SparseSGD
        ways = {"dense": dense(torch.optim.SGD, **settings), "frozen": alone.frozen_sgd}
        ways |= {"touched": alone.sgd, "touched, in lines": beside.sgd, "flush": alone.flush_sgd}
    else:
        settings, ours = {"lr": 0.001}, SparseAdamW
        ways = {"dense": dense(torch.optim.AdamW, **settings), "touched": alone.adamw}
        ways |= {"touched, in lines": beside.adamw, "flush": alone.flush_adamw}
    for every in FLUSH_EVERY:
        ways[f"apply, flush_every={every}"] = applied(ours, given, flush_every=every, **settings)
    return ways


def merge_ways() -> dict[str, Way]:
    """Four ranks, 250,000 elements together."""
    parts = gradients(4, DENSITY / 4)
    indices = torch.cat([torch.from_numpy(part.indices_K.astype(np.int64)) for part in parts])
    values = torch.cat([torch.from_numpy(part.values_K) for part in parts])

    def torchs() -> None:
        places, inverse = torch.unique(indices, return_inverse=True)
        torch.zeros(len(places)).index_add_(0, inverse, values, alpha=0.25)

    return {"unique + index_add": torchs, "merge": lambda: merge(parts, [1.0] * 4)}


def message() -> tuple[dict[str, Way], float]:
    """Packing and unpacking; and bytes an element."""
    (given,) = gradients(1)
    coder = QUANTISERS.get("bf16")()
    header = MessageHeader(0, 0, 0, given.size, given.count, 1.0, "bf16")
    data = pack(header, given, coder)
    return {"pack": lambda: pack(header, given, coder), "unpack": lambda: unpack(data)}, len(data) / given.count


def rows(took: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median and quartiles in milliseconds; ratio to the first, the median of the rounds'."""
    first = next(iter(took.values()))
    told = {}
    for name, each in took.items():
        low, middle, high = statistics.quantiles(each, n=4)
        ratio = statistics.median(mine / theirs for mine, theirs in zip(each, first, strict=True))
        told[name] = {"ms": middle, "low_ms": low, "high_ms": high, "best_ms": min(each), "ratio": ratio}
    return told


def report(result: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "# Receiving a sparse gradient",
        "",
        f"{result['machine']}, commit {result['commit']}, {result['rounds']} rounds",
    ]
    lines += [
        "",
        "25 million parameters, 1 % touched. Median of the rounds (quartiles), best round, ratio to the first row.",
        "",
    ]
    for title, table in result["tables"].items():
        lines += [f"| {title} | ms | best | ratio |", "|---|---|---|---|"]
        for name, row in table.items():
            spread = f"{row['ms']:.2f} ({row['low_ms']:.2f} … {row['high_ms']:.2f})"
            lines.append(f"| {name} | {spread} | {row['best_ms']:.2f} | {row['ratio']:.2f} |")
        lines.append("")
    lines.append(f"Message: {result['bytes_per_element']:.2f} bytes an element (bar {BYTES_BAR}).")
    lines += [""] + [
        f"* {name}: {ratio:.2f} (bar {BARS[name.partition(' ')[0]]})" for name, ratio in result["ratios"].items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, help="folder for gradient-apply.json and gradient-apply.md")
    arguments = parser.parse_args()
    random.seed(0)
    tables: dict[str, dict[str, dict[str, float]]] = {}
    given, in_lines = gradients(), gradients(unit=16)
    for threads in (1, os.cpu_count() or 1):
        torch.set_num_threads(threads)
        for kind in ("sgd", "adamw"):
            tables[f"{kind}, dense on {threads} threads"] = rows(
                measure(step_ways(kind, given, in_lines), arguments.rounds)
            )
    torch.set_num_threads(1)  # a pool of threads waits for its turn on a busy machine, longer than the work takes
    tables["merge of 4 ranks"] = rows(measure(merge_ways(), 3 * arguments.rounds))
    ways, bytes_per_element = message()
    tables["message"] = rows(measure(ways, 3 * arguments.rounds))
    everywhere = f"dense on {os.cpu_count() or 1} threads"
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"torch {torch.__version__}, numba {numba.__version__}",
        "commit": commit(),
        "rounds": arguments.rounds,
        "tables": tables,
        "bytes_per_element": bytes_per_element,
        "ratios": {
            **{
                f"{kind} {name}": tables[f"{kind}, {everywhere}"][name]["ratio"]
                for kind in ("sgd", "adamw")
                for name in ("touched", "touched, in lines")
            },
            "merge": tables["merge of 4 ranks"]["merge"]["ratio"],
        },
    }
    print(report(result))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gradient-apply.json").write_text(json.dumps(result, indent=1) + "\n")
        (arguments.out / "gradient-apply.md").write_text(report(result))


if __name__ == "__main__":
    main()
