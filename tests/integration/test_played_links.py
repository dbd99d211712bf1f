"""Compares a controller with every fixed density on the same link: it must not lose, and not oscillate.

Objective: wall time to a given total progress (`tests.support.link_simulator`); the curve gives the
progress of a step. All runs stop at the same progress, so none is faster by being worse.
"""

from __future__ import annotations

import random
import sys
from statistics import fmean, median

import pytest

from shade.control.controller import CEILING, FLOOR, Controller
from shade.control.curve import Curve, power
from shade.errors import ConfigError
from tests.support.link_simulator import Cluster, Link, Outcome, alternating, play, random_walk

MBIT = 1e6 / 8
GRID = [FLOOR * (CEILING / FLOOR) ** (place / 7) for place in range(8)]
NUM_BYTES = 25e6 * 3.33
"""25 million parameters, and what an element comes to on the wire."""
TRACE = (115, 80, 300, 40, 150, 20, 500, 60, 220)
LINKS = {
    "constant": Link((0.0,), (100 * MBIT,)),
    "falls": Link((0.0, 90.0), (500 * MBIT, 50 * MBIT)),
    "rises": Link((0.0, 90.0), (50 * MBIT, 500 * MBIT)),
    "wanders": random_walk(1, 100 * MBIT, num_segments=200, segment_seconds=5.0),
    "is cut again and again": alternating((200 * MBIT, 2 * MBIT), (60.0, 5.0), 30),
    "trace": alternating([each * MBIT for each in TRACE], (20.0, 15.0, 30.0, 10.0, 40.0, 20.0, 10.0, 15.0, 25.0), 10),
}


TWENTY = {
    **{f"{rate} Mbit/s": Link((0.0,), (rate * MBIT,)) for rate in (20, 100, 500, 10_000)},
    "falls": LINKS["falls"],
    "falls late": Link((0.0, 200.0), (200 * MBIT, 20 * MBIT)),
    "rises": LINKS["rises"],
    "rises early": Link((0.0, 30.0), (20 * MBIT, 300 * MBIT)),
    "wanders, ± 25 % each 5 s": LINKS["wanders"],
    "another": random_walk(2, 100 * MBIT, num_segments=200, segment_seconds=5.0),
    "wanders each 2 s": random_walk(3, 50 * MBIT, num_segments=400, segment_seconds=2.0),
    "wanders each 20 s": random_walk(4, 300 * MBIT, num_segments=60, segment_seconds=20.0),
    "wanders, ± 50 % each 5 s": random_walk(5, 100 * MBIT, num_segments=300, segment_seconds=5.0, spread=0.5),
    "wanders, ± 70 % each 15 s": random_walk(6, 100 * MBIT, num_segments=100, segment_seconds=15.0, spread=0.7),
    "cut for 5 s a minute": LINKS["is cut again and again"],
    "cut for 20 s a minute": alternating((200 * MBIT, 2 * MBIT), (60.0, 20.0), 30),
    "300 and 30 Mbit/s in turns of 100 s": alternating((300 * MBIT, 30 * MBIT), (100.0, 100.0), 10),
    "20, 60, 180, 540 Mbit/s in turns of 10 s": alternating([x * MBIT for x in (20, 60, 180, 540)], (10.0,) * 4, 40),
    "the testbed's four rates, 20 s each": alternating([x * MBIT for x in (300, 40, 100, 15)], (20.0,) * 4, 20),
    "nine rates": LINKS["trace"],
}
"""Where the controller has to be within 5 % of the best fixed density."""


def cluster(staleness: int, noise: float = 0.05, latency: float = 0.0) -> Cluster:
    return Cluster((0.01, 0.01), (20, 20), NUM_BYTES, staleness, latency_seconds=latency, noise_fraction=noise)


def controlled(cluster: Cluster, link: Link, curve: Curve, goal: float, **options: object) -> Outcome:
    control = Controller(len(cluster.batch_sizes), density=0.01, staleness=cluster.staleness, **options)  # type: ignore[arg-type]
    return play(cluster, link, curve, goal, density=0.01, control=control)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", LINKS)
