"""A window over shards: the same samples and weights, each block read once, memory for a window, and exact resume."""

from __future__ import annotations

import collections
import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shade import ShadeDataset, ShadeSampler, Shards
from shade.cache import breaker
from shade.data._origin.origin import ByteRange, FileOrigin
from shade.data._shards import blocks, index
from shade.errors import ConfigError, DataError
from tests.support.shards import WRITERS, Item, make_items, open_shards, read_shards, write_shards

N, BATCH, WINDOW = 400, 8, 90
BLOCK_BYTES = 8 << 10
MAPPED = ("arrow", "lmdb")
"""Formats whose local files are mapped into memory, so that no block is read."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(breaker, "SLOW_SECONDS", 60.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (blocks, index):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The machine's shared memory: here, so that other tests' folders are elsewhere. It is empty again afterwards."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(blocks, "_MEMORY", str(tmp_path / "memory"))
    yield tmp_path / "memory"
    assert not list((tmp_path / "memory").iterdir())


class CountedOrigin(FileOrigin):
    """Counts the ranges that are read, and fails at some."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__(1)
        self.places: list[ByteRange] = []
        self.fails = fails

    def _content(self, path: Any) -> bytes:
        self.places.append(path)
        if len(self.places) <= self.fails:
            raise OSError(errno.EIO, "the storage fails")
        return super()._content(path)


def opened(paths: list[Path], fails: int = 0, **options: Any) -> tuple[Shards, CountedOrigin]:
    shards, origin = open_shards(paths, **options), CountedOrigin(fails)
    shards._pieces._origin = origin
    return shards, origin


def sampler_of(dataset: Any, **options: Any) -> ShadeSampler:
    settings: dict[str, Any] = {"batch_size": BATCH, "mode": "uniform", "seed": 3, "shuffle_window": WINDOW}
    return ShadeSampler(dataset, **settings | options)


def loader_of(dataset: Any, sampler: ShadeSampler) -> Any:
    return DataLoader(dataset, batch_size=sampler.batch_size, sampler=sampler, collate_fn=list)


def epoch_of(dataset: Any, sampler: ShadeSampler, expected: list[Item], number: int) -> list[int]:
    """Loads an epoch, compares every sample, and returns which it were."""
    sampler.set_epoch(number)
    seen = []
    for items in loader_of(dataset, sampler):
        for content, place in items:
            assert (content, place) == expected[place]
            seen.append(place)
    return seen


