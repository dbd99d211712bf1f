"""Chooses a strategy and an interval: the most training kept, within a budget for what saving adds.

Every strategy gets its own best interval, the exact optimum of `interval`, and no shorter one than its budget and its
landing allow: C ≤ budget · f · t, and a save has landed before the next one needs its place. Then the strategies are
compared by what each keeps of a run's time. A budget of 2 % with a failure a day is often not used up: saving more
often than is best costs more than it brings. Invariant: a choice never plans to be over the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shade.checkpoint._pacing.schedule import MTBF_SECONDS
from shade.checkpoint.autopilot.interval import best_cycle, goodput
from shade.checkpoint.autopilot.predict import Prediction
from shade.errors import ConfigError

MOST_STEPS: Final = 10**9
"""Between two saves; where nothing fails, the best is never."""


@dataclass(frozen=True)
class Choice:
    """A strategy, how often, and what is expected of it."""

    strategy: str
    every_steps: int
    prediction: Prediction
    overhead: float
    """What saving adds, as a share of the training without."""
    goodput: float
    """Share of all time that ends up as training, failures included."""

    def __str__(self) -> str:
        return (
            f"{self.strategy} every {self.every_steps} steps: stall {self.prediction.stall_seconds:.3f} s, "
            f"overhead {100 * self.overhead:.2f} %, kept {100 * self.goodput:.2f} % of the time"
        )


def interval_steps(prediction: Prediction, step_seconds: float, budget: float, mtbf_seconds: float) -> int:
    """Steps between two saves of a strategy.

    Args:
        prediction: Of its saves.
        step_seconds: Of a step without a save.
        budget: Share of the training that saving may add; > 0.
        mtbf_seconds: Mean time between failures; infinity: they do not happen.

    Returns:
        At least 1.
    """
    cost = prediction.cost_seconds
    wanted = min(best_cycle(cost, mtbf_seconds) - cost, MOST_STEPS * step_seconds)
    allowed = cost / budget
    possible = prediction.landed_seconds / prediction.in_flight - cost
    steps = max(wanted, possible) / step_seconds
    return max(1, round(steps), math.ceil(allowed / step_seconds - 1e-9))


def judge(strategy: str, prediction: Prediction, every_steps: int, step_seconds: float, mtbf_seconds: float) -> Choice:
    """What is to be expected of a strategy at an interval.

    Args:
        strategy: Its name.
        prediction: Of its saves; predicted or measured.
        every_steps: The interval.
        step_seconds: Of a step without a save.
        mtbf_seconds: Mean time between failures.

    Returns:
        The choice that this would be.
    """
    work, cost = every_steps * step_seconds, prediction.cost_seconds
    kept = goodput(
        work,
        cost,
        mtbf_seconds,
        lag_seconds=prediction.landed_seconds - cost,
        recover_seconds=prediction.recover_seconds,
    )
    return Choice(strategy, every_steps, prediction, cost / work, kept)


def ranked(
    predictions: Mapping[str, Prediction],
    step_seconds: float,
    *,
    budget: float,
    mtbf_seconds: float = MTBF_SECONDS,
) -> list[Choice]:
    """All strategies, each at its best interval, the best first; of two alike the one that stalls less.

    Args:
        predictions: By strategy.
        step_seconds: Of a step without a save.
        budget: Share of the training that saving may add.
        mtbf_seconds: Mean time between failures.

    Returns:
        As many as there are predictions.

    Raises:
        ConfigError: No predictions, or a budget or a time that cannot be.
    """
    if not predictions or not budget > 0 or not mtbf_seconds > 0 or not step_seconds > 0:
        got = (
            f"{len(predictions)} strategies, budget {budget}, {mtbf_seconds} s between failures, step {step_seconds} s"
        )
        raise ConfigError.of("strategies, a budget > 0 and times > 0", got, "give the budget as a share: 0.02 for 2 %")
    choices = []
    for name, prediction in predictions.items():
        steps = interval_steps(prediction, step_seconds, budget, mtbf_seconds)
        choices.append(judge(name, prediction, steps, step_seconds, mtbf_seconds))
    return sorted(choices, key=lambda choice: (-choice.goodput, choice.prediction.stall_seconds, choice.strategy))
