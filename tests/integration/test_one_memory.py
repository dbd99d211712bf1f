"""Samples and snapshots in one Redis that is too small for both: the snapshot wins, the samples come back."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeSampler
from shade.cache import breaker
from shade.config import RunConfig
from shade.store._servers.server import LocalServer
from shade.train.snapshots import Snapshots
from tests.support.data_plane import make_pictures
from tests.support.launching import STREAM, rows, run, stream_of, wait_for

pytestmark = pytest.mark.multiprocess

N, BATCH = 240, 16
"""Pictures of 270 KB: 65 MB. A server's buffers come to some megabytes, so less would tell nothing."""
BALLAST = 4_000_000
"""Numbers: 16 MB a snapshot, and as much twice while it comes in."""
TIGHT_BYTES = 108_000_000
"""For the samples and one snapshot, or for three snapshots: not for the samples and three."""
MIB = 2**20


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set."""
    return make_pictures(tmp_path_factory.mktemp("pictures"), N, side=300)


def server_of(max_bytes: int) -> LocalServer:
    return LocalServer(settings={"maxmemory": str(max_bytes)})


def refusals(server: LocalServer) -> int:
    """How often the server had no memory for a write."""
    told = re.search(rb"errorstat_OOM:count=(\d+)", server.ask("INFO", "errorstats"))
    return int(told[1]) if told else 0


class Trial:
    """A run in this process, epoch by epoch, that says what it does."""

    def __init__(self, pictures: Path, url: str, persist: Path | None, *, ballast: int = BALLAST, every: str = "never"):
        folder = ImageFolder(str(pictures))
        self.dataset = ShadeDataset(folder, cache=url, working_set_fraction=0.9, transform=transforms.ToTensor())
        self.sampler = ShadeSampler(self.dataset, batch_size=BATCH, seed=0, epochs=10)
        assert self.dataset.cache is not None
        self.cache = self.dataset.cache
        self.model = torch.nn.Linear(1, 1)
        self.model.register_buffer("ballast", torch.zeros(ballast))
        config = RunConfig(
            "out", "s.py", ("d",), checkpoint=url, persist_to=str(persist) if persist else None, checkpoint_every=every
        )
        self.snapshots = Snapshots(config, {"sampler": self.sampler, "model": self.model}, self.cache)
        self.steps = 0
        self.ids: list[int] = []

    def epoch(self, epoch: int, *, save_at: int | None = None) -> dict[str, Any]:
        """What the ledger counted in it."""
        before = self.cache.residency.totals()
        self.snapshots.begin_epoch(self.steps, -(-N // BATCH))
        self.sampler.set_epoch(epoch)
        for step, (_, _, indices) in enumerate(DataLoader(self.dataset, batch_size=BATCH, sampler=self.sampler)):
            self.ids += indices.tolist()
            self.sampler.report(indices, 0.1 + indices * 7919 % 97 / 97)
            self.sampler.weights(indices)
            self.steps += 1
            self.snapshots.step(self.steps)
            if step == save_at:
                self.save()
        return (self.cache.residency.totals() - before).as_dict()

    def save(self) -> str:
        """Saves and waits; where it is."""
        self.snapshots.save(self.steps)
        return self.snapshots._checkpointer.wait_committed()

    def flushed(self) -> None:
        """Returns when the flusher is done with every slot."""
        memory = self.snapshots._checkpointer._tiers.memory
        assert memory is not None
        wait_for(lambda: not memory.dirty())

    def end(self) -> None:
        self.snapshots.close(None, None, None)
        self.sampler.close()
        self.dataset.close()


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Trial]]:
    """Whatever is put in is ended. The cache stays in use where a crowded machine makes a file in memory faster."""
    monkeypatch.setattr(breaker, "SLOW_SECONDS", math.inf)
    made: list[Trial] = []
    yield made
    for trial in made:
        trial.end()


@pytest.mark.slow
def test_the_least_useful_yield_to_a_snapshot_and_come_back_when_it_is_in_storage(
    pictures: Path, trials: list[Trial], tmp_path: Path
) -> None:
    with server_of(TIGHT_BYTES) as server, server_of(256 * MIB) as large:
        trial = Trial(pictures, f"unix://{server.socket_path}", tmp_path)
        trials.append(trial)
        cache, full = trial.cache, trial.cache.capacity_bytes
        before = [trial.epoch(0), trial.epoch(1)][1]
        assert before["yielded"] == 0
        assert before["hits"] == cache.policy.resident_N.sum(), "the cache is not full"  # type: ignore[union-attr]

        assert trial.save() == "cluster memory"
        yielding = trial.epoch(2, save_at=5)
        assert trial.save() == "cluster memory"
        assert yielding["yielded"] > 0
        assert cache.admission.counted_bytes() <= cache.residency.capacity_bytes < full
        trial.flushed()

        refilling = trial.epoch(3)
        assert cache.residency.capacity_bytes == full, "slots with nothing but old snapshots keep their memory"
        assert refilling["admitted"] == refilling["misses"] > 0
        later = [trial.epoch(epoch) for epoch in range(4, 9)]
        assert later[-1]["hits"] == before["hits"]
        assert all(each["yielded"] == each["declined"] == each["surprises"] == 0 for each in later)
        assert refusals(server) == 0

        undisturbed = Trial(pictures, f"unix://{large.socket_path}", None)
        trials.append(undisturbed)
        assert sum(undisturbed.epoch(epoch)["yielded"] for epoch in range(9)) == 0
        assert trial.ids == undisturbed.ids
        end(trials)


@pytest.mark.slow
def test_every_save_of_a_run_that_saves_often_finds_room_and_some_samples_stay(
    pictures: Path, trials: list[Trial], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with server_of(TIGHT_BYTES + 32 * MIB) as server:
        trial = Trial(pictures, f"unix://{server.socket_path}", tmp_path, every="4")
        trials.append(trial)
        with caplog.at_level(logging.WARNING, "shade.checkpoint"):
            told = [trial.epoch(epoch) for epoch in range(6)]
            trial.snapshots.settle()
        assert not [record.message for record in caplog.records if "saves go to storage" in record.message]
        assert sum(each["yielded"] for each in told) > 0
        assert min(each["hits"] for each in told[1:]) > 0
        assert not any(each["surprises"] for each in told)
        figures = trial.snapshots.figures()
        assert figures["saves"] == trial.steps // 4
        assert figures["failed"] == 0
        assert trial.snapshots._committed is not None
        assert trial.snapshots._committed.committed.result().tier.name == "cluster memory"
        assert refusals(server) == 0
        end(trials)


def test_a_cluster_that_is_full_of_other_things_makes_a_save_go_to_storage_and_says_so(
    pictures: Path, trials: list[Trial], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with server_of(TIGHT_BYTES) as server:
        for number in range(84):
            server.ask("SET", f"a stranger's {number}", "x" * (MIB - 4096))  # more would take 1.25 MiB from jemalloc
        trial = Trial(pictures, f"unix://{server.socket_path}", tmp_path)
        trials.append(trial)
        trial.epoch(0)
        with caplog.at_level(logging.WARNING, "shade.checkpoint"):
            assert [trial.save(), trial.save()] == ["storage", "storage"]
        said = [record.message for record in caplog.records if "saves go to storage" in record.message]
        assert len(said) == 1, "once"
        assert "expected room for" in said[0]
        assert trial.snapshots.figures()["durable_step"] == trial.steps
        assert trial.cache.admission.counted_bytes() == 0, "whoever could yield has yielded"
        assert trial.epoch(1)["admitted"] > 0
        end(trials)


def test_a_share_that_one_rank_has_not_heard_of_yet_decides_nothing(
    pictures: Path, trials: list[Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's thread learns its job's share when it does: between two of them, no exchange of the ranks may differ."""
    with server_of(TIGHT_BYTES) as server:
        trial = Trial(pictures, f"unix://{server.socket_path}", tmp_path)
        trials.append(trial)
        memory = trial.snapshots._one_memory
        assert memory is not None
        exchanges: list[Any] = []
        share = memory._group.share
        monkeypatch.setattr(memory._group, "share", lambda value: (exchanges.append(value), share(value))[1])
        for quota in (trial.cache.capacity_bytes, trial.cache.capacity_bytes // 2):
            trial.cache.quota_bytes = quota
            memory.begin_epoch(due=False, latest=None)
        assert exchanges == [], "nothing has been divided yet"
        end(trials)


def end(trials: list[Trial]) -> None:
    """Ends them while their servers are there."""
    while trials:
        trials.pop().end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [pytest.param(("--checkpoint-every", "never"), id="rare"), pytest.param(("--checkpoint-every", "7"), id="often")],
)
def test_two_ranks_yield_alike_and_see_the_samples_that_they_would_have_seen(
    words: tuple[str, ...], pictures: Path, tmp_path: Path
) -> None:
    common = (STREAM, pictures, "-g", "2", "--batch_size", "8", "--workers", "1", "--epochs", "4", "-wss", "0.9")
    given = {"STREAM_BALLAST": str(BALLAST), "STREAM_SAVE_EVERY": "13" if "never" in words else "1000000"}
    streams = []
    with server_of(TIGHT_BYTES) as server:
        url = f"unix://{server.socket_path}"
        for name, more in (("alone", ("--cache", "none")), ("both", ("--cache", url, "--checkpoint", url, *words))):
            (tmp_path / name).mkdir()
            told = run(*common, *more, "--out", tmp_path / name / "out", cwd=tmp_path, STREAM_LOG=str(tmp_path / name),
                       **given)  # fmt: skip
            assert told.returncode == 0, told.stderr + (tmp_path / name / "out" / "output.log").read_text()[-3000:]
            streams.append(stream_of(tmp_path / name, 2))
        assert refusals(server) == 0
    assert streams[0] == streams[1]
    residents = [(tmp_path / "both" / f"residents{rank}.jsonl").read_text() for rank in (0, 1)]
    assert residents[0] == residents[1]
    allowed = [json.loads(line)["allowed"] for line in residents[0].splitlines()]
    said = (tmp_path / "both" / "out" / "output.log").read_text()
    assert min(allowed) < rows(tmp_path / "both" / "out")[0]["capacity_bytes"]
    assert "saves go to storage" not in said
    assert "is not saved" not in said
    assert sum(row["yielded"] for row in rows(tmp_path / "both" / "out")) > 0
    assert not any(row["store_errors"] for row in rows(tmp_path / "both" / "out"))
    assert "samples left the cache early" in (tmp_path / "both" / "out" / "report.txt").read_text()
