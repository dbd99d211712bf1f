"""Two ranks are told that they will be killed, and then are: what is left is whole, and the end if time allows."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._flush.service import is_served
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.store import open_store
from shade.store._servers.local_cluster import free_ports
from shade.store._servers.server import LocalServer
from tests.support.noticed_training import build, digest, run_of

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "noticed_training.py"
PATIENCE_SECONDS = 120.0
EXIT_CODE = 143


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    (tmp_path / "redis").mkdir()
    with LocalServer(directory=tmp_path / "redis") as started:
        yield started


@dataclass
class Training:
    """Two ranks, or a launcher that has them."""

    folder: Path
    server: LocalServer
    persist: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, grace_seconds: float, step_seconds: float, *sources: list[str], launcher: bool = False) -> None:
        """Starts the ranks; each with its own sources."""
        (port,) = free_ports(1)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ranks: list[list[str]] = [[sys.executable, str(PROGRAM), str(rank)] for rank in range(2)]
        if launcher:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
            ranks = [[*torchrun, str(PROGRAM), "0"]]
        for rank, words in enumerate(ranks):
            command = [*words, "2", str(port), str(self.folder), str(self.server.url), self.persist]
            command += [str(grace_seconds), str(step_seconds), *sources[rank]]
            with (self.folder / f"errors-{rank}").open("wb") as errors:
                self.processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=errors))

    def told(self, rank: int, word: str) -> dict[int, str]:
        """What a rank has written so far under a word, by step; a torn last line is left out."""
        path = self.folder / f"rank-{rank}.log"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        words = [line.split() for line in lines]
        return {int(each[1]): each[-1] for each in words if each[0] == word}

    def errors(self) -> str:
        """All that went to standard error."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("errors-*")))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when it holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.errors()
            assert all(process.poll() is None for process in self.processes), self.errors()
            time.sleep(0.005)

    def kill(self) -> None:
        """The end."""
        for process in self.processes:
            process.kill()
            process.wait()

    def ended(self) -> list[int]:
        """Exit codes, of processes that end by themselves."""
        return [process.wait(PATIENCE_SECONDS) for process in self.processes]

    def lose_machine(self) -> None:
        """Its memory is gone; the store's, elsewhere, is left."""
        shutil.rmtree(own_folder(run_of(self.folder)))

    def recovered(self) -> int:
        """The step that a restart would go on from, once its every bit was compared with what the ranks had then."""
        model, optimizer = build()
        with Checkpointer(
            str(self.server.url), persist_to=self.persist or None, run=run_of(self.folder)
        ) as checkpointer:
            checkpointer.attach(model=model, optimizer=optimizer)
            step = checkpointer.restore_latest().step
        assert digest(model, optimizer) == self.told(0, "step")[step] == self.told(1, "step")[step]
        if self.persist:
            with open_store(self.server.url) as store:
                deadline = time.monotonic() + PATIENCE_SECONDS
                while is_served(store, run_of(self.folder)):
                    assert time.monotonic() < deadline
        return step


@pytest.fixture
def training(tmp_path: Path, server: LocalServer) -> Iterator[Training]:
    made = Training(tmp_path, server)
    yield made
    made.kill()


def run_until_told(training: Training, seed: int, told: Callable[[], object]) -> None:
    """Lets it train until a random moment after its first save, and tells it."""
    generator = random.Random(seed)
    last = generator.randint(6, 25)
    training.wait_until(lambda: max(training.told(0, "step"), default=0) >= last and bool(training.told(0, "landed")))
    time.sleep(generator.uniform(0, 0.05))
    told()


def budgets(training: Training, seed: int, seconds: float) -> None:
    """SIGTERM to one rank, SIGKILL to both so many seconds later: what had landed is there, or newer."""
    training.start(seconds, 0.02, ["SIGTERM"], ["SIGTERM"])
    victim = training.processes[seed % 2]
    run_until_told(training, seed, lambda: victim.send_signal(signal.SIGTERM))
    landed = max(training.told(0, "landed"))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in training.processes):
        time.sleep(0.01)
    training.kill()
    if seed % 3:
        training.lose_machine()
    step = training.recovered()
    assert landed <= step <= max(training.told(0, "step"))
    if seconds >= 2:  # with less the kill may come before the word
        assert "notice: SIGTERM" in training.errors()


