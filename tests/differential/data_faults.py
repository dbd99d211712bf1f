"""Faults that shade once had, or might get: inside a fault's context shade has it (again)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import torch

from shade.data._dataset import batch_reader
from shade.data._dataset.batch_reader import BatchReader, TransformChain
from shade.data._loader import loader as loading
from shade.data._loader.batch_parts import BatchBuffers
from shade.data._loader.loader import EpochProgress
from shade.data._sampler import sampler as sampling
from shade.data._sampler.place import LoaderCount
from shade.data._sampler.rank_shard import RankShard
from shade.data._sampler.sampler import ShadeSampler
from shade.data._source import item_codec, source
from shade.data._source.content import ContentDigest
from shade.data._source.source import FileSource, ItemSource
from shade.data._transforms.randomness import BatchGenerators
from shade.sampling import uniform
from tests.differential.harness import together

replaced = mock.patch.object


def names_by_length() -> AbstractContextManager[None]:
    """A data set's name in the store is its class, its length and 32 items: corrected labels are served stale."""
    return together(
        replaced(ContentDigest, "hexdigest", lambda self: ""), replaced(BatchReader, "_compare_hits", lambda *_: None)
    )


def whole_targets() -> AbstractContextManager[None]:
    """The targets of a folder become integers."""
    rest_of = FileSource.rest_of
    return together(replaced(FileSource, "rest_of", lambda self, index: (int(float(rest_of(self, index)[0])),)))


def odd_strides() -> AbstractContextManager[None]:
    """A tensor of one element with odd strides cannot be encoded, and counts as a bad sample."""

    def element_bytes(tensor: torch.Tensor) -> Any:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    def encoded(self: Any, index: int, item: Any) -> Any:
        try:
            return self._encode(item)
        except RuntimeError as error:
            return error

    probe = ItemSource._probe

    def probed(self: Any, indices: list[int], **options: Any) -> list[bytes]:
        return [each for each in probe(self, indices, **options) if isinstance(each, bytes)]

    return together(
        replaced(item_codec, "element_bytes", element_bytes),
        replaced(ItemSource, "_encoded", encoded),
        replaced(ItemSource, "_probe", probed),
    )


def outer_index() -> AbstractContextManager[None]:
    """A wrapper around a ShadeDataset is sampled by its own numbers, and reports come with those inside."""

    def place(self: Any, index_B: Any, num_done: int, drawn_K: Any, num_ahead: int) -> tuple[int, bool]:
        return num_done, True

    nothing = lambda dataset: None  # noqa: E731
    return together(
        replaced(sampling, "check_wrapping", nothing),
        replaced(sampling, "check_numbering", nothing),
        replaced(loading, "check_wrapping", nothing),
        replaced(RankShard, "place", place),
    )


def outer_pass_ends() -> AbstractContextManager[None]:
    """A pass ends as soon as another begins."""
    inner = ShadeSampler._pass

    def passed(self: Any, order_K: Any, num_drawn: int) -> Iterator[int]:
        number = self._num_passes + 1
        for index in inner(self, order_K, num_drawn):
            if self._num_passes != number:
                return
            yield index

    return together(replaced(ShadeSampler, "_pass", passed))


def reports_count() -> AbstractContextManager[None]:
    """Each report counts as a step."""
    return together(replaced(RankShard, "place", lambda self, index_B, num_done, *_: (num_done, True)))


