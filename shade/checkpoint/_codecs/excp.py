"""Codec ``excp``: weights as pruned differences, moments pruned with them, each item one of sixteen values. Lossy.

This is ExCP's checkpoint compression. A pruned item is 0: a weight keeps the value of the previous snapshot, a moment
is lost. A kept item becomes the nearest of up to 15 centres, which k-means finds for each tensor's part of a chunk, and
is stored in four bits; docs/format.md §5 has the bytes. As published, the error is limited only to 1, relative: it is
measured and recorded with every snapshot, and a run that resumes from one has lost most of its moments. A smaller limit
(``max_error=``) stores what exceeds it exactly.

References:
    Li et al., "ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking", ICML 2024, §3.2, and
    excp/compress_pythia.py. Ours clusters a chunk's part instead of a tensor, keeps centres in float32, and packs with
    zstandard instead of 7-Zip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shade.checkpoint._codecs.base import CODECS, Span
from shade.checkpoint._codecs.lossy import Items, LossyDelta, Raw, item_ranges
from shade.checkpoint._format.manifest import TensorEntry
from shade.errors import CorruptCheckpointError

CENTRES: Final = 15
"""2⁴ values, one of them for pruned items."""


@CODECS.register("excp")
class ExCPCodec(LossyDelta):
    """Stores pruned and clustered items."""

    name: ClassVar[str] = "excp"
    limit: ClassVar[float] = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._survey: Survey | None = None

    @override
    def survey(self, data: memoryview, base: memoryview, entries: Mapping[str, TensorEntry], tree: Any) -> None:
        self._survey = Survey(data, base, entries, tree)

    @override
    def encode_items(self, items_N: Items, base_N: Items, spans: Sequence[Span]) -> Raw | None:
        # None if centres and indices would take more bytes than the items.
        assert self._survey is not None, "survey() comes first"
        encoded: list[Raw] = []
        for span, here in item_ranges(spans):
            kept = self._survey.kept[span.name][span.offset // 4 :][: here.stop - here.start]
            is_change = not self._survey.is_moment[span.name]
            values = items_N[here] - base_N[here] if is_change else items_N[here]
            if not np.isfinite(values).all():
                return None
            encoded += _part(values, kept, is_change=is_change)
        whole = np.concatenate(encoded)
        return whole if len(whole) <= 4 * len(items_N) else None

    @override
    def decode_items(self, encoded: Raw, base_N: Items, spans: Sequence[Span]) -> Items:
        position = 0
        for _, here in item_ranges(spans):
            length = here.stop - here.start
            head = encoded[position : position + 2]
            if len(head) < 2 or head[0] > 1 or head[1] > CENTRES:
                raise CorruptCheckpointError("expected the centres of a tensor's part, got other bytes")
            centres_end = position + 2 + 4 * int(head[1])
            position = centres_end + (length + 1) // 2
            if position > len(encoded):
                raise CorruptCheckpointError(f"expected {length} indices, got too few bytes")
            values = np.zeros(CENTRES + 1, "<f4")
            values[1 : 1 + int(head[1])] = encoded[centres_end - 4 * int(head[1]) : centres_end].view("<f4")
            pairs = encoded[centres_end:position]
            indices = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:length]
            base_N[here] = base_N[here] + values[indices] if head[0] else values[indices]
        if position != len(encoded):
            raise CorruptCheckpointError(f"expected {position} bytes of indices, got {len(encoded)}")
        return base_N

    @override
    def encoded_lengths(self, num_items: int) -> tuple[int, int]:
        return 3, 4 * num_items


def _part(values: Items, kept: np.ndarray[Any, np.dtype[np.bool_]], *, is_change: bool) -> list[Raw]:
    """Returns what is stored for one tensor's part."""
    indices = np.zeros(len(values) + len(values) % 2, np.uint8)
    centres = np.empty(0, np.float32)
    if kept.any():
        centres, labels = cluster(np.ascontiguousarray(values[kept]), CENTRES)
        indices[: len(values)][kept] = labels + 1
    packed = (indices[0::2] | indices[1::2] << 4).astype(np.uint8)
    return [np.array([is_change, len(centres)], np.uint8), centres.astype("<f4").view(np.uint8), packed]


