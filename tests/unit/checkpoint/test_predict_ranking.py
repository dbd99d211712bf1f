"""The best choice has the highest goodput, and never plans to exceed its budget."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from shade.checkpoint._strategies.predict import Prediction, interval_steps, judge, ranked
from shade.errors import ConfigError

SAVE = Prediction(0.5, 0.5, 1.0, None, 3.0, 0.5, None, 4.0, 1)


def test_the_interval_is_youngs_where_the_budget_allows_it() -> None:
    steps = interval_steps(SAVE, 0.5, 0.10, 86400.0)
    assert steps * 0.5 == pytest.approx(math.sqrt(2 * 1.0 * 86400), rel=0.01)


def test_a_tight_budget_is_kept() -> None:
    steps = interval_steps(SAVE, 0.5, 0.001, 86400.0)
    assert steps == 2000
    assert judge("x", SAVE, steps, 0.5, 86400.0).overhead <= 0.001


def test_no_save_begins_before_the_last_is_safe() -> None:
    slow = dataclasses.replace(SAVE, durable_seconds=5000.0)
    assert interval_steps(slow, 0.5, 0.5, 86400.0) * 0.5 >= 5000.0 - 1.0
    twice = dataclasses.replace(slow, in_flight=2)
    assert interval_steps(twice, 0.5, 0.5, 86400.0) * 0.5 == pytest.approx(2500.0 - 1.0, abs=0.5)


def test_the_cheaper_strategy_wins_unless_it_is_safe_too_late() -> None:
    dear = dataclasses.replace(SAVE, stall_seconds=5.0)
    late = dataclasses.replace(SAVE, stall_seconds=0.0, durable_seconds=2000.0)
    assert [each.strategy for each in ranked({"dear": dear, "cheap": SAVE}, 0.5, budget=0.1)] == ["cheap", "dear"]
    assert ranked({"late": late, "soon": SAVE}, 0.5, budget=0.1)[0].strategy == "soon"


def test_every_plan_is_the_best_within_the_budget() -> None:
    rng = random.Random(2)
    for _ in range(200):
        predictions = {
            str(number): dataclasses.replace(
                SAVE,
                stall_seconds=rng.uniform(0, 3),
                drag_seconds=rng.uniform(0, 3),
                durable_seconds=rng.uniform(6, 60),
            )
            for number in range(4)
        }
        step, budget, mtbf = rng.uniform(0.05, 4), rng.uniform(0.002, 0.2), 10 ** rng.uniform(2.5, 6)
        best, *others = ranked(predictions, step, budget=budget, mtbf_seconds=mtbf)
        assert best.overhead <= budget + 1e-9
        assert all(each.goodput <= best.goodput for each in others)
        for factor in (0.7, 1.4):  # no other interval of any of them is better by more than rounding to whole steps
            steps = max(1, round(best.every_steps * factor))
            other = judge(best.strategy, best.prediction, steps, step, mtbf)
            landed = steps * step + best.prediction.cost_seconds >= best.prediction.safe_seconds
            if other.overhead <= budget and landed:
                assert other.goodput <= best.goodput + 1e-3


@pytest.mark.parametrize("wrong", [{"budget": 0.0}, {"budget": 0.1, "mtbf_seconds": 0.0}])
def test_refuses_impossible_choices(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"0\.02 for 2 %"):
        ranked({"x": SAVE}, 0.5, **wrong)
    with pytest.raises(ConfigError, match="0 strategies"):
        ranked({}, 0.5, budget=0.1)
