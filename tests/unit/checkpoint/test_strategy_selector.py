"""The selector believes measurements, tries promising candidates, and settles on the best."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._strategies import STRATEGIES
from shade.checkpoint._strategies.auto import AUTO, TRIALS, StrategySelector, candidates
from shade.checkpoint._strategies.base import StrategyConfig
from shade.checkpoint._strategies.measure import Costs, MemoryRates, costs_of

STEP = 0.5
COSTS = Costs(
    state_bytes=10**9,
    step_seconds=STEP,
    pass_seconds=0.45,
    copy_rate=4e9,
    burst_rate=8e9,
    hash_rate=20e9,
    copy_drag=0.3,
    work_drag=0.3,
    write_rate=1e9,
)
CONFIGS = {
    "overlap": StrategyConfig(),
    "copy": StrategyConfig(save_waits_for="copied"),
    "streamed": StrategyConfig(streams=True),
}


def selector() -> StrategySelector:
    return StrategySelector(CONFIGS, "overlap", budget=0.05, mtbf_seconds=3600.0)


def pace(cost: float, *, blocked: float = 0.01, landed: float = 1.2) -> Pace:
    return Pace(step_seconds=STEP, cost_seconds=cost, save_seconds=landed, blocked_seconds=blocked)


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


def test_without_measurements_the_first_strategy_stays() -> None:
    made = selector()
    assert made.decide() == "overlap"
    assert made.choices() == []
    assert made.report() == ""


def test_finds_the_best_despite_wrong_predictions() -> None:
    for best in CONFIGS:
        made = selector()
        made.learn(COSTS)
        true_costs = dict.fromkeys(CONFIGS, 0.4) | {best: 0.2}
        strategies = save_all(made, true_costs, 30)
        assert set(strategies[-15:]) == {best}
        assert max(strategies.count(name) for name in CONFIGS if name != best) <= 2 * TRIALS


def test_a_prediction_of_no_cost_is_corrected_by_other_measurements() -> None:
    """The save that rates are learned from has happened to cost nothing, so all that do not wait seem free."""
    made = selector()
    made.learn(replace(COSTS, copy_drag=0.0, work_drag=0.0))
    assert made.cost_seconds("streamed") == made.cost_seconds("overlap") == 0.0
    made.record("overlap", pace(0.3))
    assert made.cost_seconds("streamed") == pytest.approx(0.3)
    assert made.cost_seconds("copy") == pytest.approx(0.3)
    made.record("copy", pace(0.5))  # predicted not to be free, so there is a factor; it is none of the free ones'
    assert made.cost_seconds("streamed") == pytest.approx(0.4)
    for best in CONFIGS:
        made = selector()
        made.learn(replace(COSTS, copy_drag=0.0, work_drag=0.0))
        strategies = save_all(made, dict.fromkeys(CONFIGS, 0.4) | {best: 0.2}, 30)
        assert set(strategies[-15:]) == {best}


def test_a_trial_ends_before_its_measurements_arrive() -> None:
    """A choice holds two saves later, and the first save of each in a row is not measured."""
    made, under_way, strategies = selector(), ["overlap", "overlap"], []
    made.learn(COSTS)
    for _ in range(24):
        strategies.append(under_way.pop(0))
        if len(strategies) > 1 and strategies[-2] == strategies[-1]:
            made.record(strategies[-1], pace(0.3))
        under_way.append(made.decide())
    turns = [len(list(turn)) for _, turn in itertools.groupby(strategies)]
    assert turns[1:-1] == [TRIALS + 1] * (len(turns) - 2)
    assert len(turns) >= len(CONFIGS)


def test_the_mean_pace_needs_several_saves() -> None:
    made = selector()
    for cost in (-0.1, 0.5, 0.5):
        assert made.mean_pace("overlap") == Pace()
        made.record("overlap", pace(cost))
    assert made.mean_pace("overlap").cost_seconds == pytest.approx(0.3)
    made.record("copy", pace(-0.4, blocked=0.1))
    for _ in range(TRIALS):
        made.record("copy", pace(-0.4, blocked=0.1))
    assert made.mean_pace("copy").cost_seconds == pytest.approx(0.1), "a cost is at least the wait"


def test_a_near_prediction_gets_its_trials() -> None:
    """The saves that rates are learned from were dear, so all like them are predicted to be: half as much again as the
    one that was found to be cheaper."""
    made = selector()
    made.learn(replace(COSTS, copy_drag=0.6, work_drag=0.6))
    for _ in range(TRIALS):
        made.record("overlap", pace(0.9))
        made.record("copy", pace(0.6, blocked=0.12))
    untried = made.cost_seconds("streamed") or 0.0
    assert untried > 1.25 * 0.6
    strategies = save_all(made, {"overlap": 0.9, "copy": 0.6, "streamed": 0.3}, 20)
    assert strategies.count("overlap") <= 1, "what was measured needs no trial"
    assert set(strategies[-10:]) == {"streamed"}


def test_noise_costs_little() -> None:
    for seed in range(20):
        made = selector()
        made.learn(COSTS)
        true_costs = {"overlap": 0.3, "copy": 0.36, "streamed": 0.24}
        strategies = save_all(made, true_costs, 60, noise=0.3, seed=seed)
        assert sum(true_costs[name] for name in strategies[-20:]) / 20 <= 1.15 * 0.24


PARTS = {"overlap": (0.01, 0.20), "copy": (0.07, 0.10), "streamed": (0.10, 0.02)}
"""Seconds that a save waits and works; a second's work costs a second and a half."""


