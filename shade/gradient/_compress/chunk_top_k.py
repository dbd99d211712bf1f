"""Picks the largest elements of every chunk of 4,096, the same share of each, so that no part is starved (SparseLoCo,
§3). It catches less energy than a threshold over the whole bucket.

Legend: D bucket · K kept.
"""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from shade.gradient._compress.compressor import COMPRESSORS, Compressor, Key, Sparse, check, non_finite, wanted_count
from shade.gradient._kernels.build import prepare
from shade.gradient._kernels.lines import OVERFLOW
from shade.types import Floats


@COMPRESSORS.register("chunk-top-k")
class ChunkTopK(Compressor):
    """The largest elements of each chunk, exactly; of equal ones the first. At 1/64: 64 of 4,096."""

    @override
    def select(self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, density: float, key: Key) -> Sparse:
        check(gradient_D, residual_D, rest_D, density)
        wanted = wanted_count(gradient_D.size, density)
        places, values = np.empty(wanted, dtype=np.uint32), np.empty(wanted, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            count = prepare().pick_chunks(gradient_D, residual_D, rest_D, density, places, values)
        if count == OVERFLOW:
            raise non_finite()
        return Sparse(places[:count], values[:count], gradient_D.size)