@pytest.mark.parametrize("kind", list(WRITERS))
@pytest.mark.parametrize("disk", [None, "10MiB", "90KiB"])
def test_every_block_is_read_once_an_epoch(tmp_path: Path, memory: Path, kind: str, disk: str | None) -> None:
    """Without a disk; with one for the data set, then only in the first epoch; and with one for a part of it."""
    paths = write_shards(tmp_path / "shards", kind, make_items(N), 150)
    expected = read_shards(paths)
    shards, origin = opened(paths, disk=f"{tmp_path}/disk?capacity={disk}" if disk else None)
    if disk == "10MiB":
        origin.places.clear()
    sampler, num_blocks = sampler_of(shards), len(shards.first_sample_D)
    assert kind in MAPPED or num_blocks > 10
    orders, origin_reads = [], []
    for number in range(3):
        origin.places.clear()
        orders.append(epoch_of(shards, sampler, expected, number))
        origin_reads.append(len(origin.places))
        read = [(place.path, at) for place in origin.places for at in range(place.start, place.stop)]
        assert len(read) == len(set(read))  # no byte twice
    assert all(sorted(order) == list(range(N)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    # Of an epoch, the blocks at the end of the one before may still be here.
    if kind in MAPPED:
        assert origin_reads == [0, 0, 0]
    elif disk is None:
        assert origin_reads[0] == num_blocks
        assert all(num_blocks - 20 <= each <= num_blocks for each in origin_reads[1:])
    elif disk == "10MiB":
        assert origin_reads == [num_blocks, 0, 0]
    else:
        assert origin_reads[0] == num_blocks
        assert all(0 < each < num_blocks - 3 for each in origin_reads[1:])
    sampler.close()
    shards.close()


@pytest.mark.parametrize("mode", ["unbiased", "uniform", "pads"])
def test_set_and_weights_are_those_without_a_window(tmp_path: Path, memory: Path, mode: str) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    expected, drawn = read_shards(paths), []
    for window in (None, WINDOW):
        dataset = ShadeDataset(open_shards(paths), "memory://", working_set_fraction=0.3, policy="lru")
        sampler = sampler_of(dataset, mode=mode, shuffle_window=window)
        for number in range(4):
            sampler.set_epoch(number)
            seen = []
            for items in loader_of(dataset, sampler):
                assert [item[:2] for item in items] == [expected[item[2]] for item in items]
                places = torch.tensor([place for *_, place in items])
                seen += zip(places.tolist(), sampler.weights(places).tolist(), strict=True)
                sampler.report(places, 1.0 + places % 7)
        drawn.append(seen)
        sampler.close()
        dataset.close()
    if mode != "pads":  # whose draw follows the cache, which holds other samples
        assert sorted(drawn[0]) == sorted(drawn[1])
    assert drawn[0] != drawn[1]


def test_the_ledger_tells_what_came_from_the_shards(tmp_path: Path, memory: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    shards, origin = opened(paths, disk=f"{tmp_path}/disk?capacity=10MiB")
    dataset = ShadeDataset(shards, "memory://?capacity=1")
    probes, sampler = dataset.stats()["origin_reads"], sampler_of(dataset)
    origin.places.clear()
    for number in range(2):
        sampler.set_epoch(number)
        for _ in loader_of(dataset, sampler):
            pass
        counts = dataset.stats()
        assert counts["samples"] == counts["hits"] + counts["misses"]
        assert counts["origin_reads"] - probes == len(origin.places)
        if number:
            assert counts["epoch_hits"] == counts["epoch_disk_hits"] == N
            assert counts["epoch_origin_reads"] == 0
        else:  # probed samples were here before
            assert counts["epoch_misses"] >= 0.75 * N
    sampler.close()
    dataset.close()


@pytest.mark.parametrize("first_ranks", [1, 2, 4])
@pytest.mark.parametrize("then_ranks", [1, 2, 4])
def test_a_run_resumes_on_other_ranks(tmp_path: Path, memory: Path, first_ranks: int, then_ranks: int) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    expected, global_batch, stop = read_shards(paths), 16, 11

    def samplers(ranks: int) -> list[Any]:
        batch = global_batch // ranks
        made = []
        for rank in range(ranks):
            shards = open_shards(paths)
            made.append((shards, sampler_of(shards, batch_size=batch, num_replicas=ranks, rank=rank)))
        return made

    def steps(shards: Shards, sampler: ShadeSampler, count: int | None) -> list[list[int]]:
        found = []
        for items in loader_of(shards, sampler):
            assert all((content, place) == expected[place] for content, place in items)
            found.append([place for _, place in items])
            sampler.report(torch.tensor(found[-1]), torch.ones(len(found[-1])))
            if len(found) == count:
                break
        return found

    def globally(each: list[list[list[int]]]) -> list[list[int]]:
        return [[place for part in parts for place in part] for parts in zip(*each, strict=True)]

    ((shards, sampler),) = samplers(1)
    sampler.set_epoch(1)
    whole = steps(shards, sampler, None)
    shards.close()
    first, states = [], []
    for shards, sampler in samplers(first_ranks):
        sampler.set_epoch(1)
        first.append(steps(shards, sampler, stop))
        states.append(sampler.state_dict())
        shards.close()
    rest = []
    for shards, sampler in samplers(then_ranks):
        sampler.load_state_dict(states[0])
        rest.append(steps(shards, sampler, None))
        shards.close()
    assert globally(first) + globally(rest) == whole


def test_memory_holds_a_window_and_not_the_data_set(tmp_path: Path, memory: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(4 * N), 600)
    shards, _ = opened(paths)
    sampler, most = sampler_of(shards), 0
    tier: Any = shards._window
    for number in range(2):
        sampler.set_epoch(number)
        for _ in loader_of(shards, sampler):
            most = max(most, tier._store.stats().num_keys)
    per_block = 4 * N / len(shards.first_sample_D)
    ahead: Any = shards._ahead
    assert WINDOW / 2 < most < WINDOW + (ahead.ahead_blocks + 6) * per_block + 2 * BATCH < 2 * N
    shards.close()
    shards.close()


def test_a_second_sampler_takes_the_place_of_the_first(tmp_path: Path, memory: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    shards, _ = opened(paths)
    first = sampler_of(shards)
    for _ in loader_of(shards, first):
        break
    second = sampler_of(shards)
    assert len(list(memory.iterdir())) == 1
    assert sorted(epoch_of(shards, second, read_shards(paths), 0)) == list(range(N))
    shards.close()


def test_names_that_are_bound_anew_leave_no_thread_and_no_memory(tmp_path: Path, memory: Path) -> None:
    """A cell of a notebook that is run again closes nothing."""
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    expected, mine = read_shards(paths), set(threading.enumerate())
    for number in range(3):
        shards, _ = opened(paths)
        sampler = sampler_of(shards)
        epoch_of(shards, sampler, expected, number)
    left = [each for each in threading.enumerate() if each not in mine and each.name == "shade-read-ahead"]
    assert left
    del shards, sampler, _
    gc.collect()
    for thread in left:
        thread.join(20)
    assert not any(thread.is_alive() for thread in left)


def test_a_window_of_all_is_the_global_order(tmp_path: Path, memory: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    shards, _ = opened(paths)
    sampler = sampler_of(shards, shuffle_window=N)
    assert (
        epoch_of(shards, sampler, read_shards(paths), 0) == sampler_of(shards, shuffle_window=None).order_of(0).tolist()
    )
    shards.close()


def test_what_cannot_be_read_ahead_is_read_by_who_wants_it(tmp_path: Path, memory: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    expected = read_shards(paths)
    shards, origin = opened(paths, fails=4)
    assert sorted(epoch_of(shards, sampler_of(shards), expected, 0)) == list(range(N))
    assert len(origin.places) > len(shards.first_sample_D)
    shards.close()
    shards, _ = opened(paths)
    sampler = sampler_of(shards)
    tier: Any = shards._window
    tier._store._max_bytes = 3000  # others have taken the memory
    assert sorted(epoch_of(shards, sampler, expected, 0)) == list(range(N))
    shards.close()


def test_a_shard_that_changes_is_refused_by_name(tmp_path: Path, memory: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    shards, _ = opened(paths)
    sampler = sampler_of(shards)
    os.utime(paths[1], (1, 1))
    with pytest.raises(DataError, match=r"001\.tar to be what it was"):
        epoch_of(shards, sampler, read_shards(paths), 0)
    shards.close()


@pytest.mark.multiprocess
def test_what_was_left_in_memory_is_removed_but_not_what_is_used(tmp_path: Path, memory: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    code = f"""
import os, sys
from shade.data._shards import blocks
blocks._MEMORY = {str(memory)!r}
tier = blocks.memory_tier("data", "killed", 10, 1000.0)
tier.keep({{0: b"left"}})
os.kill(os.getpid(), 9)
"""
    subprocess.run(
        [sys.executable, "-c", code], check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert len(list(memory.iterdir())) == 1
    first, _ = opened(paths)
    sampler_of(first)
    (mine,) = memory.iterdir()
    assert "killed" not in mine.name
    second, _ = opened(paths)
    sampler_of(second)
    assert len(list(memory.iterdir())) == 2
    second.close()
    assert list(memory.iterdir()) == [mine]
    first.close()


def test_mistakes_are_refused_by_name(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    shards = open_shards(paths)
    with pytest.raises(ConfigError, match=r"shuffle_window ≥ 1, in samples, got 0"):
        sampler_of(shards, shuffle_window=0)
    with pytest.raises(ConfigError, match=r"shuffle=True with a shuffle_window, got False"):
        sampler_of(shards, shuffle=False)
    sampler_of(shards, shuffle=False, shuffle_window=None)  # the cure
    plain = TensorDataset(torch.arange(N))
    with pytest.raises(
        ConfigError, match=r"Shards with a shuffle_window.*got 'TensorDataset'; leave shuffle_window out"
    ):
        sampler_of(plain)
    sampler_of(plain, shuffle_window=None)  # the cure
    state = sampler_of(shards).state_dict()
    for other in (WINDOW + 1, None):
        with pytest.raises(ConfigError, match=rf"shuffle_window={WINDOW}, as in the saved run, got {other}"):
            sampler_of(shards, shuffle_window=other).load_state_dict(state)
    with pytest.raises(ConfigError, match=rf"shuffle_window=None, as in the saved run, got {WINDOW}"):
        sampler_of(shards).load_state_dict(sampler_of(shards, shuffle_window=None).state_dict())
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 20, 1 << 20, 1000))
    other = open_shards(paths)
    with pytest.raises(ConfigError, match=r"of shared memory for a window of \d+ samples.*give the Shards a disk="):
        sampler_of(other)
    other.close()
    other = open_shards(paths, disk=f"{tmp_path}/disk?capacity=10MiB")
    sampler_of(other)  # the cure
    other.close()
    shards.close()


def test_a_prefix_over_shards_may_have_a_window(tmp_path: Path, memory: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(N), 150)
    shards, origin = opened(paths)
    dataset = ShadeDataset(shards, "memory://", working_set_fraction=0.1, prefix=len)
    sampler = sampler_of(dataset)
    origin.places.clear()
    found = [item for items in loader_of(dataset, sampler) for item in items]
    assert sorted(found, key=lambda item: item[1]) == [
        (len(content), number, number) for content, number in read_shards(paths)
    ]
    assert len(origin.places) <= len(shards.first_sample_D) + 5
    sampler.close()
    dataset.close()
