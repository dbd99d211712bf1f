"""BatchReader: reads a batch of a `ShadeDataset` through the cache, decodes it and runs the transforms.

The DataLoader's processes use it through ``ShadeDataset.__getitems__``, `ShadeLoader`'s threads step by step: one
thread fetches and draws, many render. Invariant: samples are the same whether transforms are fused or run as written.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import default_generator
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from shade.cache.cache import SampleCache
from shade.data._source import item_codec, item_columns
from shade.data._source.content import fingerprints_in, innermost_transform
from shade.data._source.source import (
    FreshItem,
    ItemSource,
    PreparedSource,
    SampleSource,
    checked_index,
    not_counted,
    read_nearest,
)
from shade.data._source.source_choice import SampleFiles
from shade.data._transforms.fused import FusedBatch, Fuser, fuser_of
from shade.data._transforms.randomness import BatchGenerators
from shade.data._transforms.recognise import parameters_of
from shade.errors import BadSampleError, ConfigError, DataError, shown_place

logger = logging.getLogger("shade.data")

_REPLACEMENTS = 64
"""Samples after a bad one that are tried in its place."""
_COMPARED_HITS = 1024
"""One hit in so many is compared with the origin; at first more are."""
Transforms = list[Callable[[Any], Any]]


class CollatedBatch:
    """A batch that is collated already: ``default_collate`` of a list with this alone returns its ``parts``, in the
    process that receives it."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        # torch passes a tensor between processes as a file descriptor: a connection, a handshake and a mapping, 0.3 ms
        # each. Columns of up to `INLINE_BYTES` travel as bytes in the message.
        return _unpacked, (_packed(self.parts),)


default_collate_fn_map[CollatedBatch] = lambda batch, **_: batch[0] if get_worker_info() else batch[0].parts


class _PackedColumn(NamedTuple):
    content: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def _packed(part: Any) -> Any:
    if type(part) is list:
        return [_packed(each) for each in part]
    if type(part) is dict:
        return {key: _packed(each) for key, each in part.items()}
    if type(part) is torch.Tensor and _is_inline(part):
        return _PackedColumn(item_codec.element_bytes(part).tobytes(), part.dtype, tuple(part.shape))
    return part


def _is_inline(column: torch.Tensor) -> bool:
    is_plain = item_codec.is_dense(column) and column.is_cpu and not column.is_quantized and not column.requires_grad
    return is_plain and column.is_contiguous() and 0 < column.nbytes <= item_columns.INLINE_BYTES


def _unpacked(part: Any) -> Any:
    if type(part) is list:
        return [_unpacked(each) for each in part]
    if type(part) is dict:
        return {key: _unpacked(each) for key, each in part.items()}
    if type(part) is _PackedColumn:
        return torch.frombuffer(bytearray(part.content), dtype=part.dtype).reshape(part.shape)
    return part


