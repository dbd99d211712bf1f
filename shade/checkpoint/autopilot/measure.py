"""Measures what this machine, its storage and its store need for the parts of a save: a second or two of work.

Each rate is that of the middle one of three tries on a sample, large enough to leave the caches. Storage is written to
and synced, and what was written is removed again. How fast it reads is not measured: what was just written comes out of
the page cache, so a restore is taken to be as fast as a save, which is on the safe side of most disks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np

from shade.checkpoint._buffer.streaming_copy import copy_bytes, prepare
from shade.checkpoint._codecs.base import standing_alone
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint.autopilot.costs import CodecCost, Costs
from shade.errors import StoreFullError
from shade.storage.base import Volume
from shade.store.base import Store

SAMPLE_BYTES: Final = 64 * 2**20
"""Of each try; beyond the caches of most processors."""
_TRIES: Final = 3


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
    """Of this process, now; whoever else works takes its share.

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
    codec, stored = standing_alone(name), 0
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
    """Costs, from the rates of memory and from what saves behind the training have come to.

    What a save took beyond its copy and its hashes is sending: to wherever it lands. What it cost beyond its stall is
    drag: of the work that was done behind the training, where that is known, else of all that went on there alike. (To
    wait for a disk is no work, so sending drags less than copying.)

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
