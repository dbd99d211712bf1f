"""Codec ``dedup``: a chunk that is as it was in the base is not stored again; what has changed is stored as it is.

What is stored of it is its digest, 16 bytes. So frozen layers, embeddings that nobody looked up and whatever else
stands still cost next to nothing, and all else what it costs with ``none``. No base has to be kept in memory: its
digests are enough. Every other `Delta` does the same for such chunks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from shade.checkpoint._codecs.base import CODECS, Delta, Piece
from shade.checkpoint._format.digest import digest_of
from shade.errors import CorruptCheckpointError
from shade.types import Bytes


@CODECS.register("dedup")
class Dedup(Delta):
    """The digest of a chunk that has not changed."""

    needs_data: ClassVar[bool] = False

    def encode(
        self, data: memoryview, base: memoryview, piece: Piece, exact: Collection[str] = frozenset()
    ) -> Bytes | None:
        """See `Delta`."""
        digest = digest_of(data)
        return bytes.fromhex(digest) if digest == digest_of(base) else None

    def decode(self, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        """See `Delta`."""
        if bytes.fromhex(digest_of(base)) != bytes(stored):
            raise CorruptCheckpointError(f"expected a base with digest {bytes(stored).hex()}, got {digest_of(base)}")
        return base
