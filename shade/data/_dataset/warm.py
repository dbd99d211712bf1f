"""Fills a cache before a job begins, with what its first epoch reads: `warm`, behind ``shade cache warm``.

Memory gets the first samples of the epoch that fit, and the disk below it the next ones, so no sample lies in both and
none is read that would not be kept. The job finds them as it finds what an earlier job has left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shade.cache.cache import SampleCache
from shade.data._dataset.dataset import ShadeDataset, reader_of
from shade.errors import ConfigError
from shade.types import Indices, Order

_CHUNK: Final = 128
"""Samples that are read together."""


@dataclass
class Warmed:
    """The result of `warm` in one tier."""

    url: str
    num_samples: int = 0
    """Samples that the tier had already, or has now."""
    num_read: int = 0
    """Samples of them that were read from the origin."""
    num_failed: int = 0
    """Samples that the origin could not read; the job will say why."""
    num_left: int = 0
    """Samples that would fit, for which no bytes or no time were left."""


def warm(
    dataset: ShadeDataset,
    sampler: Any,
    *,
    most_bytes: int | None = None,
    most_seconds: float | None = None,
    machine: int = 0,
    num_machines: int = 1,
    advance: Callable[[int, int], None] = lambda num_done, num_wanted: None,
) -> list[Warmed]:
    """Reads what the first epoch needs, in its order, into the tiers of a data set's cache until they are full.

    Args:
        dataset: The data set, as the job makes it.
        sampler: Its sampler, as the job makes it, with its state loaded if the job resumes.
        most_bytes: Upper bound of what is taken into all tiers, as they count bytes; None: none.
        most_seconds: No read begins later; None: no bound.
        machine: Which of the machines this is, below ``num_machines``. Each fills its part of memory that they share,
            and its own disk.
        num_machines: How many machines call this.
        advance: Called with how many samples are done, and how many are wanted.

    Returns:
        What was done, by tier: memory, and the disk if there is one.

    Raises:
        ConfigError: The data set has no cache that outlives this process, or there is no such machine.
    """
    if not 0 <= machine < num_machines:
        raise ConfigError.of(f"a machine from 0 to {num_machines - 1}", machine, "count from 0")
    plans = _planned(dataset, np.asarray(sampler.order_of(sampler.epoch)), machine, num_machines)
    end = math.inf if most_seconds is None else time.monotonic() + most_seconds
    left_bytes = math.inf if most_bytes is None else most_bytes
    num_wanted, num_done, done = sum(len(wanted) for _, wanted, _ in plans), 0, []
    for tier, wanted, size_bytes in plans:
        result = Warmed(tier.store.url)
        for start in range(0, len(wanted), _CHUNK):
            chunk = wanted[start : start + _CHUNK]
            left_bytes -= int(size_bytes[start : start + _CHUNK].sum())
            if left_bytes < 0 or time.monotonic() >= end:
                result.num_left = len(wanted) - start
                break
            payloads, hits = reader_of(dataset).take_in(tier, chunk.tolist())
            num_failed = sum(isinstance(payload, Exception) for payload in payloads)
            result.num_samples += len(chunk) - num_failed
            result.num_read += hits.count(False) - num_failed
            result.num_failed += num_failed
            num_done += len(chunk)
            advance(num_done, num_wanted)
        done.append(result)
    return done


def _planned(
    dataset: ShadeDataset, order: Order, machine: int, num_machines: int
) -> list[tuple[SampleCache, Indices, Indices]]:
    """Returns the tiers, what goes into each, and what that occupies."""
    cache = dataset.cache
    is_kept = cache is not None and cache.store.shared and not cache.store.is_private
    if cache is None or not (is_kept or cache.disk is not None):
        cure = "pass cache= the URL of a server (shade cache up prints one), or disk= a folder"
        raise ConfigError.of("a cache that outlives this command", cache and cache.store.url, cure)
    _, first = np.unique(order, return_index=True)
    order = order[np.sort(first)].astype(np.int64)
    first_tier = cache.for_thread(0)
    first_tier.disk = None
    tiers = [(first_tier, cache)] if is_kept else []
    tiers += [] if cache.disk is None else [(cache.disk, cache.disk)]
    plans = []
    for tier, planned in tiers:
        fits = np.cumsum(planned.size_bytes_N[order]) <= planned.allowed_bytes
        # All machines see one memory, and each has a disk of its own.
        is_mine = tier.store.medium == "disk" or order % num_machines == machine
        mine, order = order[fits & is_mine], order[~fits]
        plans.append((tier, mine, planned.size_bytes_N[mine]))
    return plans
