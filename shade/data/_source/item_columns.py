"""The items of a batch, column by column: what `item_codec` does to each of them costs one step a column here.

An item of one kilobyte costs more in Python than in bytes: a skeleton, a buffer and a tensor each. Those of a batch are
mostly alike and differ in values alone.

Invariants: `encode_many` returns what `item_codec.encode` makes of each item; `decoded_many` and `collated` the decoded
items, and what ``default_collate`` makes of them, or None.

Legend: B batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from shade.data._source.item_codec import (
    ALIGN,
    ARRAY_KINDS,
    DTYPES,
    JSON,
    LENGTH,
    Buffer,
    aligned,
    dtype_of,
    element_bytes,
    encode,
    flatten,
    head_of,
    is_dense,
    num_elements,
)

_COLLATED_KINDS = "biuf"
_MOST_LAYOUTS = 4096
_MOST_TOGETHER_BYTES = _MOST_SKELETON_BYTES = 1 << 14
INLINE_BYTES = 1 << 18
"""A column of a batch up to this size is faster in a message than in shared memory."""


def encode_many(items: Sequence[Any]) -> list[bytes]:
    """Returns what `encode` makes of each item. Raises ConfigError for an item that it refuses."""
    first = [encode(item) for item in items[:1]]
    if len(items) < 2 or len(first[0]) > _MOST_TOGETHER_BYTES:
        return first + [encode(item) for item in items[1:]]
    parts = _Parts(len(items))
    parts.add(items)
    return parts.joined()


class _Parts:
    """The skeletons and buffers of a batch of items, in the order in which the items are taken apart."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._texts: list[str | list[str]] = []  # pieces of the skeletons: one for all items, or one for each
        self._buffers: list[list[list[Buffer]]] = []  # by column, those of each item, aligned

    def add(self, items: Sequence[Any]) -> None:
        """Takes in a part of each item."""
        kind = type(items[0]) if len(set(map(type, items))) == 1 else None
        if kind in (list, tuple) and len(set(map(len, items))) == 1:
            self._add_columns(kind.__name__, [("", column, "") for column in zip(*items, strict=True)])
        elif kind is dict and (keys := _common_keys(items)) is not None:
            named = [(f"[{JSON.encode(key)},", [item[key] for item in items], "]") for key in keys]
            self._add_columns("dict", named)
        elif kind in (bool, int, float):
            self._texts.append(JSON.encode(list(items))[1:-1].split(","))
        elif kind is None or (rows := _rows_of(kind, items)) is None:
            self._add_each(items)
        else:
            self._texts.append(rows[0])
            self._buffers.append(rows[1])

    def _add_columns(self, name: str, columns: Sequence[tuple[str, Sequence[Any], str]]) -> None:
        self._texts.append(f'{{"{name}":[')
        for number, (before, column, behind) in enumerate(columns):
            self._texts.append("," * (number > 0) + before)
            self.add(column)
            self._texts.append(behind)
        self._texts.append("]}")

    def _add_each(self, items: Sequence[Any]) -> None:
        texts, column = list[str](), list[list[Buffer]]()
        for item in items:
            buffers: list[bytes] = []
            texts.append(JSON.encode(flatten(item, buffers)))
            column.append(aligned(buffers))
        self._texts.append(texts)
        self._buffers.append(column)

    def joined(self) -> list[bytes]:
        """Returns the bytes of each item."""
        if all(isinstance(text, str) for text in self._texts):
            heads: Iterable[bytes] = repeat(head_of("".join(self._texts)), self._num_items)  # type: ignore[arg-type]
        else:
            pieces = [repeat(text, self._num_items) if isinstance(text, str) else text for text in self._texts]
            heads = map(head_of, map("".join, zip(*pieces, strict=True)))
        return [b"".join([head, *chain(*buffers)]) for head, *buffers in zip(heads, *self._buffers, strict=True)]


def _common_keys(items: Sequence[dict[Any, Any]]) -> list[str | int] | None:
    """Returns the keys that all dicts have, in the same order; None if they differ, or the codec refuses them."""
    kinds = set(chain.from_iterable(map(type, item) for item in items))
    keys = list(items[0])
    is_common = (kinds <= {str} or kinds == {int}) and all(list(item) == keys for item in items)
    return keys if is_common else None


