"""ShadeLoader: takes DataLoader's place in the script, with threads where those are faster.

It takes the arguments of ``DataLoader(ShadeDataset(…), sampler=…)`` and returns the same batches, in the same order,
with the same random augmentations under a `ShadeSampler`. Decoding and rendering run outside the interpreter's lock, so
threads can make batches ahead (`_loader.pipeline`): no copies between processes, no start-up each epoch, and one
process's caches. Transforms that are not recognised (`ShadeDataset.is_fused`) and items run in worker processes.

A loader is always some batches ahead of training. A state must hold what training has got: `EpochProgress` counts it,
and `ResumableBatches` leaves out as many batches when the epoch begins again.

Invariants: batches do not depend on the number of workers, on threads or processes, or on where the run was stopped.
The rest of a resumed epoch is the rest of the interrupted one, for every sampler that draws from the loader's generator
(or the process's, or Python's or NumPy's) when its iteration begins.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import default_generator
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory as pinned
from typing_extensions import override

from shade.data._dataset.batch_reader import BatchReader
from shade.data._dataset.dataset import ShadeDataset, reader_of
from shade.data._loader.batch_parts import BatchBuffers, DrawnParts, FusedParts, PlainParts, SeededBatch, on_device
from shade.data._loader.pipeline import BatchParts, Job, LoaderPipeline
from shade.data._mixture.mixture import MixtureSampler
from shade.data._mixture.packed import PackedDataset
from shade.data._sampler.sampler import ShadeSampler
from shade.data._sampler.usage import check_wrapping
from shade.data._transforms.randomness import plain_states, set_plain_states
from shade.errors import ConfigError, refused_as
from shade.types import ClosedByWith


@dataclass(eq=False)
class LoaderPass:
    """One iteration over a loader."""

    num_batches: int = 0
    """Batches of the epoch that training has got."""
    order: tuple[Any, ...] = ()
    """State of the generator before the order was drawn, and of Python's and NumPy's if it was drawn from them."""
    seed: int = 0
    """Seed of the random draws that follow no other rule."""
    epoch: int | None = None
    """The sampler's epoch, and its first step in this pass; of a sampler of ours."""
    first_step: int = 0
    is_live: bool = True
    """Whether it may give batches yet."""
    before: LoaderPass | None = None
    """The pass that training was in when this one began."""
    resume: dict[str, Any] | None = None
    """The place that it began from, as long as it is a look at one batch, after which the next pass begins there."""
    num_got: int = 0
    """Batches that it gave."""
    is_seeded: bool = False
    """Whether worker processes draw each batch's random numbers from `seed`."""
    is_collated: bool = False
    """Whether `ShadeDataset` may collate its batches."""
    wait_seconds: float = 0.0
    """Time that training waited for batches."""


