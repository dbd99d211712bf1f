"""A bucket as lines of 16 elements, the length of a cache line, and the memory that the compiled loops write to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shade.types import Floats

LINE = 16
"""Elements of a cache line."""
CHUNK = 4096
"""Elements of a chunk, of which the largest few are picked; they fit into the first-level cache."""
TILE = 2**14
"""Elements between two checks of the room that is left: outputs need room for a tile more than is picked."""
OVERFLOW = -1
"""Returned instead of a count when the room did not suffice, or a sum that is counted was not finite."""

ALIGNMENT_BYTES = 64
"""Where the memory for a rest begins: streaming stores write whole lines of the cache."""
Places = npt.NDArray[np.uint32]


def aligned_zeros(size: int) -> Floats:
    """Returns zeros, float32 (size,), that begin at a multiple of `ALIGNMENT_BYTES`."""
    room = np.zeros(size + ALIGNMENT_BYTES // 4, dtype=np.float32)
    start = -room.ctypes.data % ALIGNMENT_BYTES // 4
    return room[start : start + size]


def as_lines(array_D: Floats) -> Floats:
    """Returns the array as lines of 16, the last one padded with zeros; a view if nothing needs padding."""
    whole = array_D.size // LINE * LINE
    if whole == array_D.size:
        return array_D.reshape(-1, LINE)
    filled = np.zeros(whole + LINE, dtype=np.float32)
    filled[: array_D.size] = array_D
    return filled.reshape(-1, LINE)
