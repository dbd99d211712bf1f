"""The item codec: an item of any map-style data set to bytes and back, without pickle.

Layout: ``u32 skeleton length | skeleton (JSON) | raw buffers, 8-byte aligned``. The skeleton names each buffer's dtype
and shape; tensors, arrays and PIL images lie behind it as they lay in memory. Nothing in it can run code, so bytes that
came over a network are safe to decode. Invariant: ``decode(encode(item)) == item``, dtypes and containers included.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch
from PIL import Image

from shade.errors import ConfigError

_LENGTH = struct.Struct("<I")
_ALIGN = 8


def encode(item: Any) -> bytes:
    """Encodes tensors, arrays, PIL images, numbers, strings, bytes, None, and tuples, lists and dicts of them.

    Args:
        item: What the wrapped data set returned.

    Returns:
        The payload.

    Raises:
        ConfigError: A type it does not know; the message names it.
    """
    buffers: list[bytes] = []
    skeleton = json.dumps(_flatten(item, buffers), separators=(",", ":")).encode()
    parts = [_LENGTH.pack(len(skeleton)), skeleton, bytes(-(len(skeleton) + _LENGTH.size) % _ALIGN)]
    for buffer in buffers:
        parts += [buffer, bytes(-len(buffer) % _ALIGN)]
    return b"".join(parts)


def decode(payload: bytes | memoryview) -> Any:
    """The inverse of `encode`.

    Args:
        payload: What `encode` returned; the buffers are copied out of it.

    Returns:
        The item.
    """
    view = memoryview(payload)
    (length,) = _LENGTH.unpack_from(view)
    skeleton = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
    start = _LENGTH.size + length
    return _build(skeleton, _Cursor(view, start + -start % _ALIGN))


class _Cursor:
    def __init__(self, view: memoryview, position: int) -> None:
        self._view, self._position = view, position

    def take(self, num_bytes: int) -> bytearray:
        taken = bytearray(self._view[self._position : self._position + num_bytes])
        self._position += num_bytes + -num_bytes % _ALIGN
        return taken


def _flatten(item: Any, buffers: list[bytes]) -> Any:
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item
    if kind in (list, tuple):
        return {kind.__name__: [_flatten(part, buffers) for part in item]}
    if kind is dict and all(type(key) is str for key in item):
        return {"dict": [[key, _flatten(part, buffers)] for key, part in item.items()]}
    if kind is bytes:
        buffers.append(item)
        return {"bytes": len(item)}
    if isinstance(item, torch.Tensor):
        dense = item.detach().cpu().contiguous()
        buffers.append(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"tensor": [str(dense.dtype).removeprefix("torch."), list(dense.shape)]}
    if isinstance(item, (np.ndarray, np.generic)) and not np.asarray(item).dtype.hasobject:
        array = np.ascontiguousarray(item)
        buffers.append(array.tobytes())
        return {"scalar" if isinstance(item, np.generic) else "array": [array.dtype.str, list(np.shape(item))]}
    if isinstance(item, Image.Image):
        buffers.append(item.tobytes())
        return {"image": [item.mode, list(item.size), len(buffers[-1]), item.getpalette()]}
    raise ConfigError.of(
        "tensors, arrays, PIL images, numbers, strings, bytes, None, or tuples, lists and dicts of them",
        kind,
        "pass ShadeDataset(…, encode=…, decode=…) that turn your items into bytes and back",
    )


def _build(skeleton: Any, cursor: _Cursor) -> Any:
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, value),) = skeleton.items()
    if kind == "list":
        return [_build(part, cursor) for part in value]
    if kind == "tuple":
        return tuple(_build(part, cursor) for part in value)
    if kind == "dict":
        return {key: _build(part, cursor) for key, part in value}
    if kind == "bytes":
        return bytes(cursor.take(value))
    if kind == "tensor":
        dtype, shape = getattr(torch, value[0]), value[1]
        raw = cursor.take(int(np.prod(shape)) * dtype.itemsize)
        return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
    if kind in ("array", "scalar"):
        dtype_np = np.dtype(value[0])
        array = np.frombuffer(cursor.take(int(np.prod(value[1])) * dtype_np.itemsize), dtype=dtype_np)
        return array[0] if kind == "scalar" else array.reshape(value[1])
    mode, size, num_bytes, palette = value
    image = Image.frombytes(mode, tuple(size), bytes(cursor.take(num_bytes)))
    if palette is not None:
        image.putpalette(palette)
    return image