class EpochProgress:
    """Counts the batches of each pass. The order is drawn from the sampler's generator, if it has one of its own, else
    from the loader's ``generator`` (None: the process's), as the workers' seed is. ``batch_size`` is None where the
    user's own batch sampler decides.

    Several passes may be under way at once. The state is that of the pass that gave the last batch; a look at one batch
    that is dropped again leaves the state as it was.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None, batch_size: int | None = None) -> None:
        self._batch_size = batch_size
        self._sampler = sampler if isinstance(sampler, (ShadeSampler, MixtureSampler)) else None
        self._generator = default_generator if generator is None else generator
        own = getattr(sampler, "generator", None)
        self._of_order = own if isinstance(own, torch.Generator) else self._generator
        self._resume: dict[str, Any] | None = None
        self.begun = self.current = LoaderPass(is_live=False)
        """The pass that began last, and the one whose place is the state."""
        self.wait_seconds = 0.0
        """Time that training waited for batches, in all passes."""

    @property
    def epoch(self) -> int | None:
        """Returns the epoch of a `ShadeSampler`, or the round of a `MixtureSampler`; None of another sampler."""
        return None if self._sampler is None else self._sampler.epoch

    def begin(self) -> LoaderPass:
        """Begins an epoch, or the rest of one."""
        resume = self._resume
        self.begun = LoaderPass(0 if resume is None else resume["batches"], before=self.current, resume=resume)
        self.current.before = None
        self.current = self.begun
        return self.begun

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Takes back what is drawn to begin the rest of an interrupted epoch."""
        if self._resume is None:
            self._resume, self.begun.resume = self.begun.resume, None
        is_rest = self._resume is not None and (self._sampler is None or self._sampler.steps_done > 0)
        # A generator of the loader's own, which the order is drawn from, is set by `open`, and stays where that ends.
        is_set = self._sampler is None and self._of_order is self._generator is not default_generator
        # The undisturbed run drew nothing here.
        before = self._generator.get_state() if is_rest and not is_set else None
        yield
        if before is not None:
            self._generator.set_state(before)

    def draw_seed(self, *, keeps: bool = False) -> int:
        """Draws this pass's seed, as DataLoader draws its workers', or takes that of the epoch that is resumed. It
        ``keeps`` the generator's state where DataLoader is about to draw."""
        self.begun.is_seeded = True
        before = self._generator.get_state() if keeps else None
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
        if before is not None:
            self._generator.set_state(before)
        self.begun.seed = seed if self._resume is None else self._resume["seed"]
        return self.begun.seed

    def open(self, batches: Iterable[Sequence[int]], mine: LoaderPass) -> Iterator[Sequence[int]]:
        """Yields the sample indices of the batches that are left, in order."""
        resume, self._resume = self._resume, None
        if self._sampler is not None:
            iterator = iter(batches)
            first = next(iterator, None)
            mine.epoch, mine.first_step, mine.num_batches = self._sampler.epoch, self._sampler.place.first_step, 0
            self._sampler.place.count_batches(lambda: mine.num_batches)
        else:
            # A sampler that is not ours cannot begin in the middle: its order is drawn again, from the generator's
            # state at the first draw, and the batches that training had are left out.
            now, others = self._of_order.get_state(), plain_states()
            mine.order = (now,) if resume is None else resume["order"]
            self._of_order.set_state(mine.order[0])
            set_plain_states(*mine.order[1:])
            iterator = iter(batches)
            first = next(iterator, None)
            if resume is None and plain_states() != others:
                mine.order += others
            if resume is not None:
                for _ in range(resume["batches"]):
                    first = next(iterator, None)
                # The process's generator is the script's, which restores it, if at all.
                if self._of_order is default_generator:
                    default_generator.set_state(now)
                set_plain_states(*others)
        # A ShadeSampler's draws follow its epoch.
        is_seeded = mine.is_seeded and self._sampler is None
        seed, marks = mine.seed if is_seeded else 0, is_seeded or mine.is_collated
        for batch in itertools.chain([] if first is None else [first], iterator):
            is_marked = marks and isinstance(batch, list)
            yield SeededBatch(batch, seed, collates=mine.is_collated) if is_marked else batch

    def got_one(self, mine: LoaderPass, waited_seconds: float) -> None:
        """Counts a batch that training has got."""
        mine.num_batches, mine.num_got = mine.num_batches + 1, mine.num_got + 1
        if mine.num_got > 1:
            mine.resume = None
        mine.wait_seconds += waited_seconds
        self.wait_seconds += waited_seconds
        self.current = mine

    def count_step(self) -> None:
        """Hears that training has done a step."""
        if self._sampler is not None:
            self._sampler.count_step()

    def end(self, mine: LoaderPass) -> None:
        """Ends the epoch, after training has got the last batch."""
        mine.before, mine.resume, mine.is_live = None, None, False
        if self._sampler is None:
            mine.num_batches, mine.order = 0, ()

    def drop(self, mine: LoaderPass) -> None:
        """Leaves a pass that is used no longer, and returns to the one before if this was a look at one batch."""
        mine.is_live = False
        if mine.resume is not None and self.begun is mine:
            self._resume, mine.resume, mine.num_batches = mine.resume, None, 0
        elif self.current is mine and mine.num_batches <= 1 and mine.before is not None and mine.before.is_live:
            self.current = mine.before

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state."""
        mine = self.current
        if self._sampler is None:
            if self._resume is not None:
                return dict(self._resume)
            now = self._of_order.get_state()
            order = (now,) if mine.is_live and not mine.order else mine.order
            is_between = not mine.is_live and self._of_order is not default_generator
            # In tuples, which torch.distributed.checkpoint takes as a whole, empty or not.
            return {
                "batches": mine.num_batches,
                "batch_size": self._batch_size,
                "order": order,
                "seed": mine.seed,
                "sampler": None,
                "generator": (now,) if is_between else (),
            }
        sampler = self._sampler.state_dict()
        # The sampler's place is that of the pass that began last; another may have given the last batch.
        if mine is not self.begun and mine.epoch == self._sampler.epoch:
            sampler["steps_done"] = mine.first_step + mine.num_batches
        return {"batches": 0, "order": (), "seed": mine.seed, "sampler": sampler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the loader's state. Raises ConfigError if it belongs to another kind of sampler."""
        self._take(state)
        if self._sampler is not None:
            self._sampler.load_state_dict(state["sampler"])

    @refused_as(ConfigError, "what ShadeLoader.state_dict() returned", "pass that")
    def _take(self, state: dict[str, Any]) -> None:
        if (state["sampler"] is None) != (self._sampler is None):
            raise ConfigError.of(
                "the state of a loader with the same kind of sampler",
                "one with a ShadeSampler" if self._sampler is None else "one without",
                "resume with the saved settings",
            )
        if self._sampler is None and state["batch_size"] != self._batch_size:
            expected = f"batch_size={state['batch_size']}, as in the saved run"
            raise ConfigError.of(expected, self._batch_size, "resume with that one")
        self._resume = dict(state) if state["order"] or self._sampler is not None else None
        if self._sampler is None and state["generator"]:
            self._of_order.set_state(*state["generator"])
        self.current, self.begun.resume = LoaderPass(seed=state["seed"], is_live=False), None


