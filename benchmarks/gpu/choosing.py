"""What choosing a hundredth of a gradient on the device costs, beside `torch.topk` and beside sending all of it.

Ours is the whole of it: the residual is added, elements are chosen and rounded to bfloat16, the residual is kept, and
what was chosen is on the host. `torch.topk` only finds the places of the largest. The all-reduce is that of the same
gradient in bfloat16, over as many GPUs as there are; over one it moves nothing between devices.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gpu.machine import Machine
from gpu.ranks import on_ranks
from gpu.table import Row, interleaved, rounds, row, told
from shade.gradient import COMPRESSORS, QUANTISERS
from shade.gradient._compress.compressor import Key
from shade.gradient._compress.device_error_feedback import DeviceErrorFeedback

DENSITY = 0.01


def all_reduces(machine: Machine, sizes: list[int]) -> list[list[float]]:
    """The seconds of an all-reduce for each size, on one rank."""
    found = []
    for size in sizes:
        gradient_D = torch.ones(size, dtype=torch.bfloat16, device=machine.device)
        work: Callable[[], Any] = lambda gradient_D=gradient_D: dist.all_reduce(gradient_D)  # noqa: E731
        work()
        found.append([machine.seconds(work) for _ in range(10)])
    return found


def choosing(machine: Machine) -> list[Row]:
    """The rows of both sizes."""
    sizes, rows = machine.sized([25_000_000, 355_000_000], [250_000, 1_000_000]), []
    reduced = on_ranks(all_reduces, machine, sizes)
    for size, seconds in zip(sizes, reduced, strict=True):
        gradient_D = torch.randn(size, device=machine.device)
        feedback = DeviceErrorFeedback(size, COMPRESSORS.get("threshold-v")(), QUANTISERS.get("bf16")(), machine.device)
        wanted = int(DENSITY * size)

        def ours(feedback: Any = feedback, gradient_D: torch.Tensor = gradient_D) -> object:
            return feedback.compress(gradient_D, DENSITY, Key(0, 0, 0))

        def top(wanted: int = wanted, gradient_D: torch.Tensor = gradient_D) -> object:
            return torch.topk(gradient_D.abs(), wanted, sorted=False).indices

        found = interleaved(
            {"ours": lambda ours=ours: machine.seconds(ours), "topk": lambda top=top: machine.seconds(top)},
            rounds(6, machine.sized(5.0, 0.5)),
        )
        what = f"choosing 1 % of {size / 1e6:,.3g} M elements"
        link = f"bfloat16 all-reduce, {machine.backend}, ranks: {machine.num_ranks}"
        ratio = statistics.median(found["ours"]) / statistics.median(seconds)
        rows += [
            row(what, found["ours"], "torch.topk", found["topk"], 0.2),
            Row(what, told(found["ours"]), link, told(seconds), ratio),
        ]
    return rows
