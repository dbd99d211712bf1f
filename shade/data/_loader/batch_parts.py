"""The kinds of batches in the pipeline, and the memory that they are rendered into.

One thread fetches and draws a batch, all threads render parts of it, and the last one finishes it. Each thread counts
in a ledger row of its own, because no lock protects one.

Invariants: two living batches never share memory; at most as many blocks are kept as are asked for, in use or free.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate
from typing_extensions import override

from shade.data._dataset.batch_reader import BatchReader
from shade.data._loader.pipeline import BatchParts
from shade.data._source.host_copy import moved
from shade.data._transforms.device import render_on_device

PART_SAMPLES = 8
"""Samples that a worker takes at once: a few milliseconds of work."""


class SeededBatch(list[int]):
    """A batch's indices, on their way to a worker, with the seed of its random draws. It ``collates`` where
    ``default_collate`` comes next."""

    def __init__(self, indices: Sequence[int] = (), seed: int = 0, *, collates: bool = False) -> None:
        super().__init__(indices)
        self.seed, self.collates = seed, collates


class FusedParts(BatchParts):
    """A batch that is rendered into one piece of memory, and comes out ``collated`` or as a list of samples.

    Each thread that computes has a reader in ``workers``. ``otherwise`` seeds the random draws while no epoch is known.
    """

    def __init__(
        self,
        workers: Sequence[BatchReader],
        fetcher: BatchReader,
        indices: Sequence[int],
        buffers: BatchBuffers,
        otherwise: int,
        *,
        collated: bool,
    ) -> None:
        self._workers, self._indices, self._collated = workers, indices, collated
        payloads = fetcher.fetch(indices)
        self._batch = fetcher.fuse(indices, payloads, fetcher.generators.alone(indices, otherwise))
        self._samples_BCHW = buffers.take(self._batch.shape, self._batch.dtype)
        self._out_BCHW = self._samples_BCHW.numpy()
        # A part of small pictures takes longer to hand over than to render, so one worker does all of the batch.
        self._part_samples = len(indices) if self._batch.is_small else PART_SAMPLES
        self.num_parts = -(-len(indices) // self._part_samples)

    @override
    def run(self, part: int, worker: int) -> None:
        first = part * self._part_samples
        stop = min(first + self._part_samples, len(self._indices))
        self._workers[worker].count_time(*self._batch.fill(first, stop, self._out_BCHW))

    @override
    def finish(self) -> Any:
        self._batch.finish(self._out_BCHW)
        if not self._collated:
            return self._batch.items(self._indices, self._samples_BCHW)
        rests = zip(self._batch.rests, self._indices, strict=True)
        return [self._samples_BCHW, *default_collate([(*rest, index) for rest, index in rests])]


class DrawnParts(BatchParts):
    """A batch that is drawn here and rendered on a device, in the training thread; arguments as `FusedParts`."""

    num_parts = 1

    def __init__(self, fetcher: BatchReader, indices: Sequence[int], otherwise: int, device: torch.device) -> None:
        self._indices, self._device = indices, device
        payloads = fetcher.fetch(indices)
        self._batch = fetcher.fuse(indices, payloads, fetcher.generators.alone(indices, otherwise))

    def run(self, part: int, worker: int) -> None:
        """Does nothing: the device does all the work."""

    @override
    def finish(self) -> DrawnParts:
        return self

    def render(self) -> list[Any]:
        """Returns the batch as `default_collate` would."""
        samples_BCHW = render_on_device(self._batch, self._device)
        rests = zip(self._batch.rests, self._indices, strict=True)
        return [samples_BCHW, *default_collate([(*rest, index) for rest, index in rests])]


class PlainParts(BatchParts):
    """A batch of samples that are only decoded; arguments as `FusedParts`."""

    def __init__(self, workers: Sequence[BatchReader], fetcher: BatchReader, indices: Sequence[int]) -> None:
        self._workers, self._indices = workers, indices
        self._payloads = fetcher.fetch(indices)
        self.num_parts = -(-len(indices) // PART_SAMPLES)
        self._samples: list[list[Any]] = [[] for _ in range(self.num_parts)]

    @override
    def run(self, part: int, worker: int) -> None:
        which = slice(part * PART_SAMPLES, (part + 1) * PART_SAMPLES)
        self._samples[part] = self._workers[worker].run_as_written(self._indices[which], self._payloads[which])

    @override
    def finish(self) -> list[Any]:
        return list(itertools.chain.from_iterable(self._samples))


class BatchBuffers:
    """Memory for batches, used again when a batch is gone. It knows at most ``most`` blocks, in use or free; others go
    back to the system after use. ``pinned`` memory is page-locked, for asynchronous copies to a device."""

    def __init__(self, most: int, *, pinned: bool) -> None:
        self._most, self._pinned = most, pinned
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lent: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {}
        """By the weak reference's id, which stays the same after its batch has died, as its hash does not."""
        self._dead: deque[weakref.ref[npt.NDArray[np.uint8]]] = deque()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a contiguous tensor on the host, with undefined content, which shares memory with no other."""
        # torch itself uses pinned memory again.
        if self._pinned:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        self._collect()
        # 64 images of 224 × 224 are 38 MB. Allocated each time, they cost 10,000 page faults, a tenth of what decoding
        # them costs.
        try:
            block = self._free.pop()
        except IndexError:
            block = np.empty(num_bytes, dtype=np.uint8)
        if block.size < num_bytes:
            block = np.empty(num_bytes, dtype=np.uint8)
        # torch holds on to this very array until its last tensor is gone; numpy would not keep a view of a view alive.
        lent = block[:num_bytes]
        if len(self._lent) + len(self._free) < self._most:
            # No line of Python runs when a batch dies: a Ctrl-C that arrives then would be raised in it, and what a
            # finalizer raises is ignored. So the reference is only appended here, in C.
            reference = weakref.ref(lent, self._dead.append)
            self._lent[id(reference)] = reference, block
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _collect(self) -> None:
        """Takes back the blocks of batches that are gone."""
        with contextlib.suppress(IndexError):
            while True:
                _, block = self._lent.pop(id(self._dead.popleft()))
                self._free.append(block)


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yields the same batches with their tensors on a device, ready to be used in the current stream."""
    if device.type != "cuda":
        for batch in batches:
            yield _moved(batch, device)
        return
    stream, previous = torch.cuda.Stream(device), None  # type: ignore[no-untyped-call]
    for batch in batches:
        # The copy runs while training is at the batch before. Price: one batch more in the device's memory.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            there, copied = _moved(batch, device), stream.record_event()
        if previous is not None:
            yield _ready(*previous, device)
        previous = (there, copied)
    if previous is not None:
        yield _ready(*previous, device)


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: moved(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _ready(batch: Any, copied: torch.cuda.Event, device: torch.device) -> Any:
    """Returns the batch, for which the current stream waits; the processor does not wait."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            # The memory is the copying stream's, whose allocator must not give it away while this stream reads it.
            leaf.record_stream(current)
    return batch
