"""Codec ``none``: a chunk as it is. Nothing is copied, and the file in storage is one that safetensors reads."""

from __future__ import annotations

from shade.checkpoint._codecs.base import CODECS, Standalone, of_length
from shade.types import Bytes


@CODECS.register("none")
class Plain(Standalone):
    """As it is."""

    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        """See `Standalone`."""
        return data

    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        """See `Standalone`."""
        return of_length(stored, num_bytes)
