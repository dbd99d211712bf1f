"""The cached format: samples are in the cache as the origin's files, decoded, or after some steps of the transforms.

With decoded pictures a hit costs no decoding, but takes about five times the space, so there are fewer hits; the same
holds for the result of any step that is not random. `forecast` predicts which is fastest, from costs that are measured
on a few files when the data set is made: Seneca's model of a loader (Kim et al., "Seneca", FAST 2026), for one cache
and several formats.

``"decoded"`` keeps the whole picture as uint8, because a random crop may be anywhere in it. With ``max_side`` every
sample is resized, cached or not, and training sees other pixels than without; so only the user can choose it.

Invariant: without ``max_side`` samples are the same in every format, bit for bit.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shade.errors import ConfigError

CACHED_FORMATS = ("encoded", "decoded", "auto")
PROBES = 24
"""Files that are read and decoded to measure the costs."""
LEAST_GAIN = 1.1
"""``auto`` chooses decoded pictures only if they are predicted to be faster by this factor."""
COPY_SECONDS = 1e-9
"""Cost of a byte from the cache: a server's core serves about 1 GB/s (decision 0002)."""
_HEADER = struct.Struct("<4sII4x")
_MAGIC = b"SHPX"


def pack_picture(picture_HWC: npt.NDArray[np.uint8]) -> bytes:
    """Returns a uint8 RGB picture as a payload: its size, then its pixels."""
    height, width, _ = picture_HWC.shape
    return _HEADER.pack(_MAGIC, height, width) + picture_HWC.tobytes()


def packed_bytes(height: int, width: int) -> int:
    """Returns the length of such a payload."""
    return _HEADER.size + 3 * height * width


def picture_of(payload: Any) -> npt.NDArray[np.uint8] | None:
    """Returns the picture of a payload, (height, width, 3), without a copy; None if it is something else."""
    if len(payload) < _HEADER.size or payload[:4] != _MAGIC:
        return None
    _, height, width = _HEADER.unpack_from(payload)
    if len(payload) != packed_bytes(height, width):
        return None
    return np.frombuffer(payload, dtype=np.uint8, offset=_HEADER.size).reshape(height, width, 3)


def shrunk(image: Image.Image, max_side: int | None) -> Image.Image:
    """Returns the image with no side longer than ``max_side``; the image itself if it is small enough."""
    if max_side is None or max(image.size) <= max_side:
        return image
    scale = max_side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BILINEAR)


@dataclass(frozen=True)
class FormatCosts:
    """Costs of a mean sample, in seconds and bytes."""

    origin_seconds: float
    """To read it from the origin, with as many reads under way as the origin takes well."""
    decode_seconds: float
    """To decode it, on one core."""
    encoded_bytes: float
    """In the store."""
    decoded_bytes: float | None
    """In the store; None for what is no picture."""
    make_seconds: float = 0.0
    """To make it, where the data set's code does that, on one core; a hit spares it."""


@dataclass(frozen=True)
class PrefixCosts:
    """Costs of a prefix, the first steps of the transforms, in seconds and bytes a sample."""

    name: str
    """The cached format that keeps its results."""
    seconds: float
    """To process a decoded sample, on one core."""
    stored_bytes: float
    """Size of its result in the store."""
    decode_seconds: float = 0.0
    """To decode its result, on one core."""


