"""Predicts what a save costs the training and how soon it is safe, and ranks the strategies by it.

A save has four parts: its bytes are copied, packed (encoded and hashed), sent, and flushed. What sets strategies apart
is which of them the training waits for, and which merely drag on it:

* Where saving waits for the copy, that stops the training for S / burst_rate. Otherwise it takes S / copy_rate,
  stretched by the drag, of which the forward and backward pass hide as much as they last; the rest is waited for, and
  what was hidden is paid as drag.
* Packing and sending are behind the training unless `StrategyConfig.save_waits_for` or `step_waits_for` says otherwise.
  Then what is waited for costs time, but drags on nothing.
* Chunks that leave while others are copied (`StrategyConfig.streams`) take as long as the slowest part; otherwise the
  parts follow on each other. Restoring is reading, then hashing what was read.

To compare strategies, each gets its own best interval: the exact optimum of `_pacing.schedule.best_cycle`, and
not shorter than its budget and its commit allow: C ≤ budget · f · t, and a save is committed before the next one
needs its slot. Then the strategies are ranked by what each keeps of a run's time. A budget of 2 % with a failure a day
is often not used up: saving more often than is best costs more than it brings. Invariant: a choice never plans to be
over the budget. Arithmetic only: the same rates give the same ranking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shade.checkpoint._pacing.schedule import MTBF_SECONDS, best_cycle, goodput
from shade.checkpoint._strategies.base import DurabilityLevel, StrategyConfig
from shade.checkpoint._strategies.measure import Costs
from shade.errors import ConfigError

MOST_STEPS: Final = 10**9
"""Between two saves; where nothing fails, the best is never."""


@dataclass(frozen=True)
class Prediction:
    """What one strategy's saves are expected to be like, in seconds; None: there is no such tier."""

    stall_seconds: float
    """The training thread waits."""
    drag_seconds: float
    """Steps that do not wait take so much longer, all together."""
    kept_seconds: float
    """From the moment it is taken until own memory holds it."""
    committed_seconds: float | None
    """Until the cluster's memory does."""
    durable_seconds: float | None
    """Until storage does."""
    recover_own_seconds: float
    recover_cluster_seconds: float | None
    recover_storage_seconds: float | None
    stored_bytes: int
    """That leave this rank."""
    in_flight: int = 1

    @property
    def cost_seconds(self) -> float:
        """What a save adds to the training."""
        return self.stall_seconds + self.drag_seconds

    @property
    def landed_seconds(self) -> float:
        """Until it is beyond own memory, or in it where there is nothing else: then the buffer is free."""
        if self.committed_seconds is not None:
            return self.committed_seconds
        return self.kept_seconds if self.durable_seconds is None else self.durable_seconds

    @property
    def recover_seconds(self) -> float:
        """From where it landed."""
        if self.recover_cluster_seconds is not None:
            return self.recover_cluster_seconds
        return self.recover_own_seconds if self.recover_storage_seconds is None else self.recover_storage_seconds


def predict(costs: Costs, config: StrategyConfig) -> Prediction:
    """What a strategy's saves will be like.

    Args:
        costs: Of the machine and the model.
        config: Of the strategy, as agreed.

    Returns:
        The prediction.

    Raises:
        ConfigError: Its codec has not been measured.
    """
    state = costs.state_bytes
    at_once = config.save_waits_for != "begun"
    ratio, encode = _codec(costs, config.codec)
    stored = round(state / ratio)
    copied = state / (costs.burst_rate if at_once else costs.copy_rate)
    if not at_once:
        copied *= 1 + costs.copy_drag
    packed = state * encode + stored / costs.hash_rate
    first = costs.write_rate if costs.send_rate is None else costs.send_rate
    sent = 0.0 if first is None else stored / first
    is_streamed = config.streams and config.codec == "none"
    kept = copied + packed
    landed = max(copied, packed, sent) if is_streamed else kept + sent
    landed += 0.0 if first is None else costs.commit_seconds
    committed = None if costs.send_rate is None else landed
    durable = None
    if costs.write_rate is not None:
        flushed = 0.0 if committed is None else stored / costs.write_rate + costs.commit_seconds
        durable = landed + flushed
    reached: dict[DurabilityLevel, float] = {
        "begun": 0.0,
        "copied": copied,
        "committed": landed,
        "durable": landed if durable is None else durable,
    }
    stall = _stall(
        reached, config.save_waits_for, config.step_waits_for, copied if at_once else 0.0, costs.pass_seconds
    )
    hidden_copy = 0.0 if at_once else max(0.0, min(copied, copied - stall))
    hidden_work = max(0.0, packed + sent - max(0.0, stall - copied))
    return Prediction(
        stall_seconds=stall,
        drag_seconds=costs.copy_drag * hidden_copy + costs.work_drag * hidden_work,
        kept_seconds=kept,
        committed_seconds=committed,
        durable_seconds=durable,
        recover_own_seconds=state / costs.copy_rate + state / costs.hash_rate,
        recover_cluster_seconds=_recovery(costs, stored, costs.fetch_rate or costs.send_rate),
        recover_storage_seconds=_recovery(costs, stored, costs.read_rate or costs.write_rate),
        stored_bytes=stored,
        in_flight=config.in_flight,
    )


def _codec(costs: Costs, name: str) -> tuple[float, float]:
    """Plain bytes a stored byte, and seconds a plain byte."""
    if name == "none":
        return 1.0, 0.0
    if name not in costs.codecs:
        raise ConfigError.of(f"codec {name!r} to be measured", sorted(costs.codecs), "measure it on this state")
    return costs.codecs[name].ratio, 1 / costs.codecs[name].encode_rate


def _stall(
    reached: dict[DurabilityLevel, float], save: DurabilityLevel, step: DurabilityLevel, at_once: float, passing: float
) -> float:
    """What the training waits for: within the save, and before the step, which comes a pass later."""
    in_save = max(at_once, reached[save])
    needed = max(reached[step], reached["copied"])
    return in_save + max(0.0, needed - in_save - passing)


def _recovery(costs: Costs, stored: int, rate: float | None) -> float | None:
    return None if rate is None else stored / rate + stored / costs.hash_rate


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
