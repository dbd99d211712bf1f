"""Decodes JPEG files to RGB pixels, and of a large picture only what the crop needs.

It uses the fastest of three decoders that this machine has. All are libjpeg-turbo inside, with the same pixels as
Pillow, bit for bit:

* TurboJPEG 3 (`TurboDecoder`, through ctypes) reads rows above the crop without transforming them, skips columns
  beside it, and does not read rows below it.
* simplejpeg decodes the whole picture straight into an array, without the interpreter's lock.
* Pillow decodes the whole picture, as torchvision does it.

Only Pillow judges what is not plain (CMYK, 12 bits, arithmetic coding, a truncated file): `size_of` returns None, and
the caller decodes it as it would without this module.

A picture several times larger than the output can be decoded at a fraction of its size (`REDUCTIONS`) and of the time,
by leaving out high frequencies. The pixels differ by a few levels, so only ``reduced_decode`` asks for it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import importlib.util
import io
import logging
import sysconfig
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shade.data._decode.pixels import Box, DecodeWindow, Pixels
from shade.types import Bytes

logger = logging.getLogger("shade.data")

_DECOMPRESS, _RGB = 1, 0
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT = 0, 4, 5, 6
_BLOCK_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
"""Width of a minimal coded unit: 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1."""
_SPARE = 64
"""Readable bytes behind the pixels, without meaning."""


class _Region(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class _Scale(ctypes.Structure):
    _fields_ = (("num", ctypes.c_int), ("denom", ctypes.c_int))


# No maintained wheel wraps partial decoding, and few functions of the interface are enough for it.
class _Library:
    """The functions, with their types."""

    def __init__(self, path: str) -> None:
        # Short functions keep the interpreter's lock (PyDLL), because releasing it takes longer than they do.
        short, long = ctypes.PyDLL(path), ctypes.CDLL(path)
        handle, number, content, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
        self.init = short.tj3Init
        self.init.argtypes, self.init.restype = [number], handle
        self.destroy = short.tj3Destroy
        self.destroy.argtypes, self.destroy.restype = [handle], None
        self.error = short.tj3GetErrorStr
        self.error.argtypes, self.error.restype = [handle], ctypes.c_char_p
        self.get = short.tj3Get
        self.get.argtypes = [handle, number]
        self.set = short.tj3Set
        self.set.argtypes = [handle, number, number]
        self.header = short.tj3DecompressHeader
        self.header.argtypes = [handle, content, size]
        self.crop = short.tj3SetCroppingRegion
        self.crop.argtypes = [handle, _Region]
        self.scale = short.tj3SetScalingFactor
        self.scale.argtypes = [handle, _Scale]
        self.decompress = long.tj3Decompress8
        self.decompress.argtypes = [handle, content, size, ctypes.c_void_p, number, number]


class TurboDecoder:
    """Decodes parts of pictures. Raises OSError if the library cannot be loaded, and AttributeError if it is older than
    3."""

    def __init__(self, path: str) -> None:
        self._handles: list[int] = []
        self._library = _Library(path)
        self._own = threading.local()

    def __call__(self, content: Bytes, box: Box, reduction: int) -> Pixels:
        library, handle = self._library, self._take()
        try:
            view = np.frombuffer(content, dtype=np.uint8)
            address, size = view.ctypes.data, view.size
            self._check(handle, library.header(handle, address, size))
            subsampling = library.get(handle, _SUBSAMPLING)
            if not 0 <= subsampling < len(_BLOCK_WIDTHS):
                raise ValueError("subsampled in no usual way")
            width = -(-library.get(handle, _WIDTH) // reduction)
            height = -(-library.get(handle, _HEIGHT) // reduction)
            block = max(_BLOCK_WIDTHS[subsampling] // reduction, 1)
            # Where the library widens subsampled colours it reads the neighbouring column, which the edge of the
            # decoded part lacks. With one block more on either side the wanted part equals that of the whole picture,
            # bit for bit.
            left = max(box.left // block - 1, 0) * block
            right = min(box.left + box.width + block, width)
            bottom = min(box.top + box.height, height)
            region = _Region(left, box.top, right - left, bottom - box.top)
            pitch = 3 * region.w
            pixels_S = self._memory(pitch * region.h + _SPARE)
            self._check(handle, library.scale(handle, _Scale(1, reduction)))
            self._check(handle, library.crop(handle, region))
            self._check(handle, library.decompress(handle, address, size, pixels_S.ctypes.data, pitch, _RGB))
        finally:
            self._handles.append(handle)
        return Pixels(pixels_S, pitch, box.top, left)

    def _take(self) -> int:
        # Two threads must not use one handle at once, so each call takes one and gives it back.
        try:
            return self._handles.pop()
        except IndexError:
            handle: int = self._library.init(_DECOMPRESS)
            # What the library warns of is damaged, and only Pillow judges that.
            self._library.set(handle, _STOP_ON_WARNING, 1)
            return handle

    def _check(self, handle: int, returned: int) -> None:
        if returned:
            raise ValueError(self._library.error(handle).decode(errors="replace"))

    def _memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        # The calling thread's, used again by its next call.
        memory: npt.NDArray[np.uint8] | None = getattr(self._own, "memory", None)
        if memory is None or memory.size < num_bytes:
            memory = self._own.memory = np.empty(num_bytes, dtype=np.uint8)
        return memory

    def __del__(self) -> None:
        for handle in self._handles:
            self._library.destroy(handle)


def _places() -> Iterator[str]:
    """Yields where the library may be: the system's, this environment's (conda), a wheel's."""
    if (found := ctypes.util.find_library("turbojpeg")) is not None:
        yield found
    yield from map(str, sorted(Path(sysconfig.get_config_var("LIBDIR") or "/nowhere").glob("libturbojpeg.so.0*")))
    yield from map(str, sorted(Path(sysconfig.get_path("platlib")).glob("*.libs/libturbojpeg*.so*")))


