"""Shards behind a web server and in a bucket: the same samples, and how many requests they take."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shade import ShadeDataset, ShadeLoader, ShadeSampler, Shards
from shade.cache import breaker
from shade.data._shards import blocks, index
from shade.errors import DataError
from tests.support.shards import COLUMNS, REMOTE_KINDS, make_items, read_shards, write_shards
from tests.support.storage_servers import BUCKET, S3Server
from tests.support.web_server import WebServer, serving

NUM_SAMPLES, BATCH = 1600, 16
NUM_SHARDS = 4


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(breaker, "SLOW_SECONDS", 60.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "site").mkdir()
    with serving(tmp_path / "site") as server:
        yield server


def _written(server: WebServer, tmp_path: Path, kind: str) -> tuple[list[str], list[Any]]:
    """URLs of shards of a kind, and their samples."""
    paths = write_shards(tmp_path / "site", kind, make_items(NUM_SAMPLES), NUM_SAMPLES // NUM_SHARDS)
    return [f"{server.url}/{path.name}" for path in paths], read_shards(paths)


def _epoch(dataset: ShadeDataset, sampler: ShadeSampler, expected: list[Any], workers: int) -> None:
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=workers, collate_fn=list)
    seen = []
    for items in loader:
        for content, number, place in items:
            assert (content, number) == expected[place]
            seen.append(place)
    assert sorted(seen) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", REMOTE_KINDS)
def test_behind_a_web_server_samples_are_the_same(server: WebServer, tmp_path: Path, kind: str) -> None:
    urls, expected = _written(server, tmp_path, kind)
    shards = Shards(urls, COLUMNS)
    order = np.random.default_rng(0).permutation(NUM_SAMPLES)[:200].tolist()
    assert shards.__getitems__(order) == [expected[number] for number in order]
    shards.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", REMOTE_KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_disk_requests_are_a_fiftieth_of_the_samples(
    server: WebServer, tmp_path: Path, kind: str, workers: int
) -> None:
    """In a globally random order; and later epochs and jobs read nothing."""
    urls, expected = _written(server, tmp_path, kind)
    disk = f"{tmp_path}/disk?capacity=100MiB"
    Shards(urls, COLUMNS).close()  # makes the index
    server.reads.clear()
    for job in range(2):
        dataset = ShadeDataset(Shards(urls, COLUMNS, disk=disk), "local://", working_set_fraction=0.2)
        sampler = ShadeSampler(dataset, batch_size=BATCH, mode="uniform", seed=job)
        probes = len(server.reads) if kind in ("parquet", "arrow") else 0
        for epoch in range(2):
            sampler.set_epoch(epoch)
            _epoch(dataset, sampler, expected, workers)
            requests = len(server.reads) - probes
            assert requests <= NUM_SAMPLES // 50
            assert epoch or job or requests >= NUM_SHARDS
        counts = dataset.stats()
        assert counts["origin_reads"] <= probes + NUM_SAMPLES // 50
        assert counts["hits"] == counts["samples"] - counts["misses"]
        assert counts["epoch_misses"] == 0  # of the second epoch: nothing came from the server
        if job:
            assert counts["misses"] == 0
        sampler.close()
        dataset.close()
        server.reads.clear()


def test_without_ranges_the_server_is_named(server: WebServer, tmp_path: Path) -> None:
    urls, expected = _written(server, tmp_path, "tar")
    shards = Shards(urls, COLUMNS)
    server.serves_ranges = False
    with pytest.raises(Exception, match=r"000\.tar gave \d+ bytes for the range .*its server knows no ranges"):
        shards[3]
    server.serves_ranges = True  # the cure
    assert shards[3] == expected[3]
    shards.close()


def test_a_shard_that_changes_behind_a_url_is_refused_by_name(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, expected = _written(server, tmp_path, "tar")
    shards = Shards(urls, COLUMNS)
    assert shards[0] == expected[0]
    monkeypatch.setattr(index, "CHECK_SECONDS", 0.0)
    path = tmp_path / "site" / "000.tar"
    os.utime(path, (time.time() + 100, time.time() + 100))
    with pytest.raises(DataError, match=r"000\.tar to be what it was when its index was made.*Last-Modified") as info:
        shards[1]
    found = re.search(r"remove (\S+\.index)", str(info.value))
    assert found is not None
    os.unlink(found[1])  # the cure
    again = Shards(urls, COLUMNS)
    assert again[1] == expected[1]
    for each in (shards, again):
        each.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_shards_in_a_bucket(s3: S3Server, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(FileExistsError):  # the server outlives a test
        s3.make_bucket(monkeypatch)
    paths = write_shards(tmp_path / "shards", kind, make_items(120))
    expected, bucket = read_shards(paths), fsspec.filesystem("s3", skip_instance_cache=True)
    for path in paths:
        bucket.put_file(str(path), f"{BUCKET}/{path.name}")
    shards = Shards(f"s3://{BUCKET}/*.{kind}", COLUMNS, disk=f"{tmp_path}/disk?capacity=10MiB")
    assert shards.__getitems__(range(120)) == expected
    bucket.put_file(str(paths[0]), f"{BUCKET}/{paths[1].name}")
    with pytest.raises(DataError, match=rf"{paths[1].name} to be what it was when its index was made"):
        Shards(f"s3://{BUCKET}/*.{kind}", COLUMNS)
    shards.close()
    for path in paths:
        bucket.rm(f"{BUCKET}/{path.name}")


def _take_and_die(shards: Shards, taken: Any, may_die: Any) -> None:
    tier: Any = shards._blocks
    assert tier.keeps((0, 0))
    assert tier.take((0, 0))
    taken.set()
    may_die.wait(60)
    os._exit(1)


@pytest.mark.multiprocess
def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(40))
    shards = Shards(paths, COLUMNS, disk=f"{tmp_path}/disk?capacity=10MiB")
    tier: Any = shards._blocks
    context = multiprocessing.get_context("spawn")
    taken, may_die = context.Event(), context.Event()
    other = context.Process(target=_take_and_die, args=(shards, taken, may_die))
    other.start()
    assert taken.wait(60)
    assert not tier.take((0, 0))
    assert tier.take((0, 1))  # another block is free
    tier.release((0, 1))
    may_die.set()
    tier.wait((0, 0))
    assert shards.__getitems__(range(40)) == read_shards(paths)
    other.join()
    shards.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", REMOTE_KINDS)
def test_two_ranks_load_each_sample_once_through_shade_loader(tmp_path: Path, kind: str, workers: int) -> None:
    paths = write_shards(tmp_path, kind, make_items(96), 24)
    expected, seen = read_shards(paths), []
    for rank in range(2):
        dataset = ShadeDataset(Shards([str(path) for path in paths], COLUMNS), cache="local://")
        sampler = ShadeSampler(dataset, batch_size=8, mode="uniform", num_replicas=2, rank=rank, seed=3)
        for items in ShadeLoader(dataset, batch_size=8, sampler=sampler, num_workers=workers, collate_fn=list):
            assert [(content, number) for content, number, _ in items] == [expected[place] for *_, place in items]
            seen += [place for *_, place in items]
        dataset.close()
    assert sorted(seen) == list(range(96))


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_shade_loader_collates_columns_of_shards_as_a_dataloader_does(tmp_path: Path, workers: int) -> None:
    paths = [str(path) for path in write_shards(tmp_path, "parquet", make_items(64), 16)]
    loaded = []
    for loader_type in (DataLoader, ShadeLoader):
        dataset = ShadeDataset(Shards(paths, COLUMNS), cache="local://")
        loaded.append([*loader_type(dataset, batch_size=16, num_workers=workers)])
        dataset.close()
    assert len(loaded[0]) == 4
    for plain, ours in zip(*loaded, strict=True):
        assert plain[0] == ours[0]
        assert all((mine == theirs).all() for mine, theirs in zip(ours[1:], plain[1:], strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_window_each_block_is_read_once_without_a_disk(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """By one process and by two, in a memory that holds a part of the data set."""
    _make_blocks_small(monkeypatch)
    urls, expected = _written(server, tmp_path, "tar")
    dataset = ShadeDataset(Shards(urls, COLUMNS), cache=None)
    shards = dataset.source.shards  # type: ignore[attr-defined]
    sampler = ShadeSampler(dataset, batch_size=BATCH, mode="uniform", shuffle_window=300)
    num_blocks = len(shards.first_sample_D)
    assert num_blocks > 20
    for epoch in range(3):
        server.reads.clear()
        sampler.set_epoch(epoch)
        _epoch(dataset, sampler, expected, workers)
        assert num_blocks / 2 < len(server.reads) <= num_blocks  # the last ones of the epoch before are still here
    assert len(server.reads) <= NUM_SAMPLES // 20
    sampler.close()
    dataset.close()


def _make_blocks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, index):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64 << 10)


def _load_as_rank(rank: int, urls: list[str], folder: str, results: Any) -> None:
    _make_blocks_small(pytest.MonkeyPatch())
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    dataset = ShadeDataset(Shards(urls, COLUMNS), cache=None)
    sampler = ShadeSampler(dataset, batch_size=BATCH, mode="uniform", shuffle_window=300)
    seen, window = [], 0
    for items in DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=list):
        seen += [(content, number, place) for content, number, place in items]
        torch.distributed.barrier()
        window = max(window, dataset.source.shards._window._store.stats().num_keys)  # type: ignore[attr-defined]
    results.put((seen, window))
    torch.distributed.barrier()
    sampler.close()
    dataset.close()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_of_a_machine_read_each_block_once(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_blocks_small(monkeypatch)
    urls, expected = _written(server, tmp_path, "tar")
    shards = Shards(urls, COLUMNS)  # makes the index
    num_blocks = len(shards.first_sample_D)
    shards.close()
    server.reads.clear()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_load_as_rank, args=(rank, urls, str(tmp_path), results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    seen = [each for part, _ in found for each in part]
    assert sorted(place for *_, place in seen) == list(range(NUM_SAMPLES))
    assert all((content, number) == expected[place] for content, number, place in seen)
    # Besides a block of each rank's probes: every block once for both.
    assert len([each for each in server.reads if each.endswith(".tar")]) <= num_blocks + 2 * 16
    assert 0 < max(window for _, window in found) < NUM_SAMPLES
