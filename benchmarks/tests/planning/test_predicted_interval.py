"""The interval is the best there is, never plans to exceed the budget, and leaves each save its buffer."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from goodput import goodput
from predict import Prediction, interval_steps

SAVE = Prediction(0.5, 0.5, 1.0, None, 3.0, 0.5, None, 4.0, 1)


def share_kept(save: Prediction, steps: int, step: float, mtbf: float) -> float:
    cost = save.cost_seconds
    lag = save.safe_seconds - cost
    return goodput(steps * step, cost, mtbf, lag_seconds=lag, recover_seconds=save.recover_seconds)


def test_the_interval_is_youngs_where_the_budget_allows_it() -> None:
    steps = interval_steps(SAVE, 0.5, 0.10, 86400.0)
    assert steps * 0.5 == pytest.approx(math.sqrt(2 * 1.0 * 86400), rel=0.01)


def test_a_tight_budget_is_kept() -> None:
    steps = interval_steps(SAVE, 0.5, 0.001, 86400.0)
    assert steps == 2000
    assert SAVE.cost_seconds <= 0.001 * steps * 0.5


def test_no_save_begins_before_the_last_is_safe() -> None:
    slow = dataclasses.replace(SAVE, durable_seconds=5000.0)
    assert interval_steps(slow, 0.5, 0.5, 86400.0) * 0.5 >= 5000.0 - 1.0
    twice = dataclasses.replace(slow, in_flight=2)
    assert interval_steps(twice, 0.5, 0.5, 86400.0) * 0.5 == pytest.approx(2500.0 - 1.0, abs=0.5)


def test_every_interval_is_the_best_within_the_budget() -> None:
    rng = random.Random(2)
    for _ in range(800):
        save = dataclasses.replace(
            SAVE, stall_seconds=rng.uniform(0, 3), drag_seconds=rng.uniform(0, 3), durable_seconds=rng.uniform(6, 60)
        )
        step, budget, mtbf = rng.uniform(0.05, 4), rng.uniform(0.002, 0.2), 10 ** rng.uniform(2.5, 6)
        best = interval_steps(save, step, budget, mtbf)
        assert save.cost_seconds <= budget * best * step + 1e-9
        for factor in (0.7, 1.4):  # no other interval is better by more than rounding to whole steps
            steps = max(1, round(best * factor))
            landed = steps * step + save.cost_seconds >= save.safe_seconds
            if save.cost_seconds <= budget * steps * step and landed:
                assert share_kept(save, steps, step, mtbf) <= share_kept(save, best, step, mtbf) + 1e-3
