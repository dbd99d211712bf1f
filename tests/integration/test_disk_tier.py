"""Memory, this node's disk and the origin: the same samples, honest counts, and a second job that reads nothing."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from shade.config import ACCESS_LOG
from shade.errors import ConfigError, StoreUnavailableError
from shade.store import disk as disk_module
from tests.support.data_plane import (
    CountingOrigin,
    Job,
    Outcome,
    global_steps,
    make_pictures,
    train,
    train_ranks,
)
from tests.support.launching import ROOT, make_images, rows
from tests.support.launching import run as launch

NUM_SAMPLES = 320


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pictures(tmp_path_factory.mktemp("pictures"), NUM_SAMPLES))


@pytest.fixture
def job(root: str, tmp_path: Path) -> Job:
    """Memory for a fifth; the disk's capacity is filled in."""
    return Job(root, "memory://", mode="uniform", log=str(tmp_path / "origin"), disk=f"{tmp_path}/tier?capacity=50MB")


def with_share(job: Job, tmp_path: Path, fraction: float) -> Job:
    """The job, with a disk for this fraction of the data set."""
    dataset = ShadeDataset(ImageFolder(job.root), cache=None, disk=f"{tmp_path}/sizes?capacity=50MB")
    assert dataset.cache is not None
    capacity_bytes = int(fraction * dataset.cache.size_bytes_N.sum())
    dataset.close()
    return replace(job, disk=f"{tmp_path}/tier?capacity={capacity_bytes}")


def reads(job: Job) -> int:
    """Reads of the origin by all processes since the last call."""
    assert job.log is not None
    count, _ = CountingOrigin.total(Path(job.log))
    Path(job.log).unlink(missing_ok=True)
    return count


def plain(job: Job) -> Outcome:
    """The same training without any cache."""
    return train(replace(job, url=None, disk=None, log=None))


@pytest.mark.parametrize("mode", ["uniform", "unbiased"])
def test_memory_and_disk_together_spare_the_origin(job: Job, mode: str, tmp_path: Path) -> None:
    job = replace(with_share(job, tmp_path, 0.4), mode=mode)
    outcome, undisturbed = train(job), plain(job)
    assert (outcome.steps, outcome.pixels) == (undisturbed.steps, undisturbed.pixels)
    for ledger in outcome.ledgers[1:]:
        assert ledger["misses"] <= ledger["samples"] - 0.6 * min(ledger["samples"], NUM_SAMPLES) + 0.02 * NUM_SAMPLES
        assert ledger["hits"] + ledger["misses"] == ledger["samples"]
        assert 0 < ledger["disk_hits"] < ledger["hits"]
        assert ledger["misses"] == ledger["origin_reads"]
        assert ledger["surprises"] == ledger["store_errors"] == ledger["disk_errors"] == 0
    assert outcome.totals["origin_reads"] == reads(job)
    in_memory = outcome.totals["cache_reads"]
    assert outcome.totals["hits"] == in_memory + outcome.totals["disk_hits"]


def test_the_log_of_accesses_calls_a_disk_hit_a_hit(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACCESS_LOG, str(tmp_path / "accesses"))
    outcome = train(with_share(job, tmp_path, 0.4))
    lines = (tmp_path / "accesses").read_text().splitlines()
    assert sum(line.startswith("hitting ") for line in lines) == outcome.totals["hits"]
    assert sum(line.startswith("miss ") for line in lines) == outcome.totals["misses"] == reads(job)


@pytest.mark.parametrize("url", ["memory://", None])
def test_the_second_job_reads_nothing(job: Job, url: str | None) -> None:
    job = replace(job, url=url, epochs=1)
    train(job)
    assert reads(job) == NUM_SAMPLES
    outcome = train(replace(job, epochs=3, seed=5))
    assert reads(job) == outcome.totals["origin_reads"] == outcome.totals["misses"] == 0
    assert outcome.totals["hits"] == 3 * NUM_SAMPLES
    assert outcome.totals["disk_hits"] >= 2 * NUM_SAMPLES * (1.0 if url is None else 0.8)
    assert outcome.pixels == plain(replace(job, epochs=3, seed=5)).pixels


