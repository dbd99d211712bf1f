"""What density each step has: the schedule it was started with, until a decision of rank 0 takes its place.

A decision is proposed on rank 0, rides to all ranks in the counts of the coming step, and takes effect at a step that
all of them can still reach: no earlier than the first step that no rank can have begun. So all of them change over
together.

How dense to send while a training warms up: a quarter at first, then exponentially down to the final density.

Early gradients are large, change direction quickly, and are worth most when fresh; what is delayed then is delayed at
its most harmful. So the first steps send much and the link is paid for it (Deep Gradient Compression, §3.3: 25 %, 6.25
%, 1.56 % … by epoch; here smoothly, by step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from shade.errors import ConfigError
from shade.gradient._compress.compressor import check_density
from shade.types import Decision


class DensityPlan:
    """Density and batch sizes by step.

    Args:
        warm_up: Until anything else is decided.
        staleness: Steps that may be under way beside the current one.
    """

    def __init__(self, warm_up: WarmUp, staleness: int) -> None:
        self._warm_up, self._staleness = warm_up, staleness
        self._decisions: list[Decision] = []
        """By step they take effect at; the last that holds and those to come."""

    def at(self, step: int) -> Decision | None:
        """The decision in force at a step; None: none yet."""
        return next((each for each in reversed(self._decisions) if each.effective_step <= step), None)

    def density(self, step: int) -> float:
        """The density of a step."""
        decision = self.at(step)
        return self._warm_up.at(step) if decision is None else decision.density

    def adopt(self, decision: Decision, told_at: int) -> Decision:
        """Takes in what rank 0 proposed.

        Args:
            decision: As it came.
            told_at: The step whose counts carried it.

        Returns:
            It, with the step it really takes effect at.
        """
        step = max(decision.effective_step, told_at + 1 + self._staleness)
        current = self.at(told_at)
        later = [each for each in self._decisions if told_at < each.effective_step < step]
        before = [*([current] if current else []), *later]
        sizes = decision.batch_sizes or (before[-1].batch_sizes if before else ())  # empty: as they are
        adopted = Decision(decision.density, sizes, step, decision.reason)
        self._decisions = [*before, adopted]
        return adopted

    def state_dict(self) -> dict[str, Any]:
        """The decisions."""
        return {"decisions": [plain_decision(each) for each in self._decisions]}

    def load_state_dict(self, state: Mapping[str, Any], world_size: int) -> None:
        """Takes `state_dict` back.

        Args:
            state: Perhaps of a world of another size.
            world_size: Ranks now; batch sizes for as many are kept, others left out.
        """
        decisions = [read_decision(each) for each in state["decisions"]]
        self._decisions = [
            each if len(each.batch_sizes) == world_size else replace(each, batch_sizes=()) for each in decisions
        ]


def check_decision(decision: Decision, rank: int, world_size: int) -> None:
    """Whether a rank may decide this for all.

    Args:
        decision: Proposed.
        rank: That proposes it.
        world_size: Ranks that it is for.

    Raises:
        ConfigError: On another rank than 0, or one that cannot be.
    """
    if rank:
        raise ConfigError.of("a decision on rank 0", f"rank {rank}", "run the controller on rank 0 only")
    check_density(decision.density)
    if decision.batch_sizes and len(decision.batch_sizes) != world_size:
        got = len(decision.batch_sizes)
        raise ConfigError.of(f"{world_size} batch sizes, or none", got, "give one for each rank")


def plain_decision(decision: Decision) -> dict[str, Any]:
    """A decision as a state holds it."""
    return {**asdict(decision), "batch_sizes": list(decision.batch_sizes)}


def read_decision(state: Mapping[str, Any]) -> Decision:
    """The decision that `plain_decision` wrote down."""
    return Decision(**{**state, "batch_sizes": tuple(state["batch_sizes"])})


@dataclass(frozen=True)
class WarmUp:
    """A density for each step.

    Args:
        density: The final one, in (0, 1].
        num_steps: From which step on it holds; 0: from the start.
        first_density: At step 0; not used where the final one is larger.

    Raises:
        ConfigError: One of them out of its range.
    """

    density: float
    num_steps: int = 0
    first_density: float = 0.25

    def __post_init__(self) -> None:
        for name in ("density", "first_density"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError.of(f"a {name} in (0, 1]", getattr(self, name), "0.01 sends one element in a hundred")
        if self.num_steps < 0:
            raise ConfigError.of("num_steps ≥ 0", self.num_steps, "0 warms nothing up")

    def at(self, step: int) -> float:
        """The density of that step."""
        if step >= self.num_steps or self.first_density <= self.density:
            return self.density
        return self.first_density * float((self.density / self.first_density) ** (step / self.num_steps))
