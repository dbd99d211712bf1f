"""A replay accounts for every second, and finds what the closed forms find."""

from __future__ import annotations

import math
import random

import pytest
from goodput import goodput
from predict import Prediction
from replay import KINDS, Failure, Habit, Kind, Outcome, PreemptionTrace, replay, replay_all

from shade.checkpoint._pacing.schedule import best_cycle


def saves(
    cost: float = 1.0,
    *,
    kept: float = 1.0,
    committed: float | None = None,
    durable: float | None = 1.0,
    recover: tuple[float, float | None, float | None] = (0.5, None, 4.0),
    in_flight: int = 1,
) -> Prediction:
    own, cluster, storage = recover
    return Prediction(cost, 0.0, kept, committed, durable, own, cluster, storage, 1, in_flight)


def played(prediction: Prediction, every: int, *failures: Failure, length: float, step: float = 1.0) -> Outcome:
    return replay(PreemptionTrace(failures, length), Habit("x", prediction, step, every))


def test_without_failures_only_saving_is_lost() -> None:
    outcome = played(saves(), 9, length=100.0)
    assert (outcome.steps, outcome.useful_seconds, outcome.saving_seconds) == (90, 90.0, 10.0)
    assert outcome.goodput == pytest.approx(0.9)


def test_a_machine_lost_goes_back_to_storage() -> None:
    # steps 1-10, a save until 11, steps 11-14, and half of step 15
    outcome = played(saves(), 10, Failure(15.5, "machine", 2.0), length=100.0)
    first_life_useful, recovery = 10.0, 4.0
    assert outcome.down_seconds == 2.0
    assert outcome.recovering_seconds == recovery
    assert outcome.total_seconds == pytest.approx(100.0)
    left = 100.0 - 15.5 - 2.0 - recovery  # 78.5: seven cycles of 11, then one step and a half
    assert outcome.steps == first_life_useful + 71
    assert left == pytest.approx(7 * 11 + 1.5)
    assert outcome.lost_seconds == pytest.approx(4.5 + 0.5)
    assert outcome.saving_seconds == pytest.approx(1.0 + 7.0)


@pytest.mark.parametrize(
    ("kind", "back", "recovery"), [("process", 20, 0.5), ("machine", 10, 2.0), ("cluster", 0, 0.0)]
)
def test_each_end_goes_back_to_what_is_left(kind: Kind, back: int, recovery: float) -> None:
    prediction = saves(0.0, kept=1.0, committed=8.0, durable=20.0, recover=(0.5, 2.0, 9.0), in_flight=2)
    outcome = played(prediction, 10, Failure(25.0, kind), length=25.0 + recovery + 3.0)
    assert outcome.recovering_seconds == pytest.approx(recovery)
    assert outcome.steps == back + 3
    assert outcome.lost_seconds == pytest.approx(25.0 - back)


def test_what_was_committed_becomes_durable_behind_a_dead_trainer() -> None:
    prediction = saves(0.0, kept=1.0, committed=2.0, durable=20.0, recover=(0.5, 2.0, 4.0), in_flight=3)
    # saved at 10, committed at 12, and durable at 30: the trainer dies at 13, all memory is lost at 31 and at 29
    late = played(prediction, 10, Failure(13.0, "machine", 17.0), Failure(31.0, "cluster"), length=31.0 + 4.0)
    early = played(prediction, 10, Failure(13.0, "machine", 15.0), Failure(29.0, "cluster"), length=29.0 + 4.0)
    assert (late.steps, early.steps) == (10, 4)


def test_shared_memory_is_worth_nothing_while_its_only_buffer_is_written_to() -> None:
    prediction = saves(0.0, kept=3.0, durable=3.0, recover=(0.5, None, 4.0))
    within = played(prediction, 10, Failure(21.0, "process"), length=30.0)
    after = played(prediction, 10, Failure(23.5, "process"), length=30.0)
    assert within.recovering_seconds == 4.0
    assert after.recovering_seconds == 0.5


