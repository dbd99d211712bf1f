"""The item codec: turns an item of any map-style data set into bytes and back, without pickle.

Layout: ``u32 skeleton length | skeleton (JSON) | raw buffers, 8-byte aligned``. The skeleton names each buffer's dtype
and shape; tensors, arrays and PIL images follow it as they were in memory. No part of it can run code, and every length
is checked against the bytes present before memory is allocated. So bytes from a network are safe to decode: at worst
they raise `CorruptEntryError`.

Invariant: ``decode(encode(item)) == item``, dtypes and containers included. `encode` refuses what cannot keep that
promise: subclasses of tensors (but torchvision's `Image`, `Mask` and `Video`), arrays and containers, sparse and
quantised tensors, structured arrays. Of a PIL image it keeps pixels, palette and transparency, not the file's metadata;
an array that is mapped from a file comes back as an ordinary one.

`decoded_many` and `collated` copy a batch's buffers together. Invariant: they return the decoded items, and what
``default_collate`` makes of them, or None.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import default_collate, get_worker_info
from torchvision import tv_tensors

from shade.errors import ConfigError, CorruptEntryError

_LENGTH = struct.Struct("<I")
_ALIGN = 8
_ARRAY_KINDS = "biufcmMSU"
_PIXEL_BITS = {"1": 1} | dict.fromkeys(("L", "P"), 8) | dict.fromkeys(("LA", "PA", "La", "I;16", "I;16L", "I;16B"), 16)
_PIXEL_BITS |= dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 24)
_PIXEL_BITS |= dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 32)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
_JSON = json.JSONEncoder(separators=(",", ":"))
_COLLATED_KINDS = "biuf"
_MOST_LAYOUTS = 4096
_MOST_TOGETHER_BYTES = 1 << 14
INLINE_BYTES = 1 << 18
"""A column of a batch up to this size is faster in a message than in shared memory."""
_TV_TENSORS: dict[str, Any] = {kind.__name__: kind for kind in (tv_tensors.Image, tv_tensors.Mask, tv_tensors.Video)}


def encode(item: Any) -> bytes:
    """Encodes tensors, arrays, PIL images, numbers, strings, bytes, None, and tuples, lists and dicts of them.

    Raises ConfigError for any other type; the message names it.
    """
    buffers: list[bytes] = []
    skeleton = _JSON.encode(_flatten(item, buffers)).encode()
    parts = [_LENGTH.pack(len(skeleton)), skeleton, bytes(-(len(skeleton) + _LENGTH.size) % _ALIGN)]
    for buffer in buffers:
        parts += [buffer, bytes(-len(buffer) % _ALIGN)]
    return b"".join(parts)


def decode(payload: bytes | memoryview) -> Any:
    """Decodes what `encode` returned; copies the buffers. Raises CorruptEntryError for bytes that `encode` did not
    make."""
    view = memoryview(payload)
    try:
        (length,) = _LENGTH.unpack_from(view)
        skeleton = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
        start = _LENGTH.size + length
        cursor = _Cursor(view, start + -start % _ALIGN)
        item = _build(skeleton, cursor)
        cursor.check_end()
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError, struct.error) as error:
        raise CorruptEntryError(f"expected an encoded item, got {len(view)} other bytes ({error})") from error
    return item


class _Cursor:
    def __init__(self, view: memoryview, position: int) -> None:
        self._view, self._position = view, position

    def take(self, num_bytes: int) -> bytearray:
        return bytearray(self.view(num_bytes))

    def view(self, num_bytes: int) -> memoryview:
        end = self._position + num_bytes
        if num_bytes < 0 or end > len(self._view):
            raise ValueError(f"a buffer of {num_bytes} bytes is not there")
        taken = self._view[self._position : end]
        self._position = end + -num_bytes % _ALIGN
        return taken

    def check_end(self) -> None:
        if self._position != len(self._view):
            raise ValueError("the buffers do not end where the bytes do")


def _flatten(item: Any, buffers: list[bytes]) -> Any:
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item
    if kind in (list, tuple):
        return {kind.__name__: [_flatten(part, buffers) for part in item]}
    if kind is dict and all(type(key) in (str, int) for key in item):
        return {"dict": [[key, _flatten(part, buffers)] for key, part in item.items()]}
    if kind is bytes:
        buffers.append(item)
        return {"bytes": len(item)}
    if kind is torch.Tensor and is_dense(item) and (name := str(item.dtype)[6:]) in _DTYPES:
        buffers.append((item.numpy() if _is_plain(item) else element_bytes(item)).tobytes())
        return {"tensor": [name, list(item.shape)]}
    if _TV_TENSORS.get(kind.__name__) is kind:
        return {"tv_tensor": [kind.__name__, _flatten(item.as_subclass(torch.Tensor), buffers)]}
    if kind in (np.ndarray, np.memmap) and item.dtype.kind in _ARRAY_KINDS:
        buffers.append(item.tobytes())
        return {"array": [item.dtype.str, list(item.shape)]}
    if isinstance(item, np.generic) and item.dtype.kind in _ARRAY_KINDS:
        array = np.asarray(item)
        buffers.append(array.tobytes())
        return {"scalar": array.dtype.str}
    if isinstance(item, Image.Image) and item.mode in _PIXEL_BITS:
        buffers.append(item.tobytes())
        return {"image": [item.mode, list(item.size), len(buffers[-1]), _palette(item), _transparency(item)]}
    raise ConfigError.of(
        "tensors, arrays, PIL images, numbers, strings, bytes, None, or tuples, lists and dicts of them",
        _described(item),
        "pass ShadeDataset(…, encode=…, decode=…) that turn your items into bytes and back",
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements are all there, each in a place of its own."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether NumPy has the same elements in the same order, for the usual dtypes."""
    is_real = tensor.dtype in (torch.uint8, torch.int32, torch.int64, torch.float32)
    return is_real and tensor.is_cpu and not tensor.requires_grad and not tensor.is_neg()


