"""Looks through torch's `Subset` and `ConcatDataset`, also nested, at the data sets that hold the samples.

What reads files or shards many at once does so for any choice of their samples. As items, pictures would be cached as
pixels, which are 20 times the bytes of JPEGs, and read one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from shade.types import Indices


class Selection(NamedTuple):
    """The samples of a data set, as samples of those inside it."""

    leaves: list[Any]
    """The data sets that no wrapper of torch's is around, each once."""
    leaf_N: Indices
    """(N,) which of them has a sample."""
    index_N: Indices
    """(N,) which of its samples that is."""

    def grouped(self, indices: list[int]) -> dict[int, list[int]]:
        """Returns, by leaf, the positions in ``indices`` of the samples that it has."""
        found = dict[int, list[int]]()
        for position, leaf in enumerate(self.leaf_N[indices].tolist()):
            found.setdefault(leaf, []).append(position)
        return found


def selection_of(dataset: Any) -> Selection:
    """Returns what a data set selects; itself, if it is no wrapper of torch's, or one that does more than select."""
    try:
        if _only_selects(dataset, Subset):
            return _of_subset(dataset)
        if _only_selects(dataset, ConcatDataset):
            return _of_concat(dataset)
    # Indices that are no numbers, or too large; it fails in its own way when it is read.
    except (TypeError, ValueError, IndexError):
        pass
    num_samples = len(dataset)
    return Selection([dataset], np.zeros(num_samples, np.int64), np.arange(num_samples))


def _only_selects(dataset: Any, kind: type) -> bool:
    names = ("__getitem__", "__getitems__", "__len__")
    return isinstance(dataset, kind) and all(getattr(type(dataset), n, None) is getattr(kind, n, None) for n in names)


def _of_subset(subset: Subset[Any]) -> Selection:
    inner = selection_of(subset.dataset)
    index_N = np.asarray(subset.indices)
    if index_N.ndim != 1 or not (np.issubdtype(index_N.dtype, np.integer) or not len(index_N)):
        raise TypeError("the indices are no numbers")
    index_N = index_N.astype(np.int64)
    return Selection(inner.leaves, inner.leaf_N[index_N], inner.index_N[index_N])


def _of_concat(joined: ConcatDataset[Any]) -> Selection:
    leaves, parts = list[Any](), [selection_of(each) for each in joined.datasets]
    leaf_M = list[Indices]()
    for part in parts:
        for leaf in part.leaves:
            if not any(leaf is each for each in leaves):
                leaves.append(leaf)
        number = [next(n for n, each in enumerate(leaves) if each is leaf) for leaf in part.leaves]
        leaf_M.append(np.array(number, np.int64)[part.leaf_N])
    return Selection(leaves, np.concatenate(leaf_M), np.concatenate([part.index_N for part in parts]))
