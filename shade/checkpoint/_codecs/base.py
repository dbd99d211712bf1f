"""What a codec is: a way to store one chunk of a shard, alone or as the difference from the same chunk of a base.

Two kinds. `Standalone` needs nothing else to be read. `Delta` needs the *base*, another snapshot of the run: the newest
keyframe, or, for those that send a little each time, the snapshot before, and so on to the keyframe. A keyframe holds
chunks that stand alone, and so does any snapshot in as far as a difference would not be smaller, or not be true enough.

A codec that is not exact gives back something near. How near is never assumed: whoever encodes decodes at once,
measures, and keeps the difference only where it is within the limit (`_save.packing`). Invariant of all: no
stored bytes, whoever made them, make `decode` ask for more than a few times the chunk's length in memory, or return
something of another length; and what it returns is the same on every machine, bit for bit.
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
    """A way to store chunks: an `Standalone` or a `Delta`."""

    is_exact: ClassVar[bool] = True
    """Whether a chunk comes back bit for bit."""


CODECS: Final[Registry[Codec]] = Registry("checkpoint codec")


class Standalone(Codec, ABC):
    """A chunk that is read by itself. Threads may share one."""

    @abstractmethod
    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        """The stored form.

        Args:
            data: A chunk; may be returned itself.
            item_bytes: Width of most of its items, ≥ 1.

        Returns:
            Any number of bytes.
        """

    @abstractmethod
    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        """The chunk again.

        Args:
            stored: From `encode`.
            num_bytes: Length of the chunk.
            item_bytes: As it was given to `encode`.

        Returns:
            Exactly ``num_bytes`` bytes.

        Raises:
            CorruptCheckpointError: Not the stored form of a chunk of that length.
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
    may_be_rough: bool
    """See `TensorEntry.may_be_rough`."""


@dataclass(frozen=True)
class Piece:
    """What a chunk consists of."""

    item_bytes: int
    """Width of most items of the shard."""
    spans: tuple[Span, ...]
    """They tile the chunk."""

    @classmethod
    def of(cls, manifest: Manifest, number: int) -> Piece:
        """What a chunk of a shard consists of.

        Args:
            manifest: Of the shard.
            number: Of the chunk.

        Returns:
            The same for whoever writes and whoever reads.
        """
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
                    entry.may_be_rough,
                )
                for name, entry in manifest.tensors_between(first, last)
            ),
        )

    def clipped(self, num_bytes: int) -> Piece:
        """The first part of it.

        Args:
            num_bytes: How long.

        Returns:
            What that part consists of.
        """
        inside = (span for span in self.spans if span.start < num_bytes)
        return Piece(self.item_bytes, tuple(replace(span, stop=min(span.stop, num_bytes)) for span in inside))


class Delta(Codec, ABC):
    """A chunk as what is different from the base's chunk of the same number. One thread at a time encodes."""

    alone: ClassVar[str] = "none"
    """Codec of the chunks that stand alone."""
    follows_previous: ClassVar[bool] = False
    """Whether the base is the snapshot before; else it is the newest keyframe."""
    needs_data: ClassVar[bool] = True
    """Whether `encode` reads the base's bytes: whoever packs has to keep them, as many as the shard has."""
    limit: ClassVar[float] = 0.0
    """Greatest relative error, of each tensor's part in a chunk, that is kept unless another is asked for."""

    def survey(self, data: memoryview, base: memoryview, entries: Mapping[str, TensorEntry], tree: Any) -> None:
        """Looks at a whole shard before its chunks are encoded; most have nothing to learn from it.

        Args:
            data: The shard.
            base: The base's shard, of the same layout.
            entries: Its tensors.
            tree: The skeleton of the state.
        """

    @abstractmethod
    def encode(
        self, data: memoryview, base: memoryview, piece: Piece, exact: Collection[str] = frozenset()
    ) -> Bytes | None:
        """The stored form.

        Args:
            data: A chunk.
            base: The base's chunk, as long.
            piece: What it consists of.
            exact: Tensors that must come back bit for bit.

        Returns:
            Any number of bytes; None where this chunk cannot be stored so, and has to stand alone.
        """

    @abstractmethod
    def decode(self, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        """The chunk again, or something near.

        Args:
            stored: From `encode`.
            base: As it was given to `encode`; left as it is.
            piece: Likewise.

        Returns:
            As many bytes as the base has.

        Raises:
            CorruptCheckpointError: Not the stored form of a difference from that base.
        """


def standing_alone(name: str) -> Standalone:
    """A codec for those who have no base to compare with.

    Args:
        name: In `CODECS`.

    Returns:
        The codec.

    Raises:
        UnknownNameError: There is none of that name.
        ConfigError: It needs a base, or a package that is missing.
    """
    codec = CODECS.get(name)()
    if not isinstance(codec, Standalone):
        known = ", ".join(each for each in CODECS if issubclass(CODECS.get(each), Standalone))
        raise ConfigError.of("a codec whose chunks stand alone", name, f"choose one of {known}")
    return codec


def builds(name: str) -> bool:
    """Whether snapshots with that codec build on others.

    Args:
        name: In `CODECS`.

    Returns:
        The answer.

    Raises:
        UnknownNameError: There is none of that name.
    """
    return issubclass(CODECS.get(name), Delta)


def memory_slots(name: str, slots: int, keyframe_every: int) -> int:
    """How many slots cluster memory needs to hold so many full snapshots, and what builds on them.

    Args:
        name: Of the codec.
        slots: Full snapshots that there is room for, ≥ 2.
        keyframe_every: Saves from one keyframe to the next.

    Returns:
        A number; a slot costs what lies in it, so more of them take no more memory.
    """
    kind = CODECS.get(name)
    if not issubclass(kind, Delta):
        return slots
    # A keyframe stays while the newest builds on it. What builds on the snapshot before keeps all of those, too.
    return (slots - 1) * keyframe_every + 1 if kind.follows_previous else slots + 1


def of_length(content: Bytes, num_bytes: int) -> Bytes:
    """What is given, if it is as long as it should be.

    Args:
        content: A chunk.
        num_bytes: Its length.

    Returns:
        The same.

    Raises:
        CorruptCheckpointError: It is not.
    """
    if len(content) != num_bytes:
        raise CorruptCheckpointError(f"expected a chunk of {num_bytes} bytes, got {len(content)}")
    return content
