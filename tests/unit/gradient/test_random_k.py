"""Random elements: each with the same chance, in order, determined by the key."""

from __future__ import annotations

import numpy as np
import pytest

from shade.gradient._compress.compressor import COMPRESSORS, Key
from shade.gradient._kernels.lines import aligned_zeros


@pytest.mark.parametrize(("size", "density"), [(100, 0.1), (103, 0.1), (103, 0.4)])
def test_every_place_has_the_same_chance(size: int, density: float) -> None:
    compressor, rest_D = COMPRESSORS.get("random-k")(), aligned_zeros(size)
    ones, zeros = np.ones(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
    num_draws = 1500
    hits_D = np.zeros(size)
    for step in range(num_draws):
        hits_D += compressor.select(ones, zeros, rest_D, density, Key(1, step, 0)).dense()
    count = -(-size * density // 1)
    assert hits_D.sum() == num_draws * count
    # Stretches are of unlike lengths where K does not divide D, by one element.
    expected = num_draws * count / size
    shortest, longest = size // count, -(-size // count)
    spread = 5 * np.sqrt(expected)
    assert hits_D.min() > num_draws / longest - spread
    assert hits_D.max() < num_draws / shortest + spread


def test_buckets_and_seeds_draw_apart() -> None:
    compressor, rest_D = COMPRESSORS.get("random-k")(), aligned_zeros(1000)
    ones, zeros = np.ones(1000, dtype=np.float32), np.zeros(1000, dtype=np.float32)
    drawn = {
        compressor.select(ones, zeros, rest_D, 0.05, Key(*key)).indices_K.tobytes()
        for key in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1))
    }
    assert len(drawn) == 4
