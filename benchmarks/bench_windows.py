"""Does a snapshot by `asymmetric` make a training wait for as long as its windows foretell, and no longer?

Question
    Partitions are sized by windows, so a copy that takes X seconds beside a pass of T seconds should make the training
    wait for X - T, and for nothing where T is longer. Is that so?

Method
    A model whose layers compute elsewhere: a forward takes a while, a backward twice as long, and no core is used
    meanwhile. Its state is real, and is copied and hashed for real. X is measured in the same process: saves for which
    the training stands still. Then passes of a quarter of X up to four times X, in a new random order each round.

    stall       the call of save(), and the wait before the optimizer's step. Median of the rounds, quartiles.
    foretold    b + max(0, X - b - T). b is what a save does before it copies: the state is captured, what is not steady
                is copied at once. It is the call's own length where T is longest.
    over        stall over foretold, less 1. To hold: at most 10 %.

Command
    python benchmarks/bench_windows.py --out benchmarks/results        (on an idle machine, four minutes)

Reading
    Where X is longer than T, what is over is the check at the end of the copy, which no window hides, and threads that
    wait for a mark. Figures: decision 0020.
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measures import publish

from shade import Checkpointer
from shade.checkpoint._strategies.asymmetric import Asymmetric
from shade.checkpoint._strategies.windows import PROFILED_STEPS

LAYERS = 24
LAYER_BYTES = 48 * 2**20
PASSES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Lengths, in X."""
BACKWARD_OVER_FORWARD = 2.0


class Elsewhere(torch.autograd.Function):
    """The identity, for as long as a device would compute."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Takes the layer's time."""
        context.layer = layer
        time.sleep(layer.seconds)
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Takes twice that."""
        time.sleep(BACKWARD_OVER_FORWARD * context.layer.seconds)
        return gradient, None


class Layer(torch.nn.Module):
    """A large state, and one number that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.weight = torch.nn.Parameter(torch.rand(LAYER_BYTES // 4), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """As `Elsewhere`."""
        return Elsewhere.apply(values * self.scale, self)  # type: ignore[no-untyped-call]


class Training:
    """The layers, and saves of them into shared memory."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.optimizer = torch.optim.SGD([layer.scale for layer in self.model], 1e-3)
        self.checkpointer = Checkpointer(run=f"windows-{secrets.token_hex(4)}", strategy="asymmetric", every="never")
        self.checkpointer.attach(model=self.model, optimizer=self.optimizer)
        strategy = self.checkpointer._strategy
        assert isinstance(strategy, Asymmetric)
        self.windows = strategy._windows

    def step(self, pass_seconds: float, *, save: bool = False) -> tuple[float, float]:
        """One step.

        Args:
            pass_seconds: Of forward and backward, together.
            save: Whether to save before.

        Returns:
            Seconds in the call, and before the optimizer's step.
        """
        for layer in self.model:
            layer.seconds = pass_seconds / LAYERS / (1 + BACKWARD_OVER_FORWARD)
        begun = time.perf_counter()
        if save:
            self.checkpointer.save()
        called = time.perf_counter() - begun
        self.model(torch.ones(1)).sum().backward()
        begun = time.perf_counter()
        self.checkpointer.wait_copy_complete()
        waited = time.perf_counter() - begun
        self.optimizer.step()
        self.optimizer.zero_grad()
        return called, waited

    def save(self, pass_seconds: float) -> tuple[float, float, float]:
        """A save whose windows have been profiled.

        Returns:
            What `step` does, and how long the pass took: sleeping takes longer than asked.
        """
        for _ in range(PROFILED_STEPS):
            self.step(pass_seconds)
        found = self.step(pass_seconds, save=True)
        length = sum(map(sum, self.windows.seconds()))
        self.checkpointer.wait_committed()
        return *found, length

    def standing(self) -> float:
        """X: a save for which the training stands still."""
        self.windows.cores_left = lambda: 0  # type: ignore[method-assign]
        called, waited, _ = self.save(0.0)
        self.windows.cores_left = lambda: 1  # type: ignore[method-assign]
        return called + waited


def measure(rounds: int) -> list[str]:
    """Rows of the table."""
    training = Training()
    for _ in range(3):
        training.standing()  # buffers are made, the copying compiled
    time.sleep(5)  # and pages are huge
    standing = [training.standing() for _ in range(rounds)]
    found: dict[float, list[tuple[float, float, float]]] = {share: [] for share in PASSES}
    for turn in range(rounds):
        standing.append(training.standing())
        for share in random.Random(turn).sample(PASSES, len(PASSES)):
            found[share].append(training.save(share * statistics.median(standing)))
    training.checkpointer.close()
    training.checkpointer._tiers.shared_memory.remove()
    copy = statistics.median(standing)
    before = statistics.median(called for called, _, _ in found[max(PASSES)])
    rows = [
        f"{LAYERS * LAYER_BYTES / 1e9:.2f} GB of state; X = {1000 * copy:.1f} ms, b = {1000 * before:.1f} ms; "
        f"{rounds} rounds",
        "",
        "| T over X | T | stall | quartiles | foretold | over |",
        "|---|---|---|---|---|---|",
    ]
    for share, saves in found.items():
        length = statistics.median(each for _, _, each in saves)
        stalls = [called + waited for called, waited, _ in saves]
        low, stall, high = statistics.quantiles(stalls, n=4)
        foretold = before + max(0.0, copy - before - length)
        rows.append(
            f"| {share:g} | {1000 * length:.0f} ms | {1000 * stall:.1f} ms | {1000 * low:.1f} – {1000 * high:.1f} | "
            f"{1000 * foretold:.1f} ms | {100 * (stall / foretold - 1):+.0f} % |"
        )
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for windows.md")
    given = parser.parse_args()
    publish("windows", "What a snapshot by asymmetric waits for, against its windows", measure(given.rounds), given.out)


if __name__ == "__main__":
    main()
