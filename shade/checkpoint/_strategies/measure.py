"""Measures what the parts of a save cost on this machine, its storage and its store, and keeps the rates as `Costs`.

Every prediction is made from one set of rates (`Costs`). Rates are state bytes a second of one rank; everything else
is in seconds. *Drag* is what the training loses while another thread works: seconds a second, 0 on a machine with
spare cores and bandwidth, near 1 where the thread takes a core from the training. It decides whether a copy beside the
training is cheap, and no data sheet has it. `Costs` is kept as JSON, so that `shade checkpoint simulate` can ask what
another strategy or interval would have cost the same run.

Each rate is the median of three tries on a sample that is large enough to leave the caches. Storage is written to and
synced, and the file is removed. Its reading speed is not measured, because the file would come out of the page cache:
a restore is assumed to be as fast as a save, which is the safe side for most disks.
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

from shade.checkpoint._buffer.tensor_copy import copy_bytes, prepare
from shade.checkpoint._codecs.base import standalone_codec
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES
from shade.checkpoint._pacing.schedule import Pace
from shade.errors import ConfigError, StoreFullError
from shade.storage.base import Volume
from shade.store.base import Store

SAMPLE_BYTES: Final = 64 * 2**20
"""Of each try; beyond the caches of most processors."""
_TRIES: Final = 3


@dataclass(frozen=True)
class CodecCost:
    """One codec, on this state."""

    encode_rate: float
    """Plain bytes a second."""
    ratio: float
    """Plain bytes a stored byte."""


@dataclass(frozen=True)
class Costs:
    """The rates of one machine and one training; see the top of the file."""

    state_bytes: int
    """Of this rank's shard."""
    step_seconds: float
    """Of a step in which nothing is saved."""
    pass_seconds: float
    """Forward and backward: the part of a step in which the state stands still."""
    copy_rate: float
    """One thread, into memory that has been written to before."""
    burst_rate: float
    """Two threads, while the training stands still."""
    hash_rate: float
    copy_drag: float = 0.0
    """While a copy runs behind the training."""
    work_drag: float = 0.0
    """While chunks are encoded, hashed, sent and written behind it."""
    send_rate: float | None = None
    """To the cluster's memory; None where there is none."""
    write_rate: float | None = None
    """To storage, until it is durable; None where there is none."""
    fetch_rate: float | None = None
    """Back from the cluster's memory; None: as sent."""
    read_rate: float | None = None
    """Back from storage; None: as written."""
    commit_seconds: float = 0.0
    """Of each save, whatever its size: files, records, rounds between ranks."""
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
        """Reads one.

        Args:
            path: Of it.

        Returns:
            The costs.

        Raises:
            ConfigError: It is no such file.
        """
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            codecs = {name: CodecCost(**each) for name, each in found.pop("codecs", {}).items()}
            return cls(**found, codecs=codecs)
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError, AttributeError) as error:
            cure = "name one that strategy='auto' or shade checkpoint simulate wrote"
            raise ConfigError.of("a file of measured costs", f"{path}: {error}", cure) from error


class MemoryRates(NamedTuple):
    """Bytes a second."""

    copy: float
    """One thread, warm pages."""
    burst: float
    """Two threads."""
    hashing: float


class StorageRates(NamedTuple):
    """Of a volume."""

    write: float
    """Bytes a second, until durable."""
    commit_seconds: float
    """Of a small file, until durable."""


class StoreRates(NamedTuple):
    """Bytes a second, of a cluster's memory."""

    send: float
    fetch: float


def memory_rates(num_bytes: int = SAMPLE_BYTES) -> MemoryRates:
    """Measures this process's memory rates now, while other processes take their share.

    Args:
        num_bytes: Of the sample.

    Returns:
        The rates.
    """
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
    """What a codec takes and gives, on a piece of a state.

    Args:
        name: In `CODECS`: one that stands alone.
        sample: Bytes of the state, whole items.
        item_bytes: Width of an item.

    Returns:
        Its cost.

    Raises:
        ConfigError: What it takes depends on a snapshot before.
    """
    codec, stored = standalone_codec(name), 0
    begun = time.perf_counter()
    for start in range(0, len(sample), CHUNK_BYTES):
        stored += len(codec.encode(sample[start : start + CHUNK_BYTES], item_bytes))
    return CodecCost(len(sample) / (time.perf_counter() - begun), len(sample) / max(1, stored))


def storage_rates(volume: Volume, num_bytes: int = SAMPLE_BYTES) -> StorageRates:
    """Of a volume; what is written for it is removed.

    Args:
        volume: Open.
        num_bytes: Of the sample.

    Returns:
        The rates.

    Raises:
        StorageError: It cannot be written.
    """
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
    """Of a cluster's memory; what is put there is removed.

    Args:
        store: Open.
        num_bytes: Of the sample.

    Returns:
        The rates.

    Raises:
        StoreError: It does not answer, or has no room for the sample.
    """
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


def costs_of(num_bytes: int, rates: MemoryRates, pass_seconds: float, pace: Pace) -> Costs:
    """Derives costs from the rates of memory and from measured saves.

    A save's time beyond its copy and its hashes is sending. Its cost beyond its stall is drag: per second of processor
    time where that is known, else per second of all work behind the training. (Waiting for a disk is no work, so
    sending drags less than copying.)

    Args:
        num_bytes: Of the state.
        rates: Of memory.
        pass_seconds: Forward and backward.
        pace: Measured with such saves. The drag of a single one is mostly chance: give the mean of some.

    Returns:
        The costs.
    """
    copying, hashing = num_bytes / rates.copy, num_bytes / rates.hashing
    sending = max(num_bytes / rates.burst / 10, pace.save_seconds - copying - hashing)
    lost = max(0.0, pace.cost_seconds - pace.blocked_seconds)
    copy_drag = work_drag = lost / (copying + hashing + sending)
    if pace.worked_seconds > copying:
        copy_drag = lost / pace.worked_seconds
        work_drag = copy_drag * (pace.worked_seconds - copying) / (hashing + sending)
    return Costs(
        state_bytes=num_bytes,
        step_seconds=pace.step_seconds,
        pass_seconds=pass_seconds,
        copy_rate=rates.copy,
        burst_rate=rates.burst,
        hash_rate=rates.hashing,
        copy_drag=copy_drag,
        work_drag=work_drag,
        write_rate=num_bytes / sending,
    )


def _seconds(action: Callable[[], object]) -> float:
    """The middle of some tries."""
    taken = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begun)
    return max(1e-9, statistics.median(taken))
