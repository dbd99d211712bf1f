"""DecodedSource: keeps samples decoded in the cache. FormatChoice: measures whether that pays.

`DecodedSource` reads files as `FileSource` does, and decodes those that stay in the cache. The files' headers have the
pictures' sizes, but reading all headers would cost an epoch of slow storage. So sizes are estimated from a few files,
and the true size of an entry is counted when it is written (`shade.cache.admission`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from PIL import Image
from typing_extensions import override

from shade.cache.entry import FORMAT_PICTURE, HEADER_BYTES
from shade.data._dataset import item_codec
from shade.data._dataset.prefix import Prefix, PrefixSplit, random_prefix
from shade.data._dataset.prefix_probe import Probed, probe, probed_indices
from shade.data._dataset.prefixed_source import prefixed_source_of
from shade.data._dataset.source import CountOrigin, FileSource, ItemSource, PreparedSource, SampleSource, read_nearest
from shade.data._decode.cached_format import (
    PROBES,
    FormatCosts,
    FormatForecast,
    PrefixCosts,
    forecast,
    pack_picture,
    packed_bytes,
    picture_of,
    shrunk,
)
from shade.data._decode.jpeg import decode_rgb, jpeg_decoder, size_of
from shade.data._decode.pixels import Box
from shade.data._transforms.randomness import kept_generators
from shade.errors import ConfigError, DataError

logger = logging.getLogger("shade.data")


def decoded(content: Any, max_side: int | None) -> npt.NDArray[np.uint8]:
    """Returns a file's whole picture, (height, width, 3), with no side longer than ``max_side`` (None: as it is).

    Raises what Pillow raises for a file that is no picture.
    """
    size = size_of(content)
    if size is not None and (max_side is None or max(size) <= max_side):
        try:
            box = Box(0, 0, *size)
            return jpeg_decoder()(content, box, 1).cut(box)
        except ValueError:  # Pillow has the last word on damaged files
            pass
    return np.asarray(shrunk(decode_rgb(content), max_side))


class Probe:
    """Measures a few evenly spaced samples, which stand for all. Raises DataError if none of them can be decoded."""

    def __init__(self, source: SampleSource, indices: list[int], max_side: int | None) -> None:
        self._source, self._max_side = source, max_side
        self.num_reads = self.num_bytes = 0
        half = len(indices) // 2
        self.payload_of = self.read(indices[:half])  # here the origin finds out how slow it is
        begun, num_bytes = time.perf_counter(), self.num_bytes
        rest = self.read(indices[half:])
        seconds, num_bytes = time.perf_counter() - begun, self.num_bytes - num_bytes
        wanted_bytes = sum(len(payload) for payload in rest.values() if not isinstance(payload, Exception))
        # Of a block that was read for one sample, the others in it have their share.
        self.read_seconds = seconds / len(rest) * min(1.0, wanted_bytes / max(1, num_bytes))
        """A sample's read, with the usual number of others under way."""
        self.payload_of |= rest
        self._measure_decoding()

    def read(self, indices: list[int]) -> dict[int, Any]:
        """Returns payloads by index, as `SampleSource.read_many` returns them, and counts them."""
        with kept_generators():  # the script's random numbers stay those that it has without shade
            payloads, _ = read_nearest(self._source, indices, self._count)
        return dict(zip(indices, payloads, strict=True))

    def _count(self, num_reads: int, num_bytes: int) -> None:
        self.num_reads += num_reads
        self.num_bytes += num_bytes

    def _measure_decoding(self) -> None:
        seconds, payload_bytes, picture_bytes = [], 0, 0
        for index, payload in self.payload_of.items():
            try:
                begun = time.perf_counter()
                if self._source.has_pictures:
                    height, width, _ = decoded(payload, self._max_side).shape
                    picture_bytes += packed_bytes(height, width)
                else:
                    self._source.decode(index, payload)
            except Exception:  # noqa: BLE001 - no picture, or not read at all; `on_bad_sample` decides when its turn comes
                continue
            seconds.append(time.perf_counter() - begun)
            payload_bytes += len(payload)
        if not seconds:
            what = "pictures" if self._source.has_pictures else "samples"
            raise DataError.of(f"readable {what}", f"{len(self.payload_of)} files that are none", "check the data set")
        self.decode_seconds = float(np.median(seconds))
        """On one core; the median leaves out compiling and loading at the first one."""
        self.growth = picture_bytes / max(1, payload_bytes)
        """How many times larger pictures are than files; 0 for what is no picture."""