def sampler_inside(batches: Any) -> Any:
    """Returns the sampler that a batch sampler takes its samples from; itself if it draws them."""
    inside = getattr(batches, "sampler", None)
    return batches if inside is None else sampler_inside(inside)


class ResumableBatches:
    """A batch sampler, or a sampler if nothing is batched, that begins where training is."""

    def __init__(self, batches: Iterable[Sequence[int]], progress: EpochProgress) -> None:
        self._inner, self._progress = batches, progress

    def __iter__(self) -> Iterator[Sequence[int]]:
        return self._progress.open(self._inner, self._progress.begun)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


_FETCHERS = 2
"""Threads that wait for bytes: while one waits for a batch's last read, the reads of the next batch are under way."""


class ShadeLoader(DataLoader[Any], ClosedByWith):
    """Loads batches of a `ShadeDataset`, or of a `PackedDataset`, whose batches are made in worker processes.

    Args:
        dataset: What to load.
        batch_size: Samples a batch.
        shuffle: As DataLoader's; leave it out with a sampler.
        sampler: A `ShadeSampler`, or any other; for a `PackedDataset` its `MixtureSampler`.
        batch_sampler: In place of batch_size, shuffle, sampler and drop_last.
        num_workers: Threads that decode (processes, if the transforms are not recognised); 0: the training thread does
            it all. None: as many as this process may use processors.
        collate_fn: Samples → batch.
        pin_memory: Batches in page-locked memory, where there is a GPU; always with that as ``device``.
        drop_last: As DataLoader's.
        timeout: Seconds to wait for a batch; 0: without limit.
        worker_init_fn: As DataLoader's; with one, workers are processes.
        multiprocessing_context: For worker processes.
        generator: As DataLoader's.
        prefetch_factor: Batches under way for each worker; 2 when None.
        persistent_workers: As DataLoader's, for worker processes: those that stay do not see what is assigned to the
            data set later.
        pin_memory_device: Taken as DataLoader's, and not used.
        in_order: Taken as DataLoader's; batches come in order in any case, because the state counts them.
        device: Batches are copied there while training is at the one before; None: they stay where they are.
        decode_on: ``"host"``; or ``"device"``: recognised transforms run there, and nvJPEG decodes the files, which is
            faster than a few processors and changes pixels by a level or two (`_transforms.device`).

    Raises:
        ConfigError: No `ShadeDataset`.
        ValueError: As DataLoader's.
    """

    def __init__(
        self,
        dataset: ShadeDataset | PackedDataset,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
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
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: torch.device | str | None = None,
        decode_on: str = "host",
    ) -> None:
        if not isinstance(dataset, (ShadeDataset, PackedDataset)):
            check_wrapping(dataset)
            raise ConfigError.of("a ShadeDataset", type(dataset).__name__, "wrap it: ShadeDataset(dataset, cache=…)")
        drawing = sampler_inside(sampler if batch_sampler is None else batch_sampler)
        num_at_once = getattr(batch_sampler, "batch_size", batch_size or 1)
        if isinstance(dataset, PackedDataset) and not isinstance(drawing, MixtureSampler):
            raise ConfigError.of(
                "a MixtureSampler of the PackedDataset",
                "none" if drawing is None else type(drawing).__name__,
                "write ShadeLoader(data, batch_size=…, sampler=MixtureSampler(data, …))",
            )
        if isinstance(drawing, (ShadeSampler, MixtureSampler)) and num_at_once != drawing.batch_size:
            raise ConfigError.of(
                f"batch_size={drawing.batch_size}, as the sampler's",
                batch_size,
                "give loader and sampler one batch_size, that of one rank",
            )
        if decode_on not in ("host", "device"):
            raise ConfigError.of("decode_on 'host' or 'device'", decode_on, "choose one of the two")
        is_fused = isinstance(dataset, ShadeDataset) and dataset.is_fused
        can_decode = device is not None and num_workers != 0 and is_fused and collate_fn is None
        if decode_on == "device" and not can_decode:
            raise ConfigError.of(
                "decode_on='device' with device=, workers, transforms that are recognised, and no collate_fn",
                f"device={device}, num_workers={num_workers}, recognised: {is_fused}",
                "see shade.data._transforms.recognise for what is recognised, or leave decode_on out",
            )
        if num_workers is None:
            num_workers = len(os.sched_getaffinity(0))
        self.device = None if device is None else torch.device(device)
        # The training thread would wait for a copy from pageable memory.
        pin_memory = pin_memory or (self.device is not None and self.device.type == "cuda")
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
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self._reader: BatchReader | None = reader_of(dataset) if isinstance(dataset, ShadeDataset) else None
        self._decodes_on_device = decode_on == "device"
        self._free_readers: list[list[BatchReader]] = []
        self._num_readers = 0
        self._persistent: weakref.ref[_CountedBatches] | None = None
        self._passes: weakref.WeakSet[_ThreadEpoch] = weakref.WeakSet()
        self._depth = self.num_workers * (self.prefetch_factor or 2)
        self._buffers = BatchBuffers(self._depth + 2, pinned=self._pins)
        self._progress = EpochProgress(self.sampler if drawing is None else drawing, generator, self.batch_size)
        # Where DataLoader takes its order from, in threads and in processes; it refuses an ordinary assignment.
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        self.__dict__[name] = ResumableBatches(getattr(self, name), self._progress)

    @property
    def epoch(self) -> int | None:
        """Returns the present epoch of its `ShadeSampler`, or the round of its `MixtureSampler`; None with another."""
        return self._progress.epoch

    @property
    def in_threads(self) -> bool:
        """Returns whether threads make the batches; else processes do, or the training thread itself."""
        # The user's own code would wait for the interpreter's lock, and its random draws would depend on which thread
        # comes first.
        is_plain = self.worker_init_fn is None and self.batch_sampler is not None
        return self.num_workers > 0 and is_plain and self._reader is not None and self._reader.draws_nothing

    @property
    def _pins(self) -> bool:
        return bool(self.pin_memory and torch.cuda.is_available())

    def __iter__(self) -> Any:
        with self._progress.drawing():
            mine = self._progress.begin()
            if self._reader is not None:
                self._reader.transforms.refresh()
            made: Iterator[Any] = self._threads() if self.in_threads else self._processes()
        batches = made if self.device is None else on_device(made, self.device)
        counted = _CountedBatches(batches, self._progress, mine, self)
        if made is self._iterator:
            self._persistent = weakref.ref(counted)
        return counted

    def _processes(self) -> Iterator[Any]:
        """Returns DataLoader's iterator."""
        self._progress.begun.is_collated = self.batch_sampler is not None and self.collate_fn is default_collate
        if not self.num_workers:
            return super().__iter__()
        # The workers that stay serve one pass at a time: another that begins meanwhile gets workers of its own.
        served = None if self._persistent is None else self._persistent()
        is_served = served is not None and not served.has_ended
        # Only new workers draw a seed, and the order must not depend on that.
        self._progress.draw_seed(keeps=self._iterator is None or is_served)
        return self._get_iterator() if self._iterator is not None and is_served else super().__iter__()

    def _threads(self) -> _ThreadEpoch:
        reader = self._reader
        assert reader is not None, "sequences are packed in processes"
        assert self.batch_sampler is not None
        if self._free_readers:
            readers = self._free_readers.pop()
        else:
            numbers = range(self._num_readers, self._num_readers + _FETCHERS + self.num_workers)
            readers, self._num_readers = [reader.for_worker(number) for number in numbers], numbers.stop
        fetchers, workers = readers[:_FETCHERS], readers[_FETCHERS:]
        order = map(reader.checked_many, self.batch_sampler)
        seed, buffers, collated = self._progress.draw_seed(), self._buffers, self.collate_fn is default_collate
        fused, target = reader.is_fused, self.device if self._decodes_on_device else None

        def begin(number: int, indices: Sequence[int]) -> BatchParts:
            if target is not None:
                return DrawnParts(fetchers[number], indices, seed, target)
            if not fused:
                return PlainParts(workers, fetchers[number], indices)
            return FusedParts(workers, fetchers[number], indices, buffers, seed, collated=collated)

        made = _ThreadEpoch(
            LoaderPipeline(begin, len(fetchers), len(workers)),
            partial(self._free_readers.append, readers),
            order,
            self._depth,
            self.timeout or None,
            DrawnParts.render
            if self._decodes_on_device
            else _FinishBatch(None if fused and collated else self.collate_fn, self._pins),
        )
        self._passes.add(made)
        return made

    @override
    def close(self) -> None:
        """Ends the passes under way, their threads, and worker processes that stay. Safe to call twice."""
        for each in list(self._passes):
            each.close()
        self._iterator = None

    def __repr__(self) -> str:
        """Returns how batches are made, and how many training has got in this epoch."""
        engine = "threads" if self.in_threads else "processes" if self.num_workers else "the training thread"
        length = ""
        with contextlib.suppress(TypeError):  # a stream that is being recorded
            length = f" of {len(self)}" if self.batch_sampler is not None else ""
        return (
            f"ShadeLoader(batch_size={self.batch_size}, num_workers={self.num_workers} ({engine}), "
            f"sampler={type(self.sampler).__name__}, device={None if self.device is None else str(self.device)!r}, "
            f"batches={self._progress.current.num_batches}{length})"
        )

    def stats(self) -> dict[str, float]:
        """Returns `ShadeDataset.stats`, and the seconds that training waited for batches.

        Returns:
            The data set's numbers, ``wait_seconds`` in all and ``epoch_wait_seconds`` in the present pass.
        """
        waits = {"wait_seconds": self._progress.wait_seconds, "epoch_wait_seconds": self._progress.current.wait_seconds}
        return self.dataset.stats() | waits  # type: ignore[attr-defined,no-any-return]

    def count_step(self) -> None:
        """Says that a step of training is done, in a loop that does not report; a `Checkpointer` does."""
        self._progress.count_step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the sampler's state, and how many batches of this epoch training has got. Call it between steps."""
        return self._progress.state_dict() | {"num_workers": self.num_workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a `state_dict`: the next iteration begins with the batch after the last that training had got.

        Args:
            state: Of a loader with the same settings.

        Raises:
            ConfigError: It belongs to other settings, or to a loader whose random numbers cannot be drawn again.
        """
        with refused_as(ConfigError, "what ShadeLoader.state_dict() returned", "pass that"):
            saved, mine, of_sampler = state["num_workers"], self.num_workers, state["sampler"]
        # Without workers, random numbers come from the process's generators, with workers from the seed of the pass.
        reader = self._reader
        draws_others = reader is not None and (
            (reader.may_draw and bool(saved) != bool(mine)) or reader.has_random_items
        )
        if saved != mine and of_sampler is None and draws_others:
            raise ConfigError.of(
                f"num_workers={saved}, as in the saved run, because samples may draw random numbers, then others",
                mine,
                "resume with that number; or move what is random into transform= and draw with "
                "ShadeSampler(…, mode='uniform'), which any number of workers resumes",
            )
        self._progress.load_state_dict(state)


class _FinishBatch:
    """Collates and pins a batch in the training thread. ``collate`` is None for a batch that is collated already."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None, pins: bool) -> None:
        self._collate, self._pins = collate, pins

    def __call__(self, batch: Any) -> Any:
        batch = batch if self._collate is None else self._collate(batch)
        return pinned(batch) if self._pins else batch  # type: ignore[no-untyped-call]


class _ThreadEpoch:
    """The batches of one epoch, made by the pipeline's threads, which end with it; ``closed`` is called then. ``order``
    are the samples of each batch, ``depth`` the batches under way."""

    def __init__(
        self,
        pipeline: LoaderPipeline,
        closed: Callable[[], None],
        order: Iterator[list[int]],
        depth: int,
        timeout_seconds: float | None,
        finish: Callable[[Any], Any],
    ) -> None:
        self._pipeline, self._order, self._timeout_seconds, self._finish = pipeline, order, timeout_seconds, finish
        # Threads hold the pipeline and not this epoch, so leaving it early, a Ctrl-C and dropping the loader end them.
        self._close = weakref.finalize(self, _close, pipeline, closed, os.getpid())
        self._jobs: deque[Job] = deque()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        indices = next(self._order, None)
        if indices is not None:
            self._jobs.append(self._pipeline.submit(indices))

    def __iter__(self) -> _ThreadEpoch:
        return self

    def close(self) -> None:
        self._jobs.clear()
        self._close()

    def __next__(self) -> Any:
        if not self._jobs:
            self._close()
            raise StopIteration
        job = self._jobs[0]
        try:
            batch = self._pipeline.wait(job, self._timeout_seconds)
        finally:
            # A batch that is late may be waited for again; one that failed is over.
            if job.done.is_set():
                self._jobs.popleft()
                self._submit()
        # In the training thread, so that the random draws of the user's collate function are in order.
        return self._finish(batch)


def _close(pipeline: LoaderPipeline, closed: Callable[[], None], process: int) -> None:
    # A child's copies of the queues may be locked by threads that it does not have.
    if process == os.getpid():
        pipeline.close()
        closed()


class _CountedBatches:
    """An epoch's batches, counted as training gets them; the loader knows how many there are."""

    def __init__(self, batches: Iterator[Any], progress: EpochProgress, mine: LoaderPass, loader: ShadeLoader) -> None:
        self._batches, self._progress, self._mine, self._loader = batches, progress, mine, loader
        self.has_ended = False
        weakref.finalize(self, progress.drop, mine).atexit = False

    def __iter__(self) -> _CountedBatches:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        begun = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self.has_ended:
                self.has_ended = True
                self._progress.end(self._mine)
            raise
        self._progress.got_one(self._mine, time.perf_counter() - begun)
        return batch
