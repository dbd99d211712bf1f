"""What a quantiser is: it writes values in fewer bytes, and says what the receiver will read.

What is lost on the way is not lost to the training: `_compress.error_feedback` keeps it in the residual. So a
quantiser need not be unbiased, only deterministic (round to nearest, ties to even) and near: within half a step.

Invariant: ``decode(encode(x), len(x))`` is the same on every machine, finite where x is, and encodes to itself.

Legend: K kept.

Four bytes a value: nothing is lost, nothing is saved. To compare with, and for links that are not the bottleneck.

Two bytes a value: float32 cut to bfloat16, to the nearest, ties to even.

The exponent stays whole, so values of any size keep 8 significant bits and no scale has to travel. What would round up
to infinity becomes the largest finite value; the rest of it stays in the residual like any other rounding.

One byte a value, and a float32 scale for each 256 of them: 1.016 bytes.

A block's scale is its largest magnitude / 127. Neighbours in a payload are neighbours in the bucket, mostly of one row
of one layer, so a block's values are of a size. Values below half a step become 0 and wait in the residual.

Layout: the scales, float32 little-endian; then the values, int8.
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
    """Base of all quantisers; without state."""

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Length of ``count`` encoded values."""

    @abstractmethod
    def encode(self, values_K: Floats) -> Octets:
        """Finite values as bytes, `num_bytes` long."""

    @abstractmethod
    def _decode(self, data: Octets, count: int) -> Floats:
        """Hook: the values; ``data`` has the right length."""

    def decode(self, data: Octets, count: int) -> Floats:
        """The values that bytes stand for.

        Args:
            data: uint8, contiguous.
            count: How many.

        Returns:
            float32 (count,), new memory.

        Raises:
            PayloadError: Another length than ``count`` values have.
        """
        if count < 0 or len(data) != self.num_bytes(count):
            raise PayloadError(
                f"expected the bytes of {count} values, got {len(data)} bytes; sender and receiver differ"
            )
        return self._decode(data, count)


QUANTISERS: Registry[Quantiser] = Registry("quantiser")
"""Name → class. Importing `shade.gradient` fills it."""


@QUANTISERS.register("none")
class NoQuantiser(Quantiser):
    """float32, little-endian."""

    def num_bytes(self, count: int) -> int:
        """Four each."""
        return 4 * count

    def encode(self, values_K: Floats) -> Octets:
        """The bytes as they lie in memory; a copy."""
        return values_K.astype("<f4").view(np.uint8)

    def _decode(self, data: Octets, count: int) -> Floats:
        del count
        return data.copy().view("<f4").astype(np.float32, copy=False)


_LARGEST = float(torch.finfo(torch.bfloat16).max)


@QUANTISERS.register("bf16")
class BFloat16(Quantiser):
    """bfloat16, little-endian."""

    def num_bytes(self, count: int) -> int:
        """Two each."""
        return 2 * count

    def encode(self, values_K: Floats) -> Octets:
        """Rounded; by PyTorch, whose loop for it is the fastest at hand."""
        short_K = torch.from_numpy(values_K).clamp(-_LARGEST, _LARGEST).to(torch.bfloat16).view(torch.int16).numpy()
        return short_K.astype("<i2", copy=False).view(np.uint8)

    def _decode(self, data: Octets, count: int) -> Floats:
        wide_K = np.empty(count, dtype=np.uint32)
        np.left_shift(data.copy().view("<u2"), 16, out=wide_K, dtype=np.uint32)
        return wide_K.view(np.float32)


_BLOCK = 256
_MOST = np.float32(127)


@QUANTISERS.register("int8")
class Int8(Quantiser):
    """Scaled int8, symmetric: -127 … 127."""

    def num_bytes(self, count: int) -> int:
        """One each, four a block."""
        return count + 4 * -(-count // _BLOCK)

    def encode(self, values_K: Floats) -> Octets:
        """Scaled by block and rounded."""
        count = len(values_K)
        blocks = np.zeros((-(-count // _BLOCK), _BLOCK), dtype=np.float32)
        blocks.reshape(-1)[:count] = values_K
        scales = np.abs(blocks).max(axis=1) / _MOST
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