@dataclass(frozen=True)
class FormatForecast:
    """The prediction when the format was chosen."""

    cached_format: str
    """The better format."""
    seconds: dict[str, float]
    """Predicted seconds a sample, by format."""
    hit_ratios: dict[str, float]
    """Predicted hit ratio, by format."""
    num_cores: int
    """Cores that share the work."""

    @property
    def rival(self) -> str:
        """Returns the format that is predicted to be the fastest, of those that are not the files as they are."""
        return min((name for name in self.seconds if name != "encoded"), key=self.seconds.__getitem__)

    @property
    def gain(self) -> float:
        """Returns how many times faster than the files as they are the best other format is predicted to be; below 1:
        slower."""
        return self.seconds["encoded"] / self.seconds[self.rival]

    @property
    def reason(self) -> str:
        """Returns why ``auto`` chose as it did, in a few words."""
        needed = f", {LEAST_GAIN} × is asked for" if self.cached_format == "encoded" else ""
        return f"{self.rival} is predicted to load {self.gain:.2g} × as fast as encoded{needed}"

    def __str__(self) -> str:
        rates = "; ".join(
            f"{name}: {1 / seconds:,.0f} samples/s at {self.hit_ratios[name]:.1%} hits"
            for name, seconds in self.seconds.items()
        )
        return f"{self.reason} ({rates})"

    def check(self, cached_format: str, counts: dict[str, Any]) -> dict[str, Any]:
        """Returns a row of metrics: the format that was used, seconds a sample and hit ratio, predicted and measured.
        ``counts`` is one epoch's ledger, as `shade.cache.ledger.Ledger.as_dict` returns it."""
        samples, busy = max(1, counts["hits"] + counts["misses"]), counts["busy_seconds"]
        work = (busy["decode"] + busy["cache"]) / self.num_cores
        return {
            "form": cached_format,
            "predicted_seconds_per_sample": self.seconds[cached_format],
            "measured_seconds_per_sample": max(busy["origin"], work) / samples,
            "predicted_hit_ratio": self.hit_ratios[cached_format],
            "measured_hit_ratio": counts["hits"] / samples,
        }


def forecast(
    costs: FormatCosts,
    num_samples: int,
    capacity_bytes: float,
    num_cores: int | None = None,
    prefixes: Sequence[PrefixCosts] = (),
) -> FormatForecast:
    """Predicts each format for N samples; chooses another one than the files only if that pays by `LEAST_GAIN`.

    ``num_cores`` decode; None: as many as this process may use. ``prefixes`` are in order, each longer than the one
    before; what the longest one does has to be done in every format.
    """
    num_cores = num_cores or len(os.sched_getaffinity(0))
    steps = max((prefix.seconds for prefix in prefixes), default=0.0)
    formats = {"encoded": (costs.encoded_bytes, costs.decode_seconds + steps)}
    if costs.decoded_bytes is not None:
        formats["decoded"] = (costs.decoded_bytes, steps)
    for prefix in prefixes:
        formats[prefix.name] = prefix.stored_bytes, prefix.decode_seconds + steps - prefix.seconds
    hit_ratios, seconds = {}, {}
    for name, (size, hit_seconds) in formats.items():
        hits = hit_ratios[name] = min(1.0, capacity_bytes / (num_samples * size))
        at_miss = (costs.make_seconds + costs.decode_seconds + steps) * (1.0 - hits)
        work = (at_miss + (hit_seconds + COPY_SECONDS * size) * hits) / num_cores
        # Reading what is not in the cache and the processors' work run side by side, and the slower one decides.
        seconds[name] = max(costs.origin_seconds * (1.0 - hits), work, 1e-9)
    best = min(seconds, key=seconds.__getitem__)
    pays = seconds["encoded"] >= LEAST_GAIN * seconds[best]
    return FormatForecast(best if pays else "encoded", seconds, hit_ratios, num_cores)


def check_cached_format(
    cached_format: str, max_side: int | None, *, has_files: bool, has_cache: bool, has_prefix: bool = False
) -> None:
    """Refuses a cached format that does not fit the data set, with ConfigError for the argument that does not fit."""
    if cached_format not in CACHED_FORMATS:
        raise ConfigError.of("form 'encoded', 'decoded' or 'auto'", cached_format, "choose one of the three")
    if cached_format == "decoded" and has_prefix:
        raise ConfigError.of("form='encoded' or 'auto' with a prefix", cached_format, "its results are cached")
    if cached_format == "decoded" and not has_files:
        raise ConfigError.of(
            "form='encoded' for a data set whose samples are not image files",
            cached_format,
            "its items are cached as they are",
        )
    if cached_format == "decoded" and not has_cache:
        raise ConfigError.of("a cache to keep decoded pictures in", None, "pass cache=, or form='encoded'")
    if max_side is not None and (cached_format != "decoded" or max_side < 1):
        raise ConfigError.of("max_side ≥ 1 with form='decoded'", max_side, "leave it out, or pass form='decoded'")
