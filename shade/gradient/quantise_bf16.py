"""Two bytes a value: float32 cut to bfloat16, to the nearest, ties to even.

The exponent stays whole, so values of any size keep 8 significant bits and no scale has to travel. What would round up
to infinity becomes the largest finite value; the rest of it stays in the residual like any other rounding.
"""

from __future__ import annotations

import numpy as np
import torch

from shade.gradient.quantiser import QUANTISERS, Octets, Quantiser
from shade.types import Floats

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
