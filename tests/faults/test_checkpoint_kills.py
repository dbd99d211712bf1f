"""Ranks, flusher and server are killed, alone and all at once: the resumed run is the undisturbed one, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.store._servers.local_cluster import free_ports
from shade.store._servers.server import LocalServer
from tests.support.killed_training import Job, train

pytestmark = pytest.mark.multiprocess

PATIENCE_SECONDS = 120.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.killed_training"])


@dataclass
class Told:
    """What a rank has written: each line whole."""

    losses: dict[int, set[str]]
    """By step; of all lives."""
    restored: list[tuple[int, str, str]]
    """Step, digest of the parameters, tiers; one a life."""
    durable: list[int]
    """Steps, each said before whatever came after it."""
    floors: list[int]
    """For each life the newest step that had been durable before it."""
    end: str | None

    @classmethod
    def read(cls, path: Path) -> Told:
        told = cls({}, [], [], [], None)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for word, *rest in map(str.split, lines):
            if word == "step":
                told.losses.setdefault(int(rest[0]), set()).add(rest[1])
            elif word == "restored":
                told.floors.append(max(told.durable, default=0))
                told.restored.append((int(rest[0]), rest[1], rest[2] if len(rest) > 2 else ""))
            elif word == "durable":
                told.durable.append(int(rest[0]))
            else:
                told.end = rest[0]
        return told


class Ranks:
    """The processes of one life of a job."""

    def __init__(self, job: Job) -> None:
        (port,) = free_ports(1)
        self.job = replace(job, port=port)
        self.processes: list[BaseProcess] = [
            _context.Process(target=train, args=(self.job, rank), daemon=True) for rank in range(job.world_size)
        ]
        self._before = self.num_lines()
        for process in self.processes:
            process.start()

    def num_lines(self) -> int:
        path = self.job.folder / "rank-0.log"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, num_lines: int) -> None:
        """Returns when rank 0 has said so much in this life, or has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.num_lines() < self._before + num_lines and any(p.is_alive() for p in self.processes):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def kill(self, first: int | None = None) -> None:
        """SIGKILL: one of them, then, as torchrun does, the others."""
        victims = list(self.processes)
        if first is not None:
            victims = [victims.pop(first), *victims]
        for process in victims:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            if first is not None:
                time.sleep(0.01)
        for process in victims:
            process.join(PATIENCE_SECONDS)

    def finish(self) -> None:
        for process in self.processes:
            process.join(PATIENCE_SECONDS)
            assert process.exitcode == 0


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Not started."""
    made = LocalServer(directory=tmp_path_factory.mktemp("s"))
    yield made
    made.stop()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make_job(**more: object) -> Job:
        run = f"kills-{secrets.token_hex(4)}"
        folder = tmp_path / run
        folder.mkdir()
        job = Job(**{"folder": folder, "run": run, "num_steps": 60, "persist": str(folder / "durable")} | more)  # type: ignore[arg-type]
        jobs.append(job)
        return job

    yield make_job
    for job in jobs:
        for flusher in flushers(job):
            flusher.kill()
        shutil.rmtree(own_folder(job.run), ignore_errors=True)


def flushers(job: Job) -> list[psutil.Process]:
    """The flushers of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"--run={job.run}" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def half_written(job: Job) -> list[str]:
    """Folders of saves in storage that have no record."""
    return [
        folder.name
        for folder in (Path(str(job.persist)) / job.run).glob("step-*")
        if not (folder / "commit.json").exists()
    ]


def undisturbed(job: Job) -> list[Told]:
    """The same training, never saved and never killed."""
    folder = job.folder / "undisturbed"
    folder.mkdir()
    Ranks(replace(job, folder=folder, saves=False)).finish()
    return [Told.read(folder / f"rank-{rank}.log") for rank in range(job.world_size)]


def check(job: Job, num_lives: int, *, keeps_durable: bool = True) -> list[Told]:
    """Every loss of every life is the undisturbed run's, and no life began before what had been durable."""
    rights = undisturbed(job)
    found = [Told.read(job.folder / f"rank-{rank}.log") for rank in range(job.world_size)]
    for told, right in zip(found, rights, strict=True):
        assert told.end == right.end
        assert told.losses == right.losses
    # Of all ranks rank 0 alone can be compared with its own durable lines: one that is killed first says less.
    told = found[0]
    assert len(told.restored) == num_lives
    if keeps_durable:
        assert all(step >= floor for (step, _, _), floor in zip(told.restored, told.floors, strict=True))
    return found