class TransformChain:
    """The transforms of one data set, shared by all its readers in a process.

    `refresh` takes in what the user has assigned or changed since. Only this process has the wrapped ``dataset``; a
    worker that is spawned takes its transforms. They may run ``before_cache``, and then must stay as they are; those of
    targets still run after it if the data set has ``files``. ``first`` are steps between the data set's and the user's.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        *,
        before_cache: bool,
        may_fuse: bool,
        reduced_decode: bool,
        first: Sequence[Callable[[Any], Any]] = (),
        files: SampleFiles | None = None,
    ) -> None:
        self._first, self._files = list(first), files
        self.transform, self._target_transform = transform, target_transform
        self._dataset, self._may_fuse, self._reduced_decode = dataset, may_fuse, reduced_decode
        self._before_cache = before_cache
        self._cached = innermost_transform(dataset) if before_cache else None
        self._fingerprints = fingerprints_in(dataset) if before_cache else []
        self._recognised = ""
        self.samples: Transforms = []
        """Applied to the sample, in order."""
        self.targets: Transforms = []
        """Applied to the target, in order."""
        self.fuser: Fuser | None = None
        """Does what ``samples`` do, if they are recognised and nothing is done to targets."""
        self._own: tuple[Any, Any] = None, None
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        self.refresh()
        return self.__dict__ | {"_dataset": None, "_files": None}

    def refresh(self) -> None:
        """Takes the transforms as they are now. Raises ConfigError if the cache holds what others made."""
        if self._before_cache:
            if self._dataset is not None and innermost_transform(self._dataset) != self._cached:
                raise ConfigError.of(
                    f"{type(self._dataset).__name__} to keep the transform that was there when it was wrapped, because "
                    "its results are cached",
                    "another one",
                    "assign it to the ShadeDataset, where it runs after the cache: dataset.transform = …",
                )
            if self._dataset is not None and fingerprints_in(self._dataset) != self._fingerprints:
                raise ConfigError.of(
                    f"{type(self._dataset).__name__} to keep the format that it had when it was wrapped, because its "
                    "items are cached",
                    "another one",
                    "set the format before wrapping, or wrap the data set again: ShadeDataset(data, cache=…)",
                )
        if self._files is not None:
            own = None if self._before_cache else self._files.own("transform")
            self._own = own, self._files.own("target_transform")
        self.samples = [each for each in (self._own[0], *self._first, self.transform) if each]
        self.targets = [each for each in (self._own[1], self._target_transform) if each]
        may_fuse = self._may_fuse and not self.targets
        recognised = parameters_of(self.samples) if may_fuse else ""
        if recognised != self._recognised:
            self.fuser = fuser_of(self.samples, reduced=self._reduced_decode) if may_fuse else None
            self._recognised = recognised


class BatchReader:
    """Reads batches in one process or thread.

    With ``skips_bad`` a readable sample replaces a bad one. ``access_log`` is the path of a file for a line an access.
    """

    def __init__(
        self,
        source: SampleSource,
        cache: SampleCache | None,
        transforms: TransformChain,
        *,
        skips_bad: bool,
        access_log: str | None,
    ) -> None:
        self._source, self._cache, self._skips_bad, self.transforms = source, cache, skips_bad, transforms
        self._num_hits, self._next_compared, self._num_bad = 0, 1, 0
        self._access_log = access_log
        self._log_fd: tuple[int, int] | None = None
        self.generators = BatchGenerators()
        """Sets the random generators before each batch, once `BatchGenerators.follow` has set the epoch."""

    def __len__(self) -> int:
        return self._source.num_readable

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_log_fd": None}

    @property
    def is_fused(self) -> bool:
        """Returns whether the transforms run in one pass; otherwise they run as written."""
        return self.transforms.fuser is not None

    @property
    def may_draw(self) -> bool:
        """Returns whether transforms may draw random numbers, as those of a user's own may."""
        fuser = self.transforms.fuser
        return bool(self.transforms.samples or self.transforms.targets) if fuser is None else fuser.view.is_random

    @property
    def has_random_items(self) -> bool:
        """Returns whether reading an item draws random numbers."""
        return self._source.is_random

    @property
    def draws_nothing(self) -> bool:
        """Returns whether no code of the user's touches a sample, so that all random draws are the fused ones."""
        has_transforms = bool(self.transforms.samples or self.transforms.targets)
        return self.is_fused or (self._source.has_pictures and not has_transforms)

    def for_worker(self, number: int) -> BatchReader:
        """Returns a reader for one thread: the same store and plan, with counters and departures of its own.

        ``number`` counts the threads from 0, as a DataLoader numbers its workers. Closing the original closes both.
        """
        other = copy.copy(self)
        if self._cache is not None:
            other._cache = self._cache.for_thread(number)
        return other

    def enter_worker(self, worker: int) -> None:
        """Prepares the process that fetches; ``worker`` is the DataLoader's worker id, or −1."""
        if self._cache is not None:
            self._cache.enter_worker(worker)

    def checked(self, index: int) -> int:
        """Returns an index in [0, N), as `checked_index` does."""
        return checked_index(index, len(self))

    def checked_many(self, indices: Sequence[int]) -> list[int]:
        """Returns what `checked` returns for each index, and raises as it does. Without a cache a data set of items
        may have samples under other keys, such as a size and a number; they stay as they are."""
        try:
            found = [operator.index(index) for index in indices]
        except TypeError as error:
            key = next(index for index in indices if not hasattr(index, "__index__"))
            if self._cache is None and type(self._source) is ItemSource:
                return list(indices)
            raise ConfigError.of(
                "numbers as the indices of samples, because the cache has one entry for each",
                f"{type(key).__name__} {key!r}",
                "pass ShadeDataset(…, cache=None); or let the sampler yield numbers, and put what depends on the rest "
                "into collate_fn=",
            ) from error
        is_right = bool(found) and min(found) >= 0 and max(found) < len(self)
        return found if is_right else [self.checked(index) for index in found]

    def fetch(self, indices: Sequence[int], turn: threading.Lock | None = None) -> list[Any]:
        """Fetches the payloads of a batch: one round to the cache, one to the origin. A ``turn`` that the caller holds
        is left to others while the origin is read.

        Returns payloads in order, with an exception in place of one that cannot be read. Raises DataError if the origin
        has other content than the cache.
        """
        if self._cache is None:
            with _left(turn):
                payloads, near_by_index = read_nearest(self._source, list(indices), not_counted)
            hits = [bool(near_by_index) and index in near_by_index for index in indices]
        else:
            near = set[int]()
            payloads, hits = self._cache.fetch_many(indices, partial(self._read_origin, near, turn))
            hits = [hit or index in near for index, hit in zip(indices, hits, strict=True)] if near else hits
        cached = [index for index, hit in zip(indices, hits, strict=True) if hit]
        changed = self._source.changed_among(cached)
        if self._cache is not None and (self._source.compares_hits or changed):
            self._compare_hits(indices, payloads, hits, changed)
        if self._access_log is not None:
            self._log_accesses(indices, hits)
        return payloads

    def take_in(self, tier: SampleCache, indices: Sequence[int]) -> tuple[list[Any], list[bool]]:
        """Takes samples into one tier of the cache; returns as `SampleCache.fetch_many`."""
        return tier.fetch_many(indices, partial(self._read_absent, set()))

    def _compare_hits(self, indices: Sequence[int], payloads: list[Any], hits: list[bool], changed: set[int]) -> None:
        assert self._cache is not None
        # Hits number 1, 2, 4 … 1024, 2048, 3072 … of this process, and those that may have changed.
        for index, payload, hit in zip(indices, payloads, hits, strict=True):
            self._num_hits += hit
            is_due = self._source.compares_hits and self._num_hits >= self._next_compared
            if not hit or not (is_due or index in changed):
                continue
            if is_due:
                self._next_compared += min(self._next_compared, _COMPARED_HITS)
            (fresh,) = self._source.read_many([index], self._cache.count_origin)
            if isinstance(self._source, PreparedSource):
                fresh = self._source.prepared(index, fresh)
            if isinstance(fresh, Exception) or fresh == payload:
                continue
            if index in changed:
                raise ConfigError.of(
                    f"{self._source.name_of(index)} to be what it was when it was cached",
                    "another item, because what the data set holds in memory for it has changed",
                    "keep labels that change outside of the data set, and look them up by the index that comes with "
                    "each sample; or wrap the data set again: ShadeDataset(data, cache=…)",
                )
            raise DataError.of(
                f"{self._source.name_of(index)} to be what it was when it was cached",
                "another item",
                "if the data set was changed, pass ShadeDataset(…, version=…) a new word for its content; if its "
                "items are random, move that into transform=, or pass version= to keep the first draw",
            )

    def _read_origin(self, near: set[int], turn: threading.Lock | None, absent: list[int]) -> list[Any]:
        with _left(turn):
            return self._read_absent(near, absent)

    def _read_absent(self, near: set[int], absent: list[int]) -> list[Any]:
        assert self._cache is not None
        source = self._source
        payloads, found = read_nearest(source, absent, self._cache.count_origin)
        if found:
            self._cache.count_near(len(found), sum(map(len, found.values())))
            near.update(found)
        if isinstance(source, PreparedSource):
            begun = time.perf_counter_ns()
            stays = [True] * len(absent) if source.prepares_all else self._cache.will_keep(absent).tolist()
            payloads = [
                source.prepared(index, each) if stay else each
                for index, each, stay in zip(absent, payloads, stays, strict=True)
            ]
            took = time.perf_counter_ns() - begun
            self._cache.ledger.add(decode_nanoseconds=took, origin_nanoseconds=-took)
        return payloads

    def finish(self, indices: Sequence[int], payloads: list[Any], seed: int = 0) -> list[Any]:
        """Decodes and transforms a batch from `fetch`; returns ``(sample, target, index)`` of each, in order.

        Raises BadSampleError for a bad sample that must not be skipped.
        """
        if not self.is_fused:
            with self.generators.of([*map(_number_of, indices)], seed):
                return self.run_as_written(indices, payloads)
        is_seeded = bool(seed) or self.generators.following
        batch = self.fuse(indices, payloads, self.generators.alone(indices, seed) if is_seeded else default_generator)
        samples_BCHW = torch.empty(batch.shape, dtype=batch.dtype)
        self.count_time(*batch.fill(0, len(batch), samples_BCHW.numpy()))
        batch.finish(samples_BCHW.numpy())
        return batch.items(indices, samples_BCHW)

    def finish_collated(self, indices: Sequence[int], payloads: list[Any], seed: int = 0) -> list[Any]:
        """Returns a list with a `CollatedBatch` alone: what ``default_collate`` makes of `finish`, without an object a
        sample where that is possible."""
        has_transforms = bool(self.transforms.samples or self.transforms.targets)
        parts = None
        if self._source.has_encoded_items and not has_transforms:
            begun = time.perf_counter_ns()
            parts = item_columns.collated(payloads, indices) if self._fresh(payloads) is None else None
            if parts is not None:
                self.count_time(time.perf_counter_ns() - begun, 0)
        return [CollatedBatch(default_collate(self.finish(indices, payloads, seed)) if parts is None else parts)]

    def fuse(self, indices: Sequence[int], payloads: list[Any], generator: torch.Generator) -> FusedBatch:
        """Draws a batch, where `is_fused`; its samples may then be rendered in any order. The generator gives all
        random numbers, in batch order, before anything is rendered. Raises BadSampleError."""
        fuser = self.transforms.fuser
        assert fuser is not None, "fuse() is for recognised transforms"

        def decode_whole(position: int) -> tuple[npt.NDArray[np.uint8], tuple[Any, ...]]:
            image, *rest = self._decode(indices[position], payloads[position])
            return np.asarray(image), tuple(rest)

        rests = [self._source.rest_of(index) for index in indices]
        return FusedBatch(fuser, payloads, rests, decode_whole, generator)

    def run_as_written(self, indices: Sequence[int], payloads: Sequence[Any]) -> list[Any]:
        """Does what `finish` does, sample after sample, and leaves the generators as they are."""
        clock = time.perf_counter_ns
        decoding = transforming = 0
        batch, begun = [], clock()
        items = self._fresh(payloads)
        if items is None and self._source.has_encoded_items:
            items = item_columns.decoded_many(payloads)
        decoding += clock() - begun
        for place, (index, payload) in enumerate(zip(indices, payloads, strict=True)):
            begun = clock()
            found = None if items is None else items[place]
            item = self._decode(index, payload) if items is None else found if type(found) is tuple else (found,)
            decoded = clock()
            sample, *rest = item
            try:
                for transform in self.transforms.samples:
                    sample = transform(sample)
                if rest:
                    for transform in self.transforms.targets:
                        rest[0] = transform(rest[0])
            except Exception as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"while transforming {self._source.name_of(index)}")
                raise
            batch.append((sample, *rest, index))
            decoding += decoded - begun
            transforming += clock() - decoded
        self.count_time(decoding, transforming)
        return batch

    def _fresh(self, payloads: Sequence[Any]) -> list[Any] | None:
        """Returns the items of a batch that was just read, if no transform may change them and each is there once."""
        has_transforms = bool(self.transforms.samples or self.transforms.targets)
        if has_transforms or not all(type(payload) is FreshItem for payload in payloads):
            return None
        return [each.item for each in payloads] if len(set(map(id, payloads))) == len(payloads) else None

    def count_time(self, decoding: int, transforming: int) -> None:
        """Adds nanoseconds to the ledger, if there is a cache."""
        if self._cache is not None:
            self._cache.ledger.add(decode_nanoseconds=decoding, transform_nanoseconds=transforming)

    def _decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        try:
            return self._source.decode(index, payload)
        except BadSampleError as error:
            if not self._skips_bad or not isinstance(index, int):
                raise
            words = str(error)
        count = not_counted if self._cache is None else self._cache.count_origin
        # The nearest readable sample after it, which is the same one on every rank.
        for offset in range(1, min(_REPLACEMENTS, len(self)) + 1):
            other = (index + offset) % len(self)
            try:
                item = self._source.decode(other, self._source.read_many([other], count)[0])
            except BadSampleError:
                continue
            if self._cache is not None:
                self._cache.ledger.add(bad_samples=1)
            self._num_bad += 1
            # Bad sample number 1, 2, 4, 8 … of this process.
            if self._num_bad & (self._num_bad - 1) == 0:
                logger.warning("bad sample number %d: %s; sample %d takes its place", self._num_bad, words, other)
            return item
        name = shown_place(self._source.name_of(index))
        raise BadSampleError(
            f"expected a readable sample among the {_REPLACEMENTS} after {name}, got none; restore the data set"
        )

    def _log_accesses(self, indices: Sequence[int], hits: list[bool]) -> None:
        if self._log_fd is None or self._log_fd[0] != os.getpid():
            assert self._access_log is not None
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._log_fd = (os.getpid(), os.open(self._access_log, flags, 0o644))
        lines = [f"{'hitting' if hit else 'miss'} {index}\n" for index, hit in zip(indices, hits, strict=True)]
        # One write a batch, so that processes may share the file.
        os.write(self._log_fd[1], "".join(lines).encode())

    def close(self) -> None:
        """Closes the access log and the source's threads. Safe to call twice."""
        if self._log_fd is not None and self._log_fd[0] == os.getpid():
            os.close(self._log_fd[1])
        self._log_fd = None
        self._source.close()


