"""A run that is killed and resumed goes through the very samples that it would have gone through, step by step.

One uninterrupted run on one rank is the measure of all: ranks, workers and the state of the cache change who fetches a
sample, never which sample comes when. The kill is SIGKILL for every process of the run, launcher first, before a chosen
step; steps after the last checkpoint are taken again.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pytest
import torch

from shade.store._servers.server import LocalServer
from tests.support.launching import STREAM, make_images, rows, run, same_state, saved_step, stream_of, wait_for

pytestmark = pytest.mark.multiprocess

EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 4, 8, 3


@dataclass
class Trial:
    """A run that is killed once and resumed on other ranks and workers."""

    here: Path
    data: Path
    words: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """The run directory."""
        return self.here / "out"

    @property
    def log(self) -> Path:
        """Where the stream is written down; a folder of its own for each attempt."""
        return self.here / "log"

    def first(self, ranks: int, workers: int, kill_at: int | None, variable: str = "STREAM_KILL") -> None:
        """Trains until it is killed; None: to the end."""
        self.log.mkdir(parents=True)
        words = (STREAM, self.data, "-g", str(ranks), "--batch_size", str(GLOBAL_BATCH // ranks), *self.words)
        more = ("--epochs", str(EPOCHS), "--workers", str(workers), "--out", self.out)
        kill = {} if kill_at is None else {variable: str(kill_at)}
        told = run(*words, *more, cwd=self.here, STREAM_LOG=str(self.log), **kill, **self.environment)
        assert told.returncode == (0 if kill_at is None else -signal.SIGKILL), told.stderr
        servers = [Path(line) for line in (self.log / "server").read_text().split()]
        wait_for(lambda: not any(folder.exists() for folder in servers))

    def resume(self, ranks: int, workers: int, *words: str, **environment: str) -> dict[int, list[int]]:
        """Goes on to the end; the whole stream: up to the checkpoint as it was, from there as it was resumed."""
        before = self.log.rename(self.here / "log-before")
        step = saved_step(self.out)
        self.log.mkdir()
        more = ("--resume", self.out, "-g", str(ranks), "--workers", str(workers), *words)
        told = run(*more, cwd=self.here, STREAM_LOG=str(self.log), **(self.environment | environment))
        assert told.returncode == 0, told.stderr + (self.out / "output.log").read_text()[-2000:]
        after = stream_of(self.log, ranks)
        assert min(after) == step, "it did not go on from the checkpoint"
        first_ranks = len(list(before.glob("rank*.jsonl")))
        return {s: ids for s, ids in stream_of(before, first_ranks).items() if s < step} | after

    def parameters(self) -> dict[str, torch.Tensor]:
        """Of the trained model."""
        state: dict[str, torch.Tensor] = torch.load(self.log / "parameters.pt", weights_only=True)
        return state


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 images."""
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Trial:
    """One rank, no workers, from start to end."""
    trial = Trial(tmp_path_factory.mktemp("uninterrupted"), data)
    trial.first(1, 0, None)
    return trial


def test_the_measure_is_worth_something(uninterrupted: Trial) -> None:
    stream = stream_of(uninterrupted.log, 1)
    assert sorted(stream) == list(range(len(stream)))
    assert sorted(chain.from_iterable(stream[step] for step in range(6))) == list(range(48)), "the first epoch is full"
    assert len(stream) < EPOCHS * 6, "no epoch was drawn by importance"


@pytest.mark.slow
def test_one_rank_killed_in_an_epoch_and_resumed_with_workers(uninterrupted: Trial, tmp_path: Path) -> None:
    """The cache is cold: the private server has died with the run. Parameters are equal, bit for bit."""
    trial = Trial(tmp_path, uninterrupted.data)
    trial.first(1, 0, kill_at=10)
    assert saved_step(trial.out) == 9
    assert trial.resume(1, 4) == stream_of(uninterrupted.log, 1)
    assert same_state(trial.parameters(), uninterrupted.parameters())
    counted = sum(row["hits"] + row["misses"] for row in rows(trial.out))
    logged = [line for line in (trial.out / "train.log").read_text().splitlines() if not line.startswith("epoch")]
    assert len(logged) == counted, "the ledger has lost what the killed attempt read"


