"""Defines a quantiser: it encodes values in fewer bytes, and decodes what the receiver will see.

The residual keeps the rounding errors. So a quantiser need not be unbiased, only deterministic (round to nearest, ties
to even) and within half a step; `int2` has no step: it takes the nearer magnitude.

========  ==============================================================================================
``none``  4 bytes a value: float32, exact. For comparisons, and for links that are not the bottleneck
``bf16``  2 bytes: float32 rounded to bfloat16. The whole exponent remains, so no scale is sent
``int8``  1.016 bytes: int8 and one float32 scale (largest magnitude / 127) for each 256 values. Values below
          half a step become 0. Layout: scales, float32 little-endian; then values, int8
``int2``  0.3125 bytes: a sign and one of two magnitudes for each block of 64, the two of the least squared error.
          Layout: magnitudes, bfloat16 little-endian, the lower ones first; then four codes a byte, the first lowest:
          bit 0 the larger magnitude, bit 1 negative
========  ==============================================================================================

Invariant: ``decode(encode(x), len(x))`` is the same on every machine, finite where x is, and encodes to itself.

Legend: K kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch

from shade.errors import PayloadError
from shade.registry import Registry
from shade.types import Floats

Octets = npt.NDArray[np.uint8]


class Quantiser(ABC):
    """Base class of all quantisers; without state."""

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Returns the length of ``count`` encoded values."""

    @abstractmethod
    def encode(self, values_K: Floats) -> Octets:
        """Encodes finite values; the result has `num_bytes`."""

    @abstractmethod
    def _decode(self, data: Octets, count: int) -> Floats:
        """Decodes the values; ``data`` has the right length."""

    def decode(self, data: Octets, count: int) -> Floats:
        """Decodes ``count`` values to new float32 memory; `PayloadError` if the bytes have another length."""
        if count < 0 or len(data) != self.num_bytes(count):
            raise PayloadError(
                f"expected the bytes of {count} values, got {len(data)} bytes; sender and receiver differ"
            )
        return self._decode(data, count)


QUANTISERS: Registry[Quantiser] = Registry("quantiser")
"""Maps a name to a class. Importing `shade.gradient` fills it."""


@QUANTISERS.register("none")
class NoQuantiser(Quantiser):
    """float32, little-endian."""

    def num_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values_K: Floats) -> Octets:
        return values_K.astype("<f4").view(np.uint8)

    def _decode(self, data: Octets, count: int) -> Floats:
        del count
        return data.copy().view("<f4").astype(np.float32, copy=False)


_LARGEST = float(torch.finfo(torch.bfloat16).max)


@QUANTISERS.register("bf16")
class BFloat16(Quantiser):
    """bfloat16, little-endian."""

    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values_K: Floats) -> Octets:
        return _narrow(values_K)

    def _decode(self, data: Octets, count: int) -> Floats:
        return _widen(data)


def _narrow(values_K: Floats) -> Octets:
    # A value that would round up to infinity becomes the largest finite value.
    short_K = torch.from_numpy(values_K).clamp(-_LARGEST, _LARGEST).to(torch.bfloat16).view(torch.int16).numpy()
    return short_K.astype("<i2", copy=False).view(np.uint8)


def _widen(data: Octets) -> Floats:
    wide_K: Floats = np.left_shift(data.copy().view("<u2"), 16, dtype=np.uint32).view(np.float32)
    return wide_K


# Neighbours in a payload mostly belong to one row of one layer, so their magnitudes are similar.
_BLOCK = 256
_MOST = np.float32(127)