def _number_of(index: Any) -> int:
    """Returns an index, or a number that stands for another key."""
    return index if isinstance(index, int) else xxhash.xxh3_64_intdigest(repr(index).encode()) >> 1


_LAST_ROW = 126
"""Where the readers of other threads begin to count, downwards: a DataLoader numbers its workers from 0."""


@contextlib.contextmanager
def _left(turn: threading.Lock | None) -> Iterator[None]:
    """Leaves a turn that is held, if there is one, to others for a while."""
    if turn is None:
        yield
        return
    turn.release()
    try:
        yield
    finally:
        turn.acquire()


class ReaderPool:
    """The readers of one process: the first one, and others while several threads read at once.

    The origin is read in all threads at once; the cache is asked by one at a time.
    """

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader
        self._per_process()

    def _per_process(self) -> None:
        self._pid, self._free, self._num_others = os.getpid(), [(-1, self._reader)], 0
        self._asking, self._drawing = threading.Lock(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": self._reader}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, indices: Sequence[int], seed: int, worker: int, *, collates: bool) -> list[Any]:
        """Returns a batch as `BatchReader.finish` or `BatchReader.finish_collated` does; ``worker`` is the DataLoader's
        worker id, or −1."""
        if self._pid != os.getpid():
            self._per_process()
        # Threads that the user's pipeline starts (Grain, torchdata's nodes) may come and go, so a thread has a reader
        # for one batch.
        free = self._free
        try:
            number, reader = free.pop()
        except IndexError:
            number = _LAST_ROW - self._num_others
            self._num_others += 1
            reader = self._reader.for_worker(number)
        try:
            reader.enter_worker(worker if number == -1 else number)
            # Sixteen threads that take turns at the interpreter's lock make a round of 1 ms last 100 ms, for all of
            # them.
            with self._asking:
                payloads = reader.fetch(indices, self._asking)
            # Random transforms draw from the process's generators, so they run in one thread at a time.
            with self._drawing if reader.may_draw else contextlib.nullcontext():
                return (reader.finish_collated if collates else reader.finish)(indices, payloads, seed)
        finally:
            free.append((number, reader))

    def close(self) -> None:
        """Closes the readers. Safe to call twice."""
        for _, reader in self._free:
            reader.close()