@pytest.mark.parametrize("form", ["encoded", "decoded"])
@pytest.mark.parametrize("url", ["memory://", None])
def test_threads_read_either_format_from_the_disk(job: Job, url: str | None, form: str) -> None:
    view = transforms.Compose([transforms.Resize(8), transforms.CenterCrop(8), transforms.ToTensor()])
    plain_dataset = ShadeDataset(ImageFolder(job.root), cache=None, transform=view)
    for _ in range(2):  # the second job finds all of it
        dataset = ShadeDataset(ImageFolder(job.root), cache=url, disk=job.disk, transform=view, form=form)
        sampler = ShadeSampler(dataset, batch_size=16, mode="uniform")
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for pixels, _, indices in ShadeLoader(dataset, batch_size=16, sampler=sampler, num_workers=2):
                for picture, index in zip(pixels, indices.tolist(), strict=True):
                    assert torch.equal(picture, plain_dataset[index][0])
        stats = dataset.stats()
        sampler.close()
        dataset.close()
    assert stats["hits"] == 2 * NUM_SAMPLES
    assert stats["disk_hits"] >= 1.7 * NUM_SAMPLES


@pytest.mark.multiprocess
def test_workers_use_the_disk(job: Job) -> None:
    job = replace(job, url=None, epochs=1, workers=2)
    train(job)
    assert reads(job) == NUM_SAMPLES
    outcome = train(replace(job, epochs=2, context="spawn"))
    assert reads(job) == 0
    assert outcome.totals["disk_hits"] == 2 * NUM_SAMPLES


@pytest.mark.redis
@pytest.mark.multiprocess
def test_ranks_share_one_disk_by_one_plan(job: Job, get_place: Callable[..., object], tmp_path: Path) -> None:
    place = get_place("unix")
    job = replace(with_share(job, tmp_path, 0.4), url=place.url, epochs=3)  # type: ignore[attr-defined]
    ranks = train_ranks(job, 2, tmp_path / "world")
    assert global_steps(ranks) == global_steps([train(replace(job, url=None, disk=None), rank, 2) for rank in range(2)])
    for epoch in (1, 2):
        both = [rank.ledgers[epoch] for rank in ranks]
        assert sum(each["misses"] for each in both) <= 0.4 * NUM_SAMPLES + 0.02 * NUM_SAMPLES
        assert all(each["disk_hits"] > 0 for each in both)


@pytest.mark.multiprocess
def test_ranks_with_disks_of_their_own_fill_them(job: Job, tmp_path: Path) -> None:
    job = replace(job, url=None, disk=f"{tmp_path}/tier{{rank}}?capacity=50MB", epochs=6)
    ranks = train_ranks(job, 2, tmp_path / "world")
    total = [sum(rank.ledgers[epoch]["misses"] for rank in ranks) for epoch in range(6)]
    # A rank finds what it has read before: after each epoch, half of what was missing is there.
    assert total[0] == NUM_SAMPLES
    assert total[5] < total[3] < total[1] < NUM_SAMPLES
    assert total[5] < NUM_SAMPLES // 8
    assert sum(rank.totals["surprises"] + rank.totals["evicted"] for rank in ranks) == 0


def _train_to_file(job: Job, result: Path) -> None:
    result.write_bytes(pickle.dumps(train(job)))


@pytest.mark.multiprocess
def test_two_jobs_at_once_get_their_own_samples(job: Job, tmp_path: Path) -> None:
    job = replace(with_share(job, tmp_path, 0.6), epochs=3)
    context = multiprocessing.get_context("fork")
    other = replace(job, seed=9)
    neighbour = context.Process(target=_train_to_file, args=(other, tmp_path / "result"))
    neighbour.start()
    mine = train(job)
    neighbour.join(120)
    assert neighbour.exitcode == 0
    theirs = pickle.loads((tmp_path / "result").read_bytes())
    assert (mine.steps, mine.pixels) == (plain(job).steps, plain(job).pixels)
    assert (theirs.steps, theirs.pixels) == (plain(other).steps, plain(other).pixels)
    assert mine.totals["disk_hits"] > 0
    assert theirs.totals["disk_hits"] > 0


def _train_and_die(job: Job, step: int) -> None:
    train(job, hook=lambda done: os.kill(os.getpid(), signal.SIGKILL) if done == step else None)


