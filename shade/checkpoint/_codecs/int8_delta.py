"""Codec ``int8-delta``: the difference of every item to the previous snapshot, rounded to 255 steps per block. Lossy.

A step is 1/127 of the largest difference in a block. All items move at every snapshot; the rounding error becomes part
of the next difference. It takes a quarter of the bytes before zstandard, with an error of at most half a step: for
users to whom ``topk-delta`` is too stale.

Stored for N lossy items: the step of each block of 1024 items (float32), then a signed byte per item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np
from typing_extensions import override

from shade.checkpoint._codecs.base import CODECS, Span
from shade.checkpoint._codecs.lossy import Items, LossyDelta, Raw

BLOCK: Final = 1024
"""Items that share a step."""
_MOST: Final = 127


@CODECS.register("int8-delta")
class Int8Delta(LossyDelta):
    """Stores rounded differences."""

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
