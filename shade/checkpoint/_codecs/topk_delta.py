"""Codec ``topk-delta``: the hundredth of the items that has moved furthest, with sign; the rest waits. Not exact.

AsymCheck's selective compression, with what its published code had lost: the sign, and the residual. The difference is
taken from what a reader of the snapshot before would have, not from the state before. So what was not sent is part of
the next difference and grows until it is sent: error feedback, without a buffer for it. A reader starts at the keyframe
and adds one difference after the other.

Stored of N rough items: k gaps (u32: the first place, then how far to the next) and k differences (float32), together
grouped by 4 bytes.

References:
    AsymCheck, DAC 2026: density 0.01, top k within each chunk. Ours differs in sign, feedback and the measured bound,
    and takes its hundredth of each tensor's part: moments move a hundred times as far as weights, and would be all
    there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from shade.checkpoint._codecs.base import CODECS, Span
from shade.checkpoint._codecs.frames import turn
from shade.checkpoint._codecs.lossy import Items, LossyCodec, Raw, item_ranges
from shade.errors import CorruptCheckpointError

DENSITY: Final = 0.01
"""Part of the items that is sent."""


@CODECS.register("topk-delta")
class TopKDelta(LossyCodec):
    """The largest differences."""

    name: ClassVar[str] = "topk-delta"

    def rough(self, items_N: Items, base_N: Items, spans: Sequence[Span]) -> Raw | None:
        """See `LossyCodec`."""
        moved_N = items_N - base_N
        if not np.isfinite(moved_N).all():
            return None
        places_K = np.concatenate([_largest(moved_N[here]) + here.start for _, here in item_ranges(spans)]).astype(
            "<u4"
        )
        kept = len(places_K)
        gaps_K = np.diff(places_K, prepend=places_K.dtype.type(0))
        return turn(np.concatenate([gaps_K.view(np.uint8), moved_N[places_K].view(np.uint8)]), 2 * kept, 4)

    def restored(self, told: Raw, base_N: Items, spans: Sequence[Span]) -> Items:
        """See `LossyCodec`."""
        if len(told) % 8:
            raise CorruptCheckpointError(f"expected pairs of a gap and a difference, got {len(told)} bytes")
        flat = turn(told, 4, len(told) // 4)
        gaps_K, moved_K = flat[: len(flat) // 2].view("<u4"), flat[len(flat) // 2 :].view("<f4")
        places_K = np.cumsum(gaps_K, dtype=np.uint64)
        if not gaps_K[1:].all() or places_K[-1] >= len(base_N):
            raise CorruptCheckpointError(f"expected places among {len(base_N)} items, each once, got others")
        base_N[places_K] += moved_K
        return base_N

    def lengths(self, num_items: int) -> tuple[int, int]:
        """See `LossyCodec`."""
        return 8, 8 * num_items


def _largest(moved_N: Items) -> npt.NDArray[np.int64]:
    """Places of the items that have moved furthest, ascending."""
    kept = max(1, round(DENSITY * len(moved_N)))
    return np.sort(np.argpartition(np.abs(moved_N), len(moved_N) - kept)[-kept:])
