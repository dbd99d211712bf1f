"""Draws of large sets: every order equally likely, the small path's probabilities, linear work, few bytes a sample."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shade.sampling import Scores, UnbiasedMode, UniformMode, base, generator, large
from shade.sampling.unbiased import ONE, solve_units

SEED = 5


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LARGE", 0)


def streams(epoch: int) -> dict[str, np.random.Generator]:
    names = ("arrange", "start", "ties", "shuffle")
    return {name: generator(SEED, epoch, purpose) for purpose, name in enumerate(names)}


def scores(num_samples: int) -> Scores:
    score_N = np.random.default_rng(0).gamma(1, 1, num_samples).astype(np.float32)
    return Scores(score_N, np.ones(num_samples, dtype=bool))


def test_every_order_is_equally_likely() -> None:
    rounds = 12_000
    found = Counter(tuple(large.permuted(4, generator(SEED, epoch, 0)).tolist()) for epoch in range(rounds))
    assert set(found) == set(itertools.permutations(range(4)))
    expected = rounds / 24
    chi_square = sum((count - expected) ** 2 / expected for count in found.values())
    assert chi_square < 60  # 23 degrees of freedom: by chance once in 30,000


@pytest.mark.parametrize("num", [1, 2, 1000, 70_000])
def test_elements_are_kept_and_moved_across_buckets(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "BUCKET", 64)
    order = large.permuted(np.arange(num, dtype=np.int32)[::-1].copy(), generator(SEED, 1, 0))
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(num))
    if num > 1000:
        assert abs(np.corrcoef(np.arange(num), order)[0, 1]) < 5 / np.sqrt(num)
        assert np.count_nonzero(order[1:] - order[:-1] == 1) < 20  # one pair of neighbours is expected


def units(inclusion: large.Inclusion) -> np.ndarray:
    """The probabilities; the weights are their inverses."""
    unit_N = np.empty(len(inclusion.score_N), dtype=np.uint32)
    assert large._units(0, tuple(inclusion), inclusion.rest, unit_N) == 0
    np.testing.assert_array_equal(inclusion.weights(), (ONE / unit_N.astype(np.float64)).astype(np.float32))
    return unit_N


def test_probabilities_are_those_of_the_small_path() -> None:
    known = scores(20_000)
    seen_N = np.random.default_rng(2).random(20_000) < 0.95
    class_N = (np.arange(20_000) % 3).astype(np.uint16)
    floor_C = (np.array([0.1, 0.3, 0.5]) * ONE).astype(np.uint32)
    root_N = np.maximum(np.sqrt(np.minimum(known.score_N, 2.5) / 2.5), 1e-3).astype(np.float32)
    expected_N = solve_units(root_N, np.where(seen_N, floor_C[class_N], np.uint32(ONE)), 14_000)
    units_N = units(large.solve(Scores(known.score_N, seen_N), 2.5, 1e-3, floor_C, class_N, 14_000))
    assert int(units_N.sum(dtype=np.int64)) == 14_000 * ONE
    np.testing.assert_allclose(units_N, expected_N, rtol=2e-7)  # the small path's roots have 24 bits
    assert np.all(units_N[~seen_N] == ONE)
    assert np.all(units_N >= np.where(seen_N, floor_C[class_N], ONE))


@pytest.mark.parametrize("num_drawn", [31, 60, 99, 100])
def test_what_rounding_leaves_is_handed_out(num_drawn: int) -> None:
    """Where nearly all probabilities are at a bound, the few others take more than a unit each."""
    score_N = np.full(100, 1e-9, dtype=np.float32)
    score_N[-2:] = 1
    floor_C = np.array([int(0.3 * ONE)], dtype=np.uint32)
    units_N = units(large.solve(Scores(score_N, np.ones(100, dtype=bool)), 1.0, 1e-3, floor_C, None, num_drawn))
    assert int(units_N.sum(dtype=np.int64)) == num_drawn * ONE
    assert floor_C[0] <= units_N.min() <= units_N.max() <= ONE


def test_frequencies_match_the_probabilities() -> None:
    inclusion = large.solve(scores(300), 3.0, 1e-3, np.array([int(0.2 * ONE)], dtype=np.uint32), None, 180)
    pi_N, rounds, times_N = units(inclusion) / ONE, 800, np.zeros(300)
    for epoch in range(rounds):
        drawn = large.draw(inclusion, streams(epoch))
        assert len(np.unique(drawn)) == 180
        times_N[drawn] += 1
    certain_N = pi_N == 1
    assert np.all(times_N[certain_N] == rounds)
    z_N = (times_N - rounds * pi_N)[~certain_N] / np.sqrt(rounds * pi_N * (1 - pi_N))[~certain_N]
    assert np.abs(z_N).max() < 5
    assert 0.7 < np.mean(z_N**2) < 1.4


def test_classes_are_drawn_to_within_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "BUCKET", 64)
    class_N = np.sort(np.random.default_rng(4).integers(0, 12, 600)).astype(np.uint16)
    inclusion = large.solve(scores(600), 3.0, 1e-3, np.full(12, int(0.1 * ONE), dtype=np.uint32), class_N, 300)
    wanted_C = np.bincount(class_N, weights=units(inclusion) / ONE)
    for epoch in range(50):
        got_C = np.bincount(class_N[large.draw(inclusion, streams(epoch))], minlength=12)
        assert np.all(got_C >= np.floor(wanted_C - 1e-9))
        assert np.all(got_C <= np.ceil(wanted_C + 1e-9))


def test_the_smallest_are_counted_as_sorting_counts_them() -> None:
    score_N = np.random.default_rng(6).gamma(0.1, 10, 5000).astype(np.float32)
    score_N[:50], score_N[50:60] = 0, -0.0
    seen_N = np.arange(5000) % 3 > 0
    ranked = np.sort(score_N[seen_N])
    for at in (0, 1, 17, 2000, len(ranked) - 1):
        assert large.smallest(score_N, seen_N, at) == ranked[at]


COUNTED: dict[str, Callable[..., int]] = {
    "_bucket_starts": lambda num, *_: num,
    "_scatter": lambda *arguments: len(arguments[-1]),
    "_shuffle": lambda _, start, stop, __: stop - start,
    "_scatter_units": lambda *arguments: len(arguments[-1]),
    "_mark": lambda pair_N, *_: len(pair_N),
    "_wanted": lambda score_N, *_: len(score_N),
    "_add_units": lambda inclusion, _: len(inclusion[0]),
    "_fill_weights": lambda _, weight_N: len(weight_N),
    "_count_halves": lambda bits_N, *_: len(bits_N),
    "_sum_drawn": lambda order_K, weight_N, *_: len(order_K) + len(weight_N),
}


def visits(num: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """How often the loops of a draw visit a sample; no bucket outgrows the processor's cache."""
    counted = 0

    def counting(loop: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            nonlocal counted
            counted += size(*arguments)
            if size is COUNTED["_shuffle"]:
                assert size(*arguments) < 2 * large.BUCKET
            return loop(*arguments)

        return count

    with monkeypatch.context() as patch:
        for name, size in COUNTED.items():
            patch.setattr(large, name, counting(getattr(large, name), size))
        UnbiasedMode(num, 10, SEED, keep=0.7).draw(3, scores(num))
    return counted / num


@pytest.mark.usefixtures("everything_is_large")
def test_work_grows_with_the_samples_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "BUCKET", 1 << 10)
    found = [visits(num, monkeypatch) for num in (10_000, 100_000, 1_000_000)]
    assert all(8 < each < 20 for each in found), found
    assert max(found) < 1.3 * min(found)


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize(
    ("mode", "most"),
    [
        (UniformMode(1_000_000, 256, SEED), 4.1),
        (UnbiasedMode(1_000_000, 256, SEED), 8.3),
        (UnbiasedMode(1_000_000, 256, SEED, targets_N=np.arange(1_000_000) % 1000), 8.3),
    ],
    ids=["uniform", "unbiased", "classes"],
)
def test_bytes_a_sample_while_a_large_set_is_drawn(mode: Any, most: float) -> None:
    assert peak_bytes(mode) / 1_000_000 < most


def test_bytes_a_sample_while_a_small_set_is_drawn() -> None:
    assert peak_bytes(UniformMode(1_000_000, 256, SEED)) / 1_000_000 < 4.1
    assert peak_bytes(UnbiasedMode(1_000_000, 256, SEED)) / 1_000_000 < 28.1


def peak_bytes(mode: Any) -> int:
    """What a draw holds at most, its scores not counted."""
    known = scores(1_000_000)
    mode.draw(3, Scores(known.score_N, known.seen_N))  # compiles
    tracemalloc.start()
    try:
        mode.draw(4, known)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