@QUANTISERS.register("int8")
class Int8(Quantiser):
    """Symmetric int8, -127 … 127, scaled by block."""

    def num_bytes(self, count: int) -> int:
        return count + 4 * -(-count // _BLOCK)

    def encode(self, values_K: Floats) -> Octets:
        count = len(values_K)
        blocks = np.zeros((-(-count // _BLOCK), _BLOCK), dtype=np.float32)
        blocks.reshape(-1)[:count] = values_K
        scales = np.abs(blocks).max(axis=1) / _MOST
        # Rounding up may make the largest scale too large to be multiplied by 127 again.
        with np.errstate(over="ignore"):
            scales = np.where(np.isfinite(scales * _MOST), scales, np.nextafter(scales, np.float32(0)))
        divisors = np.where(scales > 0, scales, np.float32(1))
        blocks /= divisors[:, None]
        np.rint(blocks, out=blocks)
        np.clip(blocks, -_MOST, _MOST, out=blocks)
        codes_K = blocks.reshape(-1)[:count].astype(np.int8)
        return np.concatenate([scales.astype("<f4").view(np.uint8), codes_K.view(np.uint8)])

    def _decode(self, data: Octets, count: int) -> Floats:
        num_blocks = -(-count // _BLOCK)
        scales = data[: 4 * num_blocks].copy().view("<f4").astype(np.float32, copy=False)
        values_K = data[4 * num_blocks :].view(np.int8).astype(np.float32)
        whole = count // _BLOCK * _BLOCK
        values_K[:whole].reshape(-1, _BLOCK)[...] *= scales[: count // _BLOCK, None]
        values_K[whole:] *= scales[-1:] if whole < count else np.float32(1)
        return values_K


_FEW = 64


@QUANTISERS.register("int2")
class Int2(Quantiser):
    """Two magnitudes and a sign, by block; for the largest of many values, whose magnitudes are similar."""

    def num_bytes(self, count: int) -> int:
        return 4 * -(-count // _FEW) + -(-count // 4)

    def encode(self, values_K: Floats) -> Octets:
        count = len(values_K)
        padded, whole = np.zeros((-(-count // _FEW), _FEW), dtype=np.float32), count // _FEW
        padded.reshape(-1)[:count] = values_K
        magnitudes = np.abs(padded)
        # The last block may be shorter: zeros behind its end must not count.
        parts = magnitudes[:whole], magnitudes[whole:, : count % _FEW]
        levels = _narrow(np.concatenate([_two_levels(part) for part in parts if part.size] or [padded[:, :2]]).T.copy())
        low, high = _widen(levels.reshape(-1)).reshape(2, -1)[..., None]
        codes = (magnitudes > low + (high - low) / 2) + 2 * np.signbit(padded).astype(np.uint8)
        packed = np.bitwise_or.reduce(codes.reshape(-1, 4) << np.arange(0, 8, 2, dtype=np.uint8), axis=1)
        return np.concatenate([levels.reshape(-1), packed[: -(-count // 4)].astype(np.uint8)])

    def _decode(self, data: Octets, count: int) -> Floats:
        num_blocks = -(-count // _FEW)
        levels = _widen(data[: 4 * num_blocks]).reshape(2, num_blocks)
        codes_K = (data[4 * num_blocks :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1)[:count]
        seen_K: Floats = levels[codes_K & 1, np.arange(count) // _FEW]
        np.negative(seen_K, out=seen_K, where=codes_K >= 2)
        return seen_K


def _two_levels(magnitudes: Floats) -> Floats:
    """Returns the two levels of each row, the lower first, from which its magnitudes are off by the least squares."""
    # Where they are sorted, both groups are neighbours: every cut is tried. Sums of equal floats are exact in float64,
    # so what was rounded to two levels has them.
    length = magnitudes.shape[1]
    sums = np.cumsum(np.sort(magnitudes, axis=1), axis=1, dtype=np.float64)
    num_low = np.arange(1, length + 1)
    num_high = np.maximum(length - num_low, 1)
    above = sums[:, -1:] - sums
    cut = np.argmax(sums * sums / num_low + above * above / num_high, axis=1)[:, None]
    low = np.take_along_axis(sums, cut, 1)[:, 0] / num_low[cut[:, 0]]
    high = np.take_along_axis(above, cut, 1)[:, 0] / num_high[cut[:, 0]]
    return np.stack([low, np.maximum(low, high)], axis=1).astype(np.float32)
