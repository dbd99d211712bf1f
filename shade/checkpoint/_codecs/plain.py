"""Codec ``none``: stores a chunk unchanged, without a copy; the file in storage is one that safetensors reads."""

from __future__ import annotations

from typing_extensions import override

from shade.checkpoint._codecs.base import CODECS, Standalone, check_length
from shade.types import Bytes


@CODECS.register("none")
class Plain(Standalone):
    """Stores a chunk unchanged."""

    @override
    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        return data

    @override
    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        return check_length(stored, num_bytes)
