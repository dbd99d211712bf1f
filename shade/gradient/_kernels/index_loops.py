"""The loops over ascending indices in numba: their code in a message, and the merge of all ranks' parts.

Legend: K kept · W world.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shade._lazy import compiled
from shade.gradient._kernels import lanes

_U64 = np.uint64
_TILE_BITS = 15
trailing_zeros: Any = lanes.trailing_zeros  # called without its first argument, which no type checker knows


@compiled
def split(indices_K: Any, codes_K: Any, middle_K: Any, wide_K: Any) -> tuple[int, int]:
    """Writes the gaps to three streams; returns how many went to the second and to the third."""
    num_middle, num_wide = 0, 0
    after = _U64(0)
    for k in range(indices_K.size):
        index = _U64(indices_K[k])
        gap = index - after
        after = index + _U64(1)
        if gap < _U64(254):
            codes_K[k] = gap
        elif gap < _U64(65536):
            codes_K[k] = 254
            middle_K[num_middle] = gap
            num_middle += 1
        else:
            codes_K[k] = 255
            wide_K[num_wide] = gap
            num_wide += 1
    return num_middle, num_wide


@compiled
def join(codes_K: Any, middle: Any, wide: Any, indices_K: Any) -> Any:
    """Adds the gaps up; returns one more than the last index, before it was cut to 32 bits."""
    num_middle, num_wide = 0, 0
    after = _U64(0)
    for k in range(codes_K.size):
        code = codes_K[k]
        gap = _U64(code)
        if code == 254:
            gap = _U64(middle[num_middle])
            num_middle += 1
        elif code == 255:
            gap = _U64(wide[num_wide])
            num_wide += 1
        after += gap
        indices_K[k] = after
        after += _U64(1)
    return after


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
    # A tile of 32768 sums and a bit for each stays in the cache while every rank adds its share, in rank order. Then
    # the bits are read in ascending order, a word at a time. Nothing is sorted, and no branch depends on how the lists
    # interleave: the cost is that of the elements, plus one look at each word.
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
                place = base + trailing_zeros(word)
                word &= word - _U64(1)
                merged[count] = start + place
                sums[count] = tile[place]
                tile[place] = np.float32(0)
                count += 1
    return count


def probe() -> None:
    """Compiles every loop for the types that it is called with."""
    ends_W, shares_W = np.array([1, 2]), np.ones(2, dtype=np.float32)
    twice_K, values = np.array([1, 1], dtype=np.uint32), np.ones(2, dtype=np.float32)
    merge_parts(twice_K, values, ends_W, shares_W, 2, np.empty_like(twice_K), np.empty_like(values))
    indices_K: npt.NDArray[np.uint32] = np.array([3, 900, 2**31], dtype=np.uint32)
    codes_K, middle_K, wide_K = np.zeros(3, np.uint8), np.zeros(3, np.uint16), np.zeros(3, np.uint32)
    split(indices_K, codes_K, middle_K, wide_K)
    join(codes_K, middle_K, wide_K, indices_K)
