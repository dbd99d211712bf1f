"""Thousands of batches through a cluster that is hurt all the time: nothing piles up in the process that trains.

What is looked at: threads, child processes, file descriptors, resident memory. A first stretch is left out, in which
allocators and pools reach their size; from there on the level may not rise.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.simulation import chaos_training
from tests.simulation.cluster_chaos import Act, Chaos, RelayedCluster, schedule

pytestmark = pytest.mark.multiprocess

STEPS_AN_EPOCH = chaos_training.NUM_SAMPLES // chaos_training.BATCH
WINDOW = 100
"""Steps from one schedule to the next; the last third of each is calm."""
SPARE_DESCRIPTORS = 6
"""Two connections a node: training's and that of the thread that asks whether the cache is back."""
SPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class Level:
    """What the process holds."""

    threads: int
    children: int
    descriptors: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Level:
        gc.collect()
        process = psutil.Process()
        children = len(multiprocessing.active_children())
        return cls(threading.active_count(), children, len(os.listdir("/proc/self/fd")), process.memory_info().rss)


def endure(num_batches: int, workers: int, seed: int) -> tuple[list[Level], Counter[str], chaos_training.Outcome]:
    """Trains under one schedule after another; the levels after each window, in calm."""
    epochs = num_batches // STEPS_AN_EPOCH
    acts: list[Act] = []
    for number, start in enumerate(range(2 * STEPS_AN_EPOCH, num_batches - WINDOW, WINDOW)):
        acts += schedule(seed + number, range(start, start + WINDOW * 2 // 3), 3, has_replicas=False)
    levels: list[Level] = []
    with chaos_training.short_pauses(), RelayedCluster(3) as cluster:
        chaos = Chaos(cluster, acts, "shade:", {}, seed)

        def hook(step: int) -> None:
            chaos.step(step)
            if step % WINDOW == 2 * STEPS_AN_EPOCH - 2:  # before the next window begins
                chaos.settle()
                levels.append(Level.now())

        outcome = chaos_training.train(cluster.url.reveal(), "uniform", workers, hook, epochs)
    return levels, chaos.struck, outcome


def check(levels: list[Level], outcome: chaos_training.Outcome) -> None:
    assert outcome.num_wrong == 0
    first, rest = levels[len(levels) // 4], levels[len(levels) // 4 + 1 :]
    assert max(level.threads for level in rest) <= first.threads + 1, levels  # a question to the cache may be under way
    assert {level.children for level in rest} == {first.children}, levels
    assert rest[-1].descriptors <= first.descriptors + SPARE_DESCRIPTORS, levels
    assert rest[-1].resident_bytes <= first.resident_bytes + SPARE_BYTES, levels


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_nothing_piles_up_over_six_hundred_batches() -> None:
    levels, struck, outcome = endure(600, workers=0, seed=5)
    assert len(outcome.steps) == 600
    assert struck.total() > 5
    check(levels, outcome)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_piles_up_over_ten_thousand_batches(workers: int) -> None:
    before = {path.name for path in Path("/tmp").glob("shade-cluster-*")}
    levels, struck, outcome = endure(10_000, workers, seed=100)
    assert len(outcome.steps) == 10_000
    assert struck.total() > 100
    check(levels, outcome)
    assert {path.name for path in Path("/tmp").glob("shade-cluster-*")} <= before
