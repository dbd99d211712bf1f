"""What was chosen of a bucket: places and values, in the order of the places.

One shape for all who pass it on: compressors make it, the wire carries it, the merge adds it up, optimizers apply it.
Ascending places are what makes the index code short, the merge a walk along lists, and the optimizer's memory accesses
run forward. That they are ascending and in range is promised by whoever makes one and checked where it comes from
outside (the wire); looking again at every hand-over would cost more than the work itself.

Legend: D bucket · K kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shade.types import Floats


@dataclass(frozen=True)
class Sparse:
    """A bucket's chosen coordinates; all others are zero."""

    indices_K: npt.NDArray[np.uint32]
    """Ascending, each once, all < `size`."""
    values_K: Floats
    size: int
    """D, the elements of the bucket, < 2**32."""

    def dense(self) -> Floats:
        """The bucket it stands for, float32 (D,), new memory."""
        dense_D = np.zeros(self.size, dtype=np.float32)
        dense_D[self.indices_K] = self.values_K
        return dense_D

    @property
    def count(self) -> int:
        """K."""
        return len(self.indices_K)
