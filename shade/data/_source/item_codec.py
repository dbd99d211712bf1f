"""The item codec: turns an item of any map-style data set into bytes and back, without pickle.

Layout: ``u32 skeleton length | skeleton (JSON) | raw buffers, 8-byte aligned``. The skeleton names each buffer's dtype
and shape; tensors, arrays and PIL images follow it as they were in memory. No part of it can run code, and every length
is checked against the bytes present before memory is allocated. So bytes from a network are safe to decode: at worst
they raise `CorruptEntryError`.

Invariant: ``decode(encode(item)) == item``, dtypes and containers included. `encode` refuses what cannot keep that
promise: subclasses of tensors (but torchvision's `Image`, `Mask` and `Video`), arrays and containers, sparse and
quantised tensors, structured arrays. Of a PIL image it keeps pixels, palette and transparency, not the file's metadata;
an array that is mapped from a file comes back as an ordinary one.

`item_columns` does the same to the items of a batch together.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torchvision import tv_tensors

from shade.errors import ConfigError, CorruptEntryError
from shade.trajectory import MOST_EMPTY

LENGTH = struct.Struct("<I")
ALIGN = 8
ARRAY_KINDS = "biufcmMSU"
_PIXEL_BITS = {"1": 1} | dict.fromkeys(("L", "P"), 8) | dict.fromkeys(("LA", "PA", "La", "I;16", "I;16L", "I;16B"), 16)
_PIXEL_BITS |= dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 24)
_PIXEL_BITS |= dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 32)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
JSON = json.JSONEncoder(separators=(",", ":"))
Buffer = bytes | memoryview
_TV_TENSORS: dict[str, Any] = {kind.__name__: kind for kind in (tv_tensors.Image, tv_tensors.Mask, tv_tensors.Video)}


def encode(item: Any) -> bytes:
    """Encodes tensors, arrays, PIL images, numbers, strings, bytes, None, and tuples, lists and dicts of them.

    Raises ConfigError for any other type; the message names it.
    """
    buffers: list[bytes] = []
    skeleton = JSON.encode(flatten(item, buffers))
    return b"".join([head_of(skeleton), *aligned(buffers)])


def head_of(skeleton: str) -> bytes:
    """Returns a skeleton as a payload begins with it."""
    text = skeleton.encode()
    return b"".join((LENGTH.pack(len(text)), text, bytes(-(LENGTH.size + len(text)) % ALIGN)))


def aligned(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Returns buffers and what is between them in a payload."""
    return [piece for buffer in buffers for piece in (buffer, bytes(-len(buffer) % ALIGN))]


def decode(payload: bytes | memoryview) -> Any:
    """Decodes what `encode` returned; copies the buffers. Raises CorruptEntryError for bytes that `encode` did not
    make."""
    view = memoryview(payload)
    try:
        (length,) = LENGTH.unpack_from(view)
        skeleton = json.loads(bytes(view[LENGTH.size : LENGTH.size + length]))
        start = LENGTH.size + length
        cursor = _Cursor(view, start + -start % ALIGN)
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
        self._position = end + -num_bytes % ALIGN
        return taken

    def check_end(self) -> None:
        if self._position != len(self._view):
            raise ValueError("the buffers do not end where the bytes do")


def flatten(item: Any, buffers: list[bytes]) -> Any:
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item
    if kind in (list, tuple):
        return {kind.__name__: [flatten(part, buffers) for part in item]}
    if kind is dict and all(type(key) in (str, int) for key in item):
        return {"dict": [[key, flatten(part, buffers)] for key, part in item.items()]}
    if kind is bytes:
        buffers.append(item)
        return {"bytes": len(item)}
    if kind is torch.Tensor and is_dense(item) and (name := str(item.dtype)[6:]) in DTYPES:
        buffers.append((item.numpy() if _is_plain(item) else element_bytes(item)).tobytes())
        return {"tensor": [name, list(item.shape)]}
    if _TV_TENSORS.get(kind.__name__) is kind:
        return {"tv_tensor": [kind.__name__, flatten(item.as_subclass(torch.Tensor), buffers)]}
    if kind in (np.ndarray, np.memmap) and item.dtype.kind in ARRAY_KINDS:
        buffers.append(item.tobytes())
        return {"array": [item.dtype.str, list(item.shape)]}
    if isinstance(item, np.generic) and item.dtype.kind in ARRAY_KINDS:
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
        dtype = DTYPES[name]
        raw = cursor.take(num_elements(shape) * dtype.itemsize)
        return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
    if kind == "tv_tensor":
        pure = _build(value[1], cursor)
        if type(pure) is not torch.Tensor:
            raise TypeError("no tensor in it")
        return _TV_TENSORS[value[0]](pure)
    if kind == "array":
        dtype_np, shape = dtype_of(value[0]), value[1]
        raw = cursor.take(num_elements(shape) * dtype_np.itemsize)
        # NumPy would make room for text without a character, of which there may be any number in nothing.
        if not dtype_np.itemsize and num_elements(shape) > MOST_EMPTY:
            raise ValueError(f"{num_elements(shape)} items of type {dtype_np.str}")
        return np.ndarray(shape, dtype_np, raw)
    if kind == "scalar":
        dtype_np = dtype_of(value)
        raw = cursor.take(dtype_np.itemsize)
        return np.frombuffer(raw, dtype=dtype_np)[0] if raw else np.zeros((), dtype=dtype_np)[()]
    if kind == "image":
        return _build_image(value, cursor)
    raise KeyError(kind)


def num_elements(shape: list[int]) -> int:
    """Returns the product of a shape, without overflow."""
    if not all(type(length) is int and 0 <= length < 2**48 for length in shape):
        raise ValueError("a shape that is none")
    return math.prod(shape)


def dtype_of(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except SyntaxError as error:  # NumPy takes some names for Python
        raise ValueError(f"dtype {name!r}") from error
    if not isinstance(name, str) or dtype.kind not in ARRAY_KINDS or dtype.str != name:
        raise ValueError(f"dtype {name!r}")
    return dtype


def pixel_bytes(mode: str, width: int, height: int) -> int:
    """Returns the bytes of an image's pixels as Pillow stores them; raises KeyError for an unknown mode."""
    return height * -(-width * _PIXEL_BITS[mode] // 8)


def _build_image(value: list[Any], cursor: _Cursor) -> Image.Image:
    mode, (width, height), num_bytes, palette, transparency = value
    raw = cursor.take(num_bytes)
    # The image's memory is allocated only if the bytes that fill it are present.
    if num_elements([width, height]) and num_bytes != pixel_bytes(mode, width, height):
        raise ValueError(f"{num_bytes} bytes for an image of {width} × {height} in mode {mode}")
    image = Image.frombytes(mode, (width, height), bytes(raw)) if raw else Image.new(mode, (width, height))
    if palette is not None:
        image.putpalette(bytes(palette[1]), palette[0])
    if isinstance(transparency, dict):
        image.info["transparency"] = bytes(transparency["bytes"])
    elif transparency is not None:
        image.info["transparency"] = tuple(transparency) if isinstance(transparency, list) else transparency
    return image
