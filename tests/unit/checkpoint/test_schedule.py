"""When a save falls due: steps, seconds, shares; the same on ranks whose clocks differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shade.checkpoint._pacing.schedule import DRIFT_STEPS, WARM_UP_STEPS, Pace, PaceMeter, Schedule
from shade.errors import ConfigError


def due(schedule: Schedule, num_steps: int, pace: Pace) -> list[int]:
    """The steps after which a save is taken; each comes with the pace of the one before."""
    found, known = [], Pace()
    for step in range(1, num_steps + 1):
        if schedule.is_due(step):
            schedule.saved(step, known)
            found.append(step)
            known = pace
    return found


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (50, [50, 100, 150]),
        ("50", [50, 100, 150]),
        (" 50 steps ", [50, 100, 150]),
        ("1 step", list(range(1, 161))),
        ("never", []),
        ("30s", [10, 20, 80, 140]),  # half a second a step: 60 steps, once that is known
        ("0.5m", [10, 20, 80, 140]),
        ("2%", [10, 20, 45, 70, 95, 120, 145]),  # 0.25 s a save: 25 steps of 0.5 s
    ],
)
def test_what_a_schedule_means(every: str | int, steps: list[int]) -> None:
    assert due(Schedule(every), 160, Pace(step_seconds=0.5, cost_seconds=0.25)) == steps


@pytest.mark.parametrize("every", ["", "0", "-1", "1.5", "5 minutes", "s", "10x", "0%", "nan", "every 5", 0])
def test_what_is_no_schedule(every: str | int) -> None:
    with pytest.raises(ConfigError, match="use 50, '30s', '5m', '2%' or 'never'"):
        Schedule(every)


def test_an_interval_is_at_least_a_step() -> None:
    assert due(Schedule("1s"), 23, Pace(step_seconds=60.0)) == [10, 20, 21, 22, 23]


class Clock:
    """Shows what it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def late(schedules: Sequence[Schedule], clock: Clock, step_seconds: float, first: int, last: int) -> list[list[int]]:
    """The steps at which each rank's save is due, where steps have become slower."""
    found: list[list[int]] = [[] for _ in schedules]
    for step in range(first, last):
        clock.now += step_seconds
        for steps, schedule in zip(found, schedules, strict=True):
            schedule.look(step)
            if schedule.is_due(step):
                steps.append(step)
                schedule.saved(step, Pace(step_seconds=0.001))
    return found


def test_a_time_is_kept_where_steps_become_slower() -> None:
    clock = Clock()
    schedule = Schedule("30s", clock=clock)
    schedule.saved(0, Pace(step_seconds=0.001))
    assert late([schedule], clock, 10.0, 1, 10) == [[3, 6, 9]]
    for every in (50, "2%", "never"):
        other = Schedule(every, clock=clock)
        other.saved(0, Pace(step_seconds=0.001, cost_seconds=10.0))
        assert late([other], clock, 1e6, 1, 40) == [[]]


def test_ranks_save_at_the_step_that_rank_0_announces() -> None:
    clock, written = Clock(), {}

    class Wall:
        def write(self, name: str, content: Any) -> None:
            written[name] = content

        def read(self, name: str) -> Any:
            return written.get(name)

    ranks = [Schedule("30s", board=Wall(), rank=rank, clock=clock) for rank in (1, 0)]
    for schedule in ranks:
        schedule.saved(0, Pace(step_seconds=0.001))
    first, second = late(ranks, clock, 10.0, 1, 26)
    assert first == second == [3 + DRIFT_STEPS, 3 + DRIFT_STEPS + 3 + DRIFT_STEPS]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_board_that_is_gone_brings_no_save_forward(rank: int) -> None:
    class Gone:
        def write(self, name: str, content: Any) -> None:
            raise RuntimeError("connection reset by peer")

        def read(self, name: str) -> Any:
            raise RuntimeError("connection reset by peer")

    clock = Clock()
    schedule = Schedule("30s", board=Gone(), rank=rank, clock=clock)
    schedule.saved(0, Pace(step_seconds=0.001))
    assert late([schedule], clock, 60.0, 1, 5) == [[]]


def test_a_save_out_of_turn_counts_anew() -> None:
    schedule = Schedule(10)
    schedule.saved(7, Pace())
    assert not schedule.is_due(16)
    assert schedule.is_due(17)


def test_an_unknown_pace_waits_for_the_warm_up() -> None:
    assert due(Schedule("1h"), 45, Pace()) == [10, 20, 30, 40]
    assert WARM_UP_STEPS == 10


