"""Plans the density of each step: a warm-up schedule, until a decision of rank 0 replaces it.

A warm-up starts at a quarter and falls exponentially to the final density. Early gradients are large, change direction
quickly, and lose most by a delay, so the first steps send more (Deep Gradient Compression, §3.3: 25 %, 6.25 %, 1.56 %
… by epoch; here by step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from shade.errors import ConfigError
from shade.gradient._compress.compressor import check_density
from shade.types import Decision


class DensityPlan:
    """Density and batch sizes by step; ``staleness`` steps may be in progress beside the current one."""

    def __init__(self, warm_up: WarmUp, staleness: int) -> None:
        self._warm_up, self._staleness = warm_up, staleness
        self._decisions: list[Decision] = []
        """By effective step: the one in force, and future ones."""

    def at(self, step: int) -> Decision | None:
        """Returns the decision in force at a step, or None."""
        return next((each for each in reversed(self._decisions) if each.effective_step <= step), None)

    def density(self, step: int) -> float:
        """Returns the density of a step."""
        decision = self.at(step)
        return self._warm_up.at(step) if decision is None else decision.density

    def adopt(self, decision: Decision, told_at: int) -> Decision:
        """Adds a decision that the counts of step ``told_at`` carried; returns it with its real first step."""
        # The first step that no rank can have started, so that all ranks change at the same step.
        step = max(decision.effective_step, told_at + 1 + self._staleness)
        current = self.at(told_at)
        later = [each for each in self._decisions if told_at < each.effective_step < step]
        before = [*([current] if current else []), *later]
        sizes = decision.batch_sizes or (
            before[-1].batch_sizes if before else ()
        )  # an empty tuple changes no batch size
        adopted = Decision(decision.density, sizes, step, decision.reason)
        self._decisions = [*before, adopted]
        return adopted

    def state_dict(self) -> dict[str, Any]:
        """Returns the decisions."""
        return {"decisions": [plain_decision(each) for each in self._decisions]}

    def load_state_dict(self, state: Mapping[str, Any], world_size: int) -> None:
        """Loads decisions; drops batch sizes for another number of ranks than ``world_size``."""
        decisions = [read_decision(each) for each in state["decisions"]]
        self._decisions = [
            each if len(each.batch_sizes) == world_size else replace(each, batch_sizes=()) for each in decisions
        ]


def check_decision(decision: Decision, rank: int, world_size: int) -> None:
    """Raises `ConfigError` unless a decision comes from rank 0 and all its values are in range."""
    if rank:
        raise ConfigError.of("a decision on rank 0", f"rank {rank}", "run the controller on rank 0 only")
    check_density(decision.density)
    if decision.batch_sizes and len(decision.batch_sizes) != world_size:
        got = len(decision.batch_sizes)
        raise ConfigError.of(f"{world_size} batch sizes, or none", got, "give one for each rank")


def plain_decision(decision: Decision) -> dict[str, Any]:
    """Returns a decision in plain values, for a state."""
    return {**asdict(decision), "batch_sizes": list(decision.batch_sizes)}


def read_decision(state: Mapping[str, Any]) -> Decision:
    """Returns the decision that `plain_decision` wrote."""
    return Decision(**{**state, "batch_sizes": tuple(state["batch_sizes"])})


@dataclass(frozen=True)
class WarmUp:
    """A density for each step.

    Args:
        density: The final one, in (0, 1].
        num_steps: Its first step; 0: from the start.
        first_density: At step 0; unused if the final one is larger.

    Raises:
        ConfigError: One of them is out of range.
    """

    density: float
    num_steps: int = 0
    first_density: float = 0.25

    def __post_init__(self) -> None:
        for name in ("density", "first_density"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError.of(f"a {name} in (0, 1]", getattr(self, name), "0.01 sends one element in a hundred")
        if self.num_steps < 0:
            raise ConfigError.of("num_steps ≥ 0", self.num_steps, "0 turns the warm-up off")

    def at(self, step: int) -> float:
        """Returns the density of that step."""
        if step >= self.num_steps or self.first_density <= self.density:
            return self.density
        return self.first_density * float((self.density / self.first_density) ** (step / self.num_steps))
