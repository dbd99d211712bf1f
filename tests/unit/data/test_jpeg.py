"""Decoding: sizes from headers, and every way to a JPEG's pixels that this machine has against Pillow's."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shade.data._decode.jpeg import (
    TurboDecoder,
    _with_pillow,
    _with_simplejpeg,
    decode_rgb,
    jpeg_decoder,
    open_turbo,
    size_of,
)
from shade.data._decode.pixels import Box, DecodeWindow
from tests.support.data_plane import make_zoo

WAYS = ["pillow", "simplejpeg", "turbo", "chosen"]


def way(name: str) -> DecodeWindow:
    if name == "pillow":
        return _with_pillow
    if name == "simplejpeg":
        if importlib.util.find_spec("simplejpeg") is None:
            pytest.skip("simplejpeg is not installed")
        return _with_simplejpeg()
    if name == "turbo":
        found = open_turbo()
        if found is None:
            pytest.skip("this machine has no TurboJPEG 3")
        return found
    return jpeg_decoder()


def jpeg(width: int, height: int, **options: object) -> bytes:
    rng = np.random.default_rng(width * height)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    pixels = (pixels + rng.integers(-20, 20, pixels.shape)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert("L") if options.pop("grey", False) else image).save(file, "JPEG", **options)
    return file.getvalue()


KINDS: list[dict[str, object]] = [
    {"subsampling": "4:2:0"},
    {"subsampling": "4:2:2"},
    {"subsampling": "4:4:4"},
    {"progressive": True},
    {"optimize": True, "quality": 30},
    {"restart_marker_rows": 1},
    {"grey": True},
    {"comment": b"x" * 3000},
]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_every_way_gives_pillows_pixels_whole_and_in_part(name: str, options: dict[str, object]) -> None:
    decode = way(name)
    rng = np.random.default_rng(0)
    for width, height in ((400, 300), (97, 131), (16, 16), (5, 3)):
        content = jpeg(width, height, **dict(options))
        expected = np.asarray(decode_rgb(content))
        boxes = [Box(0, 0, height, width)]
        for _ in range(12):
            top, left = int(rng.integers(height)), int(rng.integers(width))
            boxes.append(Box(top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))))
        for box in boxes:
            found = decode(memoryview(content), box, 1).cut(box)
            wanted = expected[box.top : box.top + box.height, box.left : box.left + box.width]
            assert np.array_equal(found, wanted), (width, height, box)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("reduction", [2, 4, 8])
def test_reduced_pictures_are_pillows_drafts(name: str, reduction: int) -> None:
    decode = way(name)
    for width, height in ((400, 300), (401, 303), (799, 123)):
        content = jpeg(width, height, quality=90)
        size = -(-height // reduction), -(-width // reduction)
        image = Image.open(io.BytesIO(content))
        image.draft("RGB", (width // reduction, height // reduction))
        assert image.size == size[::-1]
        expected = np.asarray(image.convert("RGB"))
        for box in (Box(0, 0, *size), Box(size[0] // 3, size[1] // 3, size[0] // 2, size[1] // 2)):
            wanted = expected[box.top : box.top + box.height, box.left : box.left + box.width]
            assert np.array_equal(decode(content, box, reduction).cut(box), wanted)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", WAYS)
def test_an_objection_is_a_value_error(name: str) -> None:
    decode = way(name)
    content = bytearray(jpeg(200, 200))
    start = content.index(b"\xff\xda")
    content[start:] = b"\xff\xd9"
    with pytest.raises((ValueError, OSError)):
        decode(bytes(content), Box(0, 0, 200, 200), 1)


def test_sizes_are_in_the_header_of_what_is_plain(tmp_path: Path) -> None:
    root = make_zoo(tmp_path)
    known = {}
    for path in sorted(root.rglob("*.*")):
        size = size_of(path.read_bytes())
        if size is not None:
            with Image.open(path) as image:
                assert size == (image.height, image.width)
            known[path.name] = size
    assert set(known) == {"rgb.jpg", "grey.jpg", "progressive.jpg"}, "CMYK and other formats are Pillow's"


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_every_header_is_read(options: dict[str, object]) -> None:
    assert size_of(jpeg(123, 45, **dict(options))) == (45, 123)


def test_what_does_not_end_or_begin_as_a_jpeg_is_not_plain() -> None:
    content = jpeg(64, 64)
    for damaged in (content[:-1], content[:-200], content[1:], b"", b"\xff\xd8\xff", content[:30], b"\xff" * 300):
        assert size_of(damaged) is None
    for cut in range(2, 160, 7):
        size_of(content[:cut] + b"\xff\xd9")  # whatever it says, it ends


def test_a_library_that_is_none_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "libturbojpeg.so.0"
    path.write_bytes(b"\x7fELF but not really")
    with pytest.raises(OSError, match=str(path)):
        TurboDecoder(str(path))
