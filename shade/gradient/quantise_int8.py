"""One byte a value, and a float32 scale for each 256 of them: 1.016 bytes.

A block's scale is its largest magnitude / 127. Neighbours in a payload are neighbours in the bucket, mostly of one row
of one layer, so a block's values are of a size. Values below half a step become 0 and wait in the residual.

Layout: the scales, float32 little-endian; then the values, int8.
"""

from __future__ import annotations

import numpy as np

from shade.gradient.quantiser import QUANTISERS, Octets, Quantiser
from shade.types import Floats

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
