"""Trains through a private cluster while faults strike it, and checks that training did not notice.

A schedule (`tests.simulation.cluster_chaos`) strikes in the middle of a short training run. The run is compared with
the same run without a cache. Each run checks these promises:

* the samples of every step are those of the undisturbed run, in their order;
* every sample's bytes are the origin's;
* nothing is raised, no thread, process or file descriptor is left;
* one epoch after the last fault the cache serves as many samples as if nothing had happened.

The run is small, so that hundreds fit into an hour: an epoch takes a second where a real one takes minutes, and the
pauses after which the cache is tried again are shortened in proportion.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from shade.cache import breaker
from shade.data._dataset.dataset import ShadeDataset
from shade.data._sampler.sampler import ShadeSampler
from shade.store import node, open_store
from tests.simulation.cluster_chaos import Act, Chaos, RelayedCluster, schedule

NUM_SAMPLES: Final = 320
SAMPLE_BYTES: Final = 2000
BATCH: Final = 16
FRACTION: Final = 0.2
EPOCHS: Final = 8
FIRST_EPOCH, LAST_EPOCH = 2, 4
"""Faults strike from the beginning of the one, when the cache is warm, to the middle of the other. The next epoch is
that of the recovery; in those after it all is as before."""
PACE_SECONDS: Final = 0.02
"""What a step takes at least while faults may strike: time for a cluster to notice."""
CALM_SECONDS: Final = 0.5
"""What the rest of the last troubled epoch takes at least: longer than the longest pause below, as it is in life. An
epoch that begins while a node is left alone cannot count what that node has, and counts again in the next one."""
MODES: Final = ("uniform", "unbiased")
_IN_PROPORTION: Final = (
    (breaker, "FIRST_PAUSE_SECONDS", 0.05),
    (breaker, "LONGEST_PAUSE_SECONDS", 0.2),
    (breaker, "SLOW_SECONDS", 0.5),
    (node, "FIRST_PAUSE_SECONDS", 0.05),
    (node, "LONGEST_PAUSE_SECONDS", 0.2),
)

Hook = Callable[[int], None]


class Pixels(Dataset[tuple[torch.Tensor, int]]):
    """Samples of which everybody knows what they must be.

    Args:
        salt: Data sets of different salt differ in every sample.
    """

    def __init__(self, salt: int = 0) -> None:
        generator = torch.Generator().manual_seed(salt)
        self.truth = torch.randint(0, 256, (NUM_SAMPLES, SAMPLE_BYTES), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.truth[index].clone(), index % 7


@dataclass
class Outcome:
    """What a training run saw."""

    steps: list[tuple[int, ...]] = field(default_factory=list)
    """Epoch and sample indices, by step."""
    num_wrong: int = 0
    """Samples that were not what they must be."""
    hits: list[int] = field(default_factory=list)
    """By epoch."""
    totals: dict[str, Any] = field(default_factory=dict)
    """The ledger's."""


@dataclass
class Verdict:
    """What became of one schedule."""

    seed: int
    shape: str
    acts: tuple[Act, ...] = ()
    struck: Counter[str] = field(default_factory=Counter)
    felt: Counter[str] = field(default_factory=Counter)
    totals: dict[str, Any] = field(default_factory=dict)
    hits: list[int] = field(default_factory=list)
    """By epoch."""
    objections: list[str] = field(default_factory=list)
    """Promises that were broken; empty is what one hopes for."""


def train(
    url: str | None, mode: str, workers: int = 0, hook: Hook = lambda step: None, epochs: int = EPOCHS
) -> Outcome:
    """Trains; no model, but everything that a loader sees of one.

    Args:
        url: The cache; None for none.
        mode: Of sampling.
        workers: Of the DataLoader.
        hook: Called after each step with the number of steps done.
        epochs: How many.

    Returns:
        What it saw.
    """
    outcome, pixels = Outcome(), Pixels()
    with contextlib.ExitStack() as stack:
        dataset = ShadeDataset(pixels, cache=url, working_set_fraction=FRACTION)
        stack.callback(dataset.close)
        sampler = ShadeSampler(dataset, num_replicas=1, rank=0, batch_size=BATCH, mode=mode)
        stack.callback(sampler.close)
        loader = DataLoader(
            dataset, batch_size=BATCH, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
        )
        before = 0
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, _, indices in loader:
                outcome.num_wrong += int((images != pixels.truth[indices]).any(dim=1).sum())
                sampler.weights(indices)
                sampler.report(indices, _loss_of(indices))
                outcome.steps.append((epoch, *indices.tolist()))
                hook(len(outcome.steps))
            if dataset.cache is not None:
                outcome.totals = dataset.cache.residency.totals().as_dict()
                outcome.hits.append(outcome.totals["hits"] - before)
                before = outcome.totals["hits"]
        del loader
    return outcome


def _loss_of(indices: torch.Tensor) -> torch.Tensor:
    """A pure function of the sample, with a heavy tail."""
    return (((indices * 2654435761) % 1000).float() / 1000) ** 4 * 8 + 0.05


@lru_cache(maxsize=4)
def undisturbed(mode: str) -> tuple[Outcome, tuple[int, ...]]:
    """The run without a cache, and the hits by epoch of a run with a healthy one."""
    with short_pauses():
        bare, healthy = train(None, mode), train("memory://", mode)
    assert bare.steps == healthy.steps
    return bare, tuple(healthy.hits)


