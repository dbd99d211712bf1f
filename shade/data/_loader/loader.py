"""ShadeLoader: DataLoader's place in the script, with threads where those are faster.

Same arguments, same batches, same order, same random augmentations as ``DataLoader(ShadeDataset(…), sampler=…)``. What
differs is who makes them. Decoding and rendering run outside the interpreter's lock, so threads make batches ahead
(`_loader.pipeline`): no copies between processes, no memory shared by name, nothing to start again each epoch, and
one process's caches instead of one a worker. What the user wrote in Python would wait for the lock, and what it draws
from the process's generators would depend on who comes first; transforms that are not recognised
(`ShadeDataset.is_fused`) therefore run in worker processes, as DataLoader runs them, and the loader is no slower.

The sampler is asked in the training thread, as many batches ahead as are under way. A collate function of the user's
own runs there too, where what it draws is in order. Leaving an epoch early, Ctrl-C and dropping the loader end the
threads of that epoch.

`state_dict` counts what training has got, not what is under way; a loader that loads it goes on with the next batch.

Invariant: the batches do not depend on the number of workers, on threads or processes, or on where the run was stopped.

Batches on their way to a device, one ahead of training.

The copy runs in a stream of its own, from page-locked memory, while training computes on the batch before; training's
stream waits for it, and the processor for nothing. Price: one batch more in the device's memory.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from shade.data._dataset.dataset import ShadeDataset
from shade.data._loader.batch_parts import Buffers, DrawnParts, FusedParts, PlainParts
from shade.data._loader.pipeline import BatchParts, Job, LoaderPipeline
from shade.data._loader.resume import EpochProgress, ResumableBatches
from shade.data._sampler.sampler import ShadeSampler
from shade.data._transforms.randomness import BatchGenerators
from shade.errors import ConfigError

_FETCHERS = 2
"""Threads that wait for bytes: while one batch's last read is waited for, the next one's are under way."""


class ShadeLoader(DataLoader[Any]):
    """Loads batches of a `ShadeDataset`.

    Args:
        dataset: What to load.
        batch_size: Samples a batch.
        shuffle: As DataLoader's; leave it out with a sampler.
        sampler: A `ShadeSampler`, or any other.
        batch_sampler: Instead of the four.
        num_workers: Threads that decode (or processes, see above); 0: all in the training thread. None: as many as this
            process may use processors.
        collate_fn: Samples → batch.
        pin_memory: Batches in page-locked memory, where there is a GPU.
        drop_last: As DataLoader's.
        timeout: Seconds to wait for a batch; 0: for ever.
        worker_init_fn: For worker processes.
        multiprocessing_context: For worker processes.
        generator: As DataLoader's.
        prefetch_factor: Batches under way for each worker; 2 when None.
        device: Batches are copied there while training is at the one before; None: they stay where they are.
        decode_on: ``"host"``; or ``"device"``: recognised transforms are run there, and JPEGs decoded by nvJPEG, which
            is faster than a few processors and changes pixels by a level or two (`_transforms.device`).

    Raises:
        ConfigError: No `ShadeDataset`.
        ValueError: As DataLoader's.
    """

    def __init__(
        self,
        dataset: ShadeDataset,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        device: torch.device | str | None = None,
        decode_on: str = "host",
    ) -> None:
        if not isinstance(dataset, ShadeDataset):
            raise ConfigError.of("a ShadeDataset", type(dataset).__name__, "wrap it: ShadeDataset(dataset, cache=…)")
        if decode_on not in ("host", "device"):
            raise ConfigError.of("decode_on 'host' or 'device'", decode_on, "choose one of the two")
        there = device is not None and num_workers != 0 and dataset.is_fused and collate_fn is None
        if decode_on == "device" and not there:
            raise ConfigError.of(
                "decode_on='device' with device=, workers, transforms that are recognised, and no collate_fn",
                f"device={device}, num_workers={num_workers}, recognised: {dataset.is_fused}",
                "see shade.data._transforms.recognise for what is recognised, or leave decode_on out",
            )
        if num_workers is None:
            num_workers = len(os.sched_getaffinity(0))
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,  # type: ignore[arg-type]
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=num_workers > 0,
        )
        self.device = None if device is None else torch.device(device)
        self._shade: ShadeDataset = dataset
        self._decodes_there = decode_on == "device"
        self._crew: tuple[list[ShadeDataset], list[ShadeDataset]] | None = None
        self._depth = self.num_workers * (self.prefetch_factor or 2)
        self._buffers = Buffers(self._depth + 2, pinned=self._pins)
        self._progress = EpochProgress(self.sampler, generator)
        if self.batch_sampler is not None:
            # Where DataLoader takes its order from, in threads and in processes; it refuses an ordinary assignment.
            follow = _Follower(self.sampler, dataset.generators)
            self.__dict__["batch_sampler"] = ResumableBatches(self.batch_sampler, self._progress, follow)

    @property
    def in_threads(self) -> bool:
        """Whether threads make the batches; else processes do, or the training thread itself."""
        return self.num_workers > 0 and self.batch_sampler is not None and self._shade.draws_nothing

    @property
    def _pins(self) -> bool:
        return bool(self.pin_memory and torch.cuda.is_available())

    def __iter__(self) -> Any:
        self._progress.begin()
        batches: Iterator[Any] = self._threads() if self.in_threads else super().__iter__()
        if self.device is not None:
            batches = on_device(batches, self.device)
        return _Counted(batches, self._progress, self)

    def _threads(self) -> _ThreadEpoch:
        if self._crew is None:
            numbers = range(_FETCHERS + self.num_workers)
            everybody = [self._shade.worker(number) for number in numbers]
            self._crew = everybody[:_FETCHERS], everybody[_FETCHERS:]
        fetchers, workers = self._crew
        assert self.batch_sampler is not None
        order, checked = iter(self.batch_sampler), self._shade.checked
        seed, buffers, collated = self._progress.take_seed(), self._buffers, self.collate_fn is default_collate
        fused, target = self._shade.is_fused, self.device if self._decodes_there else None

        def begin(number: int, indices: Sequence[int]) -> BatchParts:
            if target is not None:
                return DrawnParts(fetchers[number], indices, seed, target)
            if not fused:
                return PlainParts(workers, fetchers[number], indices)
            return FusedParts(workers, fetchers[number], indices, buffers, seed, collated=collated)

        return _ThreadEpoch(
            LoaderPipeline(begin, len(fetchers), len(workers)),
            ([checked(index) for index in batch] for batch in order),
            self._depth,
            self.timeout or None,
            DrawnParts.render
            if self._decodes_there
            else _Finish(None if fused and collated else self.collate_fn, self._pins),
        )

    def state_dict(self) -> dict[str, Any]:
        """Where training is: the sampler's state, and how many batches of this epoch training has got.

        Call it between steps.
        """
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`: the next iteration begins with the batch after the last that training had got.

        Args:
            state: From `state_dict`, of a loader with the same settings.

        Raises:
            ConfigError: It belongs to other settings.
        """
        self._progress.load_state_dict(state)


