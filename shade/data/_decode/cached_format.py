"""The cached format: samples are in the cache as the origin's files, or decoded. Predicts which of the two is faster.

With decoded pictures a hit costs no decoding, but takes about five times the space, so there are fewer hits. Which is
better depends on the costs of reading the origin and of decoding, and on the space; all are measured on a few files
when the data set is made. Two things run side by side, reading what is not in the cache and the processors' work, and
the slower one decides. That is Seneca's model of a loader (Kim et al., "Seneca", FAST 2026), for one cache and two
formats.

``"decoded"`` keeps the whole picture as uint8, because a random crop may be anywhere in it. ``max_side`` makes it
smaller: then every sample is resized, cached or not, and training sees other pixels than without; so only the user can
choose it. Only samples that stay in the cache are decoded whole; all others are decoded as usual.

Invariant: without ``max_side`` samples are the same in every format, bit for bit.
"""

from __future__ import annotations

import os
import struct
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
    decoded_bytes: float
    """In the store."""


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
    def gain(self) -> float:
        """Returns how many times faster the decoded format is predicted to be; below 1: slower."""
        return self.seconds["encoded"] / self.seconds["decoded"]

    @property
    def reason(self) -> str:
        """Returns why ``auto`` chose as it did, in a few words."""
        needed = "" if self.cached_format == "decoded" else f", {LEAST_GAIN} × is asked for"
        return f"decoded is predicted to load {self.gain:.2g} × as fast as encoded{needed}"

    def __str__(self) -> str:
        rates = "; ".join(
            f"{name}: {1 / self.seconds[name]:,.0f} samples/s at {self.hit_ratios[name]:.1%} hits"
            for name in ("encoded", "decoded")
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
    costs: FormatCosts, num_samples: int, capacity_bytes: float, num_cores: int | None = None
) -> FormatForecast:
    """Predicts both formats for N samples; chooses decoded pictures only if that pays by `LEAST_GAIN`.

    ``num_cores`` decode; None: as many as this process may use.
    """
    num_cores = num_cores or len(os.sched_getaffinity(0))
    sizes = {"encoded": costs.encoded_bytes, "decoded": costs.decoded_bytes}
    hit_ratios = {
        cached_format: min(1.0, capacity_bytes / (num_samples * size)) for cached_format, size in sizes.items()
    }
    seconds = {}
    for cached_format, size in sizes.items():
        hits = hit_ratios[cached_format]
        decoded = 1.0 if cached_format == "encoded" else 1.0 - hits
        work = (costs.decode_seconds * decoded + COPY_SECONDS * size * hits) / num_cores
        seconds[cached_format] = max(costs.origin_seconds * (1.0 - hits), work, 1e-9)
    pays = seconds["encoded"] >= LEAST_GAIN * seconds["decoded"]
    return FormatForecast("decoded" if pays else "encoded", seconds, hit_ratios, num_cores)


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
