"""Defines a codec: a way to store one chunk of a shard, alone or as a delta to the same chunk of a base.

`Standalone` decodes a chunk without other data; `Delta` (`_codecs.delta`) needs another snapshot. The error of a lossy
codec is measured, not assumed (`_save.packing`). Invariant of all codecs: whatever bytes `decode` is given, it
allocates at most a few times the chunk's length and returns exactly that length; its result is the same on every
machine, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from shade.checkpoint._format.manifest import Manifest
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


def standalone_codec(name: str) -> Standalone:
    """Returns a standalone codec; raises UnknownNameError if there is none of that name, or ConfigError if the codec
    needs a base, or a package is missing."""
    codec = CODECS.get(name)()
    if not isinstance(codec, Standalone):
        known = ", ".join(each for each in CODECS if issubclass(CODECS.get(each), Standalone))
        raise ConfigError.of("a codec that needs no base", name, f"choose one of {known}")
    return codec


def is_delta(name: str) -> bool:
    """Returns whether snapshots with that codec build on others."""
    return not issubclass(CODECS.get(name), Standalone)


def check_length(content: Bytes, num_bytes: int) -> Bytes:
    """Returns a chunk if it has ``num_bytes`` bytes, or raises CorruptCheckpointError."""
    if len(content) != num_bytes:
        raise CorruptCheckpointError(f"expected a chunk of {num_bytes} bytes, got {len(content)}")
    return content
