"""Four bytes a value: nothing is lost, nothing is saved. To compare with, and for links that are not the bottleneck."""

from __future__ import annotations

import numpy as np

from shade.gradient.quantiser import QUANTISERS, Octets, Quantiser
from shade.types import Floats


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
