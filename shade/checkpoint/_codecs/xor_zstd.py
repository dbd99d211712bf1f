"""Codec ``xor-zstd``: the XOR with the newest keyframe, grouped by byte, compressed by zstandard. Exact.

Weights move little between two snapshots: sign, exponent and upper mantissa stay, and are zero in the XOR;
`benchmarks/bench_codecs.py` measures the effect. The base is the keyframe, not the previous snapshot, so a snapshot
needs only one other, and any between may be lost or removed. Cost: a copy of the keyframe in this process's memory.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import numpy as np
from typing_extensions import override

from shade.checkpoint._codecs.base import CODECS, Delta, Piece
from shade.checkpoint._codecs.frames import Frames
from shade.types import Bytes


@CODECS.register("xor-zstd")
class XorZstandard(Delta):
    """Stores one frame per chunk.

    Raises:
        ConfigError: The ``zstandard`` package is missing.
    """

    alone: ClassVar[str] = "zstd"

    def __init__(self) -> None:
        self._frames = Frames("xor-zstd")

    @override
    def encode(
        self, data: memoryview, base: memoryview, piece: Piece, exact: Collection[str] = frozenset()
    ) -> Bytes | None:
        different = np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8)
        return self._frames.pack(different, piece.item_bytes)

    @override
    def decode(self, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        different = self._frames.unpack(stored, len(base), len(base), piece.item_bytes)
        return (different ^ np.frombuffer(base, np.uint8)).data
