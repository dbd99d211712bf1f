"""TurboJPEG 3 through ctypes: decodes the part of a JPEG that a crop needs.

It looks for the library where systems and conda keep it, and in wheels that bring one. No maintained wheel wraps
partial decoding, and eight functions of the interface are enough. Two threads must not use one handle at once, so each
call takes one and gives it back; pixels go into memory of the calling thread, which its next call uses again.

Where libjpeg-turbo widens subsampled colours it reads the neighbouring column, and the edge of the decoded part has
none. So one block more than wanted is decoded on either side, and the wanted part equals that of the whole picture to
the last bit.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

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


class _Library:
    """The functions, with their types. Short ones keep the interpreter's lock, because releasing it takes longer than
    they do."""

    def __init__(self, path: str) -> None:
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
        try:
            return self._handles.pop()
        except IndexError:
            handle: int = self._library.init(_DECOMPRESS)
            self._library.set(handle, _STOP_ON_WARNING, 1)
            return handle

    def _check(self, handle: int, returned: int) -> None:
        if returned:
            raise ValueError(self._library.error(handle).decode(errors="replace"))

    def _memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        memory: npt.NDArray[np.uint8] | None = getattr(self._own, "memory", None)
        if memory is None or memory.size < num_bytes:
            memory = self._own.memory = np.empty(num_bytes, dtype=np.uint8)
        return memory

    def __del__(self) -> None:
        for handle in self._handles:
            self._library.destroy(handle)


def _places() -> Iterator[str]:
    """Yields the places of the library: the system's, this environment's, a wheel's."""
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