def _rows_of(kind: type, items: Sequence[Any]) -> tuple[str, list[list[Buffer]]] | None:
    """Returns what the skeletons say of tensors, arrays or scalars of one type and shape, and their elements."""
    first = items[0]
    is_tensor = kind is torch.Tensor and is_dense(first) and str(first.dtype)[6:] in DTYPES
    is_array = kind in (np.ndarray, np.memmap)
    is_numpy = is_array or issubclass(kind, np.generic)
    if not is_tensor and not (is_numpy and first.dtype.kind in ARRAY_KINDS and first.dtype.isnative):
        return None
    if len({item.dtype for item in items}) > 1 or len({item.shape for item in items}) > 1:
        return None
    said: dict[str, Any]
    if is_tensor:
        said = {"tensor": [str(first.dtype)[6:], list(first.shape)]}
        elements = element_bytes(torch.stack(list(items)))
    else:
        stacked = np.stack(items)
        # Such as text without a character, which NumPy makes room for.
        if stacked.dtype != first.dtype:
            return None
        said = {"array": [first.dtype.str, list(first.shape)]} if is_array else {"scalar": first.dtype.str}
        elements = np.frombuffer(stacked.tobytes(), np.uint8)
    size, rows = len(elements) // len(items), elements.data
    return JSON.encode(said), [aligned([rows[at * size : (at + 1) * size]]) for at in range(len(items))]


class _ItemLayout(NamedTuple):
    """Where the parts of an encoded item are."""

    spec: Any
    """The skeleton without its values; one object for all equal ones."""
    values: tuple[Any, ...]
    """Its numbers and strings, in order."""
    spans: tuple[tuple[int, int], ...]
    """First byte of each buffer, and the byte behind it, in order."""
    num_bytes: int
    """Length of the whole payload."""


_layouts: dict[bytes, _ItemLayout | None] = {}
_specs: dict[Any, Any] = {}


def collated(payloads: Sequence[Any], indices: Sequence[int]) -> list[Any] | None:
    """Returns ``default_collate`` of the samples ``(*item, index)`` that were encoded.

    None if these payloads have to be decoded one by one: they differ in more than values, hold what is no tensor,
    array, number or string, or are damaged.
    """
    parts = _columns(payloads)
    if parts is None:
        return None
    spec, values, buffers = parts
    batch = _collate(spec, len(payloads), values, buffers)
    return [*(batch if spec[0] == "tuple" else [batch]), torch.tensor(indices)]


def decoded_many(payloads: Sequence[Any]) -> list[Any] | None:
    """Returns what `decode` makes of each payload; None if they have to be decoded one by one, as for `collated`, or
    one of them is so large that it should have memory of its own."""
    if any(isinstance(payload, Exception) or len(payload) > _MOST_TOGETHER_BYTES for payload in payloads):
        return None
    parts = _columns(payloads)
    return None if parts is None else _rows(parts[0], len(payloads), *parts[1:])


def _columns(payloads: Sequence[Any]) -> tuple[Any, Iterator[Any], Iterator[bytes]] | None:
    """Returns what the payloads have in common, their values and their buffers, each of a whole batch."""
    # Values may differ from item to item, such as weights, and then each skeleton is met once.
    if len(_layouts) > _MOST_LAYOUTS:
        _layouts.clear()
        _specs.clear()
    # Items of one kilobyte cost more to build than to read: a JSON text, a buffer and a tensor each, and then a copy
    # into the batch.
    layouts = list[_ItemLayout]()
    for payload in payloads:
        layout = _layout_at(payload) if isinstance(payload, (bytes, memoryview)) else None
        if layout is None or layout.num_bytes != len(payload) or (layouts and layout.spec is not layouts[0].spec):
            return None
        layouts.append(layout)
    if not layouts:
        return None
    values = zip(*(layout.values for layout in layouts), strict=True)
    buffers = (
        b"".join([payload[begin:end] for payload, (begin, end) in zip(payloads, spans, strict=True)])
        for spans in zip(*(layout.spans for layout in layouts), strict=True)
    )
    return layouts[0].spec, values, buffers


