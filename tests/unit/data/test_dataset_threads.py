"""Threads of the user's pipeline read one `ShadeDataset` at once, as Grain and torchdata's nodes do."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shade import ShadeDataset
from shade.errors import ConfigError

NUM_SAMPLES, NUM_THREADS = 96, 8


class Points:
    """Items that say which they are; a barrier, once set, lets a read return when so many are under way."""

    def __init__(self) -> None:
        self.meeting: threading.Barrier | None = None
        self.reads: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads.append(index)
        if self.meeting is not None:
            self.meeting.wait()
        return torch.full((64,), float(index)), index % 3


@pytest.fixture(autouse=True)
def cache_is_never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shade.cache.breaker.SLOW_SECONDS", 1e9)


def in_threads(dataset: ShadeDataset, batches: list[list[int]]) -> list[list[Any]]:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(dataset.__getitems__, batches))


def cut(indices: list[int], length: int) -> list[list[int]]:
    return [indices[first : first + length] for first in range(0, len(indices), length)]


@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("length", [1, 5])
def test_threads_get_what_they_ask_for_and_each_access_counts_once(fraction: float, length: int) -> None:
    points = Points()
    dataset = ShadeDataset(points, cache="memory://", working_set_fraction=fraction, version="1")
    assert dataset.cache is not None
    points.reads.clear()
    for number in range(4):
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(number)).tolist()
        batches = cut(order, length)
        for batch, found in zip(batches, in_threads(dataset, batches), strict=True):
            assert [index for _, _, index in found] == batch
            assert all((point == index).all() and label == index % 3 for point, label, index in found)
    counts = dataset.stats()
    assert counts["samples"] == counts["hits"] + counts["misses"] == 4 * NUM_SAMPLES
    assert counts["misses"] == len(points.reads)
    kept = [key for key in dataset.cache.store.scan("shade:") if key.rpartition("}")[2].isdigit()]
    assert sum(dataset.cache.size_bytes_N[: len(kept)]) <= dataset.cache.capacity_bytes
    assert len(kept) >= 0.9 * fraction * NUM_SAMPLES
    dataset.close()


@pytest.mark.parametrize("cache", [None, "memory://"])
def test_several_reads_of_the_origin_are_under_way_at_once(cache: str | None) -> None:
    points = Points()
    dataset = ShadeDataset(points, cache=cache, version="1")
    points.meeting = threading.Barrier(NUM_THREADS, timeout=30)
    in_threads(dataset, cut(list(range(NUM_THREADS)), 1))  # else the barrier breaks, and says so
    dataset.close()


def test_a_prefix_runs_in_several_threads_at_once() -> None:
    meeting = [threading.Barrier(1, timeout=30)]

    def meets(point: torch.Tensor) -> torch.Tensor:
        meeting[0].wait()
        return point

    dataset = ShadeDataset(Points(), cache="memory://", prefix=meets, version="1")
    meeting[0] = threading.Barrier(NUM_THREADS, timeout=30)
    in_threads(dataset, cut(list(range(NUM_THREADS)), 1))
    dataset.close()


def num_open(path: Path) -> int:
    """How often this process has a file open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found += os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    return found


def test_closing_closes_the_access_log_of_every_thread(tmp_path: Path) -> None:
    points = Points()
    dataset = ShadeDataset(points, cache="memory://", version="1", log=tmp_path / "log")
    points.meeting = threading.Barrier(NUM_THREADS, timeout=30)
    in_threads(dataset, cut(list(range(NUM_THREADS)), 1))
    assert num_open(tmp_path / "log") == NUM_THREADS
    dataset.close()
    assert num_open(tmp_path / "log") == 0
    assert sorted((tmp_path / "log").read_text().split()[1::2]) == sorted(map(str, range(NUM_THREADS)))


def test_random_transforms_draw_for_their_batch_and_for_no_other_threads() -> None:
    def noisy(point: torch.Tensor) -> torch.Tensor:
        return torch.stack([point + torch.rand(64) for _ in range(20)]).sum(0)

    batches = cut(list(range(NUM_SAMPLES)), 4)
    found = []
    for read in (in_threads, lambda dataset, batches: [dataset.__getitems__(batch) for batch in batches]):
        dataset = ShadeDataset(Points(), cache="memory://", transform=noisy, version="1")
        dataset.generators.follow(0, 1)
        found.append([point for batch in read(dataset, batches) for point, _, _ in batch])
        dataset.close()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_copy_that_was_pickled_reads_in_threads_too() -> None:
    dataset = ShadeDataset(Points(), cache=None)
    copied = pickle.loads(pickle.dumps(dataset))
    batches = cut(list(range(NUM_SAMPLES)), 4)
    assert [[index for _, _, index in batch] for batch in in_threads(copied, batches)] == batches


@pytest.mark.multiprocess
def test_a_private_store_is_refused_in_another_process() -> None:
    """Each process would fill one of its own, and hit nothing."""
    from multiprocessing import get_context

    dataset = ShadeDataset(Points(), cache="memory://", version="1")
    with get_context("fork").Pool(1) as pool, pytest.raises(ConfigError, match="a store that processes share"):
        pool.apply(dataset.__getitems__, ([1, 2],))
    assert dataset[1][2] == 1
    dataset.close()
