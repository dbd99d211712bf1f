"""Crop, resize, flip and normalise in one pass over the pixels, bit for bit as Pillow and torchvision do it.

Pillow resizes in two passes, along rows and along columns, with weights in fixed point (22 bits behind the point) and a
rounding to uint8 after each. Both passes are integer arithmetic, so the same weights give the same bytes in any
implementation. The steps after the resize (ToTensor, Normalize, and others on each value by itself) are a table of 256
entries a channel, made by the user's own transforms. Price: some seconds of compiling, once a machine.

Invariant: `render` equals Pillow's resize followed by torchvision's tensor transforms, bit for bit; `pillow_order`
tests it on this machine before it is used.

Legend: S bytes of a source · R rows kept between the passes · V 256 values · C channels (3) · H, W output · B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from PIL import Image

from shade._lazy import compiled, load_numba

numba = load_numba()
extending, cgutils = numba.extending, numba.core.cgutils

PRECISION = 22
"""Bits behind the point of a weight: Pillow's ``32 - 8 - 2``."""
LANES = 16
PIXELS = 4
"""RGB pixels that one load of 16 bytes serves."""
_HALF = 1 << (PRECISION - 1)
_BYTE, _INT = ir.IntType(8), ir.IntType(32)
_BYTES, _INTS = ir.VectorType(_BYTE, LANES), ir.VectorType(_INT, LANES)


def _intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    # numba's decorator is typed in some versions only.
    decorate: Any = extending.intrinsic
    decorated: Callable[..., Any] = decorate(function)
    return decorated


def _constant(values: list[int]) -> Any:
    return ir.Constant(_INTS, values)


# Numba's vectoriser does not see that four neighbouring RGB pixels are twelve contiguous bytes. So the two sums are
# LLVM's instructions: 16 bytes are loaded, widened, multiplied by 16 weights and folded.
class _Code:
    """Writes vector code: arrays are numba's, offsets in elements."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self._context, self.builder, self._signature, self.arguments = context, builder, signature, arguments

    def place(self, array: int, offset: Any, kind: Any) -> Any:
        """Returns the address of an element of an argument, as a pointer to ``kind``."""
        view = self._context.make_array(self._signature.args[array])(self._context, self.builder, self.arguments[array])
        return self.builder.bitcast(self.builder.gep(view.data, [offset]), kind.as_pointer())

    def load(self, array: int, offset: Any, kind: Any, align: int) -> Any:
        return self.builder.load(self.place(array, offset, kind), align=align)

    def spread(self, value: Any) -> Any:
        """Returns a vector with one number in every lane."""
        alone = self.builder.insert_element(ir.Constant(_INTS, ir.Undefined), value, _INT(0))
        return self.builder.shuffle_vector(alone, ir.Constant(_INTS, ir.Undefined), _constant([0] * LANES))

    def picked(self, vector: Any, lanes: list[int]) -> Any:
        """Returns some lanes of a vector, as a vector of that many."""
        mask = ir.Constant(ir.VectorType(_INT, len(lanes)), lanes)
        return self.builder.shuffle_vector(vector, vector, mask)

    def nothing(self) -> Any:
        return self._context.get_dummy_value()


def _products(code: _Code, source_at: Any, weights_at: Any) -> Any:
    """Multiplies 16 bytes of the first argument by 16 weights of the third."""
    values = code.builder.zext(code.load(0, source_at, _BYTES, 1), _INTS)
    return code.builder.mul(values, code.load(2, weights_at, _INTS, 4))


def _fold(code: _Code, products: Any, out: int, out_at: Any) -> Any:
    """Adds up four pixels' products by channel, rounds, and stores three bytes and a fourth without meaning."""
    builder = code.builder
    pairs = builder.add(
        code.picked(products, [0, 1, 2, 3, 4, 5, 5, 5]), code.picked(products, [6, 7, 8, 9, 10, 11, 11, 11])
    )
    total = builder.add(code.picked(pairs, [0, 1, 2, 2]), code.picked(pairs, [3, 4, 5, 5]))
    four = ir.VectorType(_INT, 4)
    rounded = builder.lshr(builder.add(total, ir.Constant(four, [_HALF] * 4)), ir.Constant(four, [PRECISION] * 4))
    narrow = builder.bitcast(builder.trunc(rounded, ir.VectorType(_BYTE, 4)), _INT)
    builder.store(narrow, code.place(out, out_at, _INT), align=1)
    return code.nothing()


