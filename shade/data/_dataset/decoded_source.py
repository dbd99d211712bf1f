"""DecodedSource: keeps samples decoded in the cache. FormatChoice: measures whether that pays.

`DecodedSource` reads files as `FileSource` does, and decodes those that stay in the cache. The files' headers have the
pictures' sizes, but reading all headers would cost an epoch of slow storage. So sizes are estimated from a few files,
and the true size of an entry is counted when it is written (`shade.cache.admission`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
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
from shade.data._dataset.prefix import Prefix, PrefixSplit
from shade.data._dataset.prefix_probe import Probed, probe, probed_indices
from shade.data._dataset.prefixed_source import PrefixedSource
from shade.data._dataset.source import CountOrigin, FileSource, PreparedSource, SampleSource
from shade.data._decode.cached_format import (
    PROBES,
    FormatCosts,
    PrefixCosts,
    forecast,
    pack_picture,
    packed_bytes,
    picture_of,
    shrunk,
)
from shade.data._decode.jpeg import decode_rgb, jpeg_decoder, size_of
from shade.data._decode.pixels import Box
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
    """Measures a few evenly spaced files, which stand for all. Raises DataError if none of them is a picture."""

    def __init__(self, source: FileSource, max_side: int | None) -> None:
        num_samples = len(source.payload_bytes_N)
        chosen = sorted({int(index) for index in np.linspace(0, num_samples - 1, min(PROBES, num_samples))})
        self.num_reads = self.num_bytes = 0

        def count(num_reads: int, num_bytes: int) -> None:
            self.num_reads += num_reads
            self.num_bytes += num_bytes

        half = len(chosen) // 2
        payloads = source.read_many(chosen[:half], count)  # here the origin finds out how slow it is
        begun = time.perf_counter()
        payloads += source.read_many(chosen[half:], count)
        self.origin_seconds = (time.perf_counter() - begun) / (len(chosen) - half)
        """A sample's read, with the usual number of others under way."""
        seconds, file_bytes, picture_bytes = [], 0, 0
        for payload in payloads:
            try:
                begun = time.perf_counter()
                height, width, _ = decoded(payload, max_side).shape
            except Exception:  # noqa: BLE001 - no picture, or not read at all; `on_bad_sample` decides when its turn comes
                continue
            seconds.append(time.perf_counter() - begun)
            file_bytes += len(payload)
            picture_bytes += packed_bytes(height, width)
        if not seconds:
            raise DataError.of("readable pictures", f"{len(chosen)} files that are none", "check the data set")
        self.decode_seconds = float(np.median(seconds))
        """On one core; the median leaves out compiling and loading at the first file."""
        self.growth = picture_bytes / file_bytes
        """How many times larger pictures are than files."""


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


class FormatChoice:
    """Chooses the cached format (``"decoded"``, or ``"auto"`` by forecast) for the files of one data set.

    ``store_bytes`` is what all files would occupy in the store, ``capacity_bytes`` what the cache may occupy there.
    """

    def __init__(self, source: FileSource, wishes: FormatWishes, store_bytes: int, capacity_bytes: int) -> None:
        measured, num_samples = Probe(source, wishes.max_side), len(source.payload_bytes_N)
        self.num_reads, self.num_bytes = measured.num_reads, measured.num_bytes
        probed = self._probe_prefixes(source, wishes)
        mean = store_bytes / num_samples
        costs = FormatCosts(measured.origin_seconds, measured.decode_seconds, mean, mean * measured.growth)
        steps = [
            PrefixCosts(name, found.seconds, max(map(len, found.payloads)) + HEADER_BYTES)
            for name, found in probed.items()
        ]
        self.forecast = forecast(costs, num_samples, capacity_bytes, prefixes=steps)
        """The prediction for each format."""
        best = self.forecast.cached_format
        self.used = _agreed(best, list(self.forecast.seconds)) if wishes.form == "auto" else wishes.form
        """The format's name: encoded, decoded, or that of a prefix."""
        self.source: SampleSource = source
        """The source that keeps this format."""
        if self.used == "decoded":
            self.source = DecodedSource(source, measured, wishes.max_side)
        elif self.used in probed:
            prefix = Prefix(wishes.prefixes[self.used].prefix)
            codec = item_codec.encode, item_codec.decode
            self.source = PrefixedSource(None, source, prefix, *codec, wishes.version, probed[self.used])
        if wishes.form == "auto":
            logger.info("form='auto' chose %r: %s", self.used, self.forecast)
        else:
            logger.info("form=%r: %s", self.used, self.forecast)

    def _probe_prefixes(self, source: FileSource, wishes: FormatWishes) -> dict[str, Probed]:
        """Probes prefixes until the first that must not be cached: if it is random, all longer ones are."""
        num_samples = len(source.payload_bytes_N)
        indices = probed_indices(num_samples) if wishes.prefixes else []
        payload_of = dict(zip(indices, source.read_many(indices, self._count), strict=True))

        def read(index: int) -> tuple[Any, ...]:
            return source.decode(index, payload_of[index])[:1]

        found = dict[str, Probed]()
        for name, parts in wishes.prefixes.items():
            try:
                found[name] = probe(Prefix(parts.prefix), read, _encoded, num_samples, wishes.version)
            except ConfigError as error:
                logger.info("form='auto' leaves out %r and what is longer: %s", name, error)
                break
        return found

    def _count(self, num_reads: int, num_bytes: int) -> None:
        self.num_reads += num_reads
        self.num_bytes += num_bytes


def _encoded(index: int, item: tuple[Any, ...]) -> bytes:
    return item_codec.encode(item)


def _agreed(cached_format: str, names: list[str]) -> str:
    """Returns rank 0's choice: clocks differ between ranks, and ranks share a cache."""
    if not (dist.is_available() and dist.is_initialized()):
        return cached_format
    group = dist.new_group(backend="gloo")
    chosen = torch.tensor([names.index(cached_format)])
    assert isinstance(group, dist.ProcessGroup), "every rank of the world takes part"
    dist.broadcast(chosen, src=dist.get_global_rank(group, 0), group=group)
    return names[int(chosen.item())]
