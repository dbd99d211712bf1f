"""The last steps of every rank, in bounded memory, and what they come to: medians, shares, a page for Prometheus.

Medians of the last `NUM_STEPS` and not means: one step that met an evaluation or a checkpoint is not what the rank is
like. Totals since the beginning are kept besides, as Prometheus wants counters.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import asdict
from typing import Any, Final

from shade.types import Clock, Decision, StepReport

NUM_STEPS: Final = 64
"""Of each rank."""
MOST_RANKS: Final = 4096
"""Whoever sends more is not a training."""
COUNTERS: Final = {
    "samples": "Samples trained on.",
    "sent_bytes": "Bytes of compressed gradients sent.",
    "received_bytes": "Bytes of compressed gradients received.",
    "compute_seconds": "Forward and backward.",
    "compress_seconds": "Choosing, coding, decoding and merging; beside the compute.",
    "exchange_seconds": "In collectives; beside the compute where they are hidden.",
    "wait_seconds": "The training stood still for the exchange: what a better link would save.",
}
"""Totals of each rank, and how to read them."""
GAUGES: Final = {
    "step": "Optimizer steps done.",
    "density": "Kept fraction of the gradient in the last step.",
    "gradient_norm": "Of the last merged gradient.",
    "silent_seconds": "Since this rank was last heard of. Grows when it is dead, or its reports are dropped.",
}
"""Of each rank now, and how to read them."""
_SECONDS: Final = ("compute_seconds", "compress_seconds", "exchange_seconds", "wait_seconds")


class _Rank:
    def __init__(self) -> None:
        self.recent: deque[StepReport] = deque(maxlen=NUM_STEPS)
        self.totals: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.heard_at = 0.0


class History:
    """What the ranks have told.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ranks: dict[int, _Rank] = {}
        self._decision: Decision | None = None
        self._num_decisions = 0

    def add(self, report: StepReport) -> bool:
        """Takes in a report.

        Args:
            report: Of whatever rank and step.

        Returns:
            False if it was known (the sender did not hear that it had arrived) or is of a rank too many.
        """
        if report.rank not in self._ranks and len(self._ranks) >= MOST_RANKS:
            return False
        rank = self._ranks.setdefault(report.rank, _Rank())
        rank.heard_at = self._clock()
        if report in rank.recent:
            return False
        rank.recent.append(report)
        added = (report.num_samples, report.bytes_sent, report.bytes_received)
        for name, value in zip(COUNTERS, (*added, *(getattr(report, name) for name in _SECONDS)), strict=True):
            rank.totals[name] += value
        return True

    def decided(self, decision: Decision) -> None:
        """Takes in what was decided last."""
        self._decision = decision
        self._num_decisions += 1

    def state(self) -> dict[str, Any]:
        """JSON-plain: ``ranks`` in order, each with medians over its last steps, and the last ``decision``."""
        return {
            "ranks": [self._summary(number, self._ranks[number]) for number in sorted(self._ranks)],
            "decision": None if self._decision is None else asdict(self._decision),
            "num_decisions": self._num_decisions,
        }

    def _summary(self, number: int, rank: _Rank) -> dict[str, Any]:
        def median(name: str) -> float:
            return float(statistics.median(getattr(report, name) for report in rank.recent))

        last = rank.recent[-1]
        seconds = {name: median(name) for name in _SECONDS}
        step_seconds = seconds["compute_seconds"] + seconds["wait_seconds"]
        return {
            "rank": number,
            "step": last.step,
            "num_samples": last.num_samples,
            "density": last.density,
            "gradient_norm": last.gradient_norm,
            "silent_seconds": max(0.0, self._clock() - rank.heard_at),
            "samples_per_second": median("num_samples") / step_seconds if step_seconds > 0 else 0.0,
            "wait_fraction": seconds["wait_seconds"] / step_seconds if step_seconds > 0 else 0.0,
            "bytes_sent": median("bytes_sent"),
            "bytes_received": median("bytes_received"),
            **seconds,
        }

    def prometheus(self) -> str:
        """The same in the Prometheus text format, by rank: ``shade_gradient_density{rank="0"} 0.01``."""
        lines: list[str] = []

        def tell(name: str, kind: str, meaning: str, values: dict[int, float]) -> None:
            lines.extend((f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"))
            lines.extend(f'{name}{{rank="{number}"}} {value!r}' for number, value in sorted(values.items()))

        for name, meaning in COUNTERS.items():
            totals = {number: rank.totals[name] for number, rank in self._ranks.items()}
            tell(f"shade_gradient_{name}_total", "counter", meaning, totals)
        summaries = {number: self._summary(number, rank) for number, rank in self._ranks.items()}
        for name, meaning in GAUGES.items():
            tell(f"shade_gradient_{name}", "gauge", meaning, {number: each[name] for number, each in summaries.items()})
        lines += [
            "# HELP shade_gradient_decisions_total Times that the controller changed density or batches.",
            "# TYPE shade_gradient_decisions_total counter",
            f"shade_gradient_decisions_total {self._num_decisions}",
        ]
        return "\n".join(lines) + "\n"
