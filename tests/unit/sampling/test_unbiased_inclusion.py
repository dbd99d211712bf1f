"""Inclusion probabilities: the sum is exact, the bounds hold, the proportions are the wanted ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shade.sampling.unbiased import ONE, budget, draw_systematic, solve_units

roots = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(np.float32(1e-3), 1.0, width=32))


@settings(deadline=None)
@given(roots, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(0, 2**20))
def test_sum_is_exact_within_bounds(root_N: np.ndarray, keep: float, floor: float, seed: int) -> None:
    num_samples = len(root_N)
    floor_N = np.full(num_samples, int(floor * ONE), dtype=np.uint32)
    forced_N = np.random.default_rng(seed).random(num_samples) < 0.1
    floor_N[forced_N] = ONE
    least = -(-int(floor_N.sum(dtype=np.int64)) // ONE)
    num_drawn = min(num_samples, max(1, least, round(keep * num_samples)))
    units_N = solve_units(root_N, floor_N, num_drawn)
    assert units_N.dtype == np.uint32
    assert int(units_N.sum(dtype=np.int64)) == num_drawn * ONE
    assert np.all(units_N >= floor_N)
    assert np.all(units_N <= ONE)
    drawn = draw_systematic(units_N, seed, 0)
    assert len(drawn) == num_drawn == len(np.unique(drawn))
    assert set(np.flatnonzero(units_N == ONE)) <= set(drawn.tolist())


def test_between_the_bounds_probability_is_proportional() -> None:
    root_N = np.linspace(0.05, 1, 500, dtype=np.float32)
    pi_N = solve_units(root_N, np.full(500, int(0.3 * ONE), dtype=np.uint32), 350) / ONE
    free_N = (pi_N > 0.3001) & (pi_N < 0.9999)
    assert free_N.sum() > 100
    ratio = pi_N[free_N] / root_N[free_N]
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-6)
    assert np.all(np.diff(pi_N) >= -1e-8)


def test_a_million_samples_sum_exactly() -> None:
    root_N = np.sqrt(np.random.default_rng(0).gamma(1, 1, 1_000_000)).astype(np.float32) + np.float32(1e-3)
    units_N = solve_units(root_N, np.full(len(root_N), int(0.3 * ONE), dtype=np.uint32), 700_000)
    assert int(units_N.sum(dtype=np.int64)) == 700_000 * ONE


@settings(deadline=None)
@given(st.integers(1, 10_000), st.integers(1, 600), st.floats(0.001, 1.0))
def test_budget_is_whole_steps(num_samples: int, global_batch: int, keep: float) -> None:
    wanted = budget(num_samples, global_batch, keep)
    assert 1 <= wanted <= num_samples
    assert wanted == num_samples or wanted % global_batch == 0
    if wanted < num_samples and keep * num_samples >= global_batch:
        assert abs(wanted - keep * num_samples) <= global_batch


@pytest.mark.parametrize(("num_samples", "expected"), [(100, 64), (1000, 704), (64, 64), (10, 10), (128, 64)])
def test_budget_by_example(num_samples: int, expected: int) -> None:
    assert budget(num_samples, 64, 0.7) == expected


def test_frequencies_match_the_probabilities() -> None:
    rng = np.random.default_rng(3)
    root_N = rng.random(300).astype(np.float32) + np.float32(0.01)
    units_N = solve_units(root_N, np.full(300, int(0.2 * ONE), dtype=np.uint32), 180)
    pi_N = units_N / ONE
    rounds = 800
    times_N = np.zeros(300)
    for epoch in range(rounds):
        times_N[draw_systematic(units_N, 5, epoch)] += 1
    certain_N = pi_N == 1
    assert np.all(times_N[certain_N] == rounds)
    z_N = (times_N - rounds * pi_N)[~certain_N] / np.sqrt(rounds * pi_N * (1 - pi_N))[~certain_N]
    assert np.abs(z_N).max() < 5
    assert 0.7 < np.mean(z_N**2) < 1.4


def test_classes_are_drawn_to_within_one() -> None:
    rng = np.random.default_rng(4)
    class_N = np.sort(rng.integers(0, 12, 600)).astype(np.uint32)
    root_N = (rng.random(600) * (1 + class_N) / 12).astype(np.float32) + np.float32(0.01)
    units_N = solve_units(root_N, np.full(600, int(0.1 * ONE), dtype=np.uint32), 300)
    wanted_C = np.bincount(class_N, weights=units_N / ONE)
    for epoch in range(50):
        got_C = np.bincount(class_N[draw_systematic(units_N, 1, epoch, class_N)], minlength=12)
        assert np.all(got_C >= np.floor(wanted_C - 1e-9))
        assert np.all(got_C <= np.ceil(wanted_C + 1e-9))
