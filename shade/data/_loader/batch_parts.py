"""One batch's way through the pipeline: fetched and drawn by one thread, rendered in parts by all, put together by the
last.

A fused batch is rendered straight into the memory that training gets; a batch of a data set without transforms is a
list of samples. Counters are kept a thread, since nobody locks them.

Memory for batches, used again once nobody looks at it.

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
import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from shade.data._dataset.dataset import ShadeDataset
from shade.data._transforms.device import render_on_device

PART_SAMPLES = 8
"""Samples that a worker takes at once: a few milliseconds of work."""


class FusedParts:
    """A batch in one piece of memory.

    Args:
        workers: A data set for each thread that computes.
        fetcher: The one that fetches this batch.
        indices: Its samples.
        buffers: Where memory comes from.
        otherwise: Seed of what is random while no epoch is known.
        collated: True: the batch as `default_collate` makes it; False: a list of samples.
    """

    def __init__(
        self,
        workers: Sequence[ShadeDataset],
        fetcher: ShadeDataset,
        indices: Sequence[int],
        buffers: Buffers,
        otherwise: int,
        *,
        collated: bool,
    ) -> None:
        self._workers, self._indices, self._collated = workers, indices, collated
        payloads = fetcher.fetch(indices)
        self._batch = fetcher.fuse(indices, payloads, fetcher.generators.alone(indices, otherwise))
        self._samples_BCHW = buffers.take(self._batch.shape, self._batch.dtype)
        self._out_BCHW = self._samples_BCHW.numpy()
        self.num_parts = -(-len(indices) // PART_SAMPLES)

    def run(self, part: int, worker: int) -> None:
        """See `_loader.pipeline.BatchParts`."""
        first = part * PART_SAMPLES
        stop = min(first + PART_SAMPLES, len(self._indices))
        self._workers[worker].count_time(*self._batch.fill(first, stop, self._out_BCHW))

    def finish(self) -> Any:
        """See `_loader.pipeline.BatchParts`."""
        self._batch.finish(self._out_BCHW)
        if not self._collated:
            return self._batch.items(self._indices, self._samples_BCHW)
        rests = zip(self._batch.rests, self._indices, strict=True)
        return [self._samples_BCHW, *default_collate([(*rest, index) for rest, index in rests])]


class DrawnParts:
    """A batch that is drawn here and rendered on a device, in the training thread.

    Args:
        fetcher: As `FusedParts`.
        indices: As `FusedParts`.
        otherwise: As `FusedParts`.
        device: Where.
    """

    num_parts = 1

    def __init__(self, fetcher: ShadeDataset, indices: Sequence[int], otherwise: int, device: torch.device) -> None:
        self._indices, self._device = indices, device
        payloads = fetcher.fetch(indices)
        self._batch = fetcher.fuse(indices, payloads, fetcher.generators.alone(indices, otherwise))

    def run(self, part: int, worker: int) -> None:
        """See `_loader.pipeline.BatchParts`; all is left to the device."""

    def finish(self) -> DrawnParts:
        """See `_loader.pipeline.BatchParts`."""
        return self

    def render(self) -> list[Any]:
        """The batch, as `default_collate` makes it."""
        samples_BCHW = render_on_device(self._batch, self._device)
        rests = zip(self._batch.rests, self._indices, strict=True)
        return [samples_BCHW, *default_collate([(*rest, index) for rest, index in rests])]


class PlainParts:
    """A batch of samples that nothing but decoding is done to.

    Args:
        workers: As `FusedParts`.
        fetcher: As `FusedParts`.
        indices: As `FusedParts`.
    """

    def __init__(self, workers: Sequence[ShadeDataset], fetcher: ShadeDataset, indices: Sequence[int]) -> None:
        self._workers, self._indices = workers, indices
        self._payloads = fetcher.fetch(indices)
        self.num_parts = -(-len(indices) // PART_SAMPLES)
        self._samples: list[list[Any]] = [[] for _ in range(self.num_parts)]

    def run(self, part: int, worker: int) -> None:
        """See `_loader.pipeline.BatchParts`."""
        which = slice(part * PART_SAMPLES, (part + 1) * PART_SAMPLES)
        self._samples[part] = self._workers[worker].run_as_written(self._indices[which], self._payloads[which])

    def finish(self) -> list[Any]:
        """See `_loader.pipeline.BatchParts`."""
        return list(itertools.chain.from_iterable(self._samples))


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