@pytest.mark.multiprocess
def test_a_job_after_a_killed_one_begins_warm(job: Job) -> None:
    job = replace(job, epochs=2)
    fork = multiprocessing.get_context("fork")
    for step in (3, 10, 25):
        victim = fork.Process(target=_train_and_die, args=(job, step))
        victim.start()
        victim.join(60)
        assert victim.exitcode == -signal.SIGKILL
    reads(job)
    outcome = train(job)
    assert outcome.pixels == plain(job).pixels
    assert reads(job) == 0  # the third had read all 20 batches


@pytest.mark.parametrize("is_used", [False, True])
def test_a_data_set_that_no_job_uses_makes_room(job: Job, tmp_path: Path, is_used: bool) -> None:
    job = replace(with_share(job, tmp_path, 1.1), url=None, epochs=2)
    older = replace(job, root=str(make_pictures(tmp_path / "older", NUM_SAMPLES)))
    train(older)
    reads(job)
    user = ShadeDataset(ImageFolder(older.root), cache=None, disk=job.disk) if is_used else None
    outcome = train(job)
    if user is not None:
        user.close()
    assert outcome.pixels == plain(job).pixels
    assert reads(job) == outcome.totals["origin_reads"]
    assert (outcome.totals["origin_reads"] == NUM_SAMPLES) == (not is_used)
    train(replace(older, epochs=1))
    assert (reads(job) == 0) == is_used


PATIENT = """
import runpy, sys
from shade.cache import breaker
breaker.SLOW_SECONDS = 60.0  # on a crowded machine the folder of pictures is faster than any cache
sys.path.insert(0, {folder!r})
runpy.run_path({folder!r} + "/bench_cifar10.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("cache", ["none", pytest.param("local://", marks=pytest.mark.redis)])
def test_the_next_run_of_the_launcher_reads_nothing(tmp_path: Path, cache: str) -> None:
    make_images(tmp_path / "data")  # 48
    (tmp_path / "patient.py").write_text(PATIENT.format(folder=str(ROOT / "examples")))
    words = ("patient.py", "data", "--network", "cnn", "--epochs", "2", "--batch_size", "6", "-g", "2")
    more = ("--workers", "1", "--sampling", "uniform", "--cache", cache, "--disk", "tier?capacity=50MB")
    for out, is_warm in (("first", False), ("second", True)):
        done = launch(*words, *more, "--out", out, cwd=tmp_path)
        assert done.returncode == 0, done.stderr + (tmp_path / out / "output.log").read_text()[-3000:]
        names = ("samples", "hits", "misses", "disk_hits", "origin_reads", "disk_errors")
        total = {name: sum(row[name] for row in rows(tmp_path / out)) for name in names}
        assert total["samples"] == total["hits"] + total["misses"] == 2 * 48
        assert total["misses"] == total["origin_reads"]
        assert total["disk_errors"] == 0
        assert (total["misses"] == 0) if is_warm else (total["misses"] >= 48)
        assert total["disk_hits"] == total["hits"] if cache == "none" else 0 < total["disk_hits"] <= total["hits"]
        logged = (tmp_path / out / "train.log").read_text().splitlines()
        assert sum(line.startswith("hitting ") for line in logged) == total["hits"]
    assert f"disk://{tmp_path}/tier?capacity=50MB" in (tmp_path / "second" / "run.json").read_text()


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_disk_without_a_capacity_is_refused(root: str, tmp_path: Path) -> None:
    for disk in (f"{tmp_path}/tier", "redis://host:1", f"disk://{tmp_path}/tier"):
        with pytest.raises(ConfigError, match=r"write /nvme/shade\?capacity=500GiB"):
            ShadeDataset(ImageFolder(root), cache=None, disk=disk)
    ShadeDataset(ImageFolder(root), cache=None, disk=f"{tmp_path}/tier?capacity=500GiB").close()


def test_a_network_mount_is_refused_before_the_first_step(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "file_system_of", lambda _: "nfs4")
    with pytest.raises(ConfigError, match="tier on nfs4'; name a folder of a disk in this machine"):
        ShadeDataset(ImageFolder(root), "memory://", disk=f"{tmp_path}/tier?capacity=5MB")


def test_a_read_only_disk_is_refused_before_the_first_step(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreUnavailableError, match="is read-only; mount it writable"):
        ShadeDataset(ImageFolder(root), "memory://", disk=f"{tmp_path}/tier?capacity=5MB")
