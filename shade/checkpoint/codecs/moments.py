"""Which of a shard's items ExCP keeps: weights that moved much for their second moment, moments that are large there.

A weight's change is kept where it is above the median change of its tensor times min(2.5, α / √mean(v)); its moments
where the first is above β times its mean, and the change is kept (α = 5·10⁻⁵, β = 2: the published values).

Moments belong to a weight by order and shape: the i-th parameter of an optimizer is the i-th tensor of the model that
has its shape. With several ranks a weight's moments may lie in another rank's shard. Then the weight is judged by its
changes alone, and moments by their size alone.

References:
    Li et al., "ExCP", ICML 2024, §3.2, as in excp/compress_pythia.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shade.checkpoint.manifest import TensorEntry

ALPHA: Final = 5e-5
BETA: Final = 2.0
_STEEPEST: Final = 2.5
_MOMENT: Final = re.compile(r"(.+)/state/(\d+)/(exp_avg|exp_avg_sq)")


class Survey:
    """What is kept of each tensor of a shard.

    Args:
        data: The shard.
        base: The base's, of the same layout.
        entries: Its tensors.
        tree: The skeleton of the state: which tensors, in which order.
    """

    def __init__(self, data: memoryview, base: memoryview, entries: Mapping[str, TensorEntry], tree: Any) -> None:
        self._data, self._base = np.frombuffer(data, np.uint8), np.frombuffer(base, np.uint8)
        self._entries = {name: entry for name, entry in entries.items() if entry.may_be_rough}
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
            kept: npt.NDArray[np.bool_] = change > np.median(change) * steepness
            return kept

    def _keep_moments(self, moments: Mapping[str, str], kept: npt.NDArray[np.bool_] | None) -> None:
        if "exp_avg" in moments:
            with np.errstate(over="ignore", invalid="ignore"):
                size = np.abs(self._items(self._data, moments["exp_avg"]))
                large = size > BETA * np.mean(size, dtype=np.float64)
            kept = large if kept is None else kept & large
        for name in moments.values():
            self.kept[name] = kept if kept is not None else np.ones(len(self._items(self._data, name)), np.bool_)


def _tensors(node: Any) -> Iterator[str]:
    """Names in a skeleton, in the order of the state."""
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
    """The moments' names by kind, of each parameter of each optimizer, in order."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for name in entries:
        match = _MOMENT.fullmatch(name)
        if match is not None:
            found.setdefault((match[1], int(match[2])), {})[match[3]] = name
    return dict(sorted(found.items()))


def _owners(entries: Mapping[str, TensorEntry], order: list[str]) -> dict[str, dict[str, str]]:
    """The moments of each weight."""
    weights = [name for name in order if name in entries and not _MOMENT.fullmatch(name)]
    owners: dict[str, dict[str, str]] = {}
    place, optimizer = 0, None
    for (which, _), moments in _moments(entries).items():
        if which != optimizer:
            place, optimizer = 0, which
        shape = next(iter(entries[name].shape for name in moments.values()))
        later = range(place, len(weights))
        match = next(
            (each for each in later if weights[each] not in owners and entries[weights[each]].shape == shape), None
        )
        if match is not None:
            owners[weights[match]] = moments
            place = match + 1
    return owners
