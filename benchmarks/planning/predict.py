"""Predicts what a strategy's saves cost the training, how soon they are safe, and how often they are best made.

A save copies its bytes, packs them (encodes and hashes), sends and flushes them. Strategies differ in which of these
parts the training waits for, and which only drag on it:

* A save that waits for the copy stops the training for S / burst_rate. A background copy takes S / copy_rate, stretched
  by the drag. The forward and backward pass hide as much of it as they last; the training waits for the rest, and pays
  drag for the hidden part.
* Packing and sending run in the background, unless `StrategyConfig.save_waits_for` or `step_waits_for` makes the
  training wait. A part that the training waits for has no drag.
* Streamed chunks (`StrategyConfig.streams`) take as long as the slowest part; otherwise the parts run one after the
  other. A restore reads, then hashes.

Each strategy gets its own best interval: the exact optimum of `_pacing.schedule.best_cycle`, but no shorter than its
budget and its saves in flight allow (C ≤ budget · f · t, and a save commits before the next one needs its buffer). A
budget of 2 % with a failure a day is often not used up, since more frequent saves cost more than they bring. Invariant:
an interval never plans to exceed the budget. This is arithmetic: the same rates give the same intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from measure import Costs

from shade.checkpoint._pacing.schedule import best_cycle
from shade.checkpoint._strategies.base import DurabilityLevel, StrategyConfig
from shade.errors import ConfigError

MOST_STEPS: Final = 10**9
"""Longest interval; without failures the best interval is infinite."""


@dataclass(frozen=True)
class Prediction:
    """The expected times of one strategy's saves; None: there is no such tier."""

    stall_seconds: float
    """Time that the training thread waits."""
    drag_seconds: float
    """Time by which background work lengthens the steps, in all."""
    kept_seconds: float
    """Time until shared memory holds the snapshot."""
    committed_seconds: float | None
    """Time until the cluster's memory holds it."""
    durable_seconds: float | None
    """Time until storage holds it."""
    recover_own_seconds: float
    recover_cluster_seconds: float | None
    recover_storage_seconds: float | None
    stored_bytes: int
    """Bytes that leave this rank."""
    in_flight: int = 1

    @property
    def cost_seconds(self) -> float:
        """Time that a save adds to the training."""
        return self.stall_seconds + self.drag_seconds

    @property
    def safe_seconds(self) -> float:
        """Time until the snapshot is in the next tier, or in shared memory without one, and its buffer is free."""
        if self.committed_seconds is not None:
            return self.committed_seconds
        return self.kept_seconds if self.durable_seconds is None else self.durable_seconds

    @property
    def recover_seconds(self) -> float:
        """Time of a restore from that tier."""
        if self.recover_cluster_seconds is not None:
            return self.recover_cluster_seconds
        return self.recover_own_seconds if self.recover_storage_seconds is None else self.recover_storage_seconds


def predict(costs: Costs, config: StrategyConfig) -> Prediction:
    """Predicts the saves of a strategy with this config; raises `ConfigError` if its codec has not been measured."""
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
    is_streamed = config.streams and (config.codec == "none" or costs.send_rate is None)
    kept = copied + packed
    safe = max(copied, packed, sent) if is_streamed else kept + sent
    safe += 0.0 if first is None else costs.commit_seconds
    committed = None if costs.send_rate is None else safe
    durable = None
    if costs.write_rate is not None:
        flushed = 0.0 if committed is None else stored / costs.write_rate + costs.commit_seconds
        durable = safe + flushed
    reached: dict[DurabilityLevel, float] = {
        "begun": 0.0,
        "copied": copied,
        "committed": safe,
        "durable": safe if durable is None else durable,
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
    """Returns plain bytes a stored byte, and seconds a plain byte."""
    if name == "none":
        return 1.0, 0.0
    if name not in costs.codecs:
        raise ConfigError.of(f"codec {name!r} to be measured", sorted(costs.codecs), "measure it on this state")
    return costs.codecs[name].ratio, 1 / costs.codecs[name].encode_rate


def _stall(
    reached: dict[DurabilityLevel, float], save: DurabilityLevel, step: DurabilityLevel, at_once: float, passing: float
) -> float:
    """Returns the training's wait: within the save, and before the step, which comes a pass later."""
    in_save = max(at_once, reached[save])
    needed = max(reached[step], reached["copied"])
    return in_save + max(0.0, needed - in_save - passing)


def _recovery(costs: Costs, stored: int, rate: float | None) -> float | None:
    return None if rate is None else stored / rate + stored / costs.hash_rate


def interval_steps(prediction: Prediction, step_seconds: float, budget: float, mtbf_seconds: float) -> int:
    """Returns the best number of steps between two saves, at least 1.

    `budget` is the share of the training that saves may add, > 0. `mtbf_seconds` is infinite without failures.
    """
    cost = prediction.cost_seconds
    wanted = min(best_cycle(cost, mtbf_seconds) - cost, MOST_STEPS * step_seconds)
    allowed = cost / budget
    possible = prediction.safe_seconds / prediction.in_flight - cost
    steps = max(wanted, possible) / step_seconds
    return max(1, round(steps), math.ceil(allowed / step_seconds - 1e-9))
