"""Codec ``dedup``: stores the digest of a chunk that equals the base's, and any other chunk unchanged. Exact.

A digest takes 16 bytes. So frozen layers and unused embeddings cost almost nothing, and the rest costs what it does
with ``none``. The base's digests are enough: none of its data is kept in memory. Every other `Delta` treats unchanged
chunks in the same way.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from typing_extensions import override

from shade.checkpoint._codecs.base import CODECS, Delta, Piece
from shade.checkpoint._format.digest import digest_of
from shade.errors import CorruptCheckpointError
from shade.types import Bytes


@CODECS.register("dedup")
class Dedup(Delta):
    """Stores the digest of an unchanged chunk."""

    needs_data: ClassVar[bool] = False

    @override
    def encode(
        self, data: memoryview, base: memoryview, piece: Piece, exact: Collection[str] = frozenset()
    ) -> Bytes | None:
        digest = digest_of(data)
        return bytes.fromhex(digest) if digest == digest_of(base) else None

    @override
    def decode(self, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        if bytes.fromhex(digest_of(base)) != bytes(stored):
            raise CorruptCheckpointError(f"expected a base with digest {bytes(stored).hex()}, got {digest_of(base)}")
        return base