def _rows(spec: Any, num_samples: int, values: Iterator[Any], buffers: Iterator[bytes]) -> list[Any]:
    """Returns the part of each item that a spec describes."""
    kind, *rest = spec
    if kind == "value":
        return list(next(values))
    if kind in ("tuple", "list"):
        columns = [_rows(part, num_samples, values, buffers) for part in rest[0]]
        rows = zip(*columns, strict=True) if columns else [()] * num_samples
        return [*rows] if kind == "tuple" else [*map(list, rows)]
    if kind == "dict":
        named = [(key, _rows(part, num_samples, values, buffers)) for key, part in rest[0]]
        return [{key: column[row] for key, column in named} for row in range(num_samples)]
    if kind == "scalar":
        return list(np.frombuffer(next(buffers), dtype=rest[0]))
    dtype, shape = rest
    column = torch.frombuffer(bytearray(next(buffers)), dtype=dtype).reshape(num_samples, *shape)
    return list(column.unbind(0) if kind == "tensor" else column.numpy())


def _layout_at(payload: bytes | memoryview) -> _ItemLayout | None:
    if len(payload) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(payload)
    # One that is longer holds texts, which differ, and it would be kept for nothing.
    if length > _MOST_SKELETON_BYTES:
        return None
    skeleton = bytes(payload[LENGTH.size : LENGTH.size + length])
    try:
        return _layouts[skeleton]
    except KeyError:
        pass
    values, lengths = list[Any](), list[int]()
    try:
        spec = _spec_of(json.loads(skeleton), values, lengths)
        spec = _specs.setdefault(spec, spec)
    # Of another kind, or damaged: `decode` has the last word.
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        layout = None
    else:
        at = LENGTH.size + len(skeleton)
        spans = []
        for length in lengths:
            at += -at % ALIGN
            spans.append((at, at + length))
            at += length
        layout = _ItemLayout(spec, tuple(values), tuple(spans), at + -at % ALIGN)
    _layouts[skeleton] = layout
    return layout


def _spec_of(skeleton: Any, values: list[Any], lengths: list[int]) -> Any:
    """Returns a skeleton without its values, which go to ``values``, as the bytes of its buffers to ``lengths``. Raises
    ValueError, TypeError, KeyError or IndexError for what `collated` does not know."""
    if type(skeleton) in (bool, int, float, str):
        values.append(skeleton)
        return ("value",)
    if type(skeleton) is not dict:
        raise TypeError("None, or a bare list")
    ((kind, value),) = skeleton.items()
    if kind in ("tuple", "list"):
        return kind, tuple(_spec_of(part, values, lengths) for part in value)
    if kind == "dict":
        return kind, tuple((key, _spec_of(part, values, lengths)) for key, part in value)
    if kind not in ("tensor", "array", "scalar"):
        raise KeyError(kind)
    name, shape = (value, []) if kind == "scalar" else value
    if kind != "tensor" and (dtype_of(name).kind not in _COLLATED_KINDS or not dtype_of(name).isnative):
        raise TypeError(f"an array of {name}")
    dtype = DTYPES[name] if kind == "tensor" else torch.from_numpy(np.empty(0, dtype_of(name))).dtype
    lengths.append(num_elements(shape) * dtype.itemsize)
    if not lengths[-1] or (kind == "array" and not shape):
        raise ValueError("no elements, or no array")
    return kind, name if kind == "scalar" else dtype, tuple(shape)


def _collate(spec: Any, num_samples: int, values: Iterator[Any], buffers: Iterator[bytes]) -> Any:
    kind, *rest = spec
    if kind == "value":
        return default_collate(next(values))
    if kind in ("tuple", "list"):
        return [_collate(part, num_samples, values, buffers) for part in rest[0]]
    if kind == "dict":
        columns = {key: _collate(part, num_samples, values, buffers) for key, part in rest[0]}
        return {key: list(part) if type(part) is tuple else part for key, part in columns.items()}  # strings
    if kind == "scalar":
        return default_collate(list(np.frombuffer(next(buffers), dtype=rest[0])))
    dtype, shape = rest
    batch = _empty((num_samples, *shape), dtype)
    batch.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(next(buffers), dtype=np.uint8)
    return batch


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if get_worker_info() is None or math.prod(shape) * dtype.itemsize <= INLINE_BYTES:
        return torch.empty(shape, dtype=dtype)
    # As `default_collate` does it in a worker: memory that the parent process can map.
    elem = torch.empty(0, dtype=dtype)
    storage: Any = elem._typed_storage()._new_shared(math.prod(shape), device=elem.device)  # type: ignore[no-untyped-call]
    return elem.new(storage).resize_(shape)
