"""Codecs that store an approximation of float32 items: the largest differences, or rounded ones; all else exactly.

They change only float32 tensors of at least `MIN_LOSSY_ITEMS` items. Step counts, biases, norms, integers, half
precision and generators are stored unchanged, and so is a tensor whose error would be too large. Every operation is one
IEEE addition or product of float32, so the same bytes result on every machine.

Stored: one zstandard frame with a byte for each tensor's part that could be lossy, 1 if it is; the exact bytes in their
order; then what the codec makes of the lossy items, which are concatenated in their order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shade.checkpoint._codecs.base import CODECS, Piece, Span
from shade.checkpoint._codecs.delta import Delta
from shade.checkpoint._codecs.zstd_frames import Frames, transpose
from shade.errors import CorruptCheckpointError
from shade.types import Bytes

Items: TypeAlias = npt.NDArray[np.float32]
Raw: TypeAlias = npt.NDArray[np.uint8]


class LossyDelta(Delta):
    """Stores differences of float32 items to the previous snapshot."""

    is_exact: ClassVar[bool] = False
    follows_previous: ClassVar[bool] = True
    limit: ClassVar[float] = 0.01
    name: ClassVar[str]
    """Its name in the registry."""

    def __init__(self) -> None:
        self._frames = Frames(self.name)

    @abstractmethod
    def encode_items(self, items_N: Items, base_N: Items, spans: Sequence[Span]) -> Raw | None:
        """Returns the stored form of finite items that come from these spans, in order; None if they cannot be stored
        in this form."""

    @abstractmethod
    def decode_items(self, encoded: Raw, base_N: Items, spans: Sequence[Span]) -> Items:
        """Returns as many items as the base has, approximately those that were encoded; may overwrite the base's.
        Raises `CorruptCheckpointError` if it is no result of `encode_items` for that many items."""

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
        position = len(flags)
        head = position + sum(each.stop - each.start for each in kept)
        least, most = self.encoded_lengths(len(base_N))
        if not least <= len(encoded) - head <= most:
            raise CorruptCheckpointError(
                f"expected {head + least} to {head + most} bytes of a chunk, got {len(encoded)}"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # the chunk may be damaged: its digest is checked later
            items_N = self.decode_items(encoded[head:].copy(), base_N, lossy)
        for each in kept:
            length = each.stop - each.start
            made[each] = encoded[position : position + length]
            position += length
        position = 0
        for span in lossy:
            length = (span.stop - span.start) // 4
            made[span.start : span.stop] = items_N[position : position + length].view(np.uint8)
            position += length
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
    position = 0
    for span in spans:
        length = (span.stop - span.start) // 4
        yield span, slice(position, position + length)
        position += length


DENSITY: Final = 0.01
"""Part of the items that is stored."""


@CODECS.register("topk-delta")
class TopKDelta(LossyDelta):
    """``topk-delta``: the signed differences of the hundredth of the items that moved furthest. Lossy.

    This is AsymCheck's selective compression, with the sign and the residual that its published code had lost. The
    difference is taken to what a reader of the previous snapshot would have, not to the state at that time. So what
    was not stored is part of the next difference and grows until it is stored: error feedback without a buffer. A
    reader starts at the keyframe and adds one difference after the other.

    Stored for N lossy items: k gaps (u32: the first index, then the distance to the next) and k differences
    (float32), all grouped by 4 bytes.

    References:
        AsymCheck, DAC 2026: density 0.01, top k within each chunk. Ours differs in sign, feedback and measured bound,
        and selects per tensor: moments move a hundred times as far as weights, and would take all items of a chunk.
    """

    name: ClassVar[str] = "topk-delta"

    @override
    def encode_items(self, items_N: Items, base_N: Items, spans: Sequence[Span]) -> Raw | None:
        difference_N = items_N - base_N
        if not np.isfinite(difference_N).all():
            return None
        positions_K = np.concatenate(
            [_largest(difference_N[here]) + here.start for _, here in item_ranges(spans)]
        ).astype("<u4")
        kept = len(positions_K)
        gaps_K = np.diff(positions_K, prepend=positions_K.dtype.type(0))
        return transpose(np.concatenate([gaps_K.view(np.uint8), difference_N[positions_K].view(np.uint8)]), 2 * kept, 4)

    @override
    def decode_items(self, encoded: Raw, base_N: Items, spans: Sequence[Span]) -> Items:
        if len(encoded) % 8:
            raise CorruptCheckpointError(f"expected pairs of a gap and a difference, got {len(encoded)} bytes")
        flat = transpose(encoded, 4, len(encoded) // 4)
        gaps_K, difference_K = flat[: len(flat) // 2].view("<u4"), flat[len(flat) // 2 :].view("<f4")
        positions_K = np.cumsum(gaps_K, dtype=np.uint64)
        if not gaps_K[1:].all() or positions_K[-1] >= len(base_N):
            raise CorruptCheckpointError(f"expected positions among {len(base_N)} items, each once, got others")
        base_N[positions_K] += difference_K
        return base_N

    @override
    def encoded_lengths(self, num_items: int) -> tuple[int, int]:
        return 8, 8 * num_items


def _largest(difference_N: Items) -> npt.NDArray[np.int64]:
    """Returns the ascending indices of the items that moved furthest."""
    kept = max(1, round(DENSITY * len(difference_N)))
    return np.sort(np.argpartition(np.abs(difference_N), len(difference_N) - kept)[-kept:])


BLOCK: Final = 1024
"""Items that share a step."""
_MOST: Final = 127


@CODECS.register("int8-delta")
class Int8Delta(LossyDelta):
    """``int8-delta``: the difference of every item to the previous snapshot, rounded to 255 steps per block. Lossy.

    A step is 1/127 of the largest difference in a block. All items move at every snapshot; the rounding error
    becomes part of the next difference. It takes a quarter of the bytes before zstandard, with an error of at most
    half a step: for users to whom ``topk-delta`` is too stale.

    Stored for N lossy items: the step of each block of 1024 items (float32), then a signed byte per item.
    """

    name: ClassVar[str] = "int8-delta"

    @override
    def encode_items(self, items_N: Items, base_N: Items, spans: Sequence[Span]) -> Raw | None:
        difference_N = items_N - base_N
        if not np.isfinite(difference_N).all():
            return None
        largest_B = np.maximum.reduceat(np.abs(difference_N), np.arange(0, len(difference_N), BLOCK))
        steps_B = (largest_B / np.float32(_MOST)).astype(np.float32)
        of_each_N = _spread(steps_B, len(difference_N))
        ratio_N = np.divide(difference_N, of_each_N, out=np.zeros_like(difference_N), where=of_each_N > 0)
        counts_N = np.clip(np.rint(ratio_N), -_MOST, _MOST).astype(np.int8)
        return np.concatenate([steps_B.astype("<f4").view(np.uint8), counts_N.view(np.uint8)])

    @override
    def decode_items(self, encoded: Raw, base_N: Items, spans: Sequence[Span]) -> Items:
        head = 4 * -(-len(base_N) // BLOCK)
        steps_B, counts_N = encoded[:head].view("<f4"), encoded[head:].view(np.int8)
        base_N += counts_N.astype(np.float32) * _spread(steps_B, len(base_N))
        return base_N

    @override
    def encoded_lengths(self, num_items: int) -> tuple[int, int]:
        length = 4 * -(-num_items // BLOCK) + num_items
        return length, length


def _spread(steps_B: Items, num_items: int) -> Items:
    """Returns the step of its block for every item."""
    return np.repeat(steps_B, BLOCK)[:num_items]
