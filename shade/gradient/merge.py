"""Adds up what all ranks chose of a bucket, weighted by their samples, in the order of the ranks.

Float addition depends on its order, so the order is part of the result: every rank adds the same parts in the same
order and holds the same bits afterwards, on whatever processor (no product is fused into a sum). An element's sum
starts at zero and takes rank 0's share first. Weighted, because the mean over samples is what training on one machine
would use, and ranks need not have equal batches.

The work is that of the elements, not of the bucket (`shade.gradient.kernels.index_loops`).

Legend: D bucket · K kept · W world.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError, PayloadError
from shade.gradient.kernels.choice import choose
from shade.gradient.sparse import Sparse
from shade.types import Floats, Indices


class Arrays:
    """The loop in numpy; see `shade.gradient.kernels.index_loops`."""

    @staticmethod
    def merge_parts(
        indices: npt.NDArray[np.uint32],
        values: Floats,
        ends_W: Indices,
        shares_W: Floats,
        size: int,
        merged: npt.NDArray[np.uint32],
        sums: Floats,
    ) -> int:
        """Adds all parts' values, times their shares, in the order of the parts."""
        del size
        places, inverse = np.unique(indices, return_inverse=True)
        counts_W = np.diff(ends_W, prepend=0)
        merged[: len(places)] = places
        sums[: len(places)] = 0
        np.add.at(sums, inverse, values * np.repeat(shares_W, counts_W))
        return len(places)


@functools.cache
def loops() -> Any:
    """Those in use."""
    return choose("shade.gradient.kernels.index_loops", Arrays)


def merge(parts: Sequence[Sparse], weights: Sequence[float]) -> Sparse:
    """The weighted mean of all ranks' parts: an element that a rank did not choose counts as zero there.

    Args:
        parts: One for each rank, in their order, of one bucket.
        weights: Samples of each rank, ≥ 0, at least one of them > 0.

    Returns:
        Every place that any part has; its arrays may be those of a single part.

    Raises:
        ConfigError: No parts, not as many weights, or weights that make no mean.
        PayloadError: Parts of different buckets.
    """
    if not parts or len(parts) != len(weights):
        raise ConfigError.of("as many weights as parts, at least one", (len(parts), len(weights)), "one for each rank")
    total = math.fsum(weights)
    if not (math.isfinite(total) and total > 0 and min(weights) >= 0):
        raise ConfigError.of("finite weights ≥ 0, at least one > 0", list(weights), "a rank without samples weighs 0")
    sizes = [part.size for part in parts]
    if len(set(sizes)) != 1:
        raise PayloadError.of("parts of one bucket", sizes, "give every rank the same model and bucket size")
    if len(parts) == 1:
        return parts[0]
    indices = np.concatenate([part.indices_K for part in parts])
    values = np.concatenate([part.values_K for part in parts])
    ends_W = np.cumsum([part.count for part in parts], dtype=np.int64)
    shares_W = (np.asarray(weights, dtype=np.float64) / total).astype(np.float32)
    merged, sums = np.empty_like(indices), np.empty_like(values)
    count = loops().merge_parts(indices, values, ends_W, shares_W, sizes[0], merged, sums)
    return Sparse(merged[:count], sums[:count], sizes[0])
