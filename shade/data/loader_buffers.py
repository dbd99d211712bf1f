"""Memory for batches, used again once nobody looks at it.

A batch of 64 images of 224 × 224 is 38 MB. Asked of the system each time, it costs 10,000 page faults, a tenth of what
decoding the batch costs. Here it goes back into a drawer when the last tensor on it is gone, whoever held that: the
training loop, a list of yesterday's batches, a copy to a device that is still under way. Nothing is ever taken back
from somebody who still has it. Pinned memory is torch's own to use again, and torch does.

Invariant: two living batches never share memory.
"""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt
import torch


class Buffers:
    """A drawer of memory.

    Args:
        most: Blocks that it keeps; more are given back to the system.
        pinned: Page-locked memory, for copies to a device that do not wait.
    """

    def __init__(self, most: int, *, pinned: bool) -> None:
        self._most, self._pinned = most, pinned
        self._free: list[npt.NDArray[np.uint8]] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of one's own; what is in it is anybody's guess.

        Args:
            shape: Of the tensor.
            dtype: Of the tensor.

        Returns:
            A contiguous tensor on the host.
        """
        if self._pinned:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        try:
            block = self._free.pop()
        except IndexError:
            block = np.empty(num_bytes, dtype=np.uint8)
        if block.size < num_bytes:
            block = np.empty(num_bytes, dtype=np.uint8)
        # torch holds on to this very array until its last tensor is gone; numpy would not keep a view of a view alive.
        lent = block[:num_bytes]
        weakref.finalize(lent, _give_back, self._free, self._most, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)


def _give_back(free: list[npt.NDArray[np.uint8]], most: int, block: npt.NDArray[np.uint8]) -> None:
    """A function and no method: whoever holds a batch shall not keep a drawer alive that is not used any more."""
    if len(free) < most:
        free.append(block)
