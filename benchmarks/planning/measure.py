"""Measures what the parts of a save cost on this machine, its storage and its store, and keeps the rates as `Costs`.

All predictions use one set of rates (`Costs`): bytes a second of one rank, the state's bytes, else seconds. *Drag* is
what the training loses while another thread works in the background, in seconds a second: near 0 with cores and
bandwidth to spare, near 1 where the thread takes a core from the training. It decides whether a background copy is
cheap, and no data sheet has it. `Costs` is kept as JSON, so `simulate.py` can replay the same run with
another strategy or interval.

A rate is the median of three tries on a sample larger than the caches. The storage sample is written, synced and
removed. Its read rate is not measured, since the sample would come from the page cache; a restore is taken to be as
fast as a save, which is the pessimistic side for most disks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from shade.checkpoint._buffer.copy_and_compare import copy_bytes, prepare
from shade.checkpoint._codecs.base import standalone_codec
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES
from shade.errors import ConfigError, StoreFullError
from shade.storage.base import Volume
from shade.store.base import Store

SAMPLE_BYTES: Final = 64 * 2**20
"""Bytes of each try, more than most processors cache."""
_TRIES: Final = 3


@dataclass(frozen=True)
class CodecCost:
    """The cost of one codec on this state."""

    encode_rate: float
    """Plain bytes a second."""
    ratio: float
    """Plain bytes a stored byte."""


@dataclass(frozen=True)
class Costs:
    """The rates of one machine and one training."""

    state_bytes: int
    """Size of this rank's shard."""
    step_seconds: float
    """Length of a step without a save."""
    pass_seconds: float
    """Length of the forward and backward pass, in which the state stands still."""
    copy_rate: float
    """Copy rate of one thread, into warm pages."""
    burst_rate: float
    """Copy rate of two threads while the training waits."""
    hash_rate: float
    copy_drag: float = 0.0
    """Drag of a background copy."""
    work_drag: float = 0.0
    """Drag while chunks are encoded, hashed, sent and written."""
    send_rate: float | None = None
    """Rate to the cluster's memory; None without a cluster."""
    write_rate: float | None = None
    """Rate to storage, until durable; None without storage."""
    fetch_rate: float | None = None
    """Rate from the cluster's memory; None: the send rate."""
    read_rate: float | None = None
    """Rate from storage; None: the write rate."""
    commit_seconds: float = 0.0
    """Fixed time of each save: files, records, rounds between ranks."""
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("state_bytes", "step_seconds", "copy_rate", "burst_rate", "hash_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError.of(f"{name} > 0", getattr(self, name), "measure it, or leave the file out")
        if not 0 <= self.pass_seconds <= self.step_seconds:
            raise ConfigError.of("pass_seconds within step_seconds", self.pass_seconds, "measure both in one run")

    def save(self, path: Path) -> None:
        """Writes a JSON file."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Reads the JSON file; raises `ConfigError` if it holds no costs."""
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            codecs = {name: CodecCost(**each) for name, each in found.pop("codecs", {}).items()}
            return cls(**found, codecs=codecs)
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError, AttributeError) as error:
            cure = "name one that --save-costs wrote"
            raise ConfigError.of("a file of measured costs", f"{path}: {error}", cure) from error


class MemoryRates(NamedTuple):
    """Rates of memory, in bytes a second."""

    copy: float
    """One thread, warm pages."""
    burst: float
    """Two threads."""
    hashing: float


class StorageRates(NamedTuple):
    """Rates of a volume."""

    write: float
    """Bytes a second, until durable."""
    commit_seconds: float
    """Time of a small file, until durable."""


class StoreRates(NamedTuple):
    """Rates of a cluster's memory, in bytes a second."""

    send: float
    fetch: float


def memory_rates(num_bytes: int = SAMPLE_BYTES) -> MemoryRates:
    """Measures this process's memory on a sample of `num_bytes`; other running work lowers the rates."""
    prepare()
    source, target = (np.ones(num_bytes, dtype=np.uint8) for _ in range(2))
    half = num_bytes // 2

    def copy(start: int, stop: int) -> None:
        copy_bytes(target.ctypes.data + start, source.ctypes.data + start, stop - start)

    def both(helper: ThreadPoolExecutor) -> None:
        other = helper.submit(copy, half, num_bytes)
        copy(0, half)
        other.result()

    def digest() -> None:
        for start in range(0, num_bytes, CHUNK_BYTES):
            digest_of(source[start : start + CHUNK_BYTES].data)

    with ThreadPoolExecutor(1) as helper:
        alone, together = _seconds(lambda: copy(0, num_bytes)), _seconds(lambda: both(helper))
    return MemoryRates(num_bytes / alone, num_bytes / min(alone, together), num_bytes / _seconds(digest))


def codec_cost(name: str, sample: memoryview, item_bytes: int = 4) -> CodecCost:
    """Measures the codec `name` on whole items of a state; raises `ConfigError` if it needs an earlier snapshot."""
    codec, stored = standalone_codec(name), 0
    begun = time.perf_counter()
    for start in range(0, len(sample), CHUNK_BYTES):
        stored += len(codec.encode(sample[start : start + CHUNK_BYTES], item_bytes))
    return CodecCost(len(sample) / (time.perf_counter() - begun), len(sample) / max(1, stored))


def storage_rates(volume: Volume, num_bytes: int = SAMPLE_BYTES) -> StorageRates:
    """Measures an open volume and removes the sample; raises `StorageError` if the volume cannot be written."""
    name = f"shade-probe/{os.getpid()}-{time.monotonic_ns()}"
    piece = np.random.default_rng(0).bytes(CHUNK_BYTES)
    parts = max(1, num_bytes // CHUNK_BYTES)
    try:
        small = _seconds(lambda: volume.write(name, [b"probe"]))
        large = _seconds(lambda: volume.write(name, (piece for _ in range(parts))))
    finally:
        volume.delete_many([name])
    return StorageRates(parts * CHUNK_BYTES / large, small)


def store_rates(store: Store, num_bytes: int = SAMPLE_BYTES) -> StoreRates:
    """Measures an open store and removes the sample; raises `StoreError` without an answer or room for the sample."""
    stem = f"shade-probe:{os.getpid()}:{time.monotonic_ns()}"
    piece = np.random.default_rng(0).bytes(CHUNK_BYTES)
    items = {f"{stem}:{number}": piece for number in range(max(1, num_bytes // CHUNK_BYTES))}

    def send() -> None:
        if not all(store.set_many(items)):
            raise StoreFullError(f"expected room for {num_bytes / 1e6:.0f} MB in {store.url}, got a refusal; free some")

    try:
        sent, fetched = _seconds(send), _seconds(lambda: store.get_many(list(items)))
    finally:
        store.delete_many(list(items))
    size = len(items) * CHUNK_BYTES
    return StoreRates(size / sent, size / fetched)


def _seconds(action: Callable[[], object]) -> float:
    """Returns the median time of some tries."""
    taken = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begun)
    return max(1e-9, statistics.median(taken))