def selector_with_parts(
    noise: float, seed: int, factors: dict[str, float], *, are_known: bool = True
) -> StrategySelector:
    """A selector after 20 saves, whose steps are longer by what their parts cost, times a factor, and by chance."""
    made, rng = selector(), random.Random(seed)
    made.learn(COSTS)
    for _ in range(20):
        waited, worked = PARTS[made.chosen]
        cost = factors.get(made.chosen, 1.0) * (waited + 1.5 * worked)
        known = worked if are_known else 0.0
        made.record(made.chosen, replace(pace(rng.gauss(cost, noise), blocked=waited), worked_seconds=known))
        made.decide()
    return made


def test_with_noisy_steps_the_parts_decide() -> None:
    """0.13, 0.22 and 0.31 s a save; a single one is measured to 0.2."""
    num_right = [
        sum(
            selector_with_parts(0.2, seed, {}, are_known=known).choices()[0].strategy == "streamed"
            for seed in range(100)
        )
        for known in (True, False)
    ]
    assert num_right[0] >= 97
    assert num_right[0] > num_right[1] + 10, "by their steps alone they are mistaken for each other"
    held = [selector_with_parts(0.2, seed, {}).cost_seconds("streamed") for seed in range(100)]
    assert sum(abs(each - 0.13) < 0.03 for each in held if each is not None) >= 90


def test_with_many_saves_the_steps_decide() -> None:
    """One that gets in the way costs three times its parts: found out where steps tell."""
    for seed in range(20):
        made = selector_with_parts(0.02, seed, {"streamed": 3.0})
        assert made.choices()[0].strategy == "copy"
        assert (made.cost_seconds("streamed") or 0.0) > 0.22, "that is what copy costs"


def test_background_work_without_drag_is_free() -> None:
    """Where cores are left over nothing is lost but what is waited for."""
    made = selector()
    made.learn(COSTS)
    for name, (waited, worked) in PARTS.items():
        for sign in (-1, 1, -1, 1):
            made.record(name, replace(pace(waited + 0.01 * sign, blocked=waited), worked_seconds=worked))
    assert [each.strategy for each in made.choices()] == ["overlap", "copy", "streamed"]
    assert made.cost_seconds("overlap") == pytest.approx(0.01, abs=0.003)


def test_the_choice_follows_changes() -> None:
    made = selector()
    made.learn(COSTS)
    save_all(made, {"overlap": 0.2, "copy": 0.5, "streamed": 0.3}, 20)
    assert made.chosen == "overlap"
    strategies = save_all(made, {"overlap": 0.9, "copy": 0.5, "streamed": 0.3}, 30)
    assert strategies[-1] == "streamed"


def test_untried_candidates_are_corrected_by_the_tried_ones() -> None:
    made = selector()
    made.learn(COSTS)
    before = {each.strategy: each.prediction.cost_seconds for each in made.choices()}
    for _ in range(TRIALS):
        made.record("overlap", pace(3 * before["overlap"]))
    after = {each.strategy: each.prediction.cost_seconds for each in made.choices()}
    assert after["overlap"] == pytest.approx(3 * before["overlap"])
    assert after["copy"] == pytest.approx(3 * before["copy"])


def test_an_unmeasured_save_is_ignored() -> None:
    made = selector()
    made.learn(COSTS)
    made.record("copy", Pace())
    assert "measured" not in made.report()


def test_the_report_shows_predictions_and_measurements() -> None:
    made = selector()
    made.learn(COSTS)
    save_all(made, {"overlap": 0.2, "copy": 0.5, "streamed": 0.3}, 20)
    lines = made.report().splitlines()
    assert len(lines) == len(CONFIGS)
    assert lines[0].startswith("> overlap")
    assert "predicted: stall" in lines[0]
    assert "measured 10 times: stall 0.010 s, cost 0.200 s, safe in 1.20 s" in lines[0]


def test_a_candidate_whose_codec_was_not_measured_is_dropped() -> None:
    made = StrategySelector(
        CONFIGS | {"packed": StrategyConfig(codec="zstd")}, "overlap", budget=0.05, mtbf_seconds=3600.0
    )
    made.learn(COSTS)
    assert set(made.predicted) == set(CONFIGS)


def test_candidates_are_the_exact_registered_strategies() -> None:
    found = candidates()
    assert {"copy", "overlap", "asymmetric"} <= set(found)
    assert AUTO not in found
    assert not {"asymmetric-naive", "asymmetric-S", "asymmetric-S+O"} & set(found), "who would train with an ablation?"
    assert set(found) < set(STRATEGIES)


def test_costs_from_a_save_predict_the_same_save() -> None:
    from shade.checkpoint._strategies.predict import predict

    rates = MemoryRates(copy=4e9, burst=8e9, hashing=20e9)
    costs = costs_of(10**9, rates, 0.45, pace(0.35, blocked=0.05, landed=1.3))
    again = predict(costs, StrategyConfig())
    assert again.safe_seconds == pytest.approx(1.3, rel=0.1)
    assert again.cost_seconds == pytest.approx(0.35, rel=0.25)