def test_the_pace_is_that_of_quiet_steps_and_the_cost_what_a_save_adds() -> None:
    meter, now = PaceMeter(), 0.0
    assert meter.pace() == Pace()
    for _ in range(20):
        now += 0.1
        meter.step(now, busy=False)
    assert meter.pace().step_seconds == pytest.approx(0.1)
    assert meter.pace().cost_seconds == 0.0
    for took, busy in ((0.3, True), (0.2, True), (0.15, False)):
        now += took
        meter.step(now, busy=busy)
    assert meter.pace().step_seconds == pytest.approx(0.1), "a step with a save in it is none to go by"
    assert meter.pace().cost_seconds == pytest.approx(0.2 + 0.1 + 0.05)


def test_what_a_save_costs_has_a_sign_so_that_the_mean_of_several_is_right() -> None:
    meter = PaceMeter()
    for now, busy in ((1.0, False), (2.0, False), (2.5, True), (3.0, False)):
        meter.step(now, busy=busy)
    assert meter.pace().cost_seconds == pytest.approx(-1.0)
    schedule = Schedule("2%")
    schedule.saved(10, meter.pace())
    assert schedule.is_due(20), "what cost less than nothing says no more of the interval than what was not measured"
    assert not schedule.is_due(19)


def test_the_first_steps_of_a_run_are_no_measure_of_the_others() -> None:
    """GPT-2's first took twice as long: by a mean that forgot them slowly, the next saves cost less than nothing."""
    meter, now = PaceMeter(), 0.0
    for took in (1.0, 0.4, 0.3, *[0.1] * 6):
        now += took
        meter.step(now, busy=False)
    for took, busy in ((0.3, True), (0.15, False)):
        now += took
        meter.step(now, busy=busy)
    assert meter.pace().step_seconds == pytest.approx(0.1)
    assert meter.pace().cost_seconds == pytest.approx(0.2 + 0.05)


@pytest.mark.parametrize(
    ("every", "in_flight", "pace", "interval"),
    [
        ("profiled", 1, Pace(0.5, 0.25, 4.0, 0.5), 7),  # 3.5 s that nobody waits for, 7 steps
        ("profiled", 1, Pace(0.5, 0.25, 3.9, 0.5), 7),
        ("profiled", 2, Pace(0.5, 0.25, 4.0, 0.5), 4),  # two at once: half as many, rounded up
        ("profiled", 1, Pace(0.5, 0.25, 0.3, 0.3), 1),  # all of it is waited for
        ("profiled", 4, Pace(0.5, 0.0, 0.1, 0.0), 1),
        ("profiled 5%", 1, Pace(0.5, 0.0, 4.1, 0.0), 8),  # a step may take 0.525 s
        ("profiled 5%", 1, Pace(0.5, 0.25, 1.0, 0.0), 10),  # 0.25 s are 5% of 10 steps
        ("profiled 50 %", 2, Pace(1.0, 0.6, 6.0, 0.0), 2),
    ],
)
def test_saves_as_often_as_they_fit_and_as_the_budget_allows(
    every: str, in_flight: int, pace: Pace, interval: int
) -> None:
    schedule = Schedule(every, in_flight)
    assert [step for step in range(1, 11) if schedule.is_due(step)] == [10]
    schedule.saved(10, pace)
    assert not schedule.is_due(10 + interval - 1)
    assert schedule.is_due(10 + interval)


@pytest.mark.parametrize("pace", [Pace(), Pace(0.5), Pace(0.5, 0.25), Pace(0.0, 0.0, 4.0)])
def test_what_has_not_been_measured_is_no_profile(pace: Pace) -> None:
    schedule = Schedule("profiled 5%")
    schedule.saved(10, pace)
    assert not schedule.is_due(19)
    assert schedule.is_due(20)


@pytest.mark.parametrize("every", ["profiled 0%", "profiled5%", "profiled 5", "profiled -1%", "profiled all"])
def test_what_is_no_profile_either(every: str) -> None:
    with pytest.raises(ConfigError, match="'profiled': as often as saves fit"):
        Schedule(every)


def test_a_save_that_landed_before_its_step_ended_is_charged_to_it() -> None:
    meter, now = PaceMeter(), 0.0
    for took in (0.1, 0.1, 0.1):
        now += took
        meter.step(now, busy=False)
    meter.begun()
    now += 0.6
    meter.step(now, busy=False)
    assert meter.pace().step_seconds == pytest.approx(0.1)
    assert meter.pace().cost_seconds == pytest.approx(0.5)


def test_saves_that_follow_each_other_are_charged_from_beginning_to_beginning() -> None:
    meter, now = PaceMeter(), 0.0
    for took in (0.1, 0.1):
        now += took
        meter.step(now, busy=False)
    for _ in range(3):
        meter.begun()
        for took in (0.15, 0.12):
            now += took
            meter.step(now, busy=True)
    meter.begun()
    assert meter.pace().cost_seconds == pytest.approx(0.05 + 0.02)
    assert meter.pace(2.0, 0.5) == Pace(meter.pace().step_seconds, meter.pace().cost_seconds, 2.0, 0.5)
