"""Codec ``int8-delta``: every item's difference from the snapshot before, in steps of 1/127 of its block's largest.

All items move at every snapshot, each by the nearest of 255 steps; what rounding leaves is part of the next difference.
A quarter of the bytes before zstandard, and an error of at most half a step: the quantised delta for whoever finds
``topk-delta`` too stale. Not exact.

Stored of N rough items: the steps' sizes (float32, one for each block of 1024 items), then a signed byte an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from shade.checkpoint._codecs.base import CODECS, Span
from shade.checkpoint._codecs.lossy import Items, LossyCodec, Raw

BLOCK: Final = 1024
"""Items that share a step."""
_MOST: Final = 127


@CODECS.register("int8-delta")
class Int8Delta(LossyCodec):
    """Rounded differences."""

    name: ClassVar[str] = "int8-delta"

    def rough(self, items_N: Items, base_N: Items, spans: Sequence[Span]) -> Raw | None:
        """See `LossyCodec`."""
        moved_N = items_N - base_N
        if not np.isfinite(moved_N).all():
            return None
        largest_B = np.maximum.reduceat(np.abs(moved_N), np.arange(0, len(moved_N), BLOCK))
        steps_B = (largest_B / np.float32(_MOST)).astype(np.float32)
        of_each_N = _spread(steps_B, len(moved_N))
        ratio_N = np.divide(moved_N, of_each_N, out=np.zeros_like(moved_N), where=of_each_N > 0)
        counts_N = np.clip(np.rint(ratio_N), -_MOST, _MOST).astype(np.int8)
        return np.concatenate([steps_B.astype("<f4").view(np.uint8), counts_N.view(np.uint8)])

    def restored(self, told: Raw, base_N: Items, spans: Sequence[Span]) -> Items:
        """See `LossyCodec`."""
        head = 4 * -(-len(base_N) // BLOCK)
        steps_B, counts_N = told[:head].view("<f4"), told[head:].view(np.int8)
        base_N += counts_N.astype(np.float32) * _spread(steps_B, len(base_N))
        return base_N

    def lengths(self, num_items: int) -> tuple[int, int]:
        """See `LossyCodec`."""
        length = 4 * -(-num_items // BLOCK) + num_items
        return length, length


def _spread(steps_B: Items, num_items: int) -> Items:
    """Its block's step for every item."""
    return np.repeat(steps_B, BLOCK)[:num_items]
