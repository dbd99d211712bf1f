"""Codec ``zstd``: grouped by byte, then zstandard at its fastest level.

One width serves a whole shard, that of most of its bytes (`Manifest.item_bytes`); items of other widths come out right,
only less small. It buys memory in the cluster, not time: on a disk faster than about 0.25 GB/s a core it costs more
than it saves.
"""

from __future__ import annotations

import numpy as np

from shade.checkpoint._codecs.base import CODECS, Standalone
from shade.checkpoint._codecs.frames import Frames
from shade.types import Bytes


@CODECS.register("zstd")
class Zstandard(Standalone):
    """One frame a chunk.

    Raises:
        ConfigError: The ``zstandard`` package is missing.
    """

    def __init__(self) -> None:
        self._frames = Frames("zstd")

    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        """See `Standalone`."""
        return self._frames.pack(np.frombuffer(data, dtype=np.uint8), item_bytes)

    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        """See `Standalone`."""
        return self._frames.unpack(stored, num_bytes, num_bytes, item_bytes).data
