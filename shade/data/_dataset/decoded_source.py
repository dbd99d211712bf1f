"""Keeps samples decoded in the cache.

`DecodedSource` reads files as `FileSource` does, and decodes those that stay in the cache.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from typing_extensions import override

from shade.cache.entry import FORMAT_PICTURE
from shade.data._decode.cached_format import (
    pack_picture,
    packed_bytes,
    picture_of,
    shrunk,
)
from shade.data._decode.jpeg import decode_rgb, jpeg_decoder, size_of
from shade.data._decode.pixels import Box
from shade.data._source.source import CountOrigin, FileSource, PreparedSource, SampleSource, read_nearest
from shade.data._transforms.randomness import kept_generators
from shade.errors import DataError

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
        # With the first half the origin finds out how slow it is; only reads of the second half are timed.
        self.payload_of = self.read(indices[:half])
        begun, num_bytes = time.perf_counter(), self.num_bytes
        rest = self.read(indices[half:])
        seconds, num_bytes = time.perf_counter() - begun, self.num_bytes - num_bytes
        wanted_bytes = sum(len(payload) for payload in rest.values() if not isinstance(payload, Exception))
        # Of a block that was read for one sample, the others in it have their share.
        self.read_seconds = seconds / len(rest) * min(1.0, wanted_bytes / max(1, num_bytes))
        """A sample's read, with the usual number of others under way."""
        self.payload_of |= rest
        self._measure_decoding()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None, "payload_of": {}}

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
        # Or some samples would be smaller than others.
        self.prepares_all = max_side is not None
        self.num_probes, self.probe_bytes = probe.num_reads, probe.num_bytes
        self.fingerprint = f"{files.fingerprint}-{max_side or 'whole'}"
        self.target_N, self.revision = files.target_N, files.revision
        # Reading all headers for the true sizes would cost an epoch of slow storage. The true size of an entry is
        # counted when it is written (`shade.cache.admission`).
        self.payload_bytes_N = (files.payload_bytes_N * probe.growth).astype(np.int64)

    @override
    def rest_of(self, index: int) -> tuple[Any, ...]:
        return self._files.rest_of(index)

    @override
    def name_of(self, index: int) -> str:
        return self._files.name_of(index)

    @override
    def changed_among(self, indices: list[int]) -> set[int]:
        return self._files.changed_among(indices)

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
