"""Picks elements at random: a lower bound for comparisons. Each element has the same chance, K / D."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from shade.gradient._compress.compressor import COMPRESSORS, Compressor, Key, Sparse, check, non_finite, wanted_count
from shade.gradient._kernels.build import prepare
from shade.gradient._kernels.lines import TILE
from shade.types import Floats, Indices


@COMPRESSORS.register("random-k")
class RandomK(Compressor):
    """Draws elements anew at every step, by the key."""

    def __init__(self) -> None:
        self._places = np.empty(TILE, dtype=np.uint32)
        self._values = np.empty(TILE, dtype=np.float32)

    @override
    def select(self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, density: float, key: Key) -> Sparse:
        check(gradient_D, residual_D, rest_D, density)
        # The pass adds; with this threshold it picks infinity and NaN only, and so finds them.
        with np.errstate(over="ignore", invalid="ignore"):
            count = prepare().pick_elements(gradient_D, residual_D, rest_D, np.inf, self._places, self._values)
        if count:
            raise non_finite()
        places = draw_places(gradient_D.size, density, key)
        values_K = rest_D[places]
        # Values are not scaled by D / K: error feedback keeps what was not drawn.
        rest_D[places] = 0
        return Sparse(places.astype(np.uint32), values_K, gradient_D.size)


def draw_places(size: int, density: float, key: Key) -> Indices:
    """Draws one index from each of K equal stretches, ascending."""
    count = wanted_count(size, density)
    # One from each stretch: so the indices ascend and are distinct without sorting.
    edges = np.arange(count + 1, dtype=np.int64) * size // max(count, 1)
    rng = np.random.Generator(np.random.Philox(key=key.draw(2**64)))
    places: Indices = edges[:-1] + (rng.random(count) * np.diff(edges)).astype(np.int64)
    return places