def play(seed: int) -> Verdict:
    """Lives through the schedule of a seed.

    Args:
        seed: Decides the schedule, the shape of the cluster, the mode and the number of workers.

    Returns:
        What became of it.
    """
    rng = random.Random(f"play {seed}")
    replicas, mode, workers = rng.choice((0, 0, 1)), rng.choice(MODES), rng.choice((0, 0, 0, 2))
    acts = schedule(seed, troubled(mode), 3 * (1 + replicas), has_replicas=replicas > 0)
    return live(acts, replicas, mode, workers, seed)


def troubled(mode: str) -> range:
    """The steps in which faults may strike; after the last of them the cluster is made whole."""
    epochs = [epoch for epoch, *_ in undisturbed(mode)[0].steps]
    last = epochs.index(LAST_EPOCH), epochs.index(LAST_EPOCH + 1)
    return range(1 + epochs.index(FIRST_EPOCH), 1 + sum(last) // 2)


def live(acts: Sequence[Act], replicas: int, mode: str, workers: int, seed: int) -> Verdict:
    """Lives through one schedule.

    Args:
        acts: All in `troubled`.
        replicas: Of each of three primaries.
        mode: Of sampling.
        workers: Of the DataLoader.
        seed: Decides what the schedule leaves open.

    Returns:
        What became of it.
    """
    verdict = Verdict(seed, f"3 nodes with {replicas} replicas, {mode}, {workers} workers", tuple(acts))
    bare, healthy = undisturbed(mode)
    steps = troubled(mode)
    with short_pauses(), RelayedCluster(3, replicas) as cluster:
        url = cluster.url.reveal()
        foreign = _entries_of_another(url)
        chaos = Chaos(cluster, verdict.acts, "shade:", foreign, seed)

        def hook(step: int) -> None:
            chaos.step(step)
            if step in steps:
                time.sleep(PACE_SECONDS)
            if step == steps.stop:
                chaos.settle()
                time.sleep(CALM_SECONDS)

        left = _Leavings()
        try:
            outcome = train(url, mode, workers, hook)
        except Exception as error:  # noqa: BLE001 - whatever it is, it should not have been
            verdict.objections.append(f"training ended with {type(error).__name__}: {error}")
        else:
            verdict.totals, verdict.hits = outcome.totals, outcome.hits
            verdict.objections += _judge(outcome, bare, healthy)
        verdict.objections += left.complaints()
    verdict.struck, verdict.felt = chaos.struck, chaos.felt
    return verdict


def _judge(outcome: Outcome, bare: Outcome, healthy: tuple[int, ...]) -> Iterator[str]:
    """Broken promises."""
    for number, (got, wanted) in enumerate(itertools.zip_longest(outcome.steps, bare.steps), 1):
        if got != wanted:
            yield f"step {number} had {got}, without a cache {wanted}"
            break
    if outcome.num_wrong:
        yield f"{outcome.num_wrong} samples were not the origin's"
    totals = outcome.totals
    if totals["hits"] + totals["misses"] != totals["samples"]:
        yield f"{totals['hits']} hits and {totals['misses']} misses are not {totals['samples']} samples"
    recovered = LAST_EPOCH + 2
    if outcome.hits[recovered:] != list(healthy[recovered:]):
        yield f"hits by epoch {outcome.hits}, with a healthy cache {list(healthy)}"


class _Leavings:
    """What this process holds; later, what it holds too much."""

    def __init__(self) -> None:
        self._threads, self._num_descriptors = set(threading.enumerate()), len(_descriptors())

    def complaints(self) -> Iterator[str]:
        """What is left over."""
        gc.collect()
        threads = [thread.name for thread in threading.enumerate() if thread not in self._threads]
        if threads:
            yield f"threads left: {threads}"
        children = multiprocessing.active_children()
        if children:
            yield f"processes left: {children}"
        descriptors = _descriptors()
        if len(descriptors) > self._num_descriptors:
            yield f"{len(descriptors)} file descriptors, {self._num_descriptors} before: {sorted(descriptors)}"


def _descriptors() -> set[str]:
    """Of this process, with what they are."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def _entries_of_another(url: str) -> dict[str, bytes]:
    """What another data set leaves in a cache, taken out again."""
    other = ShadeDataset(Pixels(salt=1), cache=url, working_set_fraction=FRACTION)
    with contextlib.closing(other), open_store(url) as store:
        other.__getitems__(list(range(0, NUM_SAMPLES, 4)))
        keys = [key for key in store.scan("shade:") if "{" in key]
        values = store.get_many(keys)
        store.delete_many(list(store.scan("shade:")))
    return {key: value for key, value in zip(keys, values, strict=True) if value is not None}


@contextlib.contextmanager
def short_pauses() -> Iterator[None]:
    """An epoch takes a second here; so whoever leaves the cache alone must do so for less. And the origin is memory, so
    that any cache would be called slow that is merely busy."""
    before = [(module, name, getattr(module, name)) for module, name, _ in _IN_PROPORTION]
    for module, name, seconds in _IN_PROPORTION:
        setattr(module, name, seconds)
    try:
        yield
    finally:
        for module, name, seconds in before:
            setattr(module, name, seconds)
