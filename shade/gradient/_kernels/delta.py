"""The index code's two loops in numba; `_comm.message` says what they write."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shade.gradient._kernels.compiling import compiled

_U64 = np.uint64


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


def probe() -> None:
    """Compiles both."""
    indices_K: npt.NDArray[np.uint32] = np.array([3, 900, 2**31], dtype=np.uint32)
    codes_K, middle_K, wide_K = np.zeros(3, np.uint8), np.zeros(3, np.uint16), np.zeros(3, np.uint32)
    split(indices_K, codes_K, middle_K, wide_K)
    join(codes_K, middle_K, wide_K, indices_K)