@_intrinsic
def _blend_four(typing: Any, source: Any, at: Any, weights: Any, weights_at: Any, out: Any, out_at: Any) -> Any:
    """Blends one output pixel of a row from up to four neighbouring pixels."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)
        return _fold(code, _products(code, arguments[1], arguments[3]), 4, arguments[5])

    offset = numba.types.intp
    return numba.types.void(source, offset, weights, offset, out, offset), generate


@_intrinsic
def _blend_pixels(
    typing: Any, source: Any, at: Any, weights: Any, weights_at: Any, chunks: Any, out: Any, out_at: Any
) -> Any:
    """Blends one output pixel of a row from ``chunks`` times four neighbouring pixels."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)
        total = cgutils.alloca_once_value(builder, _constant([0] * LANES))
        with cgutils.for_range(builder, arguments[4]) as loop:
            step = loop.index
            place = builder.add(arguments[1], builder.mul(step, step.type(3 * PIXELS)))
            where = builder.add(arguments[3], builder.mul(step, step.type(LANES)))
            builder.store(builder.add(builder.load(total), _products(code, place, where)), total)
        return _fold(code, builder.load(total), 5, arguments[6])

    offset = numba.types.intp
    return numba.types.void(source, offset, weights, offset, offset, out, offset), generate


@_intrinsic
def _blend_rows(
    typing: Any, rows: Any, at: Any, pitch: Any, weights: Any, weights_at: Any, count: Any, out: Any, out_at: Any
) -> Any:
    """Blends 16 bytes of an output row from ``count`` rows below each other by their weights, rounded."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)
        total = cgutils.alloca_once_value(builder, _constant([_HALF] * LANES))
        with cgutils.for_range(builder, arguments[5]) as loop:
            place = builder.add(arguments[1], builder.mul(loop.index, arguments[2]))
            values = builder.zext(code.load(0, place, _BYTES, 1), _INTS)
            weight = code.load(3, builder.add(arguments[4], loop.index), _INT, 4)
            builder.store(builder.add(builder.load(total), builder.mul(values, code.spread(weight))), total)
        shifted = builder.lshr(builder.load(total), _constant([PRECISION] * LANES))
        builder.store(builder.trunc(shifted, _BYTES), code.place(6, arguments[7], _BYTES), align=1)
        return code.nothing()

    offset = numba.types.intp
    return numba.types.void(rows, offset, offset, weights, offset, offset, out, offset), generate


@compiled
def _weigh(begin: float, end: float, in_size: int, out_size: int, start: int, count: int) -> Any:
    """Returns Pillow's bilinear weights for ``count`` outputs from ``start`` on: first input, inputs, and weights."""
    # Pillow's precompute_coeffs, operation by operation, because every rounding counts.
    scale = (end - begin) / out_size
    stretch = max(scale, 1.0)
    support, inverse = stretch, 1.0 / stretch
    ksize = math.ceil(support) * 2 + 1
    first, taps = np.empty(count, np.int64), np.empty(count, np.int64)
    weight = np.zeros((count, ksize), np.int32)
    exact = np.empty(ksize, np.float64)
    for number in range(count):
        center = begin + (start + number + 0.5) * scale
        low = max(int(center - support + 0.5), 0)
        high = min(int(center + support + 0.5), in_size)
        total = 0.0
        for tap in range(high - low):
            distance = abs((tap + low - center + 0.5) * inverse)
            exact[tap] = 1.0 - distance if distance < 1.0 else 0.0
            total += exact[tap]
        for tap in range(high - low):
            value = exact[tap] / total if total != 0.0 else exact[tap]
            weight[number, tap] = int(0.5 + value * (1 << PRECISION))
        first[number], taps[number] = low, high - low
    return first, taps, weight


