"""RowsInMemory: sees which samples' entries in a data set's memory, such as labels, have changed since it was wrapped.

A cached item is compared with the origin if its entry has changed: training may write pseudo labels there, which a
plain DataLoader would show in the next epoch. Counters that change with each read are left alone after some items that
were still equal. Price: a copy of up to 64 bytes a sample, and a comparison of a batch's entries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shade.data._source.selection import Selection, selection_of

_MOST_ROW_BYTES = 64
_MOST_EQUAL = 32
_ELEMENTS = (bool, int, float, str, tuple)


class RowsInMemory:
    """The arrays, tensors and lists with one entry a sample that a data set has, or one inside torch's wrappers."""

    def __init__(self, dataset: Any) -> None:
        self._selection: Selection = selection_of(dataset)
        self._known = dict[tuple[int, str], Any]()
        for number, leaf in enumerate(self._selection.leaves):
            for name, value in getattr(leaf, "__dict__", {}).items():
                if _has_rows(value, len(leaf)):
                    self._known[number, name] = _copied(value)
        self._num_equal = dict.fromkeys(self._known, 0)

    def changed_among(self, indices: list[int]) -> set[int]:
        """Returns those cached samples of a batch that have an entry which has changed, to be compared."""
        if not self._known:
            return set()
        changed = set[int]()
        for number, positions in self._selection.grouped(indices).items():
            mine = [indices[position] for position in positions]
            rows = self._selection.index_N[mine].tolist()
            for (leaf, name), known in self._known.items():
                if leaf != number or self._num_equal[leaf, name] >= _MOST_EQUAL:
                    continue
                others = _differing(getattr(self._selection.leaves[leaf], name, None), known, rows)
                self._num_equal[leaf, name] += len(others)
                changed.update(mine[at] for at in others)
        return changed


def _has_rows(value: Any, num_rows: int) -> bool:
    if isinstance(value, list):
        return len(value) == num_rows and num_rows > 0 and type(value[0]) in _ELEMENTS
    if isinstance(value, torch.Tensor):
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and value.is_cpu
        is_plain = is_plain and value.dtype != torch.bfloat16 and not (value.requires_grad or value.is_quantized)
    else:
        is_plain = type(value) is np.ndarray and not value.dtype.hasobject
    return is_plain and value.ndim > 0 and len(value) == num_rows and value.nbytes <= _MOST_ROW_BYTES * num_rows


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    return value.copy()


def _differing(value: Any, known: Any, rows: list[int]) -> list[int]:
    """Returns the places in ``rows`` whose entry differs from the known one."""
    kinds = list if isinstance(known, list) else (np.ndarray, torch.Tensor)
    if not isinstance(value, kinds) or len(value) != len(known):
        return list(range(len(rows)))
    if isinstance(value, list):
        return [at for at, row in enumerate(rows) if value[row] is not known[row] and value[row] != known[row]]
    now = value[rows].numpy() if isinstance(value, torch.Tensor) else value[rows]
    if now.shape != known[rows].shape:
        return list(range(len(rows)))
    return [int(at) for at in np.flatnonzero((now != known[rows]).reshape(len(rows), -1).any(1))]
