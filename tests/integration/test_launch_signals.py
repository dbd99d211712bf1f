"""Whatever ends a run leaves nothing running: no torch.distributed.run, no rank, no worker, no server, no socket."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launching import STREAM, Family, forget, make_images, saved_step, start, wait_for

pytestmark = pytest.mark.multiprocess

WORKERS_NOTICE_SECONDS = 20.0
"""A worker looks after its rank every five seconds."""


class Running:
    """A run of two ranks with a worker each, in the middle of an epoch, with a private server."""

    def __init__(self, here: Path) -> None:
        data = make_images(here / "data")
        (here / "log").mkdir()
        words = (STREAM, data, "-g", "2", "--batch_size", "4", "--workers", "1", "--epochs", "50", "--out", "out")
        environment = {"STREAM_LOG": str(here / "log"), "STREAM_PAUSE": "0.1"}
        self.here = here
        self.launcher = start(*words, cwd=here, **environment)
        logs = [here / "log" / f"rank{rank}.jsonl" for rank in range(2)]
        wait_for(lambda: self.launcher.poll() is not None or all(log.exists() and log.stat().st_size for log in logs))
        assert self.launcher.poll() is None, self.launcher.communicate()
        self.family = Family(self.launcher)
        self.servers = [p for p in self.family.members if re.search("redis|valkey", p.name())]
        self.sockets = [Path(server.cwd()) for server in self.servers]

    def ranks(self) -> list[psutil.Process]:
        """The two ranks, without their workers."""
        scripts = self.family.named(str(STREAM))
        return [p for p in scripts if "torch.distributed.run" not in p.cmdline() and p.ppid() not in self._pids()]

    def _pids(self) -> set[int]:
        scripts = self.family.named(str(STREAM))
        return {p.pid for p in scripts if "torch.distributed.run" not in p.cmdline()}

    def end(self) -> tuple[int, str, str]:
        """Waits for the launcher; its status and what it said."""
        out, err = self.launcher.communicate(timeout=60)
        headline, _, rest = err.partition("\n")
        assert headline == "runshade.py: 48 images in 4 classes, 8×8 pixels"
        return self.launcher.returncode, out, rest

    def assert_all_gone(self) -> None:
        """Nothing runs, nothing is left."""
        wait_for(lambda: not self.family.running(), WORKERS_NOTICE_SECONDS)
        wait_for(lambda: not any(folder.exists() for folder in self.sockets), WORKERS_NOTICE_SECONDS)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A run; whatever a failed test leaves of it is ended."""
    run = Running(tmp_path)
    yield run
    run.launcher.kill()
    run.launcher.communicate()
    for process in run.family.running():
        if "python" in process.name():  # the server's watchdog sees to the server, and to its folder
            process.kill()
    forget(tmp_path / "out")


@pytest.mark.multiprocess
def test_the_run_of_these_tests_has_all_that_could_be_left_behind(running: Running) -> None:
    assert len(running.ranks()) == 2
    assert len(running.family.named("torch.distributed.run")) == 1
    assert len(running.servers) == 1
    assert len(running.family.members) >= 7, "launcher → watchdog → server; run → 2 ranks → 2 workers"
    assert [path.suffix for path in running.sockets[0].iterdir() if path.is_socket()] == [".sock"]
    running.launcher.send_signal(signal.SIGINT)
    status, out, err = running.end()
    assert (status, out) == (128 + signal.SIGINT, "")
    assert re.fullmatch(r"runshade\.py: stopped by SIGINT(; continue with --resume .*/out)?\n", err)
    running.assert_all_gone()


@pytest.mark.multiprocess
def test_sigterm(running: Running) -> None:
    wait_for(lambda: saved_step(running.here / "out"))
    running.launcher.send_signal(signal.SIGTERM)
    status, _, err = running.end()
    assert status == 128 + signal.SIGTERM
    assert err == f"runshade.py: stopped by SIGTERM; continue with --resume {running.here / 'out'}\n"
    running.assert_all_gone()


@pytest.mark.multiprocess
def test_sigkill_of_the_launcher(running: Running) -> None:
    running.launcher.kill()
    assert running.end()[0] == -signal.SIGKILL
    running.assert_all_gone()


@pytest.mark.slow
def test_sigkill_of_torch_distributed_run(running: Running) -> None:
    (middle,) = running.family.named("torch.distributed.run")
    middle.kill()
    status, _, err = running.end()
    assert (status, err.count("\n")) == (1, 1)
    running.assert_all_gone()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_told_in_one_line(running: Running) -> None:
    victim = running.ranks()[1]
    rank = victim.environ()["RANK"]
    victim.kill()
    status, out, err = running.end()
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"runshade.py: rank {rank} was killed by SIGKILL (out of memory?); all of it is in ")
    assert (running.here / "out" / "output.log").stat().st_size > 0
    running.assert_all_gone()


@pytest.mark.multiprocess
def test_a_signal_while_the_ranks_are_starting(tmp_path: Path) -> None:
    make_images(tmp_path / "data")
    words = (STREAM, tmp_path / "data", "--batch_size", "4", "--out", "out")
    launcher = start(*words, cwd=tmp_path, STREAM_LOG=str(tmp_path))
    wait_for(lambda: launcher.poll() is not None or psutil.Process(launcher.pid).children(recursive=True))
    family = Family(launcher)
    os.kill(launcher.pid, signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    out = tmp_path / "out"  # where this process was delayed, the ranks have started and saved by now
    cure = f"; continue with --resume {out}" if (out / "run.json").is_file() and saved_step(out) else ""
    assert err.splitlines()[-1] == f"runshade.py: stopped by SIGTERM{cure}"
    wait_for(lambda: not family.running(), WORKERS_NOTICE_SECONDS)
    if cure:
        forget(out)