@compiled
def _pass_rows(
    source_S: Any, pitch: int, left: int, top: int, num_rows: int, first: Any, taps: Any, weight: Any
) -> Any:
    """Resizes along rows: ``num_rows`` of them from ``top`` on, each to as many pixels as there are weights."""
    width = len(first)
    most = 1
    for number in range(width):
        most = max(most, taps[number])
    chunks = (most + PIXELS - 1) // PIXELS
    wide = np.zeros(width * chunks * LANES, np.int32)
    for number in range(width):
        for tap in range(taps[number]):
            at = (number * chunks + tap // PIXELS) * LANES + tap % PIXELS * 3
            wide[at] = wide[at + 1] = wide[at + 2] = weight[number, tap]
    stride = (3 * width + LANES - 1) // LANES * LANES
    rows = np.empty(num_rows * stride + LANES, np.uint8)
    reach = 3 * PIXELS * (chunks - 1) + LANES
    for row in range(num_rows):
        base, out = (top + row) * pitch + 3 * left, row * stride
        if chunks == 1 and base + 3 * first[width - 1] + reach <= source_S.size:
            for number in range(width):
                _blend_four(source_S, base + 3 * first[number], wide, number * LANES, rows, out + 3 * number)
            continue
        for number in range(width):
            at = base + 3 * first[number]
            if at + reach <= source_S.size:
                _blend_pixels(source_S, at, wide, number * chunks * LANES, chunks, rows, out + 3 * number)
            # The last pixels of the source: no byte may be read behind them.
            else:
                for channel in range(3):
                    total = 1 << (PRECISION - 1)
                    for tap in range(taps[number]):
                        total += np.int64(source_S[at + 3 * tap + channel]) * weight[number, tap]
                    rows[out + 3 * number + channel] = total >> PRECISION
    return rows, stride


@compiled
def _pass_columns(
    source_S: Any, pitch: int, left: int, top: int, num_columns: int, first: Any, taps: Any, weight: Any
) -> Any:
    """Resizes along columns: ``num_columns`` of them from ``left`` on, each to as many rows as there are weights."""
    height, ksize = weight.shape
    num_bytes = 3 * num_columns
    stride = (num_bytes + LANES - 1) // LANES * LANES
    rows, flat = np.empty(height * stride + LANES, np.uint8), weight.reshape(-1)
    for row in range(height):
        base = (top + first[row]) * pitch + 3 * left
        for x in range(0, num_bytes, LANES):
            if base + x + (taps[row] - 1) * pitch + LANES <= source_S.size:
                _blend_rows(source_S, base + x, pitch, flat, row * ksize, taps[row], rows, row * stride + x)
            # As above.
            else:
                for byte in range(x, min(x + LANES, num_bytes)):
                    total = 1 << (PRECISION - 1)
                    for tap in range(taps[row]):
                        total += np.int64(source_S[base + byte + tap * pitch]) * weight[row, tap]
                    rows[row * stride + byte] = total >> PRECISION
    return rows, stride


@compiled
def render(
    source_S: Any,
    pitch: int,
    offset: Any,
    box: Any,
    resized: Any,
    window: Any,
    columns_first: bool,
    flip: bool,
    table_CV: Any,
    out_CHW: Any,
) -> None:
    """Renders one image into its place in the batch.

    Args:
        source_S: uint8 RGB pixels, row after row.
        pitch: Bytes from row to row.
        offset: int64 (top, left): where the crop begins in ``source_S``, in pixels.
        box: float64 (top, left, height, width, bottom, right): the crop's size in pixels as height and width; the part
            of it that is resized as (top, left) to (bottom, right), fractions allowed.
        resized: int64 (height, width) that the box is resized to.
        window: int64 (top, left): the part of the resized image that is wanted begins here, with the size of ``out``.
        columns_first: Which of the two passes comes first, see `Order`.
        flip: Mirror left and right.
        table_CV: What each value becomes, by channel.
        out_CHW: Filled.
    """
    _, height, width = out_CHW.shape
    first_x, taps_x, weight_x = _weigh(box[1], box[5], int(box[3]), resized[1], window[1], width)
    first_y, taps_y, weight_y = _weigh(box[0], box[4], int(box[2]), resized[0], window[0], height)
    top, left = offset[0], offset[1]
    if columns_first:
        begin, end = first_x[0], first_x[width - 1] + taps_x[width - 1]
        rows, stride = _pass_columns(source_S, pitch, left + begin, top, end - begin, first_y, taps_y, weight_y)
        rows, stride = _pass_rows(rows, stride, -begin, 0, height, first_x, taps_x, weight_x)
    else:
        begin, end = first_y[0], first_y[height - 1] + taps_y[height - 1]
        rows, stride = _pass_rows(source_S, pitch, left, top + begin, end - begin, first_x, taps_x, weight_x)
        rows, stride = _pass_columns(rows, stride, 0, -begin, width, first_y, taps_y, weight_y)
    for y in range(height):
        line = rows[y * stride : y * stride + 3 * width]
        for channel in range(3):
            if flip:
                for x in range(width):
                    out_CHW[channel, y, width - 1 - x] = table_CV[channel, line[3 * x + channel]]
            else:
                for x in range(width):
                    out_CHW[channel, y, x] = table_CV[channel, line[3 * x + channel]]


# Of pictures of a kilobyte, what Python does for each costs more than the pixels. So this, `random_crops` and
# `jpeg_sizes` loop over a batch.
@compiled
def render_many(
    source_S: Any, begin_B: Any, size_B2: Any, window_BF: Any, columns_first_B: Any, table_CV: Any, out_BCHW: Any
) -> None:
    """Renders whole pictures that lie one behind the other, as `render` does each.

    Args:
        source_S: uint8 RGB pixels.
        begin_B: int64, first byte of each picture; -1: there is none, and its place stays as it is.
        size_B2: int64, height and width.
        window_BF: int64, `Window` in nine numbers.
        columns_first_B: bool, which of the two passes comes first.
        table_CV: What each value becomes, by channel.
        out_BCHW: Filled.
    """
    for number in range(len(begin_B)):
        begin, width = begin_B[number], size_B2[number, 1]
        if begin < 0:
            continue
        window = window_BF[number]
        height, length = float(window[2]), float(window[3])
        box = np.array([0.0, 0.0, height, length, height, length])
        source = source_S[begin : begin + 3 * size_B2[number, 0] * width]
        render(
            source,
            3 * width,
            window[:2],
            box,
            window[4:6],
            window[6:8],
            columns_first_B[number],
            window[8] != 0,
            table_CV,
            out_BCHW[number],
        )


@compiled
def random_words(state: Any, position: int, count: int) -> Any:
    """Returns the next words of a Mersenne twister, uint32, and its next position; changes ``state`` (uint32, 624)."""
    # MT19937, torch's generator on the CPU.
    words = np.empty(count, np.uint32)
    for number in range(count):
        if position >= 624:
            for at in range(624):
                mixed = (state[at] & np.uint32(0x80000000)) | (state[(at + 1) % 624] & np.uint32(0x7FFFFFFF))
                odd = np.uint32(0x9908B0DF) if mixed & np.uint32(1) else np.uint32(0)
                state[at] = state[(at + 397) % 624] ^ (mixed >> np.uint32(1)) ^ odd
            position = 0
        word = state[position]
        position += 1
        word ^= word >> np.uint32(11)
        word ^= (word << np.uint32(7)) & np.uint32(0x9D2C5680)
        word ^= (word << np.uint32(15)) & np.uint32(0xEFC60000)
        words[number] = word ^ (word >> np.uint32(18))
    return words, position


@compiled
def random_crops(
    words: Any, part: Any, aspect: Any, size_B2: Any, ratio: Any, flips: bool, probability: float, window_BF: Any
) -> int:
    """Draws torchvision's random crops and flips: the first four numbers and the last of each window.

    Args:
        words: uint32, of the generator.
        part: float32, the share of the area that each word stands for.
        aspect: float32, the crop's width over its height that each word stands for.
        size_B2: int64, height and width of the pictures.
        ratio: float64, least and greatest width over height.
        flips: Whether there is a flip, of that ``probability``.
        probability: As above.
        window_BF: int64; filled.

    Returns:
        How many words were used; -1 if there are too few.
    """
    at = 0
    for number in range(len(size_B2)):
        height, width = size_B2[number]
        found = False
        for _ in range(10):
            if at + 5 > len(words):
                return -1
            target = height * width * np.float64(part[at])
            wanted = np.float64(aspect[at + 1])
            at += 2
            # Python's round, as torchvision calls it, and rint both round halves to even.
            crop_width, crop_height = np.rint(math.sqrt(target * wanted)), np.rint(math.sqrt(target / wanted))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                window_BF[number, 0] = words[at] % np.uint32(height - np.int64(crop_height) + 1)
                window_BF[number, 1] = words[at + 1] % np.uint32(width - np.int64(crop_width) + 1)
                at += 2
                found = True
                break
        if not found:
            crop_height, crop_width = np.float64(height), np.float64(width)
            if width / height < ratio[0]:
                crop_height = np.rint(width / ratio[0])
            elif width / height > ratio[1]:
                crop_width = np.rint(height * ratio[1])
            window_BF[number, 0] = (height - np.int64(crop_height)) // 2
            window_BF[number, 1] = (width - np.int64(crop_width)) // 2
        window_BF[number, 2], window_BF[number, 3] = np.int64(crop_height), np.int64(crop_width)
        if flips:
            if at + 1 > len(words):
                return -1
            # torch.rand makes a float32 of a word's last 24 bits.
            window_BF[number, 8] = (words[at] & np.uint32(0xFFFFFF)) * 2.0**-24 < probability
            at += 1
    return at


@compiled
def jpeg_sizes(content_S: Any, end_B: Any) -> Any:
    """Finds the sizes of JPEG files that lie one behind the other, as `_decode.jpeg.size_of` does.

    Args:
        content_S: uint8.
        end_B: int64, the byte behind each file.

    Returns:
        int64 (B, 2), height and width; zeros for what is not plain.
    """
    size_B2 = np.zeros((len(end_B), 2), np.int64)
    for number in range(len(end_B)):
        begin = end_B[number - 1] if number else 0
        view = content_S[begin : end_B[number]]
        last = len(view) - 1
        if last < 31 or view[0] != 0xFF or view[1] != 0xD8 or view[2] != 0xFF:
            continue
        if view[last - 1] != 0xFF or view[last] != 0xD9:
            continue
        at, end = 2, len(view) - 10
        while at < end and view[at] == 0xFF:
            marker = view[at + 1]
            if 0xC0 <= marker <= 0xC2:
                height, width = np.int64(view[at + 5]) << 8 | view[at + 6], np.int64(view[at + 7]) << 8 | view[at + 8]
                if view[at + 4] == 8 and (view[at + 9] == 1 or view[at + 9] == 3) and height and width:
                    size_B2[number, 0], size_B2[number, 1] = height, width
                break
            # C4, C8 and CC are no frames: tables of Huffman codes, a reserved marker, arithmetic conditioning.
            if 0xC3 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
                break
            if marker == 0xFF:
                at += 1
            elif marker == 0x01 or 0xD0 <= marker <= 0xD7:
                at += 2
            else:
                at += 2 + (np.int64(view[at + 2]) << 8 | view[at + 3])
    return size_B2


@compiled
def look_up(pixels_CHW: Any, flip: bool, table_CV: Any, out_CHW: Any) -> None:
    """Flips and tabulates pixels that need no resize (or were resized by torch).

    Args:
        pixels_CHW: uint8, any strides.
        flip: Mirror left and right.
        table_CV: What each value becomes, by channel.
        out_CHW: Filled.
    """
    _, height, width = out_CHW.shape
    for channel in range(3):
        for y in range(height):
            for x in range(width):
                to = width - 1 - x if flip else x
                out_CHW[channel, y, to] = table_CV[channel, pixels_CHW[channel, y, x]]


def _rows_first(height: int, width: int, to_height: int, to_width: int) -> bool:
    # Pillow before version 13.
    return False


def _larger_shrink_first(height: int, width: int, to_height: int, to_width: int) -> bool:
    # Pillow 13, found by experiment: columns first if they lose much more pixels than rows do.
    return (height > to_height) & (height - to_height > 2 * (width - to_width))


Order = Callable[[int, int, int, int], bool]
"""Returns whether Pillow resizes along columns first, from a size to a size, or from arrays of sizes. Each pass rounds,
so the order shows."""
_SIZES = ((16, 16), (50, 90), (64, 24), (30, 60), (30, 57), (18, 51), (18, 52), (37, 60), (90, 80), (38, 40), (8, 61))


@lru_cache(maxsize=1)
def pillow_order() -> Order | None:
    """Returns the order in which this machine's Pillow resizes; None if no order gives its bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (41, 67, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).crop((5, 2, 66, 40))
    for order in (_larger_shrink_first, _rows_first):
        if all(_gives(pixels, image, height, width, order) for height, width in _SIZES):
            return order
    # A Pillow that computes otherwise: pillow-simd, or one with fused multiply-add.
    return None


def _gives(pixels: npt.NDArray[np.uint8], image: Image.Image, height: int, width: int, order: Order) -> bool:
    """Returns whether `render` makes of a part of ``pixels`` what Pillow makes of ``image``."""
    identity_CV = np.tile(np.arange(256, dtype=np.uint8), (3, 1))
    out = np.empty((3, height, width), np.uint8)
    box, place, inner = np.array([0.0, 0.0, 38.0, 61.0, 38.0, 61.0]), np.array([2, 5]), np.zeros(2, np.int64)
    columns_first = order(38, 61, height, width)
    size = np.array([height, width])
    render(pixels.reshape(-1), 67 * 3, place, box, size, inner, columns_first, True, identity_CV, out)
    expected = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))[:, ::-1]
    return np.array_equal(out.transpose(1, 2, 0), expected)
