"""ShadeDataset: any map-style data set, read through a cache.

A sample comes back as ``(sample, target, index)``; the loop reports the sample's loss under that index. It works in the
training process and in workers under fork, spawn and forkserver. Several threads may ask for batches at once.

Invariant: samples are those of the wrapped data set, pixel for pixel, whether the cache is cold, warm, wrong or dead.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset, get_worker_info

from shade.cache.cache import SampleCache, held_bytes_of
from shade.cache.entry import FORMAT_ENCODED
from shade.config import ACCESS_LOG, WORKING_SET_FRACTION
from shade.data._dataset.batch_reader import BatchReader, ReaderPool, TransformChain
from shade.data._dataset.format_choice import FormatChoice, FormatWishes
from shade.data._dataset.prefix import PrefixSplit, candidates, split
from shade.data._dataset.prefixed_source import prefixed_source_of
from shade.data._decode.cached_format import FormatForecast, check_cached_format
from shade.data._source.content import innermost_transform
from shade.data._source.source import FileSource, SampleSource
from shade.data._source.source_choice import files_of, source_of
from shade.data._transforms.randomness import BatchGenerators
from shade.errors import ConfigError
from shade.policy import POLICIES
from shade.store import StoreURL, open_store
from shade.store.base import Store
from shade.store.disk import disk_url
from shade.types import BadSample, ClosedByWith, FormName, PolicyName

logger = logging.getLogger("shade.data")

_NO_STEP = "no step of the transforms can be cached"
_STATS = (
    *("samples", "hits", "misses", "disk_hits", "origin_reads", "origin_bytes", "cache_bytes", "store_errors"),
    *("disk_errors", "bad_samples"),
)


class ShadeDataset(Dataset[Any], ClosedByWith):
    """Wraps a map-style data set.

    Args:
        dataset: ImageFolder-like data sets are cached as their files' bytes; any other as its encoded items.
        cache: Store URL, an open `Store`, or None for no cache at all (or none but ``disk``).
        disk: A folder of this machine's disk and the bytes that may lie there, such as
            ``"/nvme/shade?capacity=500GiB"``. It is asked before the origin, survives the job, and may be used by
            several jobs at once. None: no disk.
        working_set_fraction: Capacity as a fraction of the data set's bytes in the store, in (0, 1]. A ``capacity``
            in the URL (``?capacity=8GiB``) takes precedence.
        policy: Cache policy by name; None lets the sampler choose the one that suits its mode.
        transform: Applied to the sample after decoding, never cached.
        target_transform: Applied to the target.
        prefix: Applied to the data set's sample before ``transform``; its result is cached, with what comes with the
            sample. Returns what the built-in codec or ``encode`` knows, and always the same for the same sample.
        prefix_steps: Instead of ``prefix``: so many first steps of ``transform``, a Compose, or of the transform of a
            data set of image files, are cached.
        encode: Item → bytes, for data sets that the built-in codec does not know.
        decode: Bytes → item; without ``encode``: file content → sample, for files that are not images.
        form: The cached format: ``"encoded"``, files and items as they are; ``"decoded"``, image files as pixels;
            ``"auto"``, one of these, or after a step of ``transform`` that is not random, as a forecast from measured
            costs says, the same on all ranks. With a prefix ``"auto"`` decides whether it is cached.
        max_side: With ``form="decoded"``: every picture is made no larger than this before all transforms.
        reduced_decode: Pictures that are at least twice as large as what the transforms make of them are decoded at a
            half, a quarter or an eighth of their size: faster, and other pixels by a few levels.
        on_bad_sample: ``"stop"`` raises with the sample's path; ``"skip"`` takes the nearest readable sample after it
            instead, the same one on every rank, and counts it.
        version: A word for the content of a data set whose items are cached. Without it, the name in the store follows
            the items in memory and the files that the data set names, and some hits are compared with the origin; with
            it, the word alone decides, so change it when the content changes. It also stands for what has no stable
            name in a prefix; what has one stays in the name.
        log: Path of a file to which each access appends a line, ``hitting 17`` or ``miss 17`` with the sample's index;
            None: the launcher's ``train.log`` under ``shade run``, otherwise no file.

    Raises:
        ConfigError: An argument out of range, an unknown scheme or policy, a prefix that is random or has no stable
            name.
        DataError: An empty data set or an unreadable file.
        StoreUnavailableError: A named server does not answer.
        StoreAuthError: A named server refuses the login.
    """

    def __init__(
        self,
        dataset: Any,
        cache: str | Store | None = "local://",
        *,
        disk: str | os.PathLike[str] | None = None,
        working_set_fraction: float = WORKING_SET_FRACTION,
        policy: PolicyName | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        prefix: Callable[[Any], Any] | None = None,
        prefix_steps: int | None = None,
        encode: Callable[[Any], bytes] | None = None,
        decode: Callable[[Any], Any] | None = None,
        form: FormName = "encoded",
        max_side: int | None = None,
        reduced_decode: bool = False,
        on_bad_sample: BadSample = "stop",
        version: str | None = None,
        log: str | os.PathLike[str] | None = None,
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
        _check_not_wrapped(dataset)
        below = None if disk is None else disk_url(disk)
        if cache is None and below is not None:
            cache, below = str(below), None
        self._name = type(dataset).__name__
        skips_bad = on_bad_sample == "skip"
        files = files_of(dataset, encode, decode)
        own = None if files is None else files.own("transform")
        parts = split(prefix, prefix_steps, own, transform)
        choices: dict[str, PrefixSplit] = {}
        if form == "auto" and cache is not None:
            may_fuse = files is not None and decode is None
            choices = {"prefix": parts} if parts.prefix else candidates(own, transform, may_fuse=may_fuse)
        is_prefixed = bool(parts.prefix) and cache is not None and not choices
        self._source: SampleSource = (
            prefixed_source_of(dataset, parts.prefix, encode, decode, version=version, skips_missing=skips_bad)
            if is_prefixed
            else source_of(
                dataset, encode, decode, version=version, skips_missing=skips_bad, is_cached=cache is not None
            )
        )
        self._cached_format = "prefix" if is_prefixed else "encoded"
        has_pictures, has_prefix = self._source.has_pictures, bool(parts.prefix)
        check_cached_format(form, max_side, has_files=has_pictures, has_cache=cache is not None, has_prefix=has_prefix)
        is_before = self._source.cached_format != FORMAT_ENCODED  # the transforms run in the data set's __getitem__
        if is_before and not is_prefixed and cache is not None and innermost_transform(dataset) is not None:
            warnings.warn(
                f"{self._name} applies its own transform before caching, so every epoch sees the same result; pass "
                "transform= to ShadeDataset instead",
                stacklevel=2,
            )
        for name in ("classes", "class_to_idx"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        self.policy = policy
        self._is_auto = form == "auto"
        self.cache: SampleCache | None = None
        self.forecast: FormatForecast | None = None
        """The prediction that chose the cached format; None if there was nothing to choose."""
        if cache is not None:
            if self._source.is_random:
                warnings.warn(
                    f"{self._name} gives another item when it is read again; the cache keeps the first, so every epoch "
                    "sees the same result; move what is random into ShadeDataset(…, transform=…)",
                    stacklevel=2,
                )
            store = open_store(cache) if isinstance(cache, str) else cache
            capacity_bytes = StoreURL.parse(cache).capacity_bytes if isinstance(cache, str) else None
            try:
                disk_bytes = 0 if below is None else below.capacity_bytes or 0
                wishes = FormatWishes(form, max_side, choices, version, dataset, encode, decode, disk_bytes)
                self.cache = self._open_cache(store, working_set_fraction, capacity_bytes, wishes)
                if below is not None:
                    self._open_disk(self.cache, below)
            except BaseException:
                if isinstance(cache, str):
                    store.close()
                raise
        if self._cached_format in choices:
            is_prefixed, parts = True, choices[self._cached_format]
        is_before |= is_prefixed
        self._transforms = TransformChain(
            None if is_before and cache is None else dataset,
            parts.transform,
            target_transform,
            before_cache=is_before,
            may_fuse=has_pictures and not is_prefixed,
            reduced_decode=reduced_decode,
            first=parts.rest if is_prefixed else parts.uncached,
            files=files,
        )
        self._reader = BatchReader(
            self._source,
            self.cache,
            self._transforms,
            skips_bad=skips_bad,
            access_log=os.environ.get(ACCESS_LOG) if log is None else os.fspath(log),
        )
        self._readers = ReaderPool(self._reader)
        self._pid = os.getpid()

    def _open_cache(
        self,
        store: Store,
        working_set_fraction: float,
        capacity_bytes: int | None,
        wishes: FormatWishes,
    ) -> SampleCache:
        store.wait_ready()
        source = self._source
        cache = SampleCache(store, source.fingerprint, source.payload_bytes_N, 0, source.cached_format)
        total = int(cache.size_bytes_N.sum())
        capacity_bytes = int(working_set_fraction * total) if capacity_bytes is None else capacity_bytes
        num_probes, probe_bytes = source.num_probes, source.probe_bytes
        if wishes.prefixes or (wishes.form != "encoded" and isinstance(source, FileSource) and source.has_pictures):
            choice = FormatChoice(source, wishes, total, capacity_bytes)
            self.forecast, self._cached_format = choice.forecast, choice.used
            num_probes, probe_bytes = num_probes + choice.num_reads, probe_bytes + choice.num_bytes
            if choice.source is not source:
                self._source = source = choice.source
                cache = SampleCache(store, source.fingerprint, source.payload_bytes_N, 0, source.cached_format)
        if wishes.form == "auto" and self.forecast is None:
            logger.info("form='auto' chose %r: %s", self._cached_format, _NO_STEP)
        cache.capacity_bytes = capacity_bytes
        store.enter(source.fingerprint, min(capacity_bytes, int(cache.size_bytes_N.sum())), held_bytes_of(cache))
        if num_probes:
            cache.count_origin(num_probes, probe_bytes)
        return cache

    def _open_disk(self, cache: SampleCache, url: StoreURL) -> None:
        store, source = open_store(url), self._source
        try:
            store.ping()
            capacity_bytes = url.capacity_bytes or 0
            cache.disk = SampleCache(
                store, source.fingerprint, source.payload_bytes_N, capacity_bytes, source.cached_format
            )
            store.enter(source.fingerprint, min(capacity_bytes, int(cache.disk.size_bytes_N.sum())))
        except BaseException:
            store.close()
            raise

    def __repr__(self) -> str:
        """Returns what is cached where, and the hits and misses so far."""
        parts = [self._name, f"num_samples={len(self)}"]
        if self.cache is None:
            return f"ShadeDataset({', '.join([*parts, 'cache=None'])})"
        counts = self.cache.residency.totals()
        policy = repr(self.policy) if self.cache.policy is None else type(self.cache.policy).__name__
        parts += [
            f"store={self.cache.store.url!r}",
            f"capacity={self.cache.capacity_bytes / 2**20:.1f} MiB",
            *([] if self.cache.disk is None else [f"disk={self.cache.disk.store.url!r}"]),
            f"form={self._cached_format!r}{self._why_format}",
            f"policy={policy}",
            f"hits={counts['hits']}",
            f"misses={counts['misses']}",
        ]
        return f"ShadeDataset({', '.join(parts)})"

    def stats(self) -> dict[str, float]:
        """Returns what this rank has read so far, over all its worker processes, as numbers that any logger takes.

        Returns:
            ``samples``, ``hits``, ``misses``, ``hit_ratio`` (hits / samples), ``disk_hits`` (hits that were read from
            the disk), ``origin_reads``, ``origin_bytes``, ``cache_bytes``, ``store_errors``, ``disk_errors`` and
            ``bad_samples`` since the data set was made; and each again with the prefix ``epoch_``, since a
            `ShadeSampler` began the present epoch. Where the cached format was predicted: ``is_decoded``, and
            ``predicted_gain``, how many times as fast the best other format loads as the encoded one. Empty without a
            cache, which counts.
        """
        if self.cache is None:
            return {}
        total = self.cache.residency.totals()
        stats: dict[str, float] = {}
        for prefix, counts in (("", total), ("epoch_", total - self.cache.at_epoch_begin)):
            stats |= {prefix + name: counts[name] for name in _STATS}
            stats[f"{prefix}hit_ratio"] = counts["hits"] / max(1, counts["samples"])
        if self.forecast is not None:
            stats |= {"is_decoded": float(self._cached_format == "decoded"), "predicted_gain": self.forecast.gain}
        return stats

    @property
    def _why_format(self) -> str:
        """Returns, in brackets, why ``form="auto"`` chose this format; empty where the user chose."""
        if not self._is_auto:
            return ""
        reason = _NO_STEP if self.forecast is None else self.forecast.reason
        return f" (auto: {reason})"

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """Returns what is applied to the sample after decoding, and after the prefix; assign it between epochs."""
        return self._transforms.transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        self._transforms.transform = transform
        self._transforms.refresh()

    @property
    def targets(self) -> list[int]:
        """Returns the classes of the samples, where the wrapped data set names them; raises AttributeError if not."""
        if self._source.target_N is None:
            raise AttributeError(f"{self._name} names no class for each sample")
        return [int(target) for target in self._source.target_N]

    @property
    def source(self) -> SampleSource:
        """Returns the source of the samples, which knows their names, sizes and targets."""
        return self._source

    @property
    def generators(self) -> BatchGenerators:
        """Returns the generators of the random transforms; ``generators.follow(seed, epoch)`` sets the epoch."""
        return self._reader.generators

    @property
    def is_fused(self) -> bool:
        """Returns whether the transforms run in one pass over the pixels; otherwise they run as written."""
        return self._reader.is_fused

    def __len__(self) -> int:
        return len(self._source.payload_bytes_N)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns one batch; the DataLoader calls it.

        Args:
            indices: Sample indices, 0 ≤ index < N; a `SeededBatch` has the seed of their random draws, and says whether
                the batch may come collated.

        Returns:
            ``(sample, target, index)`` of each, in order.

        Raises:
            BadSampleError: A sample cannot be read or decoded and ``on_bad_sample`` is ``"stop"``.
        """
        # A whole batch costs one round to the cache and one parallel round to the origin, instead of one of each a
        # sample.
        seed, collates = getattr(indices, "seed", 0), getattr(indices, "collates", False)
        indices = self._reader.checked_many(indices)
        if self.cache is not None and not self.cache.store.shared and self._pid != os.getpid():
            raise ConfigError.of("a store that processes share", self.cache.store.url, "use local://, or num_workers=0")
        worker = get_worker_info()
        self._transforms.refresh()
        return self._readers.read(indices, seed, -1 if worker is None else worker.id, collates=collates)

    def check_forecast(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Compares the prediction that chose the cached format with what happened.

        Args:
            counts: One epoch's ledger, as its ``as_dict`` returns it.

        Returns:
            A row of metrics; empty if there was nothing to choose.
        """
        return {} if self.forecast is None else self.forecast.check(self._cached_format, counts)

    def close(self) -> None:
        """Closes the cache (and a private server) and the access log. Safe to call twice."""
        self._readers.close()
        if self.cache is not None:
            self.cache.close()


def _check_not_wrapped(dataset: Any) -> None:
    # Each sample would come with two indices.
    outer, inside = type(dataset).__name__, [dataset]
    while inside:
        found = inside.pop()
        if isinstance(found, ShadeDataset):
            raise ConfigError.of(
                "a data set that is not wrapped yet",
                f"a ShadeDataset in a {outer}" if found is not dataset else outer,
                "wrap only the outermost data set, the one that the loader reads",
            )
        if isinstance(found, Subset):
            inside.append(found.dataset)
        elif isinstance(found, ConcatDataset):
            inside.extend(found.datasets)


def reader_of(dataset: ShadeDataset) -> BatchReader:
    """Returns what reads, decodes and transforms the batches of a data set, for a loader that does it in threads."""
    return dataset._reader