def open_turbo() -> DecodeWindow | None:
    """Returns the decoder, or None if there is no library of version 3."""
    for path in _places():
        try:
            return TurboDecoder(path)
        except (OSError, AttributeError) as error:
            logger.debug("%s is no TurboJPEG 3: %s", path, error)
    return None


_FRAMES = {0xC0, 0xC1, 0xC2}
"""Baseline, extended and progressive frames; the others are arithmetic, lossless or hierarchical."""
_OTHER_FRAMES = {0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_ALONE = {0x01, *range(0xD0, 0xD8)}
"""Markers without a length."""
_SHORTEST, _ENDS = 32, (b"\xff\xd8\xff", b"\xff\xd9")
REDUCTIONS = (8, 4, 2)


def size_of(content: Bytes) -> tuple[int, int] | None:
    """Returns height and width of a plain JPEG, from its header; None for anything else, damaged files included."""
    view = memoryview(content)
    # The missing end reveals a truncated file, although the decoder of a crop may not read its last rows.
    if len(view) < _SHORTEST or (bytes(view[:3]), bytes(view[-2:])) != _ENDS:
        return None
    at, end = 2, len(view) - 10
    while at < end and view[at] == 0xFF:
        marker = view[at + 1]
        if marker in _FRAMES:
            height, width = view[at + 5] << 8 | view[at + 6], view[at + 7] << 8 | view[at + 8]
            plain = view[at + 4] == 8 and view[at + 9] in (1, 3) and height and width
            return (height, width) if plain else None
        if marker in _OTHER_FRAMES:
            return None
        at += 1 if marker == 0xFF else 2 if marker in _ALONE else 2 + (view[at + 2] << 8 | view[at + 3])
    return None


def decode_rgb(content: Bytes) -> Image.Image:
    """Decodes an image file to an RGB image: torchvision's own PIL loader, from memory."""
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


def _with_pillow(content: Bytes, box: Box, reduction: int) -> Pixels:
    del box
    with Image.open(io.BytesIO(content)) as image:
        if reduction > 1:
            image.draft("RGB", (image.width // reduction, image.height // reduction))
        return Pixels.of(np.asarray(image.convert("RGB")))


def _with_simplejpeg() -> DecodeWindow:
    decode_jpeg: Callable[..., Any] = importlib.import_module("simplejpeg").decode_jpeg

    def decode(content: Bytes, box: Box, reduction: int) -> Pixels:
        if reduction > 1:
            return _with_pillow(content, box, reduction)
        return Pixels.of(decode_jpeg(content, "RGB"))

    return decode


def _probe() -> tuple[bytes, npt.NDArray[np.uint8]]:
    """Returns a small JPEG with subsampled colours, and Pillow's pixels of it."""
    noise = np.random.default_rng(0).integers(0, 256, (75, 150, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=85, subsampling="4:2:0")
    return file.getvalue(), np.asarray(decode_rgb(file.getvalue()))


def _agrees(decode: DecodeWindow) -> bool:
    """Returns whether a decoder gives Pillow's pixels, whole and in part."""
    content, expected = _probe()
    for box in (Box(0, 0, 75, 150), Box(37, 53, 21, 40), Box(17, 1, 58, 149)):
        found = decode(content, box, 1)
        wanted = expected[box.top : box.top + box.height, box.left : box.left + box.width]
        if not np.array_equal(found.cut(box), wanted):
            return False
    return True


@lru_cache(maxsize=1)
def jpeg_decoder() -> DecodeWindow:
    """Returns the fastest decoder of this machine that gives Pillow's pixels."""
    if (turbo := open_turbo()) is not None:
        if _agrees(turbo):
            return turbo
        logger.info("this machine's TurboJPEG gives other pixels than Pillow; it is not used")
    if importlib.util.find_spec("simplejpeg") is not None:
        simple = _with_simplejpeg()
        if _agrees(simple):
            return simple
        logger.info("simplejpeg gives other pixels than Pillow; it is not used")
    return _with_pillow