@pytest.mark.parametrize("num_kills", [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize(
    ("world_size", "strategy", "codec"),
    [
        pytest.param(1, "copy", None, marks=pytest.mark.slow),
        (2, "overlap", None),
        pytest.param(2, "asymmetric", None, marks=pytest.mark.slow),
        pytest.param(2, "asymmetric", "zstd", marks=pytest.mark.slow),
        pytest.param(2, "pccheck", None, marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_killed_at_random_moments(
    make: Callable[..., Job], num_kills: int, world_size: int, strategy: str, codec: str | None
) -> None:
    dice = random.Random(num_kills)
    job = make(world_size=world_size, strategy=strategy, codec=codec, num_steps=40 + 10 * num_kills)
    for _ in range(num_kills):
        ranks = Ranks(job)
        ranks.wait_for(1 + dice.randrange(12))
        time.sleep(dice.random() * 0.01)
        ranks.kill(first=dice.randrange(world_size))
    Ranks(job).finish()
    (told, *_) = check(job, num_kills + 1)
    assert half_written(job) == []
    for step, _, tiers in told.restored:
        assert not step or set(tiers.split(",")) <= {"shared-memory", "storage"}
    assert told.restored[-1][0] > 0


def test_shared_memory_alone_brings_a_killed_rank_back(make: Callable[..., Job]) -> None:
    job = make(persist=None)
    for _ in range(2):
        ranks = Ranks(job)
        ranks.wait_for(12)
        ranks.kill()
    Ranks(job).finish()
    (told,) = check(job, 3)
    assert all(tiers == "shared-memory" for step, _, tiers in told.restored if step)


SOME_KILLS = pytest.mark.parametrize(
    "num_kills", [2, pytest.param(15, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)


@pytest.mark.slow
@SOME_KILLS
def test_the_flusher_is_killed_while_it_writes(make: Callable[..., Job], server: LocalServer, num_kills: int) -> None:
    dice = random.Random(0)
    server.start()
    job = make(store=str(server.url.reveal()), num_steps=60 + 20 * num_kills, every=2)
    killed = 0
    for _ in range(num_kills):
        ranks = Ranks(job)
        ranks.wait_for(6 + dice.randrange(10))
        for flusher in flushers(job):
            flusher.kill()
            killed += 1
        ranks.wait_for(20)
        ranks.kill()
        shutil.rmtree(own_folder(job.run), ignore_errors=True)  # another machine takes over
    Ranks(job).finish()
    (told,) = check(job, num_kills + 1)
    assert killed > 0
    assert {tiers for step, _, tiers in told.restored if step} <= {"cluster-memory", "storage"}


def test_the_store_is_killed_in_mid_run_and_saves_go_to_storage(make: Callable[..., Job], server: LocalServer) -> None:
    server.start()
    job = make(store=str(server.url.reveal()), num_steps=120, every=3)
    ranks = Ranks(job)
    ranks.wait_for(8)
    server.stop()
    ranks.wait_for(60)
    ranks.kill()
    shutil.rmtree(own_folder(job.run), ignore_errors=True)
    server.start()
    Ranks(job).finish()
    (told,) = check(job, 2)
    assert told.restored[1][2] == "storage"
    assert told.restored[1][0] > 6


@pytest.mark.slow
@SOME_KILLS
def test_everything_is_killed_at_once(make: Callable[..., Job], server: LocalServer, num_kills: int) -> None:
    dice = random.Random(1)
    job = make(store="", num_steps=60 + 20 * num_kills, every=2, world_size=2)
    for _ in range(num_kills):
        server.start()
        job = replace(job, store=str(server.url.reveal()))
        ranks = Ranks(job)
        ranks.wait_for(10 + dice.randrange(20))
        for flusher in flushers(job):
            flusher.kill()
        ranks.kill(first=dice.randrange(2))
        server.stop()
        shutil.rmtree(own_folder(job.run), ignore_errors=True)
    server.start()
    Ranks(job).finish()
    (told, _) = check(job, num_kills + 1)
    assert {tiers for step, _, tiers in told.restored if step} <= {"storage"}


@pytest.mark.slow
def test_another_number_of_ranks_restores_the_parameters(make: Callable[..., Job]) -> None:
    job = make(world_size=2, num_steps=8)
    ends = []
    for world_size, num_steps in ((2, 8), (1, 12), (3, 16), (3, 16)):
        job = replace(job, world_size=world_size, num_steps=num_steps)
        Ranks(job).finish()
        found = [Told.read(job.folder / f"rank-{rank}.log") for rank in range(world_size)]
        assert len({told.end for told in found}) == 1, "ranks hold the same parameters"
        if ends:
            step, digest, _ = found[0].restored[-1]
            assert (step, digest) == ends[-1]
            assert all(told.restored[-1][:2] == (step, digest) for told in found)
        assert found[0].end is not None
        ends.append((num_steps, found[0].end))


KILLED_IN_A_SAVE = """
import os, signal, sys
import torch
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint._tiers.storage import StorageTier
checkpointer = Checkpointer(persist_to=sys.argv[1], run=sys.argv[2], every="never")
checkpointer.attach(model=torch.nn.Linear(8, 8))
for checkpointer.step_count in (10, 20):
    if checkpointer.step_count == 20:
        StorageTier.commit = lambda *words: os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.save()
    checkpointer.wait_durable()
"""


def test_what_a_killed_save_left_in_storage_goes_when_the_run_goes_on(make: Callable[..., Job]) -> None:
    job = make()
    command = [sys.executable, "-c", KILLED_IN_A_SAVE, str(job.persist), job.run]
    assert subprocess.run(command, timeout=PATIENCE_SECONDS, check=False).returncode == -signal.SIGKILL
    assert half_written(job) == ["step-0000000020"], "it was killed with its shard written and no record"
    shutil.rmtree(own_folder(job.run))  # the machine is gone, too
    model = torch.nn.Linear(8, 8)
    with Checkpointer(persist_to=str(job.persist), run=job.run, every="never") as checkpointer:
        assert half_written(job) == []
        checkpointer.attach(model=model)
        assert checkpointer.restore_latest().step == 10
