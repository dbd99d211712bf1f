"""ShadeDataset: any map-style data set, read through a cache.

It fetches whole batches: the DataLoader hands ``__getitems__`` the indices of one, which costs one round to the cache
and one parallel round to the origin instead of one of each a sample. A sample comes back as
``(sample, target, index)``; the index travels with it so that its loss can be reported under its own name.

Where the transforms are torchvision's usual ones, a batch is drawn, decoded, cropped, resized, flipped and normalised
in one walk over the pixels (`_transforms.fused`); all others run as they were written. The samples are the same.

Works in the training process and in workers under fork, spawn and forkserver: everything it holds pickles, and
connections are made anew where they are needed. Invariant: samples are those of the wrapped data set, pixel for pixel,
whether the cache is cold, warm, wrong or dead.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import default_generator
from torch.utils.data import Dataset, get_worker_info

from shade.cache.cache import SampleCache
from shade.cache.entry import FORMAT_ENCODED
from shade.cache.residency_map import STAY
from shade.config import ACCESS_LOG
from shade.data._dataset.decoded_source import DecodedSource, FormatChoice
from shade.data._dataset.source import FileSource, SampleSource, innermost_transform, source_of
from shade.data._decode.cached_format import FormatForecast, check_cached_format
from shade.data._transforms.fused import FusedBatch, fuser_of
from shade.data._transforms.randomness import BatchGenerators
from shade.errors import BadSampleError, ConfigError
from shade.policy import POLICIES
from shade.store import StoreURL, open_store
from shade.store.base import Store

_REPLACEMENTS = 64


class ShadeDataset(Dataset[Any]):
    """Wraps a map-style data set.

    Args:
        dataset: ImageFolder-like data sets are cached as their files' bytes; any other as its encoded items.
        cache: Store URL, an open `Store`, or None for no cache at all.
        working_set_fraction: Capacity as a fraction of the data set's bytes in the store, in (0, 1]. A ``capacity``
            in the URL (``?capacity=8GiB``) takes precedence.
        policy: Cache policy by name; None lets the sampler choose the one that suits its mode.
        transform: Applied to the sample after decoding, never cached.
        target_transform: Applied to the target.
        encode: Item → bytes, for data sets the built-in codec does not know.
        decode: Bytes → item; without ``encode``: file content → sample, for files that are not images.
        form: How image files lie in the cache: ``"encoded"``, as they are; ``"decoded"``, as pixels; ``"auto"``, as a
            forecast from measured costs says (`_dataset.cached_format`), the same on all ranks.
        max_side: With ``form="decoded"``: every picture is made no larger than this before all transforms.
        reduced_decode: Pictures that are at least twice as large as what the transforms make of them are decoded at a
            half, a quarter or an eighth of their size: faster, and other pixels by a few levels.
        on_bad_sample: ``"stop"`` raises with the sample's path; ``"skip"`` puts the nearest readable sample after it in
            its place, the same one on every rank, and counts it.

    Raises:
        ConfigError: An argument out of range, an unknown scheme or policy.
        DataError: An empty data set or an unreadable file.
        StoreUnavailableError: A named server does not answer.
        StoreAuthError: It refuses us.
    """

    def __init__(
        self,
        dataset: Any,
        cache: str | Store | None = "local://",
        *,
        working_set_fraction: float = 0.2,
        policy: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        encode: Callable[[Any], bytes] | None = None,
        decode: Callable[[Any], Any] | None = None,
        form: str = "encoded",
        max_side: int | None = None,
        reduced_decode: bool = False,
        on_bad_sample: str = "stop",
    ) -> None:
        if not 0 < working_set_fraction <= 1:
            raise ConfigError.of(
                "working_set_fraction in (0, 1], the cached share of the data set",
                working_set_fraction,
                "pass 0.2 for a fifth (-wss 0.2)",
            )
        if on_bad_sample not in ("stop", "skip"):
            raise ConfigError.of("on_bad_sample 'stop' or 'skip'", on_bad_sample, "choose one of the two")
        if policy is not None:
            POLICIES.get(policy)
        self._source: SampleSource = source_of(dataset, encode, decode)
        check_cached_format(form, max_side, has_files=self._source.has_pictures, has_cache=cache is not None)
        self._transforms = self._collect_transforms(dataset, transform, target_transform)
        plain = self._source.has_pictures and not self._transforms[1]
        self._fuser = fuser_of(self._transforms[0], reduced=reduced_decode) if plain else None
        self._skip_bad = on_bad_sample == "skip"
        self._access_log = os.environ.get(ACCESS_LOG)
        self._log_fd: tuple[int, int] | None = None
        self.generators = BatchGenerators()
        """Sets the random generators before each batch, once `follow` has said which epoch it is."""
        self.policy = policy
        self.cache: SampleCache | None = None
        self.forecast: FormatForecast | None = None
        """What the choice of a form was made by; None where there was nothing to choose."""
        if cache is not None:
            store = open_store(cache) if isinstance(cache, str) else cache
            capacity_bytes = StoreURL.parse(cache).capacity_bytes if isinstance(cache, str) else None
            try:
                self.cache = self._open_cache(store, working_set_fraction, capacity_bytes, form, max_side)
            except BaseException:
                if isinstance(cache, str):
                    store.close()
                raise

    def _open_cache(
        self, store: Store, working_set_fraction: float, capacity_bytes: int | None, form: str, max_side: int | None
    ) -> SampleCache:
        store.ping()
        source = self._source
        cache = SampleCache(store, source.fingerprint, source.payload_bytes_N, 0, source.cached_format)
        total = int(cache.size_bytes_N.sum())
        capacity_bytes = int(working_set_fraction * total) if capacity_bytes is None else capacity_bytes
        num_probes, probe_bytes = source.num_probes, source.probe_bytes
        if form != "encoded" and isinstance(source, FileSource) and source.has_pictures:
            choice = FormatChoice(source, form, max_side, total, capacity_bytes)
            self.forecast, num_probes, probe_bytes = choice.forecast, choice.num_reads, choice.num_bytes
            if choice.decoded is not None:
                self._source = source = choice.decoded
                cache = SampleCache(store, source.fingerprint, source.payload_bytes_N, 0, source.cached_format)
        cache.capacity_bytes = capacity_bytes
        if num_probes:
            cache.count_origin(num_probes, probe_bytes)
        return cache

    def _collect_transforms(
        self, dataset: Any, transform: Callable[[Any], Any] | None, target_transform: Callable[[Any], Any] | None
    ) -> tuple[list[Callable[[Any], Any]], list[Callable[[Any], Any]]]:
        """The wrapped data set's own transforms, then ours; the wrapped ones run in its own code for items."""
        own = [getattr(dataset, "transform", None), getattr(dataset, "target_transform", None)]
        if self._source.cached_format != FORMAT_ENCODED:
            if innermost_transform(dataset) is not None:
                warnings.warn(
                    f"{type(dataset).__name__} applies its own transform before caching, so every epoch sees the same "
                    "result; pass transform= to ShadeDataset instead",
                    stacklevel=4,
                )
            own = [None, None]
        return [f for f in (own[0], transform) if f], [f for f in (own[1], target_transform) if f]

    @property
    def source(self) -> SampleSource:
        """Where the samples come from."""
        return self._source

    def __len__(self) -> int:
        return len(self._source.payload_bytes_N)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_log_fd": None}

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """One batch; what the DataLoader calls.

        Args:
            indices: Sample indices, 0 ≤ index < N.

        Returns:
            ``(sample, target, index)`` of each, in order.

        Raises:
            BadSampleError: A sample cannot be read or decoded and ``on_bad_sample`` is ``"stop"``.
        """
        indices = [self.checked(index) for index in indices]
        if self.cache is not None:
            worker = get_worker_info()
            if worker is not None and not self.cache.store.shared:
                raise ConfigError.of(
                    "a store that DataLoader workers share", self.cache.store.url, "use local://, or num_workers=0"
                )
            self.cache.enter_worker(-1 if worker is None else worker.id)
        return self.finish(indices, self.fetch(indices))

    def fetch(self, indices: Sequence[int]) -> list[Any]:
        """The payloads of a batch: one round to the cache, one to the origin.

        Args:
            indices: Sample indices, 0 ≤ index < N.

        Returns:
            Payloads in order; an exception for one that cannot be read.
        """
        if self.cache is None:
            payloads, hits = self._source.read_many(list(indices), _not_counted), [False] * len(indices)
        else:
            payloads, hits = self.cache.fetch_many(indices, self._read_origin)
        if self._access_log is not None:
            self._log_accesses(indices, hits)
        return payloads

    def _read_origin(self, absent: list[int]) -> list[Any]:
        assert self.cache is not None
        source, residency = self._source, self.cache.residency
        payloads = source.read_many(absent, self.cache.count_origin)
        if isinstance(source, DecodedSource):
            begun = time.perf_counter_ns()
            stays = (
                residency.flag_N[absent] & STAY if residency.planned and not source.prepares_all else [1] * len(absent)
            )
            payloads = [source.prepared(each) if stay else each for each, stay in zip(payloads, stays, strict=True)]
            took = time.perf_counter_ns() - begun
            self.cache.ledger.add(decode_nanoseconds=took, origin_nanoseconds=-took)
        return payloads

    def finish(self, indices: Sequence[int], payloads: list[Any]) -> list[Any]:
        """Decodes and transforms a batch.

        Args:
            indices: The batch.
            payloads: From `fetch`.

        Returns:
            ``(sample, target, index)`` of each, in order.

        Raises:
            BadSampleError: As `__getitems__`.
        """
        if self._fuser is None:
            with self.generators.of(indices):
                return self.run_as_written(indices, payloads)
        following = self.generators.following
        batch = self.fuse(indices, payloads, self.generators.alone(indices, 0) if following else default_generator)
        samples_BCHW = torch.empty(batch.shape, dtype=batch.dtype)
        self.count_time(*batch.fill(0, len(batch), samples_BCHW.numpy()))
        batch.finish(samples_BCHW.numpy())
        return batch.items(indices, samples_BCHW)

    @property
    def is_fused(self) -> bool:
        """Whether the transforms are run in one walk; otherwise they run as written."""
        return self._fuser is not None

    @property
    def draws_nothing(self) -> bool:
        """Whether no code of the user's touches a sample, so that nothing can be random that is not fused."""
        return self._fuser is not None or (self._source.has_pictures and not any(self._transforms))

    def fuse(self, indices: Sequence[int], payloads: list[Any], generator: torch.Generator) -> FusedBatch:
        """A batch whose samples may be rendered in any order, where `is_fused`.

        Args:
            indices: The batch.
            payloads: From `fetch`.
            generator: What is random is drawn from it, in batch order, before anything is rendered.

        Returns:
            The batch, drawn.

        Raises:
            BadSampleError: As `__getitems__`.
        """
        assert self._fuser is not None, "fuse() is for recognised transforms"

        def decode_whole(position: int) -> tuple[npt.NDArray[np.uint8], tuple[Any, ...]]:
            image, *rest = self._decode(indices[position], payloads[position])
            return np.asarray(image), tuple(rest)

        rests = [self._source.rest_of(index) for index in indices]
        return FusedBatch(self._fuser, payloads, rests, decode_whole, generator)

    def worker(self, number: int) -> ShadeDataset:
        """This data set for one thread of its own: the same store and plan, counters and departures apart.

        Args:
            number: Of the thread, from 0 on, as a DataLoader numbers its workers.

        Returns:
            A data set to call `fetch` and what follows on; closed with this one.
        """
        other = copy.copy(self)
        if self.cache is not None:
            other.cache = copy.copy(self.cache)
            other.cache.enter_worker(number)
        return other

    def checked(self, index: int) -> int:
        """A sample index as all that follows wants it: negative ones count from the end, others raise IndexError."""
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected a sample index below {len(self)}, got {index}")
        return index % len(self)

    def run_as_written(self, indices: Sequence[int], payloads: Sequence[Any]) -> list[Any]:
        """`finish` one sample after the other, with the generators as they are."""
        clock, transforms, target_transforms = time.perf_counter_ns, *self._transforms
        decoding = transforming = 0
        batch = []
        for index, payload in zip(indices, payloads, strict=True):
            begun = clock()
            item = self._decode(index, payload)
            decoded = clock()
            sample, *rest = item
            try:
                for transform in transforms:
                    sample = transform(sample)
                if rest:
                    for transform in target_transforms:
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

    def check_forecast(self, counts: dict[str, Any]) -> dict[str, Any]:
        """What was predicted when the form was chosen, beside what came of it.

        Args:
            counts: One epoch's ledger, as its ``as_dict`` gives it.

        Returns:
            A row of metrics; empty where there was nothing to choose.
        """
        form = "decoded" if isinstance(self._source, DecodedSource) else "encoded"
        return {} if self.forecast is None else self.forecast.check(form, counts)

    def count_time(self, decoding: int, transforming: int) -> None:
        """Puts nanoseconds into the ledger, if there is one."""
        if self.cache is not None:
            self.cache.ledger.add(decode_nanoseconds=decoding, transform_nanoseconds=transforming)

    def _decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        try:
            return self._source.decode(index, payload)
        except BadSampleError:
            if not self._skip_bad:
                raise
        count = _not_counted if self.cache is None else self.cache.count_origin
        for offset in range(1, min(_REPLACEMENTS, len(self)) + 1):
            other = (index + offset) % len(self)
            try:
                item = self._source.decode(other, self._source.read_many([other], count)[0])
            except BadSampleError:
                continue
            if self.cache is not None:
                self.cache.ledger.add(bad_samples=1)
            return item
        raise BadSampleError(
            f"expected a readable sample among the {_REPLACEMENTS} after {self._source.name_of(index)}, got none; "
            "restore the data set"
        )

    def _log_accesses(self, indices: Sequence[int], hits: list[bool]) -> None:
        """The greppable lines, one write a batch, so that processes may share the file."""
        if self._log_fd is None or self._log_fd[0] != os.getpid():
            assert self._access_log is not None
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._log_fd = (os.getpid(), os.open(self._access_log, flags, 0o644))
        lines = [f"{'hitting' if hit else 'miss'} {index}\n" for index, hit in zip(indices, hits, strict=True)]
        os.write(self._log_fd[1], "".join(lines).encode())

    def close(self) -> None:
        """Closes the cache (and a private server) and the log. Safe to call twice."""
        if self._log_fd is not None and self._log_fd[0] == os.getpid():
            os.close(self._log_fd[1])
        self._log_fd = None
        self._source.close()
        if self.cache is not None:
            self.cache.close()


def _not_counted(num_reads: int, num_bytes: int) -> None:
    """Without a cache there is no ledger."""
