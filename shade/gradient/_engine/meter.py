"""Counts what the engine does: totals of the run for a sink, and the last step's report for the controller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from shade.gradient._comm.step import GradientStep
from shade.gradient._compress.compressor import Sparse
from shade.tracking.events import EXCHANGE_STEPS, emit
from shade.types import StepReport

COUNTS: dict[str, str] = {
    "gradient_steps": "steps applied; the same on every rank",
    "gradient_skipped_steps": "steps that overflowed on some rank under a GradScaler and were left out on all",
    "gradient_failed_steps": "steps that ended in an error on all ranks: NaN, a damaged payload, a lost peer",
    "gradient_bytes_sent": "bytes this rank sent over its link, payloads of others that a ring passes on included",
    "gradient_bytes_received": "bytes this rank received over its link",
    "gradient_chosen": "elements this rank sent",
    "gradient_elements": "elements of its gradients; chosen / elements is the real density",
    "gradient_compute_seconds": "a step without waiting: applying, forward, backward, and all else the script does",
    "gradient_compress_seconds": "time for choosing, coding, decoding and merging, hidden behind the compute or not",
    "gradient_exchange_seconds": "time in collectives, waiting for slower ranks included, hidden or not",
    "gradient_wait_seconds": "time the training thread stood still for an exchange; near 0: the link is hidden",
    "gradient_generations": "times the group has formed anew, because a rank was lost, joined or left",
    "gradient_lost_ranks": "ranks that were lost, and their residuals with them",
    "gradient_caught_up_steps": "steps this rank applied late, because a rank was lost during their vote",
    "gradient_repaired_buckets": "buckets that differed after the group had formed anew; above 0: see the log",
}
"""Every counter, and how to read it; for `shade.telemetry.prometheus_text`."""


class Meter:
    """Adds up the steps of one rank; ``num_elements`` is what it compresses in a step."""

    def __init__(self, rank: int, num_elements: int) -> None:
        self.rank, self._num_elements = rank, num_elements
        self.totals: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self.latest: StepReport | None = None
        self._emitted: dict[str, float] = {}

    def count(self, name: str, amount: float = 1) -> None:
        """Adds to one total; ``name`` is one of `COUNTS` without its prefix."""
        self.totals[f"gradient_{name}"] += amount

    def add(self, work: GradientStep, outcome: str) -> None:
        """Adds a step that has ended; ``outcome`` is ``steps``, ``skipped_steps`` or ``failed_steps``."""
        costs = asdict(work.costs)
        num_chosen, latency_seconds = costs.pop("num_chosen"), costs.pop("latency_seconds")
        self.latest = StepReport(
            step=work.step,
            rank=self.rank,
            num_samples=work.num_samples,
            density=num_chosen / max(1, self._num_elements),
            gradient_norm=work.norm,
            latency_seconds=latency_seconds,
            **costs,
        )
        amounts = {outcome: 1, "chosen": num_chosen, "elements": self._num_elements, **costs}
        for name, amount in amounts.items():
            self.count(name, amount)
        if (work.step + 1) % EXCHANGE_STEPS == 0:
            since = {name: total - self._emitted.get(name, 0) for name, total in self.totals.items()}
            self._emitted = dict(self.totals)
            seconds = since["gradient_exchange_seconds"]
            emit("exchange", seconds, step=work.step, rank=self.rank, **{name[9:]: n for name, n in since.items()})


def norm_of(merged: Sequence[Sparse]) -> float:
    """Returns the norm of a merged gradient over all buckets."""
    return math.sqrt(sum(float(np.dot(each.values_K, each.values_K.astype(np.float64))) for each in merged))
