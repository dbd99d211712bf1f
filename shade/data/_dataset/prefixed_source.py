"""PrefixedSource: keeps the results of a `Prefix` in the cache, each with what comes with its sample.

Files are read as `FileSource` reads them, a batch at once, and so are the samples of a data set that brings its source.
Of others items are read one by one, and need not be of a kind that a codec knows, because only results are encoded.

Invariant: a sample is what the prefix makes of the data set's item, whether it is cached or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import xxhash
from PIL import Image
from typing_extensions import override

from shade.cache.entry import FORMAT_ITEM
from shade.data._dataset.prefix import Prefix, Step
from shade.data._dataset.prefix_probe import Probed, probe
from shade.data._source import item_codec
from shade.data._source.content import content_digest
from shade.data._source.probe_worker import in_probe_worker
from shade.data._source.rows_in_memory import RowsInMemory
from shade.data._source.source import (
    CountOrigin,
    FileSource,
    ItemSource,
    PreparedSource,
    SampleSource,
    class_targets,
    read_nearest,
)
from shade.data._source.source_choice import file_source_of, own_source_of
from shade.errors import BadSampleError


class PrefixFailedError(Exception):
    """Carries what a prefix raised from where samples are read to where they are decoded."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class PrefixedSource(ItemSource, PreparedSource):
    """Samples that have passed a prefix.

    ``source`` reads the samples that pass, such as files or shards. Without it they are the data set's items, one by
    one. ``probed`` is what the prefix's probe found, if it was probed.

    Raises ConfigError for a prefix that is random or has no stable name.
    """

    cached_format = FORMAT_ITEM
    has_pictures = is_random = False
    prepares_all = True

    def __init__(
        self,
        dataset: Any,
        source: SampleSource | None,
        prefix: Prefix,
        encode: Callable[[Any], bytes],
        decode_item: Callable[[Any], Any],
        version: str | None,
        probed: Probed | None = None,
    ) -> None:
        self._prefix = prefix
        self._encode, self._decode_item = encode, decode_item
        self._before, self._dataset = source, dataset if source is None else None
        self._rows = RowsInMemory(dataset) if version is None and source is None else None
        self._files = files = source if isinstance(source, FileSource) else None
        self.has_encoded_items = files is None and decode_item is item_codec.decode
        num_samples = len(dataset) if source is None else len(source.payload_bytes_N)
        # Before the first read, after which a data set may hold other things in memory.
        content = content_digest(dataset, version) if source is None else source.fingerprint
        self.num_probes = 0 if self._before is None else self._before.num_probes
        self.probe_bytes = 0 if self._before is None else self._before.probe_bytes
        if probed is None:
            work = partial(self._probe_prefix, num_samples, version)
            probed, self.num_probes, self.probe_bytes = in_probe_worker(work, dataset)
        self.fingerprint = xxhash.xxh3_64_hexdigest(f"{content} {probed.fingerprint}".encode())
        # Sizes of results are not known before they are made, so the largest probed one stands for all.
        self.payload_bytes_N = np.full(num_samples, max(map(len, probed.payloads)), dtype=np.int64)
        self.compares_hits = version is None
        self.revision = None if source is None else source.revision
        targets = getattr(dataset, "targets", None)
        self.target_N = class_targets(targets, num_samples) if files is None else files.target_N

    @property
    def shards(self) -> Any:
        """Returns the `shade.Shards` that it reads; None for other data sets."""
        return getattr(self._before, "shards", None)

    def _probe_prefix(self, num_samples: int, version: str | None) -> tuple[Probed, int, int]:
        probed = probe(self._prefix, self._probed_item, self._encoded, num_samples, version)
        return probed, self.num_probes, self.probe_bytes

    def _probed_item(self, index: int) -> tuple[Any, ...]:
        (item,) = self.read_many([index], self._count_probe)
        if isinstance(item, Exception):
            raise item
        return item  # type: ignore[no-any-return]

    def _count_probe(self, num_reads: int, num_bytes: int) -> None:
        self.num_probes += num_reads
        self.probe_bytes += num_bytes

    @override
    def rest_of(self, index: int) -> tuple[Any, ...]:
        return () if self._files is None else self._files.rest_of(index)

    @override
    def name_of(self, index: int) -> str:
        return super().name_of(index) if self._before is None else self._before.name_of(index)

    @override
    def changed_among(self, indices: list[int]) -> set[int]:
        return super().changed_among(indices) if self._before is None else self._before.changed_among(indices)

    @override
    def read_many(self, indices: list[int], count: CountOrigin) -> list[Any]:
        """Reads items before the prefix, as tuples; `prepared` passes and encodes them."""
        if self._before is not None:
            return [*map(self._decoded, indices, read_nearest(self._before, indices, count)[0])]
        items = [*map(self._checked, indices, self._items(indices))]
        read = [item for item in items if not isinstance(item, Exception)]
        count(len(read), sum(map(_num_bytes, read)))
        return items

    def _decoded(self, index: int, payload: Any) -> Any:
        assert self._before is not None
        try:
            item = self._before.decode(index, payload)
        except BadSampleError as error:
            return error
        # A file's class is known without a read, and so is not cached.
        return item if self._files is None else item[:1]

    def _checked(self, index: int, item: Any) -> Any:
        if isinstance(item, Exception):
            return item
        self._check_item(index, item)
        return item if isinstance(item, tuple) else (item,)

    @override
    def prepared(self, index: int, payload: Any) -> Any:
        if isinstance(payload, Exception):
            return payload
        try:
            result = self._prefix(payload[0])
        except Exception as error:  # noqa: BLE001 - the user's code; `decode` raises it, with the sample's name
            return PrefixFailedError(error)
        return self._encoded(index, (result, *payload[1:]))

    @override
    def decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        if isinstance(payload, tuple):
            payload = self.prepared(index, payload)
        if isinstance(payload, PrefixFailedError):
            if hasattr(payload.error, "add_note"):  # Python 3.11
                payload.error.add_note(f"while {self._prefix} processed {self.name_of(index)}")
            raise payload.error
        if isinstance(payload, BadSampleError):
            raise payload
        return *super().decode(index, payload), *self.rest_of(index)

    @override
    def close(self) -> None:
        if self._before is not None:
            self._before.close()


def _num_bytes(value: Any) -> int:
    """Returns about how many bytes a value holds."""
    if isinstance(value, (tuple, list)):
        return sum(map(_num_bytes, value))
    if isinstance(value, dict):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, Image.Image):
        return value.width * value.height * len(value.getbands())
    if isinstance(value, (str, bytes)):
        return len(value)
    return int(getattr(value, "nbytes", 8))


def prefixed_source_of(
    dataset: Any,
    prefix: Sequence[Step],
    encode: Callable[[Any], bytes] | None,
    decode: Callable[[Any], Any] | None,
    *,
    version: str | None,
    skips_missing: bool = False,
    source: SampleSource | None = None,
    probed: Probed | None = None,
) -> PrefixedSource:
    """Returns the source that caches what a prefix makes of a data set's samples.

    ``source`` has the samples before the prefix, if there is one already. Other arguments and errors are as for
    `shade.data._source.source_choice.source_of`, and as for `PrefixedSource`.
    """
    if source is None:
        files = file_source_of(dataset, encode, decode, skips_missing=skips_missing)
        source = files or own_source_of(dataset, None, None)
    decode_item = item_codec.decode if isinstance(source, FileSource) or decode is None else decode
    return PrefixedSource(dataset, source, Prefix(prefix), encode or item_codec.encode, decode_item, version, probed)
