"""Codes ascending indices in little more than a byte each: the gap to the one before, wider words for wide gaps.

Three streams, one behind the other::

    codes    uint8  × K    the gap, if it is below 254; else 254: the next word of `middle`, 255: the next of `wide`
    middle   uint16 × n    gaps below 65536
    wide     uint32 × m    all others

At one kept element in a hundred that makes 1.15 bytes an index, at one in a thousand 2.6, never more than 5. An escape
followed by four bytes in place takes 1.31 and 4.1; the entropy of such indices is 1.02. Streams rather than escapes in
place, because the length then follows from counting two values among the codes: it is checked before anything is
decoded, and numpy can do all of it without a loop. The first gap counts from zero, later ones from one behind the index
before, so whatever decodes is ascending and distinct.

Legend: K kept.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.errors import PayloadError
from shade.gradient.kernels.choice import choose

Octets = npt.NDArray[np.uint8]
Places = npt.NDArray[np.uint32]

MIDDLE, WIDE = 254, 255


class Arrays:
    """The two loops in numpy; see `shade.gradient.kernels.index_loops`."""

    @staticmethod
    def split(indices_K: Places, codes_K: Octets, middle_K: npt.NDArray[np.uint16], wide_K: Places) -> tuple[int, int]:
        """Writes the gaps to three streams."""
        gaps_K = np.empty(len(indices_K), dtype=np.uint32)
        gaps_K[:1] = indices_K[:1]
        np.subtract(indices_K[1:], indices_K[:-1], out=gaps_K[1:])
        gaps_K[1:] -= 1
        np.minimum(gaps_K, MIDDLE, out=codes_K, casting="unsafe")
        escaped = gaps_K[gaps_K >= MIDDLE]
        codes_K[gaps_K >= 2**16] = WIDE
        middle, wide = escaped[escaped < 2**16], escaped[escaped >= 2**16]
        middle_K[: len(middle)] = middle
        wide_K[: len(wide)] = wide
        return len(middle), len(wide)

    @staticmethod
    def join(codes_K: Octets, middle: npt.NDArray[np.uint16], wide: Places, indices_K: Places) -> int:
        """Adds the gaps up."""
        gaps_K = codes_K.astype(np.uint64)
        gaps_K[codes_K == MIDDLE] = middle
        gaps_K[codes_K == WIDE] = wide
        after_K = np.cumsum(gaps_K + np.uint64(1))
        indices_K[:] = (after_K - np.uint64(1)).astype(np.uint32)
        return int(after_K[-1]) if len(after_K) else 0


@functools.cache
def loops() -> Any:
    """Those in use."""
    return choose("shade.gradient.kernels.index_loops", Arrays)


def encode(indices_K: Places) -> Octets:
    """Codes indices.

    Args:
        indices_K: uint32, ascending, each once.

    Returns:
        uint8, at most 5 · K long.
    """
    count = len(indices_K)
    codes_K, middle_K = np.empty(count, dtype=np.uint8), np.empty(count, dtype="<u2")
    wide_K = np.empty(count, dtype="<u4")
    num_middle, num_wide = loops().split(indices_K, codes_K, middle_K, wide_K)
    return np.concatenate([codes_K, middle_K[:num_middle].view(np.uint8), wide_K[:num_wide].view(np.uint8)])


def decode(data: Octets, count: int, size: int = 2**32) -> Places:
    """Takes what `encode` gave. Allocates a few bytes for each byte that came, whatever ``count`` claims.

    Args:
        data: uint8, all of it.
        count: K.
        size: All indices are below.

    Returns:
        uint32 (K,), ascending, each once.

    Raises:
        PayloadError: Another number of bytes than so many indices take, or an index out of range.
    """
    if not 0 <= count <= len(data):
        raise PayloadError.of(f"at least a byte for each of {count} indices", len(data), "sender and receiver differ")
    codes_K = data[:count]
    num_middle, num_wide = int(np.count_nonzero(codes_K == MIDDLE)), int(np.count_nonzero(codes_K == WIDE))
    start = count + 2 * num_middle
    if len(data) != start + 4 * num_wide:
        raise PayloadError.of(
            f"{start + 4 * num_wide} bytes for these {count} indices", len(data), "sender and receiver differ"
        )
    middle, wide = data[count:start].copy().view("<u2"), data[start:].copy().view("<u4")
    indices_K = np.empty(count, dtype=np.uint32)
    after = int(loops().join(codes_K, middle, wide, indices_K))
    if after > size:
        raise PayloadError.of(f"indices below {size}", after - 1, "sender and receiver differ about the bucket")
    return indices_K