class _Follower:
    """Where nobody else says which epoch the random transforms are of, the sampler does, as each begins.

    Story: it was a method of the loader, which then held itself. Dropped, it waited for the garbage collector, which
    closes a queue before the DataLoader can say goodbye through it: ten seconds for two worker processes.

    Args:
        sampler: Of the loader.
        generators: Of the data set.
    """

    def __init__(self, sampler: object, generators: BatchGenerators) -> None:
        self._sampler, self._generators = sampler, generators
        self._follows = False

    def __call__(self) -> None:
        if isinstance(self._sampler, ShadeSampler) and (self._follows or not self._generators.following):
            self._follows = True
            self._generators.follow(self._sampler.seed, self._sampler.epoch)


class _Finish:
    """What is left to do in the training thread.

    Args:
        collate: Samples → batch; None: it is one already.
        pins: Whether it goes into page-locked memory.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None, pins: bool) -> None:
        self._collate, self._pins = collate, pins

    def __call__(self, batch: Any) -> Any:
        batch = batch if self._collate is None else self._collate(batch)
        return pinned(batch) if self._pins else batch  # type: ignore[no-untyped-call]


class _ThreadEpoch:
    """The batches of one epoch, made by threads that end with it.

    Args:
        pipeline: Makes them; closed here.
        order: Each batch's samples.
        depth: Batches under way.
        timeout_seconds: See `LoaderPipeline.wait`.
        finish: Done to each in the training thread.
    """

    def __init__(
        self,
        pipeline: LoaderPipeline,
        order: Iterator[list[int]],
        depth: int,
        timeout_seconds: float | None,
        finish: Callable[[Any], Any],
    ) -> None:
        self._pipeline, self._order, self._timeout_seconds, self._finish = pipeline, order, timeout_seconds, finish
        self._close = weakref.finalize(self, pipeline.close)
        self._jobs: deque[Job] = deque()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        indices = next(self._order, None)
        if indices is not None:
            self._jobs.append(self._pipeline.submit(indices))

    def __iter__(self) -> _ThreadEpoch:
        return self

    def __next__(self) -> Any:
        if not self._jobs:
            self._close()
            raise StopIteration
        job = self._jobs[0]
        try:
            batch = self._pipeline.wait(job, self._timeout_seconds)
        finally:
            if job.done.is_set():  # a batch that is late may be waited for again; one that failed is over
                self._jobs.popleft()
                self._submit()
        return self._finish(batch)


class _Counted:
    """An epoch's batches, counted as training gets them.

    Args:
        batches: They.
        progress: Counts them.
        loader: Knows how many there are.
    """

    def __init__(self, batches: Iterator[Any], progress: EpochProgress, loader: ShadeLoader) -> None:
        self._batches, self._progress, self._loader = batches, progress, loader

    def __iter__(self) -> _Counted:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._progress.end()
            raise
        self._progress.got_one()
        return batch


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The same batches, their tensors on a device.

    Args:
        batches: On the host.
        device: Where they go.

    Yields:
        Each batch, ready to be used in the current stream.
    """
    if device.type != "cuda":
        for batch in batches:
            yield _moved(batch, device)
        return
    stream, ahead = torch.cuda.Stream(device), None  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(stream):
            moved, there = _moved(batch, device), stream.record_event()
        if ahead is not None:
            yield _ready(*ahead, device)
        ahead = (moved, there)
    if ahead is not None:
        yield _ready(*ahead, device)


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _ready(batch: Any, there: torch.cuda.Event, device: torch.device) -> Any:
    """Makes the current stream wait, and its use known to the memory that the other stream took."""
    current = torch.cuda.current_stream(device)
    current.wait_event(there)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(current)
    return batch