class DecodedSource(PreparedSource):
    """Samples that are decoded in the cache, no larger than ``max_side``. The probe estimates the pictures' sizes."""

    cached_format = FORMAT_PICTURE
    has_pictures = True
    compares_hits = is_random = has_encoded_items = False

    def __init__(self, files: FileSource, probe: Probe, max_side: int | None) -> None:
        self._files, self._max_side = files, max_side
        self.prepares_all = max_side is not None  # or some samples would be smaller than others
        self.num_probes, self.probe_bytes = probe.num_reads, probe.num_bytes
        self.fingerprint = f"{files.fingerprint}-{max_side or 'whole'}"
        self.target_N = files.target_N
        self.payload_bytes_N = (files.payload_bytes_N * probe.growth).astype(np.int64)

    @override
    def rest_of(self, index: int) -> tuple[Any, ...]:
        return self._files.rest_of(index)

    @override
    def name_of(self, index: int) -> str:
        return self._files.name_of(index)

    def read_many(self, indices: list[int], count: CountOrigin) -> list[Any]:
        """Reads files as they are; `prepared` turns them into pictures."""
        return self._files.read_many(indices, count)

    @override
    def prepared(self, index: int, payload: Any) -> Any:
        if isinstance(payload, Exception):
            return payload
        try:
            return pack_picture(decoded(payload, self._max_side))
        except Exception:  # noqa: BLE001 - whatever Pillow raises; `decode` raises it again, with the sample's name
            return payload

    @override
    def decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        picture = None if isinstance(payload, Exception) else picture_of(payload)
        if picture is not None:
            return Image.fromarray(picture), *self.rest_of(index)
        image, *rest = self._files.decode(index, payload)
        return shrunk(image, self._max_side), *rest

    @override
    def close(self) -> None:
        self._files.close()


@dataclass(frozen=True)
class FormatWishes:
    """The user's wishes for the cached format: arguments of `ShadeDataset`, and the prefixes to choose among."""

    form: str
    max_side: int | None = None
    prefixes: Mapping[str, PrefixSplit] = field(default_factory=dict)
    """By name, each longer than the one before."""
    version: str | None = None
    dataset: Any = None
    encode: Callable[[Any], bytes] | None = None
    decode: Callable[[Any], Any] | None = None
    disk_bytes: int = 0
    """The capacity of the disk below the cache."""


