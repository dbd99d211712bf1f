"""k-means on a line: as good as an exhaustive search nearly is, and every label is its number's nearest centre."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.checkpoint._codecs.excp import cluster


def spread(values: npt.NDArray[np.float32], centres: npt.NDArray[np.float32], labels: npt.NDArray[np.uint8]) -> float:
    return float(np.square(values.astype(np.float64) - centres[labels]).sum())


def best(values: npt.NDArray[np.float32], num: int) -> float:
    """The least sum of squares, by dynamic programming over the sorted numbers."""
    ordered = np.sort(values.astype(np.float64))
    total, squares = np.concatenate([[0], np.cumsum(ordered)]), np.concatenate([[0], np.cumsum(ordered**2)])

    def cost(first: npt.NDArray[np.int64], last: int) -> npt.NDArray[np.float64]:
        count = last - first
        return squares[last] - squares[first] - (total[last] - total[first]) ** 2 / np.maximum(count, 1)

    ends = np.arange(len(ordered) + 1)
    least = np.where(ends == 0, 0.0, np.inf)
    for _ in range(num):
        least = np.array([np.min(least[: end + 1] + cost(ends[: end + 1], end)) for end in ends])
    return float(least[-1])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", ["normal", "heavy", "two heaps"])
def test_it_is_near_the_best_there_is(seed: int, shape: str) -> None:
    rng = np.random.default_rng(seed)
    values = {
        "normal": rng.normal(0, 1, 400),
        "heavy": rng.standard_t(2, 400),
        "two heaps": np.concatenate([rng.normal(-5, 0.1, 200), rng.normal(5, 0.1, 200)]),
    }[shape].astype(np.float32)
    centres, labels = cluster(values, 15)
    assert len(centres) <= 15
    assert (np.diff(centres) > 0).all()
    assert spread(values, centres, labels) <= 3.0 * best(values, 15)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=50), st.integers(1, 15))
def test_every_label_is_a_centre(numbers: list[float], num: int) -> None:
    values = np.array(numbers, np.float32)
    centres, labels = cluster(values, num)
    assert 1 <= len(centres) <= num
    assert labels.max() < len(centres)
    assert np.isfinite(centres).all()
    slack = 1e-6 * np.abs(values).max()
    assert values.min() - slack <= centres.min() <= centres.max() <= values.max() + slack


def test_few_different_numbers_come_back_exactly() -> None:
    values = np.array([0.5, -3.0, 0.5, 7.25, -3.0] * 100, np.float32)
    centres, labels = cluster(values, 15)
    assert np.array_equal(centres[labels], values)


def test_labels_are_the_nearest_centres_but_for_the_width_of_a_bin() -> None:
    values = np.random.default_rng(0).normal(0, 1, 20_000).astype(np.float32)
    centres, labels = cluster(values, 15)
    near = np.abs(values - centres[labels])
    nearest = np.abs(values[:, None] - centres[None, :]).min(axis=1)
    assert (near <= nearest + np.abs(values) / 64).all()
