"""Keys, densities, sparse buckets and aligned memory."""

from __future__ import annotations

import numpy as np
import pytest

from shade.errors import ConfigError
from shade.gradient._compress.compressor import Key, Sparse, check, wanted_count
from shade.gradient._engine.density import WarmUp
from shade.gradient._kernels.lines import ALIGNMENT_BYTES, aligned_zeros


def test_a_key_draws_evenly_and_always_the_same() -> None:
    drawn = [Key(1, step, 2).draw(10) for step in range(10_000)]
    assert drawn == [Key(1, step, 2).draw(10) for step in range(10_000)]
    counts = np.bincount(drawn, minlength=10)
    assert len(counts) == 10
    assert (np.abs(counts - 1000) < 150).all()
    assert Key(1, 2, 3).draw(1) == 0
    assert Key(-1, 2**70, 3).draw(5) in range(5)
    assert len({Key(1, 2, 3).draw(2**64, stream) for stream in range(100)}) == 100
    assert len({Key(*fields).draw(2**64) for fields in ((1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 3, 2))}) == 4


def test_at_least_one_place_is_wanted_of_a_bucket_that_has_any() -> None:
    assert [wanted_count(size, 0.01) for size in (0, 1, 99, 100, 101, 1000)] == [0, 1, 1, 1, 2, 10]
    assert wanted_count(7, 1.0) == 7


def test_a_sparse_bucket_stands_for_a_dense_one() -> None:
    sparse = Sparse(np.array([1, 4], dtype=np.uint32), np.array([2.0, -3.0], dtype=np.float32), 6)
    assert sparse.dense().tolist() == [0, 2, 0, 0, -3, 0]
    assert sparse.count == 2


def test_memory_for_a_rest_begins_at_a_line() -> None:
    for size in (0, 1, 15, 1000, 2**20):
        room = aligned_zeros(size)
        assert room.shape == (size,)
        assert not size or room.ctypes.data % ALIGNMENT_BYTES == 0
    array_D = np.zeros(8, dtype=np.float32)
    with pytest.raises(ConfigError, match="aligned_zeros"):
        check(array_D, array_D, aligned_zeros(9)[1:], 0.5)


def test_density_falls_from_a_quarter_to_its_aim_by_equal_factors() -> None:
    warm_up = WarmUp(0.01, num_steps=4)
    densities = [warm_up.at(step) for step in range(6)]
    assert densities[0] == 0.25
    assert densities[4] == densities[5] == 0.01
    factors = np.diff(np.log(densities[:5]))
    np.testing.assert_allclose(factors, factors[0])


def test_there_is_nothing_to_warm_up_where_the_aim_is_higher_or_no_steps_are_given() -> None:
    assert [WarmUp(0.5, num_steps=10).at(step) for step in (0, 5, 10)] == [0.5] * 3
    assert WarmUp(0.01).at(0) == 0.01


@pytest.mark.parametrize(
    "settings", [{"density": 0.0}, {"density": 1.5}, {"density": 0.1, "first_density": 0.0}, {"num_steps": -1}]
)
def test_a_bad_warm_up_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        WarmUp(**{"density": 0.01} | settings)
