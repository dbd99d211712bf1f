"""Shared part of the lossy codecs: which items they may change; everything else is stored exactly.

They change only float32 tensors of at least `MIN_LOSSY_ITEMS` items. Step counts, biases, norms, integers, half
precision and generators are stored unchanged, and so is a tensor whose error would be too large. Every operation is one
IEEE addition or product of float32, so the same bytes result on every machine.

Stored: one zstandard frame with a byte for each tensor's part that could be lossy, 1 if it is; the exact bytes in their
order; then what the codec makes of the lossy items, which are concatenated in their order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shade.checkpoint._codecs.base import Delta, Piece, Span
from shade.checkpoint._codecs.frames import Frames
from shade.errors import CorruptCheckpointError
from shade.types import Bytes

Items: TypeAlias = npt.NDArray[np.float32]
Raw: TypeAlias = npt.NDArray[np.uint8]


class LossyDelta(Delta):
    """Stores differences of float32 items to the previous snapshot.

    Raises:
        ConfigError: The ``zstandard`` package is missing.
    """

    is_exact: ClassVar[bool] = False
    follows_previous: ClassVar[bool] = True
    limit: ClassVar[float] = 0.01
    name: ClassVar[str]
    """Its name in the registry."""

    def __init__(self) -> None:
        self._frames = Frames(self.name)

    @abstractmethod
    def encode_items(self, items_N: Items, base_N: Items, spans: Sequence[Span]) -> Raw | None:
        """Returns the stored form of lossy items.

        Args:
            items_N: The items, finite.
            base_N: The base's items, finite.
            spans: Where they come from, in order; at least one.

        Returns:
            Bytes; None if the items cannot be stored in this form.
        """

    @abstractmethod
    def decode_items(self, encoded: Raw, base_N: Items, spans: Sequence[Span]) -> Items:
        """Returns the lossy items, approximately.

        Args:
            encoded: Bytes from `encode_items`.
            base_N: The base's items; may be overwritten.
            spans: As in `encode_items`.

        Returns:
            As many items as the base has.

        Raises:
            CorruptCheckpointError: It is no result of `encode_items` for that many items.
        """

    @abstractmethod
    def encoded_lengths(self, num_items: int) -> tuple[int, int]:
        """Returns the least and greatest number of bytes that `encode_items` returns for that many items."""

    @override
    def encode(
        self, data: memoryview, base: memoryview, piece: Piece, exact: Collection[str] = frozenset()
    ) -> Bytes | None:
        flags = np.array([span.name not in exact for span in _candidates(piece)], np.uint8)
        kept, lossy = _split(piece, flags)
        if not lossy:
            return None
        whole = np.frombuffer(data, np.uint8)
        items_N, base_N = _joined(whole, lossy), _joined(np.frombuffer(base, np.uint8), lossy)
        if not (np.isfinite(items_N).all() and np.isfinite(base_N).all()):
            return None
        with np.errstate(over="ignore"):
            encoded = self.encode_items(items_N, base_N, lossy)
        return (
            None
            if encoded is None
            else self._frames.pack(np.concatenate([flags, *(whole[each] for each in kept), encoded]))
        )

    @override
    def decode(self, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        candidates = _candidates(piece)
        num_items = sum(span.stop - span.start for span in candidates) // 4
        encoded = self._frames.unpack(
            stored, len(candidates) + 1, len(candidates) + len(base) + self.encoded_lengths(num_items)[1]
        )
        flags = encoded[: len(candidates)]
        kept, lossy = _split(piece, flags)
        if not lossy or flags.max() > 1:
            raise CorruptCheckpointError(f"expected a chunk with items for {self.name}, got one without")
        made = np.frombuffer(base, np.uint8).copy()
        base_N = _joined(made, lossy).copy()
        place = len(flags)
        head = place + sum(each.stop - each.start for each in kept)
        least, most = self.encoded_lengths(len(base_N))
        if not least <= len(encoded) - head <= most:
            raise CorruptCheckpointError(
                f"expected {head + least} to {head + most} bytes of a chunk, got {len(encoded)}"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # the chunk may be damaged: its digest is checked later
            items_N = self.decode_items(encoded[head:].copy(), base_N, lossy)
        for each in kept:
            length = each.stop - each.start
            made[each] = encoded[place : place + length]
            place += length
        place = 0
        for span in lossy:
            length = (span.stop - span.start) // 4
            made[span.start : span.stop] = items_N[place : place + length].view(np.uint8)
            place += length
        return made.data


def _candidates(piece: Piece) -> list[Span]:
    """Returns the parts that may be lossy; a part with an item that the chunk's edge cuts may not."""
    return [span for span in piece.spans if span.may_be_lossy and not (span.start % 4 or span.stop % 4)]


def _split(piece: Piece, flags: Raw) -> tuple[list[slice], list[Span]]:
    """Returns where a chunk is exact, and where it is lossy."""
    lossy = [span for span, flag in zip(_candidates(piece), flags, strict=True) if flag]
    exact = [slice(span.start, span.stop) for span in piece.spans if span not in lossy]
    return exact, lossy


def _joined(whole: Raw, spans: Sequence[Span]) -> Items:
    parts = [whole[span.start : span.stop].view("<f4") for span in spans]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def item_ranges(spans: Sequence[Span]) -> Iterator[tuple[Span, slice]]:
    """Yields each span with the range of its items among the lossy ones."""
    place = 0
    for span in spans:
        length = (span.stop - span.start) // 4
        yield span, slice(place, place + length)
        place += length
