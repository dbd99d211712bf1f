"""A codec that stores a chunk as a difference to the same chunk of the *base*, another snapshot of the run.

The base is the newest keyframe, a snapshot that stands alone, or the previous snapshot and so on down to the keyframe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from shade.checkpoint._codecs.base import CODECS, Codec, Piece
from shade.checkpoint._format.manifest import TensorEntry
from shade.types import Bytes


class Delta(Codec, ABC):
    """Encodes a chunk as the difference to the base's chunk of the same number. One thread at a time encodes."""

    alone: ClassVar[str] = "none"
    """Name of the codec of its standalone chunks."""
    follows_previous: ClassVar[bool] = False
    """Whether the base is the previous snapshot; otherwise it is the newest keyframe."""
    needs_data: ClassVar[bool] = True
    """Whether `encode` reads the base's bytes: the writer then keeps them, as many as the shard has."""
    limit: ClassVar[float] = 0.0
    """Greatest relative error, per tensor and chunk, that is kept unless the user sets another."""

    def survey(self, data: memoryview, base: memoryview, entries: Mapping[str, TensorEntry], tree: Any) -> None:
        """Inspects a whole shard before its chunks are encoded; most codecs do nothing here."""

    @abstractmethod
    def encode(
        self, data: memoryview, base: memoryview, piece: Piece, exact: Collection[str] = frozenset()
    ) -> Bytes | None:
        """Returns the stored form of a chunk.

        Args:
            data: The chunk.
            base: The base's chunk, of the same length.
            piece: The content of the chunk.
            exact: Tensors that must be restored bit for bit.

        Returns:
            Any number of bytes; None if this chunk has to be stored standalone.
        """

    @abstractmethod
    def decode(self, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        """Returns the chunk, or something near.

        Args:
            stored: Bytes from `encode`.
            base: The base's chunk; not changed.
            piece: The content of the chunk.

        Returns:
            As many bytes as the base has.

        Raises:
            CorruptCheckpointError: It is not the stored form of a delta to that base.
        """


def memory_slots(name: str, slots: int, keyframe_every: int) -> int:
    """Returns the number of slots that cluster memory needs for ``slots`` complete snapshots, ≥ 2, and their bases,
    with ``keyframe_every`` saves from one keyframe to the next. An empty slot costs no memory."""
    kind = CODECS.get(name)
    if not issubclass(kind, Delta):
        return slots
    # A keyframe stays while the newest builds on it; a chain of deltas keeps all of its snapshots.
    return (slots - 1) * keyframe_every + 1 if kind.follows_previous else slots + 1
