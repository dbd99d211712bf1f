"""How a failed run is told in one sentence, and what signals become."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shade.config import RunConfig
from shade.errors import ConfigError
from shade.launch.ranks import Ended, Ranks, await_machine_0, command, signals_as_exceptions
from shade.store._servers.local_cluster import free_ports

SUMMARY = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
s.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : h
  rank      : {rank} (local_rank: 0)
  exitcode  : {status} (pid: 4711)
"""


class Dead(Ranks):
    """Ranks that have failed; what they wrote is made up."""

    def __init__(self, log: Path, log_start: int = 0) -> None:
        self._log = log
        self._log_start = log_start


@pytest.mark.parametrize(
    ("said", "rank", "status", "sentence"),
    [
        ("", 1, -9, "rank 1 was killed by SIGKILL (out of memory?)"),
        ("", 0, -11, "rank 0 was killed by SIGSEGV"),
        ("KeyError: 'x'\n", 3, 1, "rank 3 failed: KeyError: 'x'"),
        ("[rank3]: torch.OutOfMemoryError: full\n", 3, 1, "rank 3 failed: torch.OutOfMemoryError: full"),
        ("", 2, 7, "rank 2 failed with exit status 7"),
        ("[rank0]: ValueError: odd\n[rank1]: RuntimeError: closed by peer\n", 0, 1, "rank 0 failed: ValueError: odd"),
        (
            "[rank0]: RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n"
            "[rank0]: RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly\n"
            "[rank1]: RuntimeError: Connection closed by peer\n",
            1,
            1,
            "rank 0 failed: RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
        ),
    ],
)  # fmt: skip
def test_the_reason_is_one_sentence(said: str, rank: int, status: int, sentence: str, tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_text(f"some line\n{said}{SUMMARY.format(rank=rank, status=status)}")
    assert Dead(log).why() == sentence


def test_the_reason_is_of_this_attempt(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_text("KeyError: 'old'\n")
    start = log.stat().st_size
    with log.open("a") as end:
        end.write(SUMMARY.format(rank=0, status=1))
    assert Dead(log, start).why() == "rank 0 failed with exit status 1"


def test_a_log_without_a_summary_still_gives_a_reason(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_text("RuntimeError: no\n")
    assert Dead(log).why() == "a rank failed: RuntimeError: no"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_once_and_the_handlers_come_back(number: signal.Signals) -> None:
    def tidy_up_under_fire() -> None:
        try:
            os.kill(os.getpid(), number)
            threading.Event().wait(10)
        finally:
            os.kill(os.getpid(), number)  # impatience: it must not stop the tidying up
            tidied.append(True)

    before, tidied = signal.getsignal(number), list[bool]()
    with pytest.raises(Ended) as caught, signals_as_exceptions():
        tidy_up_under_fire()
    assert (caught.value.number, str(caught.value), tidied) == (number, number.name, [True])
    assert signal.getsignal(number) is before


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_exceptions() as remind:
            signal.raise_signal(signal.SIGHUP)
            remind()
            with pytest.raises(Ended):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_whose_exception_was_lost_is_told_again() -> None:
    """As when it comes while Python runs its own callbacks around a fork."""
    with signals_as_exceptions() as remind:
        remind()
        with contextlib.suppress(Ended):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Ended) as caught:
            remind()
    assert caught.value.number == signal.SIGTERM


class SignalledWhenDeleted:
    """Python prints and drops what a `__del__` raises."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_comes_in_a_finalizer_prints_nothing_and_is_told_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with signals_as_exceptions() as remind:
        SignalledWhenDeleted()
        with pytest.raises(Ended):
            remind()
    assert capsys.readouterr().err == ""


def test_what_else_a_finalizer_raises_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: printed.append(ignored.exc_value))

    class Faulty:
        def __del__(self) -> None:
            raise KeyError("mine")

    with signals_as_exceptions():
        Faulty()
    assert [repr(error) for error in printed] == ["KeyError('mine')"]


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    def use() -> None:
        with signals_as_exceptions():
            used.append(True)

    used: list[bool] = []
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert used == [True]


def test_the_command_names_machines_ranks_and_script() -> None:
    config = RunConfig(
        out="o", script="/s.py", train_paths=("d",), nodes=4, processes=2, node_rank=3, master_address="h",
        master_port=9,
    )  # fmt: skip
    words = " ".join(command(config))
    assert "--nnodes 4 --node_rank 3 --master_addr h --master_port 9 --nproc_per_node 2 /s.py" in words


def machine_1(host: str, port: int) -> RunConfig:
    """The plan of the second of two machines."""
    places = {"master_address": host, "master_port": port}
    return RunConfig(out="o", script="/s.py", train_paths=("d",), nodes=2, node_rank=1, **places)  # type: ignore[arg-type]


def test_a_name_that_is_unknown_is_said_and_then_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shade.launch.ranks.SILENCE_SECONDS", 0.0)
    monkeypatch.setattr("shade.launch.ranks.NAME_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"machine 0 at no-such-host\.invalid:9.*correct -master_address"):
        await_machine_0(machine_1("no-such-host.invalid", 9), lambda: None)
    assert "waiting up to 0.1 s for machine 0 at no-such-host.invalid:9 (" in capsys.readouterr().err


def test_a_machine_0_that_comes_late_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shade.launch.ranks.SILENCE_SECONDS", 0.0)
    (port,) = free_ports(1)
    told: list[str] = []
    with contextlib.ExitStack() as late:

        def follow_the_cure() -> None:
            told.append(capsys.readouterr().err)
            late.enter_context(socket.create_server(("127.0.0.1", port)))

        await_machine_0(machine_1("127.0.0.1", port), follow_the_cure)
    (line,) = told
    assert f"machine 0 at 127.0.0.1:{port} (" in line
    assert "refused); start it there with -nr 0, or correct -master_address and --master_port" in line


@pytest.mark.multiprocess
def test_what_does_not_end_by_itself_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    monkeypatch.setattr("shade.launch.ranks.command", lambda config: [sys.executable, "-c", stubborn])
    monkeypatch.setattr("shade.launch.ranks.GRACE_SECONDS", 0.2)
    log = tmp_path / "output.log"
    config = RunConfig(out=str(tmp_path), script="s", train_paths=("d",))
    with Ranks(config, dict(os.environ), log) as ranks:
        while "up" not in log.read_text():
            assert ranks.poll() is None
    assert ranks.poll() == -signal.SIGKILL


@pytest.mark.multiprocess
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    program = """if True:
        import os, sys, time
        from pathlib import Path
        from shade.config import RunConfig
        from shade.launch import ranks

        rank = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
        ranks.command = lambda config: [sys.executable, "-c", rank]
        ranks.Ranks(RunConfig(out=".", script="s", train_paths=("d",)), dict(os.environ), Path("output.log"))
        time.sleep(60)
    """
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    log = tmp_path / "output.log"
    while not (log.exists() and log.read_text().strip()):
        assert launcher.poll() is None
    rank = os.pidfd_open(int(log.read_text()))
    launcher.kill()
    launcher.wait()
    assert select.select([rank], [], [], 30)[0], "the rank has outlived its launcher"
    os.close(rank)
