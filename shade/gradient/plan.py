"""What density each step has: the schedule it was started with, until a decision of rank 0 takes its place.

A decision is proposed on rank 0, rides to all ranks in the counts of the coming step, and takes effect at a step that
all of them can still reach: no earlier than the first step that no rank can have begun. So all of them change over
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from shade.errors import ConfigError
from shade.gradient.compressor import check_density
from shade.gradient.density import WarmUp
from shade.types import Decision


class Plan:
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
