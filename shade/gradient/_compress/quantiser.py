"""Defines a quantiser: it encodes values in fewer bytes, and decodes what the receiver will see.

The residual keeps the rounding errors. So a quantiser need not be unbiased, only deterministic (round to nearest, ties
to even) and within half a step.

========  ==============================================================================================
``none``  4 bytes a value: float32, exact. For comparisons, and for links that are not the bottleneck
``bf16``  2 bytes: float32 rounded to bfloat16. The whole exponent remains, so no scale is sent
``int8``  1.016 bytes: int8 and one float32 scale (largest magnitude / 127) for each 256 values. Values below
          half a step become 0. Layout: scales, float32 little-endian; then values, int8
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
        # A value that would round up to infinity becomes the largest finite value.
        short_K = torch.from_numpy(values_K).clamp(-_LARGEST, _LARGEST).to(torch.bfloat16).view(torch.int16).numpy()
        return short_K.astype("<i2", copy=False).view(np.uint8)

    def _decode(self, data: Octets, count: int) -> Floats:
        wide_K = np.empty(count, dtype=np.uint32)
        np.left_shift(data.copy().view("<u2"), 16, out=wide_K, dtype=np.uint32)
        return wide_K.view(np.float32)


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
