"""The merge's loop in numba: a tile of the bucket at a time, which stays in the cache while every rank adds its share.

A tile is 32768 sums and a bit for each. Ranks add to it in their order; then the bits are read in ascending order, a
word of 64 at a time. Nothing is sorted and no branch depends on how the lists interleave, so the cost is that of the
elements, plus one look at each word of bits.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

from shade.gradient._kernels.compiling import compiled

_U64 = np.uint64
_TILE_BITS = 15


@intrinsic
def _trailing_zeros(typing_context: Any, word: Any) -> Any:
    """How many bits below the lowest that is set; the word is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(numba.types.boolean, True))

    return numba.types.uint64(numba.types.uint64), generate


@compiled
def merge_parts(indices: Any, values: Any, ends_W: Any, shares_W: Any, size: Any, merged: Any, sums: Any) -> int:
    """Adds all parts' values, times their shares, in the order of the parts.

    Args:
        indices: uint32, of all parts, one behind the other.
        values: float32, likewise.
        ends_W: int64, where each part ends.
        shares_W: float32.
        size: D.
        merged: uint32, as long as ``indices``; becomes the places, ascending.
        sums: float32, as long; becomes the sums.

    Returns:
        How many places there are.
    """
    tile, bits = np.zeros(1 << _TILE_BITS, np.float32), np.zeros(1 << (_TILE_BITS - 6), np.uint64)
    cursors_W = np.zeros(ends_W.size, np.int64)
    cursors_W[1:] = ends_W[:-1]
    count = 0
    for number in range((size + (1 << _TILE_BITS) - 1) >> _TILE_BITS):
        start = _U64(number) << _U64(_TILE_BITS)
        stop = start + _U64(1 << _TILE_BITS)
        is_touched = False
        for rank in range(ends_W.size):
            k, end, share = cursors_W[rank], ends_W[rank], shares_W[rank]
            while k < end and _U64(indices[k]) < stop:
                place = _U64(indices[k]) - start
                tile[place] += share * values[k]
                bits[place >> _U64(6)] |= _U64(1) << (place & _U64(63))
                k += 1
            is_touched |= k != cursors_W[rank]
            cursors_W[rank] = k
        if not is_touched:
            continue
        for number_of_word in range(bits.size):
            word = bits[number_of_word]
            if word == _U64(0):
                continue
            bits[number_of_word] = _U64(0)
            base = _U64(number_of_word) << _U64(6)
            while word != _U64(0):
                place = base + _trailing_zeros(word)  # type: ignore[call-arg]
                word &= word - _U64(1)
                merged[count] = start + place
                sums[count] = tile[place]
                tile[place] = np.float32(0)
                count += 1
    return count


def probe() -> None:
    """Compiles it."""
    indices, values = np.array([1, 1], dtype=np.uint32), np.ones(2, dtype=np.float32)
    ends_W, shares_W = np.array([1, 2]), np.ones(2, dtype=np.float32)
    merge_parts(indices, values, ends_W, shares_W, 2, np.empty_like(indices), np.empty_like(values))
