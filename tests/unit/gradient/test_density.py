"""The density of each step, with and without decisions of rank 0."""

from __future__ import annotations

import pytest

from shade.gradient._engine.density import DensityPlan, WarmUp
from shade.types import Decision


def decision(density: float, step: int) -> Decision:
    return Decision(density, (), step, "a test")


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_decision_holds_from_a_step_that_all_ranks_can_still_reach(staleness: int) -> None:
    plan = DensityPlan(WarmUp(0.01), staleness)
    late = plan.adopt(decision(0.1, 3), told_at=5)
    assert late.effective_step == 6 + staleness
    assert [plan.density(step) for step in (5, 6 + staleness - 1, 6 + staleness, 100)] == [0.01, 0.01, 0.1, 0.1]
    assert plan.adopt(decision(0.2, 50), told_at=8).effective_step == 50
    assert [plan.density(step) for step in (9, 49, 50)] == [0.1, 0.1, 0.2]


def test_a_newer_decision_takes_the_place_of_those_that_have_not_begun() -> None:
    plan = DensityPlan(WarmUp(0.01, 100), 0)
    warm = plan.density(4)
    assert warm > 0.2
    plan.adopt(decision(0.1, 20), told_at=5)
    plan.adopt(decision(0.05, 10), told_at=6)
    assert plan.density(4) == warm
    assert [plan.density(step) for step in (10, 20, 30)] == [0.05] * 3


def test_what_was_decided_survives_a_state() -> None:
    plan, other = DensityPlan(WarmUp(0.01), 1), DensityPlan(WarmUp(0.01), 1)
    plan.adopt(Decision(0.1, (3, 4), 20, "a test"), told_at=5)
    plan.adopt(decision(0.2, 30), told_at=8)
    other.load_state_dict(plan.state_dict(), 2)
    assert [other.at(step) for step in (7, 20, 30)] == [plan.at(step) for step in (7, 20, 30)]
    assert other.at(25) == Decision(0.1, (3, 4), 20, "a test")
    other.load_state_dict(plan.state_dict(), 3)
    assert other.at(25) == Decision(0.1, (), 20, "a test")  # batches of two ranks say nothing to three


def test_batches_stay_as_they_are_where_a_decision_leaves_them_out() -> None:
    plan = DensityPlan(WarmUp(0.01), staleness=0)
    plan.adopt(Decision(0.1, (3, 4), 10, "a test"), told_at=5)
    plan.adopt(Decision(0.2, (), 20, "a test"), told_at=6)
    plan.adopt(Decision(0.3, (), 30, "a test"), told_at=25)
    found = [plan.at(step) for step in (20, 30)]
    assert [each.batch_sizes for each in found if each] == [(3, 4)] * 2
    assert [each.density for each in found if each] == [0.2, 0.3]
