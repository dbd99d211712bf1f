"""Sources of samples: a data set's files as bytes, or its items through a codec.

`FileSource` is for ImageFolder-like data sets; the payload is the file, unchanged. `ItemSource` is for any other; the
payload is the encoded item. Only the source touches the origin, and it counts exactly what it reads.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from typing_extensions import override

from shade.cache.entry import FORMAT_ENCODED, FORMAT_ITEM
from shade.data._decode.jpeg import decode_rgb
from shade.data._origin.hub import commits_of, is_hub, revision_of
from shade.data._origin.origin import FileOrigin, Origin
from shade.data._origin.url_origin import Entry, UrlOrigin, describe_many, is_url, root_of
from shade.data._source import item_codec, item_columns
from shade.data._source.content import STAT_THREADS, ContentDigest, has_fingerprint, kind_of, size_and_time
from shade.data._source.probe_worker import in_probe_worker
from shade.data._source.rows_in_memory import RowsInMemory
from shade.data._transforms.randomness import kept_generators
from shade.errors import BadSampleError, ConfigError, DataError, shown_place, without_login

CountOrigin = Callable[[int, int], None]
"""Called with (reads, bytes) after each read of the origin."""


def not_counted(num_reads: int, num_bytes: int) -> None:
    """Counts nothing: a `CountOrigin` for where there is no ledger."""


def checked_index(index: int, num_samples: int) -> int:
    """Returns an index in [0, N): negative ones count from the end.

    Raises IndexError for others, and TypeError for what is no index.
    """
    index = operator.index(index)
    if not -num_samples <= index < num_samples:
        raise IndexError(f"expected a sample index below {num_samples}, got {index}")
    return index % num_samples


_VALUES = (int, float, str, bytes, type(None))
"""A list of these alone is one value, such as tokens."""
_COMPARED_AT_ONCE = 1 << 16
"""The samples of a list that are looked through in each batch; of a longer one as many on average."""
_PROBES = 32
_PROBES_AGAIN = 16
_NOTICEABLE_SECONDS = 1e-4
logger = logging.getLogger("shade.data")


class SampleSource(Protocol):
    """What `ShadeDataset` needs to know of the data set that it wraps."""

    cached_format: int
    fingerprint: str
    payload_bytes_N: npt.NDArray[np.int64]
    target_N: npt.NDArray[np.int64] | None
    has_pictures: bool
    """Whether a payload is an image file, or a picture of `_decode.cached_format`, whose RGB pixels are the sample."""
    num_probes: int
    """Reads of the origin that were needed to learn the sizes."""
    probe_bytes: int
    """Bytes that those reads returned."""
    compares_hits: bool
    """Whether the fingerprint may miss a change of the content, so that some hits are compared with the origin."""
    is_random: bool
    """Whether reading an item twice gave two results."""
    has_encoded_items: bool
    """Whether a payload in the cache is all of a sample, encoded by `item_codec`."""
    revision: str | None = None
    """Repositories of the Hub and tables, as they are read (`revision_of`): other ranks, and the run that resumes, have
    to read the same."""

    def read_many(self, indices: list[int], count: CountOrigin) -> list[Any]:
        """Reads payloads in order, with an exception object in place of one that could not be read."""
        ...

    def decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        """Returns the item as a tuple, before the transforms of `ShadeDataset`. Raises `BadSampleError`."""
        ...

    @property
    def num_readable(self) -> int:
        """Returns how many samples can be read. Those of a stream that is being recorded become more, and until its end
        is known, ``payload_bytes_N`` raises TypeError."""
        return len(self.payload_bytes_N)

    def rest_of(self, index: int) -> tuple[Any, ...]:
        """Returns what comes with the sample, if it ``has_pictures``; else raises, because an item is not known before
        it is decoded."""
        raise IndexError(f"expected no question about {self.name_of(index)} before it is decoded")

    def name_of(self, index: int) -> str:
        """Returns the sample's name in an error: its path, if it has one."""
        ...

    def changed_among(self, indices: list[int]) -> set[int]:
        """Returns those samples of a batch whose items may be others than when the data set was wrapped, because what
        it holds in memory for them has changed. Each batch asks once, and a source takes in what needs no read."""
        del indices
        return set()

    def close(self) -> None:
        """Ends the source's threads, if it has any. Safe to call twice."""
        ...


