"""Codec ``excp``: weights as pruned changes, moments pruned with them, each item one of sixteen values. Not exact.

ExCP's checkpoint compression. What is pruned is 0: a weight stays as the snapshot before had it, a moment is gone. What
is kept becomes the nearest of up to 15 centres, found by k-means for each tensor's part of a chunk, and is stored in
four bits. As published there is no limit to the error but that nothing grows: 1, relative. What came of it is measured
and told with every snapshot; a run that resumes from one has lost most of its moments. Ask for a smaller limit
(``max_error=``), and what is beyond it is stored exactly.

Stored of N rough items, one after the other for each tensor's part: 1 if its centres are added to the base's items, 0
if they stand for themselves (u8); the number of centres (u8); the centres (float32); an index an item in four bits, the
lower half of a byte first, 0 for what is pruned, else 1 + the centre's.

References:
    Li et al., "ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking", ICML 2024. Ours clusters
    a chunk's part and not a whole tensor, keeps centres in float32, and packs with zstandard instead of 7-Zip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from shade.checkpoint.codecs.base import CODECS, Span
from shade.checkpoint.codecs.kmeans import cluster
from shade.checkpoint.codecs.moments import Survey
from shade.checkpoint.codecs.rough import Items, Raw, Rough, item_ranges
from shade.checkpoint.manifest import TensorEntry
from shade.errors import CorruptCheckpointError

CENTRES: Final = 15
"""2⁴ values, one of them for what is pruned."""


@CODECS.register("excp")
class ExCP(Rough):
    """Pruned and clustered."""

    name: ClassVar[str] = "excp"
    limit: ClassVar[float] = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._survey: Survey | None = None

    def survey(self, data: memoryview, base: memoryview, entries: Mapping[str, TensorEntry], tree: Any) -> None:
        """See `Delta`."""
        self._survey = Survey(data, base, entries, tree)

    def rough(self, items_N: Items, base_N: Items, spans: Sequence[Span]) -> Raw | None:
        """See `Rough`; None where centres and indices would take more than the items."""
        assert self._survey is not None, "survey() comes first"
        told: list[Raw] = []
        for span, here in item_ranges(spans):
            kept = self._survey.kept[span.name][span.offset // 4 :][: here.stop - here.start]
            is_change = not self._survey.is_moment[span.name]
            values = items_N[here] - base_N[here] if is_change else items_N[here]
            if not np.isfinite(values).all():
                return None
            told += _part(values, kept, is_change=is_change)
        whole = np.concatenate(told)
        return whole if len(whole) <= 4 * len(items_N) else None

    def restored(self, told: Raw, base_N: Items, spans: Sequence[Span]) -> Items:
        """See `Rough`."""
        place = 0
        for _, here in item_ranges(spans):
            length = here.stop - here.start
            head = told[place : place + 2]
            if len(head) < 2 or head[0] > 1 or head[1] > CENTRES:
                raise CorruptCheckpointError("expected the centres of a tensor's part, got something else")
            centres_end = place + 2 + 4 * int(head[1])
            place = centres_end + (length + 1) // 2
            if place > len(told):
                raise CorruptCheckpointError(f"expected {length} indices, got too few bytes")
            values = np.zeros(CENTRES + 1, "<f4")
            values[1 : 1 + int(head[1])] = told[centres_end - 4 * int(head[1]) : centres_end].view("<f4")
            pairs = told[centres_end:place]
            indices = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:length]
            base_N[here] = base_N[here] + values[indices] if head[0] else values[indices]
        if place != len(told):
            raise CorruptCheckpointError(f"expected {place} bytes of indices, got {len(told)}")
        return base_N

    def lengths(self, num_items: int) -> tuple[int, int]:
        """See `Rough`."""
        return 3, 4 * num_items


def _part(values: Items, kept: np.ndarray[Any, np.dtype[np.bool_]], *, is_change: bool) -> list[Raw]:
    """What is stored of one tensor's part."""
    indices = np.zeros(len(values) + len(values) % 2, np.uint8)
    centres = np.empty(0, np.float32)
    if kept.any():
        centres, labels = cluster(np.ascontiguousarray(values[kept]), CENTRES)
        indices[: len(values)][kept] = labels + 1
    packed = (indices[0::2] | indices[1::2] << 4).astype(np.uint8)
    return [np.array([is_change, len(centres)], np.uint8), centres.astype("<f4").view(np.uint8), packed]
