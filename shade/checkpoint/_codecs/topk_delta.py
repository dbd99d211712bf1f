"""Codec ``topk-delta``: the signed differences of the hundredth of the items that moved furthest. Lossy.

This is AsymCheck's selective compression, with the sign and the residual that its published code had lost. The
difference is taken to what a reader of the previous snapshot would have, not to the state at that time. So what was not
stored is part of the next difference and grows until it is stored: error feedback without a buffer. A reader starts at
the keyframe and adds one difference after the other.

Stored for N lossy items: k gaps (u32: the first index, then the distance to the next) and k differences (float32), all
grouped by 4 bytes.

References:
    AsymCheck, DAC 2026: density 0.01, top k within each chunk. Ours differs in sign, feedback and the measured bound,
    and selects per tensor: moments move a hundred times as far as weights, and would take all places of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shade.checkpoint._codecs.base import CODECS, Span
from shade.checkpoint._codecs.frames import transpose
from shade.checkpoint._codecs.lossy import Items, LossyDelta, Raw, item_ranges
from shade.errors import CorruptCheckpointError

DENSITY: Final = 0.01
"""Part of the items that is stored."""


@CODECS.register("topk-delta")
class TopKDelta(LossyDelta):
    """Stores the largest differences."""

    name: ClassVar[str] = "topk-delta"

    @override
    def encode_items(self, items_N: Items, base_N: Items, spans: Sequence[Span]) -> Raw | None:
        difference_N = items_N - base_N
        if not np.isfinite(difference_N).all():
            return None
        places_K = np.concatenate([_largest(difference_N[here]) + here.start for _, here in item_ranges(spans)]).astype(
            "<u4"
        )
        kept = len(places_K)
        gaps_K = np.diff(places_K, prepend=places_K.dtype.type(0))
        return transpose(np.concatenate([gaps_K.view(np.uint8), difference_N[places_K].view(np.uint8)]), 2 * kept, 4)

    @override
    def decode_items(self, encoded: Raw, base_N: Items, spans: Sequence[Span]) -> Items:
        if len(encoded) % 8:
            raise CorruptCheckpointError(f"expected pairs of a gap and a difference, got {len(encoded)} bytes")
        flat = transpose(encoded, 4, len(encoded) // 4)
        gaps_K, difference_K = flat[: len(flat) // 2].view("<u4"), flat[len(flat) // 2 :].view("<f4")
        places_K = np.cumsum(gaps_K, dtype=np.uint64)
        if not gaps_K[1:].all() or places_K[-1] >= len(base_N):
            raise CorruptCheckpointError(f"expected places among {len(base_N)} items, each once, got others")
        base_N[places_K] += difference_K
        return base_N

    @override
    def encoded_lengths(self, num_items: int) -> tuple[int, int]:
        return 8, 8 * num_items


def _largest(difference_N: Items) -> npt.NDArray[np.int64]:
    """Returns the ascending indices of the items that moved furthest."""
    kept = max(1, round(DENSITY * len(difference_N)))
    return np.sort(np.argpartition(np.abs(difference_N), len(difference_N) - kept)[-kept:])