def element_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Returns a dense tensor's elements in order, on the CPU, as bytes (without a copy where they lie so)."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A tensor of at most one element is contiguous with any strides, which `reshape` keeps and `view` refuses.
    flat: npt.NDArray[np.uint8] = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def _described(item: Any) -> str:
    """Returns the type of an item that is refused, and what about it is."""
    kind = f"{type(item).__module__}.{type(item).__qualname__}".removeprefix("builtins.")
    if isinstance(item, dict):
        keys = sorted({type(key).__name__ for key in item} - {"str", "int"})
        return f"{kind} with keys of type {', '.join(keys)}" if keys and type(item) is dict else kind
    if isinstance(item, torch.Tensor):
        return f"{kind} of {item.dtype}" + ("" if is_dense(item) else ", nested" if item.is_nested else ", sparse")
    return f"{kind} of {item.dtype}" if isinstance(item, np.ndarray) else kind


def _palette(image: Image.Image) -> list[Any] | None:
    """Returns the mode and the bytes (as numbers) of an image's palette."""
    if image.palette is None:
        return None
    mode = "RGBA" if "A" in image.palette.mode else "RGB"
    return [mode, image.getpalette(mode)]


def _transparency(image: Image.Image) -> Any:
    """Returns the colour that counts as transparent: a number, a tuple, or bytes (as a list in a dict)."""
    found = image.info.get("transparency")
    return {"bytes": list(found)} if isinstance(found, bytes) else found


def _build(skeleton: Any, cursor: _Cursor) -> Any:
    if not isinstance(skeleton, dict):
        if isinstance(skeleton, list):
            raise TypeError("a bare list")
        return skeleton
    ((kind, value),) = skeleton.items()
    if kind == "list":
        return [_build(part, cursor) for part in value]
    if kind == "tuple":
        return tuple(_build(part, cursor) for part in value)
    if kind == "dict":
        return {key: _build(part, cursor) for key, part in value}
    if kind == "bytes":
        return bytes(cursor.view(value))
    if kind == "tensor":
        name, shape = value
        dtype = _DTYPES[name]
        raw = cursor.take(_num_elements(shape) * dtype.itemsize)
        return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
    if kind == "tv_tensor":
        pure = _build(value[1], cursor)
        if type(pure) is not torch.Tensor:
            raise TypeError("no tensor in it")
        return _TV_TENSORS[value[0]](pure)
    if kind == "array":
        dtype_np, shape = _dtype(value[0]), value[1]
        raw = cursor.take(_num_elements(shape) * dtype_np.itemsize)
        return np.frombuffer(raw, dtype=dtype_np).reshape(shape) if raw else np.empty(shape, dtype=dtype_np)
    if kind == "scalar":
        dtype_np = _dtype(value)
        raw = cursor.take(dtype_np.itemsize)
        return np.frombuffer(raw, dtype=dtype_np)[0] if raw else np.zeros((), dtype=dtype_np)[()]
    if kind == "image":
        return _build_image(value, cursor)
    raise KeyError(kind)


def _num_elements(shape: list[int]) -> int:
    """Returns the product of a shape, without overflow."""
    if not all(type(length) is int and 0 <= length < 2**48 for length in shape):
        raise ValueError("a shape that is none")
    return math.prod(shape)


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if not isinstance(name, str) or dtype.kind not in _ARRAY_KINDS or dtype.str != name:
        raise ValueError(f"dtype {name!r}")
    return dtype


def _build_image(value: list[Any], cursor: _Cursor) -> Image.Image:
    mode, (width, height), num_bytes, palette, transparency = value
    raw = cursor.take(num_bytes)
    # The image's memory is allocated only if the bytes that fill it are present.
    if _num_elements([width, height]) and num_bytes != height * -(-width * _PIXEL_BITS[mode] // 8):
        raise ValueError(f"{num_bytes} bytes for an image of {width} × {height} in mode {mode}")
    image = Image.frombytes(mode, (width, height), bytes(raw)) if raw else Image.new(mode, (width, height))
    if palette is not None:
        image.putpalette(bytes(palette[1]), palette[0])
    if isinstance(transparency, dict):
        image.info["transparency"] = bytes(transparency["bytes"])
    elif transparency is not None:
        image.info["transparency"] = tuple(transparency) if isinstance(transparency, list) else transparency
    return image


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
    if len(payload) < _LENGTH.size:
        return None
    skeleton = bytes(payload[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(payload)[0]])
    try:
        return _layouts[skeleton]
    except KeyError:
        pass
    values, lengths = list[Any](), list[int]()
    try:
        spec = _spec_of(json.loads(skeleton), values, lengths)
        spec = _specs.setdefault(spec, spec)
    # Of another kind, or damaged: `decode` has the last word.
    except (ValueError, TypeError, KeyError, IndexError):
        layout = None
    else:
        at = _LENGTH.size + len(skeleton)
        spans = []
        for length in lengths:
            at += -at % _ALIGN
            spans.append((at, at + length))
            at += length
        layout = _ItemLayout(spec, tuple(values), tuple(spans), at + -at % _ALIGN)
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
    if kind != "tensor" and (_dtype(name).kind not in _COLLATED_KINDS or not _dtype(name).isnative):
        raise TypeError(f"an array of {name}")
    dtype = _DTYPES[name] if kind == "tensor" else torch.from_numpy(np.empty(0, _dtype(name))).dtype
    lengths.append(_num_elements(shape) * dtype.itemsize)
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