class PreparedSource(SampleSource):
    """A source that makes more of a payload before it goes into the cache."""

    prepares_all: bool
    """Whether samples that do not stay in the cache are prepared as well."""

    @abstractmethod
    def prepared(self, index: int, payload: Any) -> Any:
        """Returns a payload of `read_many` as it goes into the cache; the payload itself if that is not possible, so
        that `decode` raises the error."""
        ...


class NearSource(SampleSource):
    """A source that keeps samples near, such as on this machine's disk, and reads them there first."""

    @abstractmethod
    def read_near(self, indices: list[int]) -> dict[int, Any]:
        """Returns the payloads of those samples that are near."""
        ...


class FileSource(SampleSource):
    """Files and targets of an ImageFolder-like data set: (path or URL, target) by sample index.

    Of files behind URLs, ``entries`` are the server's descriptions, if the caller has them, and ``options`` are
    fsspec's. With ``skips_missing`` a file that is not there is a bad sample, not an error. ``changed`` returns the
    samples if they are others than at its last call: other targets are taken in, as they are in no cache.
    """

    cached_format = FORMAT_ENCODED
    num_probes = probe_bytes = 0
    compares_hits = is_random = has_encoded_items = False

    def __init__(
        self,
        samples: Sequence[tuple[str, Any]],
        decode_bytes: Callable[[bytes], Any],
        entries: Sequence[Entry] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        skips_missing: bool = False,
        changed: Callable[[], Sequence[tuple[str, Any]] | None] | None = None,
    ) -> None:
        if not samples:
            raise DataError.of("at least one sample", 0, "check the path of the data set")
        self._decode, self._changed, self._here = decode_bytes, changed, os.getcwd()
        self._looked: tuple[int, int] = os.getpid(), 0
        self.has_pictures = decode_bytes is decode_rgb
        digest = xxhash.xxh3_64()
        if is_url(samples[0][0]):
            paths = [path for path, _ in samples]
            found = describe_many(paths, options or {}, skips_missing=skips_missing) if entries is None else entries
            self._root = root_of(paths)
            self._origin: Origin = UrlOrigin(options)
            self.payload_bytes_N = np.array([entry.num_bytes for entry in found], dtype=np.int64)
            state = self.payload_bytes_N.tobytes() + "\n".join(entry.version for entry in found).encode()
        else:
            paths = self._paths_of(samples)
            folder = os.path.commonpath({os.path.dirname(path) for path in paths})
            self._root, self._origin = os.path.join(folder, ""), FileOrigin()
            with ThreadPoolExecutor(STAT_THREADS) as pool:
                stats = list(pool.map(partial(size_and_time, skips_missing=skips_missing), paths, chunksize=256))
            self.payload_bytes_N = np.array([size for size, _ in stats], dtype=np.int64)
            state = np.array(stats, dtype=np.int64).tobytes()
        if not self.payload_bytes_N.any():
            raise DataError.of("at least one file with content", paths[0], "restore the data set or scan it again")
        # One array instead of N Python objects: workers read it without touching reference counts, so fork's
        # copy-on-write pages stay shared.
        relative = [os.fsencode(path[len(self._root) :]) for path in paths]
        self._end_N = np.cumsum([len(name) for name in relative])
        self._names = np.frombuffer(b"".join(relative), dtype=np.uint8)
        self._take_targets(samples)
        digest.update(self._names.tobytes())
        digest.update(self._end_N.tobytes())
        digest.update(state)
        self.fingerprint = digest.hexdigest()
        self.revision = revision_of([commits_of(paths)], self.fingerprint) if is_hub(paths[0]) else None

    def __getstate__(self) -> dict[str, Any]:
        self._look()
        return self.__dict__ | {"_changed": None}

    def _paths_of(self, samples: Sequence[tuple[str, Any]]) -> list[str]:
        return [os.path.normpath(os.path.join(self._here, path)) for path, _ in samples]

    def _take_targets(self, samples: Sequence[tuple[str, Any]]) -> None:
        targets = [target for _, target in samples]
        self.target_N = class_targets(targets, len(targets))
        is_plain = all(type(target) is int for target in targets) and self.target_N is not None
        self._targets = None if is_plain else targets

    @override
    def changed_among(self, indices: list[int]) -> set[int]:
        pid, num_batches = self._looked
        is_due = pid != os.getpid() or num_batches >= len(self.payload_bytes_N) // _COMPARED_AT_ONCE
        self._looked = os.getpid(), 0 if is_due else num_batches + 1
        if is_due:
            self._look()
        return set()

    def _look(self) -> None:
        """Takes in other targets; raises ConfigError for other files."""
        samples = None if self._changed is None else self._changed()
        if samples is None:
            return
        paths = [path for path, _ in samples] if is_url(self._root) else self._paths_of(samples)
        if len(paths) != len(self._end_N) or any(self.name_of(index) != path for index, path in enumerate(paths)):
            raise ConfigError.of(
                "the files that the data set had when it was wrapped, with other targets at most",
                "other files",
                "wrap the data set again: ShadeDataset(data, cache=…)",
            )
        self._take_targets(samples)

    @override
    def rest_of(self, index: int) -> tuple[Any, ...]:
        if self._targets is not None:
            return (self._targets[index],)
        assert self.target_N is not None
        return (int(self.target_N[index]),)

    def name_of(self, index: int) -> str:
        """Returns the sample's path or URL."""
        start = int(self._end_N[index - 1]) if index else 0
        return self._root + os.fsdecode(self._names[start : int(self._end_N[index])].tobytes())

    @override
    def read_many(self, indices: list[int], count: CountOrigin) -> list[Any]:
        sizes = self.payload_bytes_N[indices].tolist()
        contents = self._origin.read_many([self.name_of(index) for index in indices], sizes)
        read = [content for content in contents if not isinstance(content, OSError)]
        count(len(read), sum(map(len, read)))
        return contents

    @override
    def decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        try:
            if isinstance(payload, Exception):
                raise payload
            sample = self._decode(payload)
        except Exception as error:
            name = self.name_of(index)
            raise BadSampleError(
                f"expected a readable image at {shown_place(name)}, got {without_login(str(error), name)}; "
                "replace or remove the file, or pass on_bad_sample='skip' (--on-bad-sample skip)"
            ) from error
        return sample, *self.rest_of(index)

    @override
    def close(self) -> None:
        self._origin.close()


