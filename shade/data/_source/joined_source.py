"""JoinedSource: any choice of the samples of sources, such as of two sets of shards that torch's wrappers join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash
from typing_extensions import override

from shade.data._source.selection import Selection
from shade.data._source.source import CountOrigin, NearSource, SampleSource


class JoinedSource(NearSource):
    """Samples of ``sources``, one for each leaf of a selection, which cache in one format."""

    has_pictures = compares_hits = is_random = has_encoded_items = False

    def __init__(self, sources: Sequence[SampleSource], selection: Selection) -> None:
        self._sources, self._selection = list(sources), selection
        self.cached_format = sources[0].cached_format
        digest = xxhash.xxh3_64(" ".join(source.fingerprint for source in sources).encode())
        digest.update(selection.leaf_N.tobytes())
        digest.update(selection.index_N.tobytes())
        self.fingerprint = digest.hexdigest()
        self.revision = " and ".join(each.revision for each in sources if each.revision) or None
        self.num_probes = sum(source.num_probes for source in sources)
        self.probe_bytes = sum(source.probe_bytes for source in sources)
        self.payload_bytes_N = np.empty(len(selection.leaf_N), np.int64)
        for leaf, source in enumerate(sources):
            mine_N = selection.leaf_N == leaf
            self.payload_bytes_N[mine_N] = source.payload_bytes_N[selection.index_N[mine_N]]
        self.target_N = None

    def _of(self, index: int) -> tuple[SampleSource, int]:
        return self._sources[int(self._selection.leaf_N[index])], int(self._selection.index_N[index])

    def _each(self, indices: list[int], read: Callable[[SampleSource, list[int]], list[Any]]) -> list[Any]:
        """Returns, in order, what ``read`` returns for a source and the numbers that its samples have there."""
        found: list[Any] = [None] * len(indices)
        for leaf, positions in self._selection.grouped(indices).items():
            inner = self._selection.index_N[[indices[position] for position in positions]].tolist()
            for position, payload in zip(positions, read(self._sources[leaf], inner), strict=True):
                found[position] = payload
        return found

    @override
    def read_near(self, indices: list[int]) -> dict[int, Any]:
        def read(source: SampleSource, inner: list[int]) -> list[Any]:
            near = source.read_near(inner) if isinstance(source, NearSource) else {}
            return [near.get(index) for index in inner]

        return {i: each for i, each in zip(indices, self._each(indices, read), strict=True) if each is not None}

    @override
    def read_many(self, indices: list[int], count: CountOrigin) -> list[Any]:
        return self._each(indices, lambda source, inner: source.read_many(inner, count))

    @override
    def decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        source, inner = self._of(index)
        return source.decode(inner, payload)

    @override
    def rest_of(self, index: int) -> tuple[Any, ...]:
        source, inner = self._of(index)
        return source.rest_of(inner)

    @override
    def name_of(self, index: int) -> str:
        source, inner = self._of(index)
        return source.name_of(inner)

    @override
    def close(self) -> None:
        for source in self._sources:
            source.close()
