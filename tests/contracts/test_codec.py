"""What the item codec promises: everything it takes comes back equal, and hostile bytes are an error and no more."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import Image
from torchvision import tv_tensors

from shade.data._source.item_codec import decode, encode
from shade.data._source.item_columns import encode_many
from shade.errors import ConfigError, CorruptEntryError

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64),
]
MODES = ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "I;16", "PA"]

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text()
arrays = npst.arrays(
    npst.scalar_dtypes().filter(lambda d: d.kind in "biufcmM" and d.itemsize <= 16) | npst.unicode_string_dtypes(),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
leaves = scalars | st.binary() | arrays | arrays.filter(lambda a: a.ndim == 0).map(lambda a: a[()])
items = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


@given(items)
def test_items_come_back_equal(item: Any) -> None:
    assert same(decode(encode(item)), item)
    assert same(decode(memoryview(encode(item))), item)


@given(st.lists(items, max_size=5) | st.builds(lambda item, count: [item] * count, items, st.integers(1, 4)))
def test_items_of_a_batch_are_encoded_as_each_alone(batch: list[Any]) -> None:
    assert encode_many(batch) == [encode(item) for item in batch]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64)],
        [torch.arange(6.0).reshape(2, 3).t(), torch.ones(3, 2)],
        [torch.ones(2, requires_grad=True), torch.ones(2)],
        [torch.ones(2), torch.ones(2).double()],
        [torch.ones(2), torch.ones(3)],
        [np.arange(6).reshape(2, 3).T, np.ones((3, 2), np.int64)],
        [np.array([1, 2], ">i4"), np.array([3, 4], ">i4")],
        [np.array([1, 2], ">i4"), np.array([3, 4], "<i4")],
        [np.datetime64("2020-01-01"), np.datetime64("2020-01-01T00")],
        [float("nan"), -0.0],
        [True, 1],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [tv_tensors.Mask(torch.ones(2, 2)), torch.ones(2, 2)],
    ],
    ids=lambda batch: type(batch[0]).__name__,
)
def test_items_of_a_batch_that_are_alike_in_part(batch: list[Any]) -> None:
    assert encode_many(batch) == [encode(item) for item in batch]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4), (0, 5)])
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert same(decode(encode((tensor, 3))), (tensor, 3))


@pytest.mark.parametrize("kind", [tv_tensors.Image, tv_tensors.Mask, tv_tensors.Video])
def test_tensors_that_say_what_they_are(kind: Any) -> None:
    tensor = kind(torch.arange(24, dtype=torch.uint8).reshape(1, 1, 4, 6))
    assert same(decode(encode((tensor, 3))), (tensor, 3))
    boxes = tv_tensors.BoundingBoxes([[0, 1, 2, 3]], format="XYXY", canvas_size=(4, 4))  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="BoundingBoxes"):
        encode(boxes)


def test_tensors_that_lie_otherwise_in_memory() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    complex_ = torch.complex(base, base)
    for tensor in (
        base.t(),
        base[:, ::2],
        base[1:],
        torch.nn.Parameter(base).data,
        complex_.conj(),
        base.expand(2, 4, 6),
        torch.tensor(7).expand(1),
        torch.tensor(7).expand(0),
        torch.ones(1, 3)[:, :1],
        torch.ones(4, dtype=torch.bfloat16).as_strided((1,), (0,)),
        torch.empty_strided((0,), (0,)),
        torch.ones(1, 5)[:, 2],
    ):
        assert same(decode(encode(tensor)), tensor.clone().resolve_conj())


def test_what_is_decoded_may_be_changed() -> None:
    tensor, array = decode(encode((torch.zeros(3), np.zeros(3))))
    tensor += 1
    array += 1
    assert tensor.sum() == array.sum() == 3


def test_not_a_number_survives() -> None:
    assert repr(decode(encode([float("nan"), float("inf"), -0.0]))) == "[nan, inf, -0.0]"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(13, 5), (1, 1), (8, 16)])
def test_images_of_every_mode(mode: str, size: tuple[int, int]) -> None:
    length = len(Image.new(mode, size).tobytes())
    image = Image.frombytes(mode, size, np.random.default_rng(0).bytes(length))
    if mode in ("P", "PA"):
        image.putpalette(list(range(256)) * 3)
    back = decode(encode(image))
    assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())
    if mode != "F":
        assert back.convert("RGB").tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("transparency", [3, b"\x00\x80\xff", None])
def test_a_palettes_transparency_survives(transparency: int | bytes | None) -> None:
    image = Image.frombytes("P", (4, 2), bytes(range(8)))
    image.putpalette([5 * i % 256 for i in range(3 * 256)])
    if transparency is not None:
        image.info["transparency"] = transparency
    assert decode(encode(image)).convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_an_image_without_pixels() -> None:
    assert decode(encode(Image.new("RGB", (0, 7)))).size == (0, 7)


class Own(dict[str, int]):
    """A container that would come back as another type."""


@pytest.mark.parametrize(
    "item",
    [
        object(),
        {1, 2},
        Own(a=1),
        {(1, 2): 3},
        3 + 4j,
        np.array([object()]),
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros(2, dtype=[("a", "i4")]),
        torch.zeros(3).to_sparse(),
        torch.nn.Parameter(torch.zeros(3)),
        lambda: None,
    ],
    ids=lambda item: type(item).__name__,
)
def test_what_would_not_come_back_equal_is_refused(item: Any) -> None:
    with pytest.raises(ConfigError, match="encode="):
        encode({"deep": [item]})


# ── hostile bytes ───────────────────────────────────────────────────────────────────────────────────────────────────


def forged(skeleton: Any, buffers: bytes = b"") -> bytes:
    text = json.dumps(skeleton).encode()
    return struct.pack("<I", len(text)) + text + bytes(-(len(text) + 4) % 8) + buffers


HUGE = 2**40
HOSTILE = {
    "tensor-without-bytes": forged({"tensor": ["float32", [HUGE]]}),
    "tensor-overflowing": forged({"tensor": ["float32", [2**32, 2**32]]}),
    "tensor-negative": forged({"tensor": ["float32", [-8]]}, bytes(32)),
    "tensor-fraction": forged({"tensor": ["float32", [2.0]]}, bytes(8)),
    "tensor-of-no-dtype": forged({"tensor": ["load", [1]]}, bytes(8)),
    "tensor-of-an-attribute": forged({"tensor": ["__builtins__", [1]]}, bytes(8)),
    "array-of-objects": forged({"array": ["|O", [1]]}, bytes(8)),
    "array-of-records": forged({"array": ["i4,i4", [1]]}, bytes(8)),
    "array-huge-item": forged({"array": ["<U99999999999", [1]]}, bytes(8)),
    "array-without-bytes": forged({"array": ["<f8", [HUGE]]}),
    "image-without-bytes": forged({"image": ["RGB", [60000, 60000], 0, None, None]}),
    "image-too-few-bytes": forged({"image": ["RGBA", [60000, 60000], 8, None, None]}, bytes(8)),
    "image-of-no-mode": forged({"image": ["XYZ", [1, 1], 8, None, None]}, bytes(8)),
    "image-palette": forged({"image": ["P", [8, 1], 8, ["RGB", "x"], None]}, bytes(8)),
    "bytes-without-bytes": forged({"bytes": HUGE}),
    "bytes-negative": forged({"bytes": -8}, bytes(16)),
    "bytes-text": forged({"bytes": "8"}, bytes(8)),
    "unknown-kind": forged({"pickle": "gASV"}),
    "two-kinds": forged({"list": [], "tuple": []}),
    "bare-list": forged([1, 2]),
    "dict-odd": forged({"dict": [[1, 2, 3]]}),
    "dict-unhashable": forged({"dict": [[[], 1]]}),
    "left-over": forged({"bytes": 8}, bytes(16)),
    "deep": struct.pack("<I", 200_000) + b'{"list":[' * 20_000 + b" " * 20_000,
    "skeleton-beyond": struct.pack("<I", 2**32 - 1) + b"{}",
    "not-json": struct.pack("<I", 4) + b"\xff\xfe{}",
    "empty": b"",
    "short": b"\x01\x00",
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_forged_payloads_are_errors_and_ask_for_no_memory(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptEntryError):
            decode(payload)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_an_error(payload: bytes) -> None:
    with contextlib.suppress(CorruptEntryError):
        decode(payload)


@settings(max_examples=300)
@given(items, st.data())
def test_a_damaged_payload_decodes_or_is_an_error(item: Any, data: st.DataObject) -> None:
    payload = bytearray(encode((item, torch.zeros(2), "text")))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptEntryError):
        decode(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