_has_said = False


def _say_once_if_slower(name: str, read_seconds: float, encode_seconds: float) -> None:
    global _has_said
    if _has_said or encode_seconds < max(read_seconds, _NOTICEABLE_SECONDS):
        return
    _has_said = True
    logger.info(
        "a sample of %s takes %.2f ms to read and %.2f ms to encode for the cache; with cache=None it is only read",
        *(name, 1e3 * read_seconds, 1e3 * encode_seconds),
    )


class ItemSource(SampleSource):
    """Items of any map-style data set.

    The fingerprint covers the type, the length, some items, and what `ContentDigest` finds. A ``version`` takes the
    place of items and digest, and no hit is compared with the origin. Items that are not cached stay as they are.
    """

    cached_format = FORMAT_ITEM
    has_pictures = False

    def __init__(
        self,
        dataset: Any,
        encode: Callable[[Any], bytes] = item_codec.encode,
        decode_item: Callable[[Any], Any] = item_codec.decode,
        version: str | None = None,
        *,
        is_cached: bool = True,
    ) -> None:
        digest = xxhash.xxh3_64(kind_of(dataset).encode())
        self._dataset, self._encode, self._decode_item = dataset, encode, decode_item
        self.has_encoded_items = decode_item is item_codec.decode
        # torch's own reads hand out what lies in memory.
        together = getattr(type(dataset), "__getitems__", None)
        self._makes_items = not getattr(together, "__module__", "torch.").startswith("torch.")
        self._is_kept = is_cached or encode is not item_codec.encode or decode_item is not item_codec.decode
        num_samples = len(dataset)
        # Else the fingerprint covers every item, or none.
        is_sampled = version is None and num_samples > _PROBES
        if is_sampled:
            # Before the first read, after which a data set may hold other things in memory.
            digest.update(ContentDigest(dataset).hexdigest().encode())
        rows = RowsInMemory(dataset)
        # Sizes are not known before an item is made; a few evenly spaced ones stand for all, the same on every rank.
        probes = sorted({int(i) for i in np.linspace(0, num_samples - 1, min(_PROBES, num_samples))})
        payloads, again, seconds = in_probe_worker(partial(self._probe_twice, probes), dataset)
        if self._is_kept:
            _say_once_if_slower(type(dataset).__name__, *(each / len(probes) for each in seconds))
        self.is_random = not set(again) <= set(payloads)
        self._rows = None if version is not None or self.is_random or not is_cached else rows
        self.compares_hits = is_sampled and not self.is_random and not has_fingerprint(dataset)
        self.num_probes, self.probe_bytes = len(payloads + again), sum(map(len, payloads + again))
        self.payload_bytes_N = np.full(num_samples, max(map(len, payloads), default=0), dtype=np.int64)
        for content in payloads if version is None else [version.encode()]:
            digest.update(content)
        self.fingerprint = digest.hexdigest()
        self.target_N = class_targets(getattr(dataset, "targets", None), num_samples)

    def _probe_twice(self, probes: list[int]) -> tuple[list[bytes], list[bytes], tuple[float, float]]:
        # The script's random numbers stay those that it has without shade.
        with kept_generators():
            payloads, seconds = self._probe(probes)
            again, _ = self._probe(probes[:: max(1, len(probes) // _PROBES_AGAIN)], may_fail=True)
            return payloads, again, seconds

    def _probe(self, indices: list[int], *, may_fail: bool = False) -> tuple[list[bytes], tuple[float, float]]:
        # `on_bad_sample` decides about items that cannot be read when their turn comes.
        payloads = list[bytes]()
        failure: Exception | None = None
        begun = time.perf_counter()
        items = self._items(indices)
        read = time.perf_counter()
        for index, item in zip(indices, items, strict=True):
            if isinstance(item, Exception):
                failure = item
            elif self._is_kept:
                payloads.append(self._encoded(index, item))
            else:
                self._check_item(index, item)
                with suppress(ConfigError):
                    payloads.append(self._encoded(index, item))
        seconds = read - begun, time.perf_counter() - read  # to read the items, and to encode them
        # Without a cache samples may have other keys than numbers.
        may_fail |= not self._is_kept and (failure is None or isinstance(failure, (TypeError, KeyError)))
        if not payloads and not may_fail:
            raise DataError.of(
                "a readable sample", f"{type(failure).__name__}: {failure}", f"all of {len(indices)} probed are not"
            ) from failure
        return payloads, seconds

    def _items(self, indices: list[int]) -> list[Any]:
        """Returns items in order, with an exception in place of one that cannot be read."""
        together = getattr(self._dataset, "__getitems__", None)
        if together and (len(indices) > 1 or isinstance(indices[0], int)):
            # If it fails, the samples are read one by one, which shows the bad one.
            with suppress(Exception):
                items = together(indices)
                if isinstance(items, (list, tuple)) and len(items) == len(indices):
                    return list(items)
        return [self._item(index) for index in indices]

    def _item(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:  # noqa: BLE001 - the user's code; it comes out in decode, with the sample's name
            return error

    def _encoded(self, index: int, item: Any) -> bytes:
        # Raises ConfigError, because the encoder's failure is no bad sample.
        self._check_item(index, item)
        try:
            return self._encode(item)
        except Exception as error:
            cause = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}; mend encode="
            raise ConfigError(f"cannot encode {self.name_of(index)}: {cause}") from error

    def _all_encoded(self, indices: list[int], items: list[Any]) -> list[Any]:
        """Returns the items' bytes, with the exceptions as they are."""
        if self._encode is item_codec.encode and not any(isinstance(item, Exception) for item in items):
            for index, item in zip(indices, items, strict=True):
                self._check_item(index, item)
            # If it fails, the samples are encoded one by one, which shows the bad one.
            with suppress(Exception):
                return item_columns.encode_many(items)
        return [
            item if isinstance(item, Exception) else self._encoded(index, item)
            for index, item in zip(indices, items, strict=True)
        ]

    def _check_item(self, index: int, item: Any) -> None:
        """Raises ConfigError for an item of several parts that has no place for the index."""
        if isinstance(item, list) and not all(isinstance(part, _VALUES) for part in item):
            kinds = ", ".join(type(part).__name__ for part in item[:4])
            raise ConfigError.of(
                f"{self.name_of(index)} as a tuple, such as (image, label), which the index can be added to",
                f"a list of {kinds}",
                "return a tuple: (image, label); or ([…],) if the list is one value",
            )

    def name_of(self, index: int) -> str:
        """Returns the sample's index, because it has no path."""
        return f"index {index} of {type(self._dataset).__name__}"

    @override
    def changed_among(self, indices: list[int]) -> set[int]:
        return set() if self._rows is None else self._rows.changed_among(indices)

    @override
    def read_many(self, indices: list[int], count: CountOrigin) -> list[Any]:
        items = self._items(indices)
        if not self._is_kept:
            return [item if isinstance(item, Exception) else _Uncached(item) for item in items]
        payloads = self._all_encoded(indices, items)
        if self._makes_items and self.has_encoded_items:
            pairs = zip(payloads, items, strict=True)
            payloads = [each if isinstance(each, Exception) else FreshItem.of(each, item) for each, item in pairs]
        read = [payload for payload in payloads if not isinstance(payload, Exception)]
        count(len(read), sum(map(len, read)))
        return payloads

    @override
    def decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        if isinstance(payload, _Uncached):
            self._check_item(index, payload.item)
        try:
            if isinstance(payload, Exception):
                raise payload
            item = payload.item if isinstance(payload, _Uncached) else self._decode_item(payload)
        except Exception as error:
            raise BadSampleError(
                f"expected {self.name_of(index)} to be readable, got {type(error).__name__}: {error}; "
                "mend the data set, or pass on_bad_sample='skip'"
            ) from error
        return item if isinstance(item, tuple) else (item,)

    @override
    def close(self) -> None:
        pass


class FreshItem(bytes):
    """An encoded item of a data set that makes the items of each batch anew, with the item."""

    item: Any

    @classmethod
    def of(cls, payload: bytes, item: Any) -> FreshItem:
        """Returns the payload with its item."""
        found = cls(payload)
        found.item = item
        return found


class _Uncached(NamedTuple):
    """An item that goes into no cache."""

    item: Any


def class_targets(targets: Any, num_samples: int) -> npt.NDArray[np.int64] | None:
    """Returns a data set's ``targets`` if they are the classes of its samples, else None."""
    if isinstance(targets, torch.Tensor):
        targets = targets.tolist()
    if isinstance(targets, list) and len(targets) == num_samples and all(map(_is_class, targets)):
        return np.array(targets, dtype=np.int64)
    return None


def _is_class(target: Any) -> bool:
    return isinstance(target, int) and -(2**63) <= target < 2**63


def read_nearest(source: SampleSource, indices: list[int], count: CountOrigin) -> tuple[list[Any], dict[int, Any]]:
    """Reads payloads in order, those first that are near; returns them, and those that were near by index."""
    near = source.read_near(indices) if isinstance(source, NearSource) else {}
    if not near:
        return source.read_many(indices, count) if indices else [], near
    rest = [index for index in indices if index not in near]
    read = dict(zip(rest, source.read_many(rest, count) if rest else (), strict=True))
    return [near[index] if index in near else read[index] for index in indices], near