class FormatChoice:
    """Chooses the cached format for one data set: ``"decoded"``, or by forecast for ``"auto"``.

    ``store_bytes`` is what all samples would occupy in the store as they are, ``capacity_bytes`` what the cache may
    occupy there. Of samples that are not image files, ``wishes`` have prefixes to choose among.
    """

    def __init__(self, source: SampleSource, wishes: FormatWishes, store_bytes: int, capacity_bytes: int) -> None:
        num_samples = len(source.payload_bytes_N)
        has_pictures = source.has_pictures
        chosen = probed_indices(num_samples, PROBES) if has_pictures else probed_indices(num_samples)
        self._wishes, self._measured = wishes, Probe(source, chosen, wishes.max_side)
        probed = self._probe_prefixes(source)
        self.num_reads, self.num_bytes = self._measured.num_reads, self._measured.num_bytes
        self.source: SampleSource = source
        """The source that keeps the chosen format."""
        self.used = "encoded"
        """The format's name: encoded, decoded, or that of a prefix."""
        self.forecast: FormatForecast | None = None
        """The prediction for each format; None if all prefixes were refused and there is no other format."""
        if not has_pictures and not probed:
            return
        costs = self._costs(source, store_bytes / num_samples)
        steps = [self._costs_of(source, name, each) for name, each in probed.items()]
        self.forecast = forecast(costs, num_samples, capacity_bytes + wishes.disk_bytes, prefixes=steps)
        best = self.forecast.cached_format
        self.used = _agreed(best, list(self.forecast.seconds)) if wishes.form == "auto" else wishes.form
        if self.used == "decoded":
            assert isinstance(source, FileSource)
            self.source = DecodedSource(source, self._measured, wishes.max_side)
        elif self.used in probed:
            self.source = prefixed_source_of(
                wishes.dataset,
                wishes.prefixes[self.used].prefix,
                wishes.encode,
                wishes.decode,
                version=wishes.version,
                source=source,
                probed=probed[self.used],
            )
        if wishes.form == "auto":
            logger.info("form='auto' chose %r: %s", self.used, self.forecast)
        else:
            logger.info("form=%r: %s", self.used, self.forecast)

    def _costs(self, source: SampleSource, mean_bytes: float) -> FormatCosts:
        """Returns the costs of samples as they are, ``mean_bytes`` long in the store. An item is made by the user's
        code, in the process that transforms it, while bytes of files and shards are waited for."""
        found = self._measured
        if isinstance(source, ItemSource):
            return FormatCosts(0.0, found.decode_seconds, mean_bytes, None, make_seconds=found.read_seconds)
        decoded_bytes = mean_bytes * found.growth if source.has_pictures else None
        return FormatCosts(found.read_seconds, found.decode_seconds, mean_bytes, decoded_bytes)

    def _probe_prefixes(self, source: SampleSource) -> dict[str, Probed]:
        """Probes prefixes until the first that must not be cached: if it is random, all longer ones are."""
        wishes, num_samples = self._wishes, len(source.payload_bytes_N)
        indices, payload_of = probed_indices(num_samples), self._measured.payload_of
        if wishes.prefixes:
            payload_of |= self._measured.read([index for index in indices if index not in payload_of])
        num_parts = 1 if isinstance(source, FileSource) else None

        def read(index: int) -> tuple[Any, ...]:
            return source.decode(index, payload_of[index])[:num_parts]

        found = dict[str, Probed]()
        for name, parts in wishes.prefixes.items():
            try:
                if source.is_random:
                    raise random_prefix("a data set that gives another item when it is read again")
                found[name] = probe(Prefix(parts.prefix), read, self._encoded, num_samples, wishes.version)
            except ConfigError as error:
                logger.info("form='auto' leaves out %r and what is longer: %s", name, error)
                break
        return found

    def _costs_of(self, source: SampleSource, name: str, probed: Probed) -> PrefixCosts:
        own = None if isinstance(source, FileSource) else self._wishes.decode
        decode = own or item_codec.decode
        begun = time.perf_counter()
        for payload in probed.payloads:
            decode(payload)
        decode_seconds = (time.perf_counter() - begun) / len(probed.payloads)
        return PrefixCosts(name, probed.seconds, max(map(len, probed.payloads)) + HEADER_BYTES, decode_seconds)

    def _encoded(self, index: int, item: tuple[Any, ...]) -> bytes:
        try:
            return (self._wishes.encode or item_codec.encode)(item)
        except Exception as error:
            cure = "let the step return tensors, arrays or numbers, or let encode= take what it returns"
            raise ConfigError.of(f"a result that can be encoded, at index {index}", str(error), cure) from error


def _agreed(cached_format: str, names: list[str]) -> str:
    """Returns rank 0's choice: clocks differ between ranks, and ranks share a cache."""
    if not (dist.is_available() and dist.is_initialized()):
        return cached_format
    group = dist.new_group(backend="gloo")
    chosen = torch.tensor([names.index(cached_format)])
    assert isinstance(group, dist.ProcessGroup), "every rank of the world takes part"
    dist.broadcast(chosen, src=dist.get_global_rank(group, 0), group=group)
    return names[int(chosen.item())]
