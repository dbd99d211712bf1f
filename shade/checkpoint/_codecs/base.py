"""Defines a codec: a way to store one chunk of a shard, alone or as a delta to the same chunk of a base.

`Standalone` decodes a chunk without other data. `Delta` needs the *base*, another snapshot of the run: the newest
keyframe, or the previous snapshot and so on down to the keyframe. The error of a lossy codec is measured, not assumed
(`_save.packing`). Invariant of all codecs: whatever bytes `decode` is given, it allocates at most a few times the
chunk's length and returns exactly that length; its result is the same on every machine, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from shade.checkpoint._format.manifest import Manifest, TensorEntry
from shade.errors import ConfigError, CorruptCheckpointError
from shade.registry import Registry
from shade.types import Bytes


class Codec:
    """A way to store chunks: a `Standalone` or a `Delta`."""

    is_exact: ClassVar[bool] = True
    """Whether a chunk is restored bit for bit."""


CODECS: Final[Registry[Codec]] = Registry("checkpoint codec")


class Standalone(Codec, ABC):
    """Encodes a chunk that is decoded without a base. Threads may share one."""

    @abstractmethod
    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        """Returns the stored form of a chunk.

        Args:
            data: The chunk; may be returned itself.
            item_bytes: Width of most of its items, ≥ 1.

        Returns:
            Any number of bytes.
        """

    @abstractmethod
    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        """Returns the chunk.

        Args:
            stored: Bytes from `encode`.
            num_bytes: Length of the chunk.
            item_bytes: The value that `encode` was given.

        Returns:
            Exactly ``num_bytes`` bytes.

        Raises:
            CorruptCheckpointError: It is not the stored form of a chunk of that length.
        """


@dataclass(frozen=True)
class Span:
    """The part of a tensor that lies in a chunk."""

    name: str
    start: int
    """First byte in the chunk."""
    stop: int
    offset: int
    """First byte in the tensor."""
    may_be_lossy: bool


@dataclass(frozen=True)
class Piece:
    """The parts of tensors that a chunk consists of."""

    item_bytes: int
    """Width of most items of the shard."""
    spans: tuple[Span, ...]
    """In order, without gaps."""

    @classmethod
    def of(cls, manifest: Manifest, number: int) -> Piece:
        """Returns the content of a chunk of a shard; the same for the writer and the reader."""
        first = number * manifest.chunk_bytes
        last = first + manifest.data_length(number)
        return cls(
            manifest.item_bytes,
            tuple(
                Span(
                    name,
                    max(entry.start, first) - first,
                    min(entry.stop, last) - first,
                    max(entry.start, first) - entry.start,
                    entry.may_be_lossy,
                )
                for name, entry in manifest.tensors_between(first, last)
            ),
        )

    def clipped(self, num_bytes: int) -> Piece:
        """Returns the content of the chunk's first ``num_bytes`` bytes."""
        inside = (span for span in self.spans if span.start < num_bytes)
        return Piece(self.item_bytes, tuple(replace(span, stop=min(span.stop, num_bytes)) for span in inside))


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


def standalone_codec(name: str) -> Standalone:
    """Returns a standalone codec.

    Raises UnknownNameError if there is no such codec, or ConfigError if the codec needs a base, or a package is
    missing.
    """
    codec = CODECS.get(name)()
    if not isinstance(codec, Standalone):
        known = ", ".join(each for each in CODECS if issubclass(CODECS.get(each), Standalone))
        raise ConfigError.of("a codec that needs no base", name, f"choose one of {known}")
    return codec


def is_delta(name: str) -> bool:
    """Returns whether snapshots with that codec build on others."""
    return issubclass(CODECS.get(name), Delta)


def memory_slots(name: str, slots: int, keyframe_every: int) -> int:
    """Returns the number of slots that cluster memory needs for ``slots`` complete snapshots, ≥ 2, and their bases,
    with ``keyframe_every`` saves from one keyframe to the next. An empty slot costs no memory."""
    kind = CODECS.get(name)
    if not issubclass(kind, Delta):
        return slots
    # A keyframe stays while the newest builds on it; a chain of deltas keeps all of its snapshots.
    return (slots - 1) * keyframe_every + 1 if kind.follows_previous else slots + 1


def check_length(content: Bytes, num_bytes: int) -> Bytes:
    """Returns a chunk if it has ``num_bytes`` bytes, or raises CorruptCheckpointError."""
    if len(content) != num_bytes:
        raise CorruptCheckpointError(f"expected a chunk of {num_bytes} bytes, got {len(content)}")
    return content
