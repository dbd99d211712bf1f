"""Codec ``zstd``: bytes grouped by item, compressed by zstandard at its fastest level. Exact.

One item width serves a whole shard, that of most of its bytes (`Manifest.item_bytes`); other items are stored correctly
but larger. It saves memory in the cluster, not time: on a disk faster than about 0.25 GB/s per core it costs more than
it saves.
"""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from shade.checkpoint._codecs.base import CODECS, Standalone
from shade.checkpoint._codecs.frames import Frames
from shade.types import Bytes


@CODECS.register("zstd")
class Zstandard(Standalone):
    """Stores one frame per chunk.

    Raises:
        ConfigError: The ``zstandard`` package is missing.
    """

    def __init__(self) -> None:
        self._frames = Frames("zstd")

    @override
    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        return self._frames.pack(np.frombuffer(data, dtype=np.uint8), item_bytes)

    @override
    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        return self._frames.unpack(stored, num_bytes, num_bytes, item_bytes).data