def test_an_event_in_a_recovery_begins_it_again() -> None:
    outcome = played(saves(), 10, Failure(15.0, "machine"), Failure(17.0, "machine"), length=30.0)
    assert outcome.recovering_seconds == pytest.approx(2.0 + 4.0)
    assert outcome.total_seconds == pytest.approx(30.0)


def test_a_save_that_lands_late_holds_the_next_one_up() -> None:
    slow = saves(0.1, durable=30.0)
    assert Habit("x", slow, 1.0, 10).cost_seconds == pytest.approx(20.0)
    assert Habit("x", slow, 1.0, 40).cost_seconds == pytest.approx(0.1)
    assert Habit("x", saves(0.1, durable=30.0, in_flight=3), 1.0, 10).cost_seconds == pytest.approx(0.1)


def test_every_second_is_accounted_for_whatever_happens() -> None:
    rng = random.Random(5)
    for _ in range(300):
        moments = sorted(rng.uniform(0, 3000) for _ in range(rng.randrange(12)))
        failures = [Failure(each, rng.choice(KINDS), rng.choice([0.0, rng.uniform(0, 400)])) for each in moments]
        committed = rng.choice([None, rng.uniform(0, 30)])
        prediction = saves(
            rng.uniform(0, 5),
            kept=rng.uniform(0, 10),
            committed=committed,
            durable=rng.choice([None, (committed or 0.0) + rng.uniform(0, 90)]),
            recover=(rng.uniform(0, 3), rng.uniform(0, 9), rng.uniform(0, 40)),
            in_flight=rng.randrange(1, 4),
        )
        outcome = played(prediction, rng.randrange(1, 60), *failures, length=3000.0, step=rng.uniform(0.1, 7))
        assert outcome.total_seconds == pytest.approx(3000.0, abs=1e-6)
        parts = (outcome.useful_seconds, outcome.lost_seconds, outcome.saving_seconds, outcome.recovering_seconds)
        assert min(*parts, outcome.down_seconds) > -1e-6


def evenly_spread(mtbf: float, number: int) -> PreemptionTrace:
    """Lives as long as random ones are, each length as often as it is likely: what drawing for ever would come to."""
    lives = [-mtbf * math.log1p(-(place + 0.5) / number) for place in range(number)]
    random.Random(0).shuffle(lives)
    time, failures = 0.0, []
    for life in lives:
        time += life
        failures.append(Failure(time))
    return PreemptionTrace(tuple(failures), time)


@pytest.mark.parametrize(
    ("cost", "lag", "recover"), [(2.0, 0.0, 0.0), (2.0, 30.0, 0.0), (20.0, 0.0, 60.0), (0.3, 5.0, 9.0)]
)
def test_the_closed_form_is_found(cost: float, lag: float, recover: float) -> None:
    mtbf, step = 3600.0, 0.05
    trace = evenly_spread(mtbf, 5_000)
    prediction = saves(cost, kept=cost + lag, durable=cost + lag, recover=(0.0, None, recover), in_flight=99)
    for every in (400, 2000, 8000):
        outcome = replay(trace, Habit("x", prediction, step, every))
        form = goodput(every * step, cost, mtbf, lag_seconds=lag, recover_seconds=recover)
        assert outcome.goodput == pytest.approx(form, rel=0.002)


def test_the_optimum_of_young_and_daly_is_recovered() -> None:
    mtbf, cost, step = 3600.0, 2.0, 0.05
    trace = evenly_spread(mtbf, 5_000)
    best = best_cycle(cost, mtbf) - cost
    habits = [
        Habit("x", saves(cost, kept=cost, durable=cost), step, round(best * 1.04**n / step)) for n in range(-15, 16)
    ]
    found = replay_all(trace, habits)
    # near its top the curve is flat: the middle of the best few is where it is
    middle = sum(math.log(each.habit.work_seconds) for each in found[:9]) / 9
    assert math.exp(middle) == pytest.approx(best, rel=0.04)
    assert math.exp(middle) == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.04)  # Young's
    exact = replay(trace, Habit("x", saves(cost, kept=cost, durable=cost), step, round(best / step)))
    assert exact.goodput > found[0].goodput - 0.0005
