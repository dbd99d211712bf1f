"""Measures in which format a data set's samples are best cached, and chooses it: as they are, decoded, or a prefix."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shade.cache.entry import HEADER_BYTES
from shade.data._dataset.decoded_source import DecodedSource, Probe
from shade.data._dataset.prefix import Prefix, PrefixSplit, random_prefix
from shade.data._dataset.prefix_probe import Probed, probe, probed_indices
from shade.data._dataset.prefixed_source import prefixed_source_of
from shade.data._decode.cached_format import (
    PROBES,
    FormatCosts,
    FormatForecast,
    PrefixCosts,
    forecast,
)
from shade.data._source import item_codec
from shade.data._source.probe_worker import in_probe_worker
from shade.data._source.source import FileSource, ItemSource, SampleSource
from shade.errors import ConfigError
from shade.rank_group import said_first

logger = logging.getLogger("shade.data")


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
        self._wishes = wishes
        work = partial(self._measure, source, chosen)
        # Files are read and decoded by code of ours.
        is_users = bool(wishes.prefixes) or isinstance(source, ItemSource)
        found = in_probe_worker(work, wishes.dataset) if is_users else work()
        self._measured, probed, steps, refused = found
        if refused:
            logger.info("form='auto' leaves out %r and what is longer: %s", *refused)
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
        self.forecast = forecast(costs, num_samples, capacity_bytes + wishes.disk_bytes, prefixes=steps)
        best = self.forecast.cached_format
        # Clocks differ between ranks, and ranks share a cache. A rank that makes its data set alone must not wait.
        among = f"{source.fingerprint}/{capacity_bytes}/{wishes.disk_bytes}/{wishes.max_side}/{[*wishes.prefixes]}"
        self.used = said_first(f"form/{among}", best) if wishes.form == "auto" else wishes.form
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
        """Returns the costs of samples as they are, ``mean_bytes`` long in the store."""
        found = self._measured
        # An item is made by the user's code, in the process that transforms it, while bytes of files and shards are
        # waited for.
        if isinstance(source, ItemSource):
            return FormatCosts(0.0, found.decode_seconds, mean_bytes, None, make_seconds=found.read_seconds)
        decoded_bytes = mean_bytes * found.growth if source.has_pictures else None
        return FormatCosts(found.read_seconds, found.decode_seconds, mean_bytes, decoded_bytes)

    def _measure(
        self, source: SampleSource, chosen: list[int]
    ) -> tuple[Probe, dict[str, Probed], list[PrefixCosts], tuple[str, str] | None]:
        """Returns what samples cost, the prefixes that may be cached, their costs, and which is refused, and why."""
        measured = Probe(source, chosen, self._wishes.max_side)
        probed, refused = self._probe_prefixes(source, measured)
        return measured, probed, [self._costs_of(source, name, each) for name, each in probed.items()], refused

    def _probe_prefixes(
        self, source: SampleSource, measured: Probe
    ) -> tuple[dict[str, Probed], tuple[str, str] | None]:
        # Up to the first that must not be cached: if it is random, all longer ones are.
        wishes, num_samples = self._wishes, len(source.payload_bytes_N)
        indices, payload_of = probed_indices(num_samples), measured.payload_of
        if wishes.prefixes:
            payload_of |= measured.read([index for index in indices if index not in payload_of])
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
                return found, (name, str(error))
        return found, None

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
