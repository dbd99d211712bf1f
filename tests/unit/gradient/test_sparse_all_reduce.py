"""The merge is the weighted mean, the same bits however it is computed, in the order of the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from shade.errors import ConfigError, PayloadError
from shade.gradient._comm import sparse_all_reduce as merging
from shade.gradient._comm.sparse_all_reduce import merge
from shade.gradient._compress.compressor import Sparse
from tests.support import kernel_oracle


@pytest.fixture(params=["numba", "numpy"])
def _loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(merging, "build", lambda _: kernel_oracle)


def drawn(size: int, count: int, seed: int) -> Sparse:
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(size, count, replace=False)).astype(np.uint32)
    values = (rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)).astype(np.float32)
    return Sparse(indices, values, size)


def by_hand(parts: list[Sparse], weights: list[float]) -> np.ndarray:
    """Rank after rank, in float32, over the whole bucket."""
    dense_D = np.zeros(parts[0].size, dtype=np.float32)
    for part, weight in zip(parts, weights, strict=True):
        dense_D[part.indices_K] += part.values_K * np.float32(weight / sum(weights))
    return dense_D


SHAPES = {
    "two": (100_000, [1000, 1000]),
    "four": (100_000, [800, 900, 1000, 1100]),
    "eight": (70_000, [100] * 8),
    "different": (100_000, [1, 20_000, 300, 0]),
    "overlap": (40_000, [39_000, 38_000, 40_000]),
    "small": (7, [3, 7, 0, 1]),
    "tiles": (32768 * 2, [32768, 10]),
    "nothing": (50, [0, 0]),
}


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_sum_in_rank_order_bit_for_bit(name: str) -> None:
    size, counts = SHAPES[name]
    parts = [drawn(size, count, seed) for seed, count in enumerate(counts)]
    weights = [float(3 + rank) for rank in range(len(parts))]
    merged = merge(parts, weights)
    assert merged.size == size
    assert merged.indices_K.dtype == np.uint32
    places = np.unique(np.concatenate([part.indices_K for part in parts]))
    np.testing.assert_array_equal(merged.indices_K, places)
    np.testing.assert_array_equal(merged.dense().view(np.uint32), by_hand(parts, weights).view(np.uint32))


@pytest.mark.usefixtures("_loops")
def test_it_is_the_mean_over_samples() -> None:
    parts = [drawn(5000, 500, 1), drawn(5000, 700, 2), drawn(5000, 0, 3)]
    dense = [part.dense().astype(np.float64) for part in parts]
    expected = (32 * dense[0] + 96 * dense[1]) / 128
    np.testing.assert_allclose(merge(parts, [32, 96, 0]).dense(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.usefixtures("_loops")
def test_order_is_part_of_the_result() -> None:
    index = np.zeros(1, dtype=np.uint32)
    parts = [Sparse(index, np.array([value], dtype=np.float32), 1) for value in (1e8, 1.0, -1e8, 1.0)]
    assert merge(parts, [1, 1, 1, 1]).values_K.tolist() == [0.25]
    assert merge([parts[0], parts[2], parts[1], parts[3]], [1, 1, 1, 1]).values_K.tolist() == [0.5]


def test_one_rank_changes_nothing() -> None:
    part = drawn(1000, 100, 1)
    assert merge([part], [17.0]) is part


def test_bad_weights_and_parts_are_named() -> None:
    part = drawn(10, 2, 1)
    for weights in ([0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]):
        with pytest.raises(ConfigError, match="expected finite weights"):
            merge([part, part], weights)
    with pytest.raises(ConfigError, match="as many weights as parts"):
        merge([part], [1.0, 1.0])
    with pytest.raises(ConfigError, match="as many weights as parts"):
        merge([], [])
    with pytest.raises(PayloadError, match=r"parts of one bucket, got \[10, 11\]"):
        merge([part, drawn(11, 2, 1)], [1.0, 1.0])
