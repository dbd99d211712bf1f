"""One batch's way through the pipeline: fetched and drawn by one thread, rendered in parts by all, put together by the
last.

A fused batch is rendered straight into the memory that training gets; a batch of a data set without transforms is a
list of samples. Counters are kept a thread, since nobody locks them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from shade.data.dataset import ShadeDataset
from shade.data.decode_device import render_on_device
from shade.data.loader_buffers import Buffers

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
        """See `shade.data.pipeline.Parts`."""
        first = part * PART_SAMPLES
        stop = min(first + PART_SAMPLES, len(self._indices))
        self._workers[worker].count_time(*self._batch.fill(first, stop, self._out_BCHW))

    def finish(self) -> Any:
        """See `shade.data.pipeline.Parts`."""
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
        """See `shade.data.pipeline.Parts`; all is left to the device."""

    def finish(self) -> DrawnParts:
        """See `shade.data.pipeline.Parts`."""
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
        """See `shade.data.pipeline.Parts`."""
        which = slice(part * PART_SAMPLES, (part + 1) * PART_SAMPLES)
        self._samples[part] = self._workers[worker].run_as_written(self._indices[which], self._payloads[which])

    def finish(self) -> list[Any]:
        """See `shade.data.pipeline.Parts`."""
        return list(itertools.chain.from_iterable(self._samples))