_ROUNDS: Final = 30
_BINS: Final = 2**16

Sums: TypeAlias = npt.NDArray[np.float64]


def cluster(
    values_N: npt.NDArray[np.float32], num_clusters: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Clusters finite numbers, at least one, by k-means into ``num_clusters`` at most, 1 … 255. Returns the centres,
    ascending, and for each number the index of its centre."""
    # K-means on a line without a sort: counted by the upper half of their bits, numbers lie in at most 65 536 bins no
    # wider than 2⁻⁷ of their content, and Lloyd's iteration moves the borders between bins.
    keys_N = _keys(values_N)
    counts = np.bincount(keys_N, minlength=_BINS)
    (used,) = np.nonzero(counts)
    weights = counts[used].astype(np.float64)
    sums = np.bincount(keys_N, weights=values_N, minlength=_BINS)[used]
    means = sums / weights
    total = np.concatenate([[0.0], np.cumsum(weights)])
    mass = np.concatenate([[0.0], np.cumsum(sums)])
    centres = _split(means, weights, num_clusters)
    for _ in range(_ROUNDS):
        edges = np.searchsorted(means, (centres[1:] + centres[:-1]) / 2)
        cuts = np.concatenate([[0], edges, [len(used)]])
        held = np.diff(total[cuts])
        inside = held > 0
        moved = np.where(inside, np.diff(mass[cuts]) / np.where(inside, held, 1.0), centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    stored = np.unique(centres.astype(np.float32))
    edges = np.searchsorted(means, (stored[1:].astype(np.float64) + stored[:-1]) / 2)
    labels = np.zeros(_BINS, np.uint8)
    labels[used] = np.searchsorted(edges, np.arange(len(used)), side="right")
    return stored, labels[keys_N]


def _split(means: Sums, weights: Sums, num_clusters: int) -> Sums:
    """Returns the initial centres: repeatedly splits the cluster with the greatest error at its mean."""
    total, mass, squares = (np.concatenate([[0.0], np.cumsum(weights * means**power)]) for power in (0, 1, 2))

    def error(first: int, last: int) -> float:
        count = total[last] - total[first]
        return float(squares[last] - squares[first] - (mass[last] - mass[first]) ** 2 / count)

    clusters = [(error(0, len(means)), 0, len(means))]
    while len(clusters) < num_clusters:
        worst = max(
            range(len(clusters)), key=lambda number: (clusters[number][2] - clusters[number][1] > 1, clusters[number])
        )
        _, first, last = clusters.pop(worst)
        if last - first == 1:
            clusters.append((0.0, first, last))
            break
        mean = (mass[last] - mass[first]) / (total[last] - total[first])
        middle = min(max(first + int(np.searchsorted(means[first:last], mean)), first + 1), last - 1)
        clusters += [(error(first, middle), first, middle), (error(middle, last), middle, last)]
    return np.array(sorted((mass[last] - mass[first]) / (total[last] - total[first]) for _, first, last in clusters))


def _keys(values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Returns the upper half of the bits, as integers that ascend with the numbers."""
    high_N = (values_N.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(high_N >= 2**15, ~high_N, high_N | np.uint16(2**15))


ALPHA: Final = 5e-5
BETA: Final = 2.0
_STEEPEST: Final = 2.5
_MOMENT: Final = re.compile(r"(.+)/state/(\d+)/(exp_avg|exp_avg_sq)(?:@rank\d+)?")


class Survey:
    """Chooses the items of a shard's tensors that are kept.

    Args:
        data: The shard.
        base: The base's shard, of the same layout.
        entries: Its tensors.
        tree: The skeleton of the state, for the order of the tensors.
    """

    def __init__(self, data: memoryview, base: memoryview, entries: Mapping[str, TensorEntry], tree: Any) -> None:
        self._data, self._base = np.frombuffer(data, np.uint8), np.frombuffer(base, np.uint8)
        self._entries = {name: entry for name, entry in entries.items() if entry.may_be_lossy}
        self.is_moment = {name: bool(_MOMENT.fullmatch(name)) for name in self._entries}
        """By tensor."""
        self.kept: dict[str, npt.NDArray[np.bool_]] = {}
        """By tensor, for each of its items."""
        owners = _owners(self._entries, list(dict.fromkeys(_tensors(tree))))
        for name in self._entries:
            if not self.is_moment[name]:
                self.kept[name] = self._moved(name, owners.get(name, {}))
        for name, moments in owners.items():
            self._keep_moments(moments, self.kept[name])
        for moments in _moments(self._entries).values():
            self._keep_moments({kind: each for kind, each in moments.items() if each not in self.kept}, None)

    def _items(self, whole: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.float32]:
        entry = self._entries[name]
        return whole[entry.start : entry.stop].view("<f4")

    def _moved(self, name: str, moments: Mapping[str, str]) -> npt.NDArray[np.bool_]:
        with np.errstate(over="ignore", invalid="ignore"):
            change = np.abs(self._items(self._data, name) - self._items(self._base, name))
            steepness = _STEEPEST
            if "exp_avg_sq" in moments:
                second = float(np.mean(self._items(self._data, moments["exp_avg_sq"]), dtype=np.float64))
                steepness = min(_STEEPEST, ALPHA / second**0.5) if second > 0 else _STEEPEST
            # As published: the median difference of the tensor times min(2.5, α / √mean(v)).
            kept: npt.NDArray[np.bool_] = change > np.median(change) * steepness
            return kept

    def _keep_moments(self, moments: Mapping[str, str], kept: npt.NDArray[np.bool_] | None) -> None:
        if "exp_avg" in moments:
            with np.errstate(over="ignore", invalid="ignore"):
                size = np.abs(self._items(self._data, moments["exp_avg"]))
                # As published: β times the mean of the first moment, and the weight's difference is kept.
                large = size > BETA * np.mean(size, dtype=np.float64)
            kept = large if kept is None else kept & large
        for name in moments.values():
            self.kept[name] = kept if kept is not None else np.ones(len(self._items(self._data, name)), np.bool_)


def _tensors(node: Any) -> Iterator[str]:
    """Yields the tensor names of a skeleton, in the order of the state."""
    if isinstance(node, list):
        for each in node:
            yield from _tensors(each)
    elif isinstance(node, dict):
        for kind, content in node.items():
            if kind == "tensor" and isinstance(content, str):
                yield content
            else:
                yield from _tensors(content)


def _moments(entries: Mapping[str, TensorEntry]) -> dict[tuple[str, int], dict[str, str]]:
    """Returns the names of the moments by kind, for each parameter of each optimizer, in order."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for name in entries:
        match = _MOMENT.fullmatch(name)
        if match is not None:
            found.setdefault((match[1], int(match[2])), {})[match[3]] = name
    return dict(sorted(found.items()))


def _owners(entries: Mapping[str, TensorEntry], order: list[str]) -> dict[str, dict[str, str]]:
    """Returns the moments of each weight."""
    # In the tree, the part of a DTensor has no rank.
    known = {name.partition("@")[0]: name for name in entries if not _MOMENT.fullmatch(name)}
    weights = [known[stem] for name in order if (stem := name.partition("@")[0]) in known]
    owners: dict[str, dict[str, str]] = {}
    position, optimizer = 0, None
    for (which, _), moments in _moments(entries).items():
        if which != optimizer:
            position, optimizer = 0, which
        shape = next(iter(entries[name].shape for name in moments.values()))
        # The i-th parameter of an optimizer is the i-th tensor of the model that has its shape. Moments in another
        # rank's shard are not seen: that weight is judged by its difference alone.
        later = range(position, len(weights))
        match = next(
            (each for each in later if weights[each] not in owners and entries[weights[each]].shape == shape), None
        )
        if match is not None:
            owners[weights[match]] = moments
            position = match + 1
    return owners
