"""Reports in, decisions out: the right density and batches, at a step that all ranks reach, and not too often."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from shade.control.controller import CEILING, FLOOR, LEAD_STEPS, Controller
from shade.control.curve import power
from shade.errors import ConfigError
from shade.types import Decision, StepReport

BULK = 80e6  # bytes of an exchange with density 1
HIDDEN = (0.1 / 0.9) ** (1 / 6)  # of the compute, what the exchange beside it is to take: 0.69, with the usual curve
RIGHT = HIDDEN * 0.2 * 10e6 / BULK  # where it stays, on the link and with the compute below


def report(
    step: int, rank: int = 0, *, density: float = 0.01, bandwidth: float = 10e6, compute: float = 0.2,
    samples: int = 32, latency: float = 0.0,
) -> StepReport:  # fmt: skip
    num_bytes = int(density * BULK)
    seconds = latency + num_bytes / bandwidth
    return StepReport(
        step, rank, samples, compute, 0.01, seconds, latency, 0.0, num_bytes, num_bytes, density, gradient_norm=1.0
    )


def feed(controller: Controller, steps: range, ranks: int = 2, **facts: Any) -> list[Decision]:
    """As a training that obeys at once would."""
    made = []
    for step in steps:
        for rank in range(ranks):
            controller.observe(report(step, rank, density=controller.density, **facts))
        decision = controller.decide(step)
        if decision is not None:
            made.append(decision)
    return made


class TestDensity:
    """What the link and the compute say."""

    @pytest.mark.parametrize(("bandwidth", "compute"), [(10e6, 0.2), (2e6, 0.2), (5e6, 1.0)])
    def test_with_staleness_1_the_exchange_is_so_much_shorter_than_the_compute_that_it_seldom_jitters_beyond(
        self, bandwidth: float, compute: float
    ) -> None:
        controller = Controller(2, density=0.001)
        (decision,) = feed(controller, range(10), bandwidth=bandwidth, compute=compute)
        assert decision.density * BULK / bandwidth == pytest.approx(HIDDEN * compute, rel=0.05)
        assert decision.batch_sizes == ()

    @pytest.mark.parametrize("exponent", [0.1, 0.2, 0.5])
    def test_with_staleness_0_the_curve_says_how_much_of_the_step_the_exchange_may_be(self, exponent: float) -> None:
        controller = Controller(2, density=0.001, staleness=0, curve=power(exponent))
        (decision,) = feed(controller, range(10))
        # The greatest d^a / (compute + k d) is where k d = a / (1 - a) compute.
        assert decision.density * BULK / 10e6 == pytest.approx(exponent / (1 - exponent) * 0.2, rel=0.05)

    @pytest.mark.parametrize("exponent", [0.02, 0.1, 0.5, 0.9])
    def test_with_staleness_1_the_curve_hardly_matters(self, exponent: float) -> None:
        (decision,) = feed(Controller(2, density=0.001, curve=power(exponent)), range(10))
        # The greatest d^a / (compute^6 + (k d)^6)^(1/6) is where (k d)^6 = a / (1 - a) compute^6.
        filled = decision.density * BULK / 10e6 / 0.2
        assert filled == pytest.approx((exponent / (1 - exponent)) ** (1 / 6), rel=0.05)
        assert 0.35 < filled < 1.8

    @pytest.mark.parametrize("pause", [0.0, 60.0])
    def test_a_pause_at_one_density_does_not_speak_against_it(self, pause: float) -> None:
        controller = Controller(2, density=0.001)
        for step in range(60):
            density = 0.02 if step < 30 else 0.04
            for rank in range(2):
                compute = 0.2 + pause * (step == 40)
                controller.observe(report(step, rank, density=density, bandwidth=20e6, compute=compute))
        decision = controller.decide(60)
        assert decision is not None
        assert decision.density == pytest.approx(20e6 * 0.2 * HIDDEN / BULK, rel=0.05)

    @pytest.mark.parametrize(("bandwidth", "limit", "told"), [(1e3, FLOOR, "floor"), (1e12, CEILING, "ceiling")])
    def test_it_stays_between_floor_and_ceiling(self, bandwidth: float, limit: float, told: str) -> None:
        (decision,) = feed(Controller(2, density=0.01), range(10), bandwidth=bandwidth)
        assert decision.density == limit
        assert told in decision.reason

    @pytest.mark.parametrize("staleness", [0, 1])
    def test_a_fast_link_with_a_delay_is_not_taken_for_a_slow_one(self, staleness: int) -> None:
        # A small model on loopback: an exchange takes as long as two computes, whatever it carries.
        controller = Controller(2, density=0.01, staleness=staleness)
        feed(controller, range(60), bandwidth=20e9, compute=0.004, latency=0.008)
        assert controller.bandwidth == pytest.approx(20e9, rel=0.05)
        assert controller.density == CEILING

    def test_a_profiles_floor_is_kept(self) -> None:
        (decision,) = feed(Controller(2, density=0.05, floor=0.02), range(10), bandwidth=1e3)
        assert decision.density == 0.02
        assert feed(Controller(2, density=0.3, floor=0.2), range(10))[0].density == 0.2  # above the usual ceiling

    def test_the_reason_has_units_and_the_figures_are_right(self) -> None:
        (decision,) = feed(Controller(2, density=0.01), range(10), bandwidth=10e6, compute=0.2)
        assert decision.reason == (
            "density 1.000% → 1.710%: the slowest hop carries 10 MB/s, a step computes 0.2 s and would exchange 0.137 s"
        )

    def test_a_change_of_less_than_a_tenth_is_none(self) -> None:
        (first,) = feed(Controller(2, density=0.001), range(10))
        right = first.density
        assert feed(Controller(2, density=right * 1.09), range(50)) == []
        assert len(feed(Controller(2, density=right * 1.12), range(50))) == 1

    def test_it_waits_until_the_last_decision_is_in_effect(self) -> None:
        controller = Controller(2, density=0.001)
        (first,) = feed(controller, range(6))
        assert first.effective_step == 2 + LEAD_STEPS  # three whole steps: 0, 1, 2
        for step in range(6, 12):
            for rank in range(2):
                controller.observe(report(step, rank, density=controller.density, bandwidth=1e6))
        second = controller.decide(20)
        assert second is not None
        assert second.effective_step == 20 + LEAD_STEPS
        for step in range(12, 20):
            for rank in range(2):
                controller.observe(report(step, rank, density=controller.density, bandwidth=20e6))
        assert controller.decide(21) is None
        assert controller.decide(22) is not None

    def test_an_effective_step_is_ahead_of_what_any_rank_has_reported(self) -> None:
        controller = Controller(1, density=0.001)
        for step in range(6):
            controller.observe(report(step))
        decision = controller.decide(3)
        assert decision is not None
        assert decision.effective_step == 5 + LEAD_STEPS

    def test_early_ranks_wait_and_the_link_is_not_blamed(self) -> None:
        def told(late_seconds: float) -> float:
            controller = Controller(2, density=0.001)
            for step in range(8):
                late = report(step, 0, density=0.001, compute=0.2)
                early = report(step, 1, density=0.001, compute=0.2 - late_seconds)
                controller.observe(late)
                controller.observe(replace(early, exchange_seconds=early.exchange_seconds + late_seconds))
            assert controller.bandwidth is not None
            return controller.bandwidth

        assert told(0.15) == pytest.approx(told(0.0), rel=1e-6)

    def test_bytes_that_do_not_shrink_settle_in_a_few_decisions(self) -> None:
        fixed, controller, made = 300_000, Controller(1, density=0.05), 0
        for step in range(200):
            num_bytes = fixed + int(controller.density * BULK)
            controller.observe(
                replace(
                    report(step, density=controller.density), exchange_seconds=num_bytes / 10e6, bytes_sent=num_bytes
                )
            )
            made += controller.decide(step) is not None
        assert made <= 4
        assert (fixed + controller.density * BULK) / 10e6 == pytest.approx(HIDDEN * 0.2, rel=0.1)

    def test_the_first_step_does_not_count(self) -> None:
        controller = Controller(1, density=RIGHT)
        controller.observe(replace(report(0), exchange_seconds=500.0, compute_seconds=60.0))
        for step in range(1, 4):
            controller.observe(report(step, density=RIGHT))
            assert controller.decide(step) is None

    def test_one_rank_alone_exchanges_nothing(self) -> None:
        controller = Controller(1, density=0.01)
        for step in range(20):
            controller.observe(replace(report(step), bytes_sent=0, bytes_received=0, exchange_seconds=0.0))
            assert controller.decide(step) is None


class TestBatches:
    """All ranks end together."""

    def test_samples_go_where_they_are_computed_fastest(self) -> None:
        controller = Controller(2, density=RIGHT, batch_sizes=(32, 32))
        sizes, made = (32, 32), []
        for step in range(30):
            for rank, each in enumerate((0.2 / 32, 0.6 / 32)):
                controller.observe(report(step, rank, samples=sizes[rank], compute=each * sizes[rank], density=RIGHT))
            decision = controller.decide(step)
            if decision is not None:
                made.append(decision)
                sizes = decision.batch_sizes or sizes
        assert sizes == (48, 16)
        assert len([each for each in made if "batches" in each.reason]) == 1
        assert {each.batch_sizes for each in made} == {(48, 16)}  # told again with a new density
        assert "batches 32, 32 → 48, 16: rank 1 takes 3.00 times as long for a sample as rank 0" in made[0].reason

    def test_the_density_fits_the_new_batches(self) -> None:
        controller = Controller(2, density=0.01, batch_sizes=(32, 32))
        for step in range(5):
            controller.observe(report(step, 0, compute=0.2))
            controller.observe(report(step, 1, compute=0.6))
        decision = controller.decide(4)
        assert decision is not None
        assert decision.batch_sizes == (48, 16)
        assert decision.density * BULK / 10e6 == pytest.approx(HIDDEN * 0.3, rel=0.05)  # not of 0.6

    def test_a_gain_of_less_than_a_tenth_is_not_worth_it(self) -> None:
        controller = Controller(2, density=RIGHT, batch_sizes=(32, 32))
        for step in range(20):
            controller.observe(report(step, 0, compute=0.2, density=RIGHT))
            controller.observe(report(step, 1, compute=0.176, density=RIGHT))
            assert controller.decide(step) is None

    def test_what_a_step_costs_whatever_its_batch_does_not_keep_it_from_equal_times(self) -> None:
        controller, sizes, made = Controller(2, density=RIGHT, batch_sizes=(32, 32)), (32, 32), 0
        for step in range(200):
            times = (0.1 + 0.002 * sizes[0], 0.1 + 0.006 * sizes[1])
            for rank, (size, seconds) in enumerate(zip(sizes, times, strict=True)):
                controller.observe(report(step, rank, samples=size, compute=seconds, density=controller.density))
            decision = controller.decide(step)
            if decision is not None:
                made, sizes = made + 1, decision.batch_sizes
        assert sum(sizes) == 64
        assert max(times) < 1.1 * min(times)
        assert made <= 6

    def test_a_rank_keeps_a_quarter_of_its_batch_where_nobody_set_limits(self) -> None:
        controller = Controller(2, density=RIGHT, batch_sizes=(32, 30))
        for step in range(5):
            controller.observe(report(step, 0, compute=0.1))
            controller.observe(report(step, 1, compute=9.0, samples=30))
        decision = controller.decide(4)
        assert decision is not None
        assert decision.batch_sizes == (54, 8)

    def test_limits_hold(self) -> None:
        controller = Controller(2, density=RIGHT, batch_sizes=(32, 32), batch_limits=((1, 40), (1, 64)))
        for step in range(5):
            controller.observe(report(step, 0, compute=0.1))
            controller.observe(report(step, 1, compute=0.9))
        decision = controller.decide(4)
        assert decision is not None
        assert decision.batch_sizes == (40, 24)

    def test_without_batches_they_are_left_alone(self) -> None:
        controller = Controller(2, density=0.01)
        for step in range(5):
            controller.observe(report(step, 0, compute=0.1))
            controller.observe(report(step, 1, compute=0.9))
        decision = controller.decide(4)
        assert decision is not None
        assert decision.batch_sizes == ()


class TestReports:
    """What comes over a network is not to be trusted."""

    @pytest.mark.parametrize(
        "wrong",
        [{"exchange_seconds": float("nan")}, {"compute_seconds": -1.0}, {"density": 0.0}, {"density": float("inf")},
         {"rank": 2}, {"rank": -1}, {"bytes_sent": -5}, {"step": -1}, {"compute_seconds": float("inf")}],
    )  # fmt: skip
    def test_what_cannot_be_is_counted_and_left_out(self, wrong: dict[str, Any]) -> None:
        clean, dirty = Controller(2, density=0.01), Controller(2, density=0.01)
        for step in range(6):
            for rank in range(2):
                clean.observe(report(step, rank))
                dirty.observe(replace(report(step, rank), **wrong))
                dirty.observe(report(step, rank))
        assert dirty.num_ignored == 12
        assert dirty.decide(6) == clean.decide(6)

    def test_steps_that_a_rank_never_told_of_are_given_up(self) -> None:
        controller = Controller(2, density=0.01)
        for step in range(1000):
            controller.observe(report(step, 0))
        assert len(controller.state_dict()["open"]) <= 16
        assert controller.decide(1000) is None
        assert len(feed(controller, range(1000, 1010))) == 1

    def test_ranks_may_be_out_of_step_with_each_other(self) -> None:
        even, odd = Controller(2, density=0.001), Controller(2, density=0.001)
        for step in range(10):
            even.observe(report(step, 0))
            even.observe(report(step, 1))
            odd.observe(report(step, 0))
        for step in range(10):
            odd.observe(report(step, 1))
        assert even.decide(10) == odd.decide(10) is not None


class TestLife:
    """Resume, another world, wrong arguments."""

    def test_a_resumed_controller_decides_the_same(self) -> None:
        def bandwidth(step: int) -> float:
            return 10e6 if step < 30 else 1e6 * (1 + step % 7)

        def go(controller: Controller, steps: range) -> list[str]:
            made = []
            for step in steps:
                for rank in range(2):
                    controller.observe(report(step, rank, density=controller.density, bandwidth=bandwidth(step)))
                made.append(json.dumps(decision and asdict(decision)) if (decision := controller.decide(step)) else "")
            controller.observe(report(steps.stop, 0, density=controller.density))
            return made

        whole = Controller(2, density=0.001, batch_sizes=(4, 4))
        half = Controller(2, density=0.001, batch_sizes=(4, 4))
        expected = go(whole, range(45)) + go(whole, range(45, 90))
        found = go(half, range(45))
        resumed = Controller(2, density=0.5, batch_sizes=(4, 4))
        resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
        assert found + go(resumed, range(45, 90)) == expected
        assert len([each for each in expected if each]) >= 3
        assert resumed.state_dict() == whole.state_dict()

    def test_another_world_goes_on_with_the_density_and_measures_anew(self) -> None:
        controller = Controller(2, density=0.001, batch_sizes=(8, 8))
        feed(controller, range(10))
        density = controller.density
        controller.resize(3, (6, 5, 5))
        assert (controller.density, controller.batch_sizes, controller.bandwidth) == (density, (6, 5, 5), None)
        assert len(feed(controller, range(10, 20), ranks=3, bandwidth=1e6, samples=5)) == 1
        other = Controller(4, density=0.01)
        other.load_state_dict(controller.state_dict())
        assert (other.density, other.bandwidth) == (controller.density, None)

    @pytest.mark.parametrize(
        "wrong",
        [{"world_size": 0}, {"staleness": 2}, {"density": 0.0}, {"density": 1.5}, {"floor": 0.0}, {"floor": 2.0},
         {"batch_sizes": (8,)}, {"batch_sizes": (8, 8), "batch_limits": ((1, 4), (1, 4))}, {"batch_sizes": (-1, 8)}],
    )  # fmt: skip
    def test_wrong_arguments(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="expected"):
            Controller(**{"world_size": 2, "density": 0.01, **wrong})
