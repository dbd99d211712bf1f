"""Files that are the same file: a sample that counts twice, or, under two labels, contradicts itself.

Only files of equal length are opened, and the most suspicious first, so a data set on slow storage is not read a second
time for its own sake: beyond `MOST_READ` files the rest is left out, and the report says so. Equal means equal byte for
byte, by a 128-bit hash; the same picture, saved anew, is another file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import xxhash

from shade.types import Indices

MOST_READ = 100_000
"""Files opened; at 20 ms a file and 32 at a time about a minute."""
_THREADS = 32


@dataclass(frozen=True)
class Duplicates:
    """What was found."""

    first_of: dict[int, int] = field(default_factory=dict)
    """Sample → the first sample that is the same file."""
    num_read: int = 0
    num_left_out: int = 0
    """Files of equal length that were not opened."""


def find_duplicates(names: Sequence[str], by_suspicion: Indices) -> Duplicates:
    """Looks for equal files.

    Args:
        names: Paths by sample index.
        by_suspicion: Sample indices in the order in which they are worth reading.

    Returns:
        The duplicates; files that cannot be read are none.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        length_N = np.fromiter(pool.map(_length, names, chunksize=256), dtype=np.int64, count=len(names))
        _, inverse_N, counts = np.unique(length_N, return_inverse=True, return_counts=True)
        alike = by_suspicion[(counts[inverse_N[by_suspicion]] > 1) & (length_N[by_suspicion] > 0)]
        chosen = np.sort(alike[:MOST_READ]).tolist()
        digests = list(pool.map(_digest, [names[index] for index in chosen], chunksize=16))
    seen: dict[bytes, int] = {}
    first_of: dict[int, int] = {}
    for index, digest in zip(chosen, digests, strict=True):
        if digest and seen.setdefault(digest, index) != index:
            first_of[index] = seen[digest]
    return Duplicates(first_of, len(chosen), len(alike) - len(chosen))


def _length(name: str) -> int:
    try:
        return os.stat(name).st_size
    except OSError:
        return 0


def _digest(name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return xxhash.xxh3_128_digest(file.read())
    except OSError:
        return b""
