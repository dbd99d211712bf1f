"""Decodes JPEG files to RGB pixels, and of a large picture only what the crop needs.

It uses the fastest of three decoders that this machine has. All are libjpeg-turbo inside, with the same pixels as
Pillow, bit for bit:

* TurboJPEG 3 (`_decode.turbojpeg`) reads rows above the crop without transforming them, skips columns beside it, and
  does not read rows below it.
* simplejpeg decodes the whole picture straight into an array, without the interpreter's lock.
* Pillow decodes the whole picture, as torchvision does it.

Only Pillow judges what is not plain (CMYK, 12 bits, arithmetic coding, a file that does not end where a JPEG ends):
`size_of` returns None, and the caller decodes it as it would without this module. So the missing end reveals a
truncated file, although no decoder may read its last rows.

A picture several times larger than the output can be decoded at a half, a quarter or an eighth of its size, for a
fraction of the time, by leaving out high frequencies. The pixels differ by a few levels, so only ``reduced_decode``
asks for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shade.data._decode.pixels import Box, DecodeWindow, Pixels
from shade.data._decode.turbojpeg import open_turbo
from shade.types import Bytes

logger = logging.getLogger("shade.data")

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