def test_within_a_tenth_of_the_best_fixed_density_in_hindsight_and_ahead_of_all_others(
    name: str, staleness: int
) -> None:
    curve = power()
    goal = 1000 * curve.at(0.01)
    fixed = sorted(play(cluster(staleness), LINKS[name], curve, goal, density=each).seconds for each in GRID)
    found = controlled(cluster(staleness), LINKS[name], curve, goal).seconds
    assert found <= 1.10 * fixed[0]
    assert found < fixed[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("latency", [0.0, 0.05])
def test_within_a_twentieth_of_the_best_fixed_density_on_twenty_links(staleness: int, latency: float) -> None:
    ranks, densities = cluster(staleness, latency=latency), [FLOOR * (CEILING / FLOOR) ** (at / 15) for at in range(16)]

    def compared(link: Link) -> float:
        """The controller's time over the best density's, the mean of four goals: runs may end before or after a cut."""
        ratios = []
        for goal in (steps * power().at(0.01) for steps in (600, 1000, 1500, 2000)):
            best = min(play(ranks, link, power(), goal, density=each).seconds for each in densities)
            ratios.append(controlled(ranks, link, power(), goal).seconds / best)
        return fmean(ratios)

    found = {name: compared(link) for name, link in TWENTY.items()}
    for name, ratio in found.items():
        sys.stderr.write(f"staleness {staleness}, {1000 * latency:.0f} ms: {name}: {ratio:.3f}\n")
    assert max(found.values()) <= 1.05
    assert median(ratio for name, ratio in found.items() if len(TWENTY[name].rates) > 1) < 0.98


@pytest.mark.parametrize("name", ["falls", "rises", "wanders", "trace"])
def test_also_where_compute_grows_with_density(name: str) -> None:
    """One core computes the model and compresses: what the link would carry is more than the processor bears."""
    shared = Cluster((0.01, 0.01), (20, 20), NUM_BYTES, 1, seconds_per_density=2.0, noise_fraction=0.05)
    goal = 1000 * power().at(0.01)
    fixed = sorted(play(shared, LINKS[name], power(), goal, density=each).seconds for each in GRID)
    found = controlled(shared, LINKS[name], power(), goal)
    assert found.seconds <= 1.05 * fixed[0]
    assert found.seconds < fixed[1]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("exponent", [0.05, 0.28])
def test_also_where_it_believes_in_a_wrong_curve(exponent: float, staleness: int) -> None:
    truth = power(exponent)
    goal = 1000 * truth.at(0.01)
    best = min(play(cluster(staleness), LINKS["trace"], truth, goal, density=each).seconds for each in GRID)
    assert controlled(cluster(staleness), LINKS["trace"], truth, goal).seconds <= 1.10 * best


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_on_a_constant_link_with_a_tenth_of_noise_it_does_not_dither(seed: int, staleness: int) -> None:
    control = Controller(2, density=0.01, staleness=staleness)
    noisy = cluster(staleness, noise=0.1)
    outcome = play(noisy, LINKS["constant"], power(), 1500 * power().at(0.01), density=0.01, control=control, seed=seed)
    assert outcome.num_steps > 1000
    assert 1 <= len(outcome.decisions) <= 4


def test_a_change_of_the_link_takes_a_handful_of_decisions() -> None:
    outcome = controlled(cluster(1), LINKS["falls"], power(), 1500 * power().at(0.01))
    assert 2 <= len(outcome.decisions) <= 10
    assert outcome.densities[-1] < 0.2 * max(outcome.densities)


def test_unequal_ranks_are_made_equal_once() -> None:
    unequal = Cluster((0.01, 0.03), (20, 20), NUM_BYTES, 1, noise_fraction=0.1)
    control = Controller(2, density=0.01, batch_sizes=(20, 20))
    with_batches = play(unequal, LINKS["constant"], power(), 300.0, density=0.01, control=control)
    assert {each.batch_sizes for each in with_batches.decisions} == {(30, 10)}
    assert with_batches.seconds < 0.75 * controlled(unequal, LINKS["constant"], power(), 300.0).seconds


def test_a_floor_is_kept_whatever_the_link() -> None:
    outcome = controlled(cluster(1), LINKS["falls"], power(), 300.0, floor=0.008)
    assert min(outcome.densities) >= 0.008


class TestModel:
    """That the model is what its docstring says."""

    def test_staleness_0_takes_the_sum_and_1_the_longer(self) -> None:
        link, curve = Link((0.0,), (1e6,)), power(0.0)
        for compute, exchange in ((0.2, 0.1), (0.1, 0.3)):
            make = {s: Cluster((compute,), (1,), exchange * 1e6 / 0.01, s) for s in (0, 1)}
            seconds = {s: play(make[s], link, curve, 100.0, density=0.01).seconds for s in (0, 1)}
            assert seconds[0] == pytest.approx(100 * (compute + exchange))
            assert seconds[1] == pytest.approx(100 * max(compute, exchange) + min(compute, exchange))

    def test_a_transfer_takes_what_the_link_gives_while_it_lasts(self) -> None:
        link = Link((0.0, 10.0, 20.0), (100.0, 10.0, 1000.0))
        assert link.finish(0.0, 500.0) == pytest.approx(5.0)
        assert link.finish(9.0, 100.0 + 50.0) == pytest.approx(15.0)
        assert link.finish(9.0, 100.0 + 100.0 + 500.0) == pytest.approx(20.5)
        assert link.finish(30.0, 1000.0) == pytest.approx(31.0)
        assert link.finish(10.0, 0.0) == 10.0

    def test_a_transfer_in_two_parts_ends_when_the_whole_does(self) -> None:
        link, draw = LINKS["wanders"], random.Random(0)
        for _ in range(200):
            begin, first, second = draw.uniform(0, 1100), draw.uniform(0, 1e8), draw.uniform(0, 1e8)
            whole = link.finish(begin, first + second)
            assert link.finish(link.finish(begin, first), second) == pytest.approx(whole)

    def test_a_wandering_link_is_the_same_each_time_and_within_bounds(self) -> None:
        link = random_walk(7, 1e6, num_segments=500, segment_seconds=1.0)
        assert link == random_walk(7, 1e6, num_segments=500, segment_seconds=1.0)
        assert link != random_walk(8, 1e6, num_segments=500, segment_seconds=1.0)
        assert min(link.rates) >= 1e5
        assert max(link.rates) <= 1e7
        assert len(set(link.rates)) > 400

    @pytest.mark.parametrize(
        ("starts", "rates"), [((), ()), ((1.0,), (1.0,)), ((0.0, 0.0), (1.0, 1.0)), ((0.0,), (0.0,)), ((0.0,), ())]
    )
    def test_what_is_no_link_is_refused(self, starts: tuple[float, ...], rates: tuple[float, ...]) -> None:
        with pytest.raises(ConfigError, match="expected"):
            Link(starts, rates)
