"""The selector tries all candidates, believes measurements, and settles on the cheapest."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._strategies import STRATEGIES
from shade.checkpoint._strategies.auto import AUTO, DEAR, TRIALS, StrategySelector, candidates

STEP = 0.5
NAMES = ("overlap", "copy", "streamed")


def selector() -> StrategySelector:
    return StrategySelector(NAMES, "overlap")


def pace(cost: float, *, blocked: float = 0.01) -> Pace:
    return Pace(step_seconds=STEP, cost_seconds=cost, save_seconds=1.2, blocked_seconds=blocked)


def save_all(
    made: StrategySelector, true_costs: dict[str, float], num_saves: int, noise: float = 0.0, seed: int = 0
) -> list[str]:
    """Makes saves with these costs; returns their strategies."""
    rng, strategies = random.Random(seed), []
    for _ in range(num_saves):
        name = made.chosen
        strategies.append(name)
        made.record(name, pace(true_costs[name] * (1 + rng.uniform(-noise, noise))))
        made.decide()
    return strategies


def cost_of(made: StrategySelector, name: str) -> float:
    cost = made.cost_seconds(name)
    assert cost is not None
    return cost


def test_without_measurements_the_first_strategy_stays() -> None:
    made = selector()
    assert made.decide() == "overlap"
    assert made.cost_seconds("overlap") is None
    assert made.report() == ""


def test_finds_the_best_after_as_many_trials() -> None:
    for best in NAMES:
        made = selector()
        true_costs = dict.fromkeys(NAMES, 0.3) | {best: 0.2}
        strategies = save_all(made, true_costs, 30)
        assert set(strategies[3 * (TRIALS + 1) :]) == {best}
        assert all(TRIALS <= strategies.count(name) <= TRIALS + 1 for name in NAMES if name != best)


def test_a_trial_ends_before_its_measurements_arrive() -> None:
    """A choice holds two saves later, and the first save of each in a row is not measured."""
    made, under_way, strategies = selector(), ["overlap", "overlap"], []
    for _ in range(24):
        strategies.append(under_way.pop(0))
        if len(strategies) > 1 and strategies[-2] == strategies[-1]:
            made.record(strategies[-1], pace(0.3))
        under_way.append(made.decide())
    turns = [len(list(turn)) for _, turn in itertools.groupby(strategies)]
    assert turns[1:-1] == [TRIALS + 1] * (len(turns) - 2)
    assert len(turns) >= len(NAMES)


def test_a_dear_candidate_is_tried_once() -> None:
    made = selector()
    strategies = save_all(made, {"overlap": 0.2, "copy": 1.1 * DEAR * 0.2, "streamed": 0.9 * DEAR * 0.2}, 30)
    assert strategies.count("copy") == 1
    assert TRIALS <= strategies.count("streamed") <= TRIALS + 1
    assert strategies[-1] == "overlap"


def test_a_cost_is_at_least_the_wait() -> None:
    made = selector()
    for _ in range(TRIALS):
        made.record("copy", pace(-0.4, blocked=0.1))
    assert cost_of(made, "copy") == pytest.approx(0.1)


def test_noise_costs_little() -> None:
    for seed in range(20):
        made = selector()
        true_costs = {"overlap": 0.3, "copy": 0.36, "streamed": 0.24}
        strategies = save_all(made, true_costs, 60, noise=0.3, seed=seed)
        assert sum(true_costs[name] for name in strategies[-20:]) / 20 <= 1.15 * 0.24


PARTS = {"overlap": (0.01, 0.20), "copy": (0.07, 0.10), "streamed": (0.10, 0.02)}
"""Seconds that a save waits and works."""


def selector_with_parts(noise: float, seed: int, *, are_known: bool = True) -> StrategySelector:
    """A selector after 20 saves whose steps are longer by chance, by the wait, and by one and a half of the work."""
    made, rng = selector(), random.Random(seed)
    for _ in range(20):
        waited, worked = PARTS[made.chosen]
        known = worked if are_known else 0.0
        lost = rng.gauss(waited + 1.5 * worked, noise)
        made.record(made.chosen, replace(pace(lost, blocked=waited), worked_seconds=known))
        made.decide()
    return made


def test_with_noisy_steps_the_parts_decide() -> None:
    """0.13, 0.22 and 0.31 s a save; a single one is measured to 0.2."""
    num_right = [
        sum(selector_with_parts(0.2, seed, are_known=known).chosen == "streamed" for seed in range(100))
        for known in (True, False)
    ]
    assert num_right[0] >= 97
    assert num_right[0] > num_right[1] + 10, "by their steps alone they are mistaken for each other"
    held = [cost_of(selector_with_parts(0.2, seed), "streamed") for seed in range(100)]
    assert sum(abs(each - 0.13) < 0.03 for each in held) >= 90


def test_background_work_without_drag_is_free() -> None:
    """Where cores are left over nothing is lost but what is waited for."""
    made = selector()
    for _ in range(4):
        for name, (waited, worked) in PARTS.items():
            for sign in (-1, 1):
                made.record(name, replace(pace(waited + 0.01 * sign, blocked=waited), worked_seconds=worked))
    assert made.decide() == "overlap"
    assert [line.split()[0] for line in made.report().removeprefix("> ").splitlines()] == [
        "overlap",
        "copy",
        "streamed",
    ]
    assert cost_of(made, "overlap") < 0.07, "less than copy waits"


def test_the_choice_follows_changes() -> None:
    made = selector()
    save_all(made, {"overlap": 0.2, "copy": 0.35, "streamed": 0.3}, 20)
    assert made.chosen == "overlap"
    strategies = save_all(made, {"overlap": 0.9, "copy": 0.5, "streamed": 0.3}, 30)
    assert strategies[-1] == "streamed"


def test_an_unmeasured_save_is_ignored() -> None:
    made = selector()
    made.record("copy", Pace())
    assert made.report() == ""


def test_the_report_shows_the_measurements() -> None:
    made = selector()
    save_all(made, {"overlap": 0.2, "copy": 0.35, "streamed": 0.3}, 20)
    lines = made.report().splitlines()
    assert len(lines) == len(NAMES)
    assert lines[0].startswith("> overlap")
    assert "measured 10 times: waits 0.010 s, works 0.000 s, costs 0.200 s" in lines[0]


def test_candidates_are_the_exact_registered_strategies() -> None:
    found = candidates()
    assert {"copy", "overlap", "asymmetric"} <= set(found)
    assert AUTO not in found
    assert not {"asymmetric-naive", "asymmetric-S", "asymmetric-S+O"} & set(found), "who would train with an ablation?"
    assert set(found) < set(STRATEGIES)
