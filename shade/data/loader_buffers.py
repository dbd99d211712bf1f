"""Memory for batches, used again once nobody looks at it.

A batch of 64 images of 224 × 224 is 38 MB. Asked of the system each time, it costs 10,000 page faults, a tenth of what
decoding the batch costs. Here it goes back into a drawer when the last tensor on it is gone, whoever held that: the
training loop, a list of yesterday's batches, a copy to a device that is still under way. Nothing is ever taken back
from somebody who still has it. Pinned memory is torch's own to use again, and torch does.

Story: a Ctrl-C arrived while the training loop waited for a batch. Python raised it at the first line of its own code
that came next: in a finalizer, called because a batch had died there; and what a finalizer raises is ignored. So no
line of Python runs when a batch dies: its weak reference is put on a list by the list itself, and looked at later.

Invariants: two living batches never share memory; no more blocks are kept than asked for, in use or free.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch


class Buffers:
    """A drawer of memory.

    Args:
        most: Blocks that it knows, in use or free; others go back to the system when they are not used any more.
        pinned: Page-locked memory, for copies to a device that do not wait.
    """

    def __init__(self, most: int, *, pinned: bool) -> None:
        self._most, self._pinned = most, pinned
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lent: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {}
        """By the weak reference's id, which is the same after its batch has died, as its hash is not."""
        self._dead: deque[weakref.ref[npt.NDArray[np.uint8]]] = deque()

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
        self._collect()
        try:
            block = self._free.pop()
        except IndexError:
            block = np.empty(num_bytes, dtype=np.uint8)
        if block.size < num_bytes:
            block = np.empty(num_bytes, dtype=np.uint8)
        # torch holds on to this very array until its last tensor is gone; numpy would not keep a view of a view alive.
        lent = block[:num_bytes]
        if len(self._lent) + len(self._free) < self._most:
            reference = weakref.ref(lent, self._dead.append)
            self._lent[id(reference)] = reference, block
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _collect(self) -> None:
        """Takes back what nobody looks at any more."""
        with contextlib.suppress(IndexError):
            while True:
                _, block = self._lent.pop(id(self._dead.popleft()))
                self._free.append(block)