def frozen() -> AbstractContextManager[None]:
    """Random items are kept in the cache without a word."""
    init = ItemSource.__init__

    def made(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.is_random = self.compares_hits = False

    return together(replaced(ItemSource, "__init__", made))


def order_by_workers() -> AbstractContextManager[None]:
    """The shuffled order depends on whether workers stay."""
    processes = loading.ShadeLoader._processes

    def made(self: Any) -> Any:
        if self._iterator is not None:
            return loading.DataLoader.__iter__(self)
        return processes(self)

    return together(replaced(loading.ShadeLoader, "_processes", made))


def last_batch() -> AbstractContextManager[None]:
    """The last batch of an epoch is left out if it is not full."""
    num_steps = RankShard.num_steps

    def fewer(self: Any, num_drawn: int) -> int:
        return max(1, num_drawn // self._global_batch) if num_drawn else num_steps(self, num_drawn)

    return together(replaced(RankShard, "num_steps", fewer))


def twice() -> AbstractContextManager[None]:
    """The last sample of an epoch is the first once more."""
    epoch_order = RankShard.epoch_order

    def order(self: Any, drawn_K: Any) -> Any:
        order_K = epoch_order(self, drawn_K).copy()
        order_K[-1] = order_K[0]
        return order_K

    return together(replaced(RankShard, "epoch_order", order))


def same_order() -> AbstractContextManager[None]:
    """The epoch is not mixed into the seed of the order."""
    generator = uniform.generator
    return together(replaced(uniform, "generator", lambda seed, epoch, purpose: generator(seed, 0, purpose)))


def same_draws() -> AbstractContextManager[None]:
    """The epoch is not mixed into the seed of random transforms."""
    follow = BatchGenerators.follow
    return together(replaced(BatchGenerators, "follow", lambda self, seed, epoch: follow(self, seed, 0)))


def lost_dtype() -> AbstractContextManager[None]:
    """Doubles come back from the cache as floats."""
    build = item_codec._build

    def built(skeleton: Any, cursor: Any) -> Any:
        found = build(skeleton, cursor)
        return found.float() if isinstance(found, torch.Tensor) and found.dtype == torch.float64 else found

    return together(replaced(item_codec, "_build", built))


def lost_class() -> AbstractContextManager[None]:
    """Numpy's numbers come back as Python's."""
    build = item_codec._build

    def built(skeleton: Any, cursor: Any) -> Any:
        found = build(skeleton, cursor)
        return found.item() if isinstance(found, np.generic) else found

    return together(replaced(item_codec, "_build", built))


def old_transform() -> AbstractContextManager[None]:
    """A transform that is assigned later is not noticed."""
    refresh = TransformChain.refresh

    def once(self: Any) -> None:
        if not hasattr(self, "_is_made"):
            refresh(self)
            self._is_made = True

    return together(replaced(TransformChain, "refresh", once))


def wrapping_draws() -> AbstractContextManager[None]:
    """Wrapping a data set draws random numbers of the script."""
    here = replaced(source, "in_probe_worker", lambda work, dataset: work())
    return together(here, replaced(source, "kept_generators", contextlib.nullcontext))


def shared_memory() -> AbstractContextManager[None]:
    """A batch is rendered into the memory of the one before."""
    take = BatchBuffers.take
    kept: dict[Any, Any] = {}

    def again(self: Any, shape: Any, dtype: Any) -> torch.Tensor:
        if (id(self), shape) not in kept:
            kept[id(self), shape] = take(self, shape, dtype)
        found: torch.Tensor = kept[id(self), shape]
        return found

    return together(replaced(BatchBuffers, "take", again))


def lost_generator() -> AbstractContextManager[None]:
    """A loader's state between two epochs is without its generator."""
    state_dict = EpochProgress.state_dict

    def without(self: Any) -> dict[str, Any]:
        state = state_dict(self)
        return state | {"generator": None} | ({"order": None} if not state["batches"] else {})

    return together(replaced(EpochProgress, "state_dict", without))


def neighbour() -> AbstractContextManager[None]:
    """A dead cache gives the sample after the one that was asked for."""
    fetch = BatchReader.fetch

    def fetched(self: Any, indices: Any) -> list[Any]:
        cache = self._cache
        payloads = fetch(self, indices)
        if cache is not None and cache.residency.totals()["store_errors"]:
            self._cache = None
            payloads = fetch(self, [(index + 1) % len(self) for index in indices])
            self._cache = cache
        return payloads

    return together(replaced(batch_reader.BatchReader, "fetch", fetched))


def look_resumes() -> AbstractContextManager[None]:
    """A look at one batch after a resume uses up the place."""
    return together(
        replaced(ShadeSampler, "_was_look", False),
        replaced(EpochProgress, "got_one", _without_resume(EpochProgress.got_one)),
    )


def _without_resume(got_one: Any) -> Any:
    def got(self: Any, mine: Any, waited_seconds: float) -> None:
        got_one(self, mine, waited_seconds)
        mine.resume = None

    return got


def unreported() -> AbstractContextManager[None]:
    """Without reports, the place in an epoch is its beginning."""
    return together(replaced(LoaderCount, "of_caller", lambda: None))


def old_format() -> AbstractContextManager[None]:
    """A format that is set in place after wrapping is not noticed."""
    return together(replaced(batch_reader, "fingerprints_in", lambda dataset: []))


OLD: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "names by class and length": names_by_length,
    "targets become integers": whole_targets,
    "odd strides are bad samples": odd_strides,
    "a wrapper's index": outer_index,
    "an inner pass ends the outer": outer_pass_ends,
    "reports are counted": reports_count,
    "random items are frozen in silence": frozen,
    "the order depends on workers": order_by_workers,
    "an assigned transform is ignored": old_transform,
    "wrapping draws random numbers": wrapping_draws,
    "a loader's generator is not saved": lost_generator,
    "a look uses up the place": look_resumes,
    "an unreported pass has no place": unreported,
    "a format set in place is ignored": old_format,
}
NEW: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "the last batch is dropped": last_batch,
    "a sample comes twice": twice,
    "epochs have one order": same_order,
    "epochs draw the same": same_draws,
    "a dtype is lost in the cache": lost_dtype,
    "a class is lost in the cache": lost_class,
    "batches share memory": shared_memory,
    "a dead cache gives a neighbour": neighbour,
}
FAULTS = OLD | NEW
