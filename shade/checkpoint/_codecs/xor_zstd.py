"""Codec ``xor-zstd``: the bits that differ from the newest keyframe, grouped by byte, zstandard. Exact.

Weights move little between two snapshots: sign, exponent and the upper mantissa stay, and are zeros in the difference.
`benchmarks/bench_codecs.py` measures how much. Against the keyframe, not the snapshot before: a snapshot then needs one
other and no more, and any between may be lost or removed. Price: a copy of the keyframe in this process's memory.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import numpy as np

from shade.checkpoint._codecs.base import CODECS, Delta, Piece
from shade.checkpoint._codecs.frames import Frames
from shade.types import Bytes


@CODECS.register("xor-zstd")
class XorZstandard(Delta):
    """One frame a chunk.

    Raises:
        ConfigError: The ``zstandard`` package is missing.
    """

    alone: ClassVar[str] = "zstd"

    def __init__(self) -> None:
        self._frames = Frames("xor-zstd")

    def encode(
        self, data: memoryview, base: memoryview, piece: Piece, exact: Collection[str] = frozenset()
    ) -> Bytes | None:
        """See `Delta`."""
        different = np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8)
        return self._frames.pack(different, piece.item_bytes)

    def decode(self, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        """See `Delta`."""
        different = self._frames.unpack(stored, len(base), len(base), piece.item_bytes)
        return (different ^ np.frombuffer(base, np.uint8)).data