@pytest.mark.parametrize(("seconds", "seed"), [(0.5, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_whatever_the_time_something_whole_is_left(training: Training, seconds: float, seed: int) -> None:
    budgets(training, seed, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("seconds", [0.05, 0.5, 2])
def test_whatever_the_time_and_moment_something_whole_is_left(training: Training, seconds: float, seed: int) -> None:
    budgets(training, seed + 10, seconds)


@pytest.mark.slow
def test_with_enough_time_the_very_last_step_is_durable(training: Training, tmp_path: Path) -> None:
    training.persist = str(tmp_path / "durable")
    training.start(30, 0.02, ["SIGTERM"], ["SIGTERM"])
    run_until_told(training, 5, lambda: training.processes[1].send_signal(signal.SIGTERM))
    assert training.ended() == [EXIT_CODE, EXIT_CODE]
    last = max(training.told(0, "step"))
    assert max(training.told(1, "step")) == last
    assert f"step {last} committed in cluster memory" in training.errors()
    assert "durable in " in training.errors()
    assert training.recovered() == last


def test_a_notice_file_that_one_machine_sees_stops_all(training: Training, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    training.start(30, 0.02, ["SIGTERM"], [str(notice)])
    run_until_told(training, 6, lambda: notice.write_text("20"))
    assert training.ended() == [EXIT_CODE, EXIT_CODE]
    assert f"notice: {notice}, on rank 1" in training.errors()
    assert training.recovered() == max(training.told(0, "step")) == max(training.told(1, "step"))


@pytest.mark.slow
def test_a_step_that_outlasts_the_time_leaves_what_was_there(training: Training) -> None:
    training.start(0.2, 1.0, ["SIGTERM"], ["SIGTERM"])
    training.wait_until(lambda: bool(training.told(0, "landed")))
    landed, last = max(training.told(0, "landed")), max(training.told(0, "step"))
    training.wait_until(lambda: max(training.told(0, "step")) > last)
    training.processes[0].send_signal(signal.SIGTERM)
    training.wait_until(lambda: "no step has ended in time" in training.errors())
    training.kill()
    assert training.recovered() == landed


@pytest.mark.slow
def test_torchrun_passes_the_signal_on_and_both_ranks_leave_in_time(training: Training) -> None:
    training.start(20, 0.02, ["SIGTERM"], launcher=True)
    run_until_told(training, 7, lambda: training.processes[0].send_signal(signal.SIGTERM))
    (code,) = training.ended()
    assert code != 0
    assert training.recovered() == max(training.told(0, "step")) == max(training.told(1, "step"))


WORKERS = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from shade import Checkpointer
folder, run, first = sys.argv[1:]
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(100_000, 4)), 2, num_workers=2)
with Checkpointer(persist_to=folder, run=run, every="1h") as checkpointer:
    checkpointer.attach(model=model, optimizer=optimizer)
    batches = iter(loader) if first == "loader" else None
    checkpointer.watch("SIGTERM", grace_seconds=20)
    for (rows,) in batches or loader:
        model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
        print(checkpointer.step_count, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("first", "code"), [("watch", EXIT_CODE), ("loader", 1)])
def test_a_signal_to_the_workers_as_well_costs_no_step(first: str, code: int, tmp_path: Path, run: str) -> None:
    command = [sys.executable, "-c", WORKERS, str(tmp_path), run, first]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            if line == "20\n":
                break
        os.killpg(child.pid, signal.SIGTERM)
        last = max([20, *map(int, child.stdout.read().split())])
        errors = child.stderr.read()
    assert child.returncode == code, errors
    assert "committed in storage" in errors
    assert ("Error" in errors) == (code == 1), errors  # and no alarm of the DataLoader's where all went well
    with Checkpointer(persist_to=str(tmp_path), run=run) as checkpointer:
        checkpointer.attach(model=torch.nn.Linear(4, 4))
        assert checkpointer.restore_latest(only=["model"]).step >= last
