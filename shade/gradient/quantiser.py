"""What a quantiser is: it writes values in fewer bytes, and says what the receiver will read.

What is lost on the way is not lost to the training: `shade.gradient.error_feedback` keeps it in the residual. So a
quantiser need not be unbiased, only deterministic (round to nearest, ties to even) and near: within half a step.

Invariant: ``decode(encode(x), len(x))`` is the same on every machine, finite where x is, and encodes to itself.

Legend: K kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

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