@pytest.mark.slow
def test_one_rank_resumed_as_two_from_a_warm_cache(uninterrupted: Trial, server: LocalServer, tmp_path: Path) -> None:
    trial = Trial(tmp_path, uninterrupted.data, words=("--cache", f"unix://{server.socket_path}", "-wss", "0.5"))
    trial.first(1, 1, kill_at=8)
    assert server.ask("DBSIZE") != 0, "the cache is not warm"
    assert trial.resume(2, 0) == stream_of(uninterrupted.log, 1)
    assert sum(row["hits"] for row in rows(trial.out)) > 0


@pytest.mark.slow
def test_two_ranks_resumed_as_one_while_the_cache_dies(
    uninterrupted: Trial, server: LocalServer, tmp_path: Path
) -> None:
    trial = Trial(tmp_path, uninterrupted.data, words=("--cache", f"unix://{server.socket_path}", "-wss", "0.5"))
    trial.first(2, 0, kill_at=13)
    stream = trial.resume(1, 1, STREAM_KILL_SERVER=str(server.process_id))
    assert stream == stream_of(uninterrupted.log, 1)
    assert sum(row["store_errors"] for row in rows(trial.out) if row["kind"] == "epoch") > 0, "the cache did not die"


@pytest.mark.slow
def test_killed_between_the_last_step_of_an_epoch_and_its_end(uninterrupted: Trial, tmp_path: Path) -> None:
    """The epoch has no step left, and still has to be ended: the learning rate is due to fall."""
    trial = Trial(tmp_path, uninterrupted.data)
    trial.first(1, 1, 0, "STREAM_KILL_BEFORE_END")
    assert saved_step(trial.out) == 6, "there is no checkpoint of the last step"
    assert trial.resume(1, 0) == stream_of(uninterrupted.log, 1)
    assert same_state(trial.parameters(), uninterrupted.parameters())
    assert [row["epoch"] for row in rows(trial.out) if row["kind"] == "epoch"] == list(range(EPOCHS))


@pytest.mark.slow
def test_a_run_whose_epoch_has_ended_goes_on_with_the_next(uninterrupted: Trial, tmp_path: Path) -> None:
    trial = Trial(tmp_path, uninterrupted.data, words=("--sampling", "uniform"))
    trial.first(1, 0, kill_at=12)
    stream = trial.resume(1, 0)
    assert sorted(stream) == list(range(24))
    for epoch in range(EPOCHS):
        assert sorted(chain.from_iterable(stream[step] for step in range(6 * epoch, 6 * epoch + 6))) == list(range(48))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_ranks_have_the_same_parameters_after_a_resume(uninterrupted: Trial, tmp_path: Path) -> None:
    whole = Trial(tmp_path / "whole", uninterrupted.data)
    whole.first(2, 1, None)
    assert stream_of(whole.log, 2) == stream_of(uninterrupted.log, 1)
    for kill_at, workers in ((1, 0), (7, 4), (16, 1)):
        trial = Trial(tmp_path / str(kill_at), uninterrupted.data)
        trial.first(2, workers, kill_at)
        if saved_step(trial.out):
            assert trial.resume(2, 4 - workers) == stream_of(uninterrupted.log, 1)
            assert same_state(trial.parameters(), whole.parameters())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(24))
def test_killed_at_any_step(seed: int, uninterrupted: Trial, tmp_path: Path) -> None:
    chance = random.Random(seed)
    expected = stream_of(uninterrupted.log, 1)
    kill_at = chance.randrange(SAVE_EVERY, len(expected))
    before, after = chance.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
    trial = Trial(tmp_path, uninterrupted.data, words=("--cache", chance.choice(["local://", "none"])))
    trial.first(before, chance.choice([0, 1, 4]), kill_at)
    assert trial.resume(after, chance.choice([0, 1, 4])) == expected
    if before == after == 1:
        assert same_state(trial.parameters(), uninterrupted.parameters())
