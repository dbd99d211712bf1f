"""``shade cache warm``: what it fills is what the job's first epoch finds, and nothing else is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shade.cli.command import main
from shade.store._servers.server import LocalServer
from tests.support.data_plane import make_pictures

pytestmark = pytest.mark.multiprocess

NUM_SAMPLES = 240
JOB = """
import json, sys
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from shade import ShadeDataset, ShadeSampler

def data(**options):
    dataset = ShadeDataset(ImageFolder({root!r}), transform=lambda image: torch.zeros(1), **({options!r} | options))
    return dataset, ShadeSampler(dataset, batch_size=16, mode={mode!r}, epochs=3)

def nothing_kept():
    return data(cache="local://", disk=None)

def not_two():
    return data()[0]

if __name__ == "__main__":
    dataset, sampler = data()
    for batch in DataLoader(dataset, 16, sampler=sampler):
        sampler.report(batch[-1], torch.ones(len(batch[-1])))
    counts = dataset.stats()
    print(json.dumps([counts["epoch_hits"], counts["epoch_origin_reads"], counts["epoch_disk_hits"]]))
    sampler.close()
    dataset.close()
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures"), NUM_SAMPLES)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer() as started:
        yield started


@pytest.fixture
def job(
    pictures: Path, server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Callable[[], list[int]]]:
    """Writes the job's script into this folder; returns what runs it, and gives hits, reads and disk hits."""
    server.ask("FLUSHALL")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "warm_job", raising=False)

    def write(mode: str = "uniform", **options: Any) -> Callable[[], list[int]]:
        options = {"cache": server.url.reveal(), "working_set_fraction": 0.25} | options
        Path("warm_job.py").write_text(JOB.format(root=str(pictures), options=options, mode=mode))

        def run() -> list[int]:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "warm_job.py"], capture_output=True, text=True, check=True
            )
            found: list[int] = json.loads(done.stdout)
            return found

        return run

    return write


def warm(*words: str) -> int:
    return main(["cache", "warm", "warm_job:data", *words])


@pytest.mark.parametrize("mode", ["uniform", pytest.param("unbiased", marks=pytest.mark.slow)])
def test_memory_holds_the_first_samples_of_the_first_epoch(
    job: Callable[..., Callable[[], list[int]]], capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    run = job(mode)
    assert warm() == 0
    (line,) = capsys.readouterr().out.splitlines()
    num_held = int(line.partition(": ")[2].partition(" ")[0])
    assert line.endswith(f"{num_held} samples, {num_held} of them read now")
    assert 0.2 * NUM_SAMPLES < num_held <= 0.25 * NUM_SAMPLES + 8
    hits, reads, _ = run()
    assert hits >= num_held
    assert hits + reads <= NUM_SAMPLES
    assert warm() == 0
    assert " 0 of them read now" in capsys.readouterr().out, "what is there is not read again"


def test_a_small_disk_holds_what_memory_does_not(
    job: Callable[..., Callable[[], list[int]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = job(disk=f"{tmp_path}/disk?capacity=300KB")
    assert warm() == 0
    memory, disk = (int(line.rpartition(": ")[2].partition(" ")[0]) for line in capsys.readouterr().out.splitlines())
    assert memory
    assert disk
    hits, reads, disk_hits = run()
    assert (hits, disk_hits) == (memory + disk, disk)
    assert reads == NUM_SAMPLES - hits


@pytest.mark.slow
def test_after_a_disk_for_all_the_first_epoch_reads_nothing(
    job: Callable[..., Callable[[], list[int]]], tmp_path: Path
) -> None:
    run = job(disk=f"{tmp_path}/disk?capacity=1GB")
    assert warm() == 0
    assert run()[:2] == [NUM_SAMPLES, 0]


@pytest.mark.slow
def test_machines_fill_one_memory_together(
    job: Callable[..., Callable[[], list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = job(working_set_fraction=1.0)
    counts = []
    for machine in range(3):
        assert warm("--machine", f"{machine}/3") == 0
        counts.append(int(capsys.readouterr().out.rpartition(", ")[2].partition(" ")[0]))
    assert counts == [NUM_SAMPLES // 3] * 3
    assert run()[:2] == [NUM_SAMPLES, 0]


def test_bytes_and_seconds_are_bounds(
    job: Callable[..., Callable[[], list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    job(working_set_fraction=1.0)
    assert warm("--seconds", "0") == 0
    assert f"0 samples, 0 of them read now; {NUM_SAMPLES} more would fit" in capsys.readouterr().out
    assert warm("--bytes", "1KiB") == 0
    assert f"; {NUM_SAMPLES} more would fit" in capsys.readouterr().out


def test_a_sample_that_cannot_be_read_is_counted(
    job: Callable[..., Callable[[], list[int]]], pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(working_set_fraction=1.0)
    victim = next(each for each in pictures.rglob("*") if each.is_file())
    aside = victim.with_suffix(".aside")
    # Listed, and gone when it is read.
    import warm_job  # type: ignore[import-not-found]

    made = warm_job.data()
    os.rename(victim, aside)
    try:
        warm_job.again = lambda: made
        assert main(["cache", "warm", "warm_job:again"]) == 1
    finally:
        os.rename(aside, victim)
    assert "; 1 could not be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "words", "message"),
    [
        ("warm_job:nothing_kept", [], "a cache that outlives this command"),
        ("warm_job:not_two", [], "(dataset, sampler) from warm_job:not_two"),
        ("warm_job:missing", [], "MODULE:FUNCTION, as train:data"),
        ("no_such_module:data", [], "MODULE:FUNCTION, as train:data"),
        ("warm_job:data", ["--machine", "3/3"], "a machine from 0 to 2"),
        ("warm_job:data", ["--machine", "x"], "--machine I/N, as 0/4"),
    ],
)
def test_what_cannot_be_done_is_refused(
    job: Callable[..., Callable[[], list[int]]],
    function: str,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job()
    assert main(["cache", "warm", function, *words]) == 2
    assert message in capsys.readouterr().err
