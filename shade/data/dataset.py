"""ShadeDataset: any map-style data set, read through a cache.

It fetches whole batches: the DataLoader hands ``__getitems__`` the indices of one, which costs one round to the cache
and one parallel round to the origin instead of one of each a sample. A sample comes back as
``(sample, target, index)``; the index travels with it so that its loss can be reported under its own name.

Works in the training process and in workers under fork, spawn and forkserver: everything it holds pickles, and
connections are made anew where they are needed. Invariant: samples are those of the wrapped data set, pixel for pixel,
whether the cache is cold, warm, wrong or dead.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from shade.cache.cache import SampleCache
from shade.cache.entry import FORM_ENCODED
from shade.config import ACCESS_LOG
from shade.data.randomness import BatchGenerators
from shade.data.source import Source, source_of
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
        self._source: Source = source_of(dataset, encode, decode)
        self._transforms = self._collect_transforms(dataset, transform, target_transform)
        self._skip_bad = on_bad_sample == "skip"
        self._access_log = os.environ.get(ACCESS_LOG)
        self._log_fd: tuple[int, int] | None = None
        self.generators = BatchGenerators()
        """Sets the random generators before each batch, once `follow` has said which epoch it is."""
        self.policy = policy
        self.cache: SampleCache | None = None
        if isinstance(cache, str):
            store = open_store(cache)
            try:
                self.cache = self._open_cache(store, working_set_fraction, StoreURL.parse(cache).capacity_bytes)
            except BaseException:
                store.close()
                raise
        elif cache is not None:
            self.cache = self._open_cache(cache, working_set_fraction, None)

    def _open_cache(self, store: Store, working_set_fraction: float, capacity_bytes: int | None) -> SampleCache:
        store.ping()
        source = self._source
        cache = SampleCache(store, source.fingerprint, source.payload_bytes_N, 0, source.form)
        total = int(cache.size_bytes_N.sum())
        cache.capacity_bytes = int(working_set_fraction * total) if capacity_bytes is None else capacity_bytes
        if source.num_probes:
            cache.count_origin(source.num_probes, source.probe_bytes)
        return cache

    def _collect_transforms(
        self, dataset: Any, transform: Callable[[Any], Any] | None, target_transform: Callable[[Any], Any] | None
    ) -> tuple[list[Callable[[Any], Any]], list[Callable[[Any], Any]]]:
        """The wrapped data set's own transforms, then ours; the wrapped ones run in its own code for items."""
        own = [getattr(dataset, "transform", None), getattr(dataset, "target_transform", None)]
        if self._source.form != FORM_ENCODED:
            if _innermost_transform(dataset) is not None:
                warnings.warn(
                    f"{type(dataset).__name__} applies its own transform before caching, so every epoch sees the same "
                    "result; pass transform= to ShadeDataset instead",
                    stacklevel=4,
                )
            own = [None, None]
        return [f for f in (own[0], transform) if f], [f for f in (own[1], target_transform) if f]

    @property
    def source(self) -> Source:
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
        indices = [self._checked(index) for index in indices]
        if self.cache is None:
            payloads, hits = self._source.read_many(indices, _not_counted), [False] * len(indices)
        else:
            worker = get_worker_info()
            if worker is not None and not self.cache.store.shared:
                raise ConfigError.of(
                    "a store that DataLoader workers share", self.cache.store.url, "use local://, or num_workers=0"
                )
            self.cache.enter_worker(-1 if worker is None else worker.id)
            count = self.cache.count_origin
            payloads, hits = self.cache.fetch_many(indices, lambda absent: self._source.read_many(absent, count))
        if self._access_log is not None:
            self._log_accesses(indices, hits)
        with self.generators.of(indices):
            return self._finish(indices, payloads)

    def _checked(self, index: int) -> int:
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected a sample index below {len(self)}, got {index}")
        return index % len(self)

    def _finish(self, indices: Sequence[int], payloads: list[Any]) -> list[Any]:
        clock, transforms, target_transforms = time.perf_counter_ns, *self._transforms
        decoding = transforming = 0
        batch = []
        for index, payload in zip(indices, payloads, strict=True):
            begun = clock()
            item = self._decode(index, payload)
            decoded = clock()
            sample, *rest = item
            for transform in transforms:
                sample = transform(sample)
            if rest:
                for transform in target_transforms:
                    rest[0] = transform(rest[0])
            batch.append((sample, *rest, index))
            decoding += decoded - begun
            transforming += clock() - decoded
        if self.cache is not None:
            self.cache.ledger.add(decode_nanoseconds=decoding, transform_nanoseconds=transforming)
        return batch

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


def _innermost_transform(dataset: Any) -> Any:
    """The transform that a data set applies, or a `Subset` of it, or a subset of that."""
    while dataset is not None:
        found = getattr(dataset, "transform", None)
        if found is not None:
            return found
        dataset = getattr(dataset, "dataset", None)
    return None


def _not_counted(num_reads: int, num_bytes: int) -> None:
    """Without a cache there is no ledger."""
