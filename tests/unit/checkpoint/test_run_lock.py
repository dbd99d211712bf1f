"""One live process saves under a run id: in a store and in storage alike."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from shade.checkpoint._tiers import run_lock as lease_module
from shade.checkpoint._tiers.run_lock import LockRecord, RunLock
from shade.errors import RunInUseError, StoreUnavailableError
from shade.storage import Volume, open_volume
from shade.store import Store, open_store
from shade.store._servers.server import LocalServer
from shade.testing import FaultyStore

pytestmark = pytest.mark.redis

BEAT_SECONDS = 0.1
Keeper = Store | Volume


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer() as started:
        yield started


@pytest.fixture(params=["store", "storage"])
def url(request: pytest.FixtureRequest, server: LocalServer, tmp_path: Path) -> str:
    if request.param == "storage":
        return str(tmp_path / "volume")
    server.ask("FLUSHALL")
    return server.url.reveal()


def open_keeper(url: str) -> Keeper:
    return open_store(url, timeout_seconds=5) if "://" in url else open_volume(url)


@pytest.fixture
def keep(url: str) -> Iterator[Callable[[], Keeper]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(open_keeper(url))


def held_elsewhere(keeper: Keeper, beat: int = 0) -> None:
    """The note of an owner on another machine."""
    lease = RunLock(keeper, "run", heartbeat_seconds=BEAT_SECONDS)
    lease._backend.write(
        json.dumps(asdict(LockRecord("other", "a machine", "far", 7, "1", BEAT_SECONDS, beat))).encode()
    )


PROGRAM = """
import sys, time
from tests.unit.checkpoint.test_run_lock import BEAT_SECONDS, open_keeper
from shade.checkpoint._tiers.run_lock import RunLock
lease = RunLock(open_keeper(sys.argv[1]), "run", heartbeat_seconds=BEAT_SECONDS)
lease.acquire()
print("held", flush=True)
while True:
    time.sleep(0.01)
    lease.check()
"""


@pytest.fixture
def other_process(url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lease."""
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-c", PROGRAM, url]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.multiprocess
def test_the_second_is_told_who_is_first(keep: Callable[[], Keeper]) -> None:
    with RunLock(keep(), "run", heartbeat_seconds=BEAT_SECONDS) as lease:
        expected = rf"expected a run id that no live process uses, got 'run', which process {os.getpid()} on host \S+ "
        expected += r"saves under; choose another id, or close\(\) its Checkpointer, which is in this process"
        with pytest.raises(RunInUseError, match=expected):
            RunLock(keep(), "run", heartbeat_seconds=BEAT_SECONDS).acquire()
        lease.check()
        with RunLock(keep(), "another", heartbeat_seconds=BEAT_SECONDS) as another:
            another.check()


def test_after_a_release_it_is_free(keep: Callable[[], Keeper]) -> None:
    for _ in range(2):
        lease = RunLock(keep(), "run", heartbeat_seconds=60)
        lease.acquire()
        lease.check()
        lease.release()
        lease.release()
    assert not [thread for thread in threading.enumerate() if thread.name == "shade-run-lock"]


@pytest.mark.multiprocess
def test_a_killed_process_of_this_machine_is_succeeded_at_once(
    keep: Callable[[], Keeper], other_process: subprocess.Popen[str]
) -> None:
    with pytest.raises(RunInUseError, match=f"process {other_process.pid} "):
        RunLock(keep(), "run", heartbeat_seconds=60).acquire()
    other_process.kill()
    other_process.wait()
    lease = RunLock(keep(), "run", heartbeat_seconds=60)
    lease._wait_for_silence = None  # type: ignore[assignment,method-assign]
    lease.acquire()
    lease.release()


@pytest.mark.multiprocess
def test_a_stopped_owner_that_was_replaced_finds_out(
    keep: Callable[[], Keeper], other_process: subprocess.Popen[str]
) -> None:
    other_process.send_signal(signal.SIGSTOP)
    with RunLock(keep(), "run", heartbeat_seconds=BEAT_SECONDS) as lease:
        other_process.send_signal(signal.SIGCONT)
        _, errors = other_process.communicate(timeout=30)
        assert "RunInUseError: expected a run id that no live process uses, got 'run', which process" in errors
        assert f"process {os.getpid()} on host" in errors
        lease.check()


def test_an_owner_elsewhere_is_dead_when_its_beat_stands_still(keep: Callable[[], Keeper]) -> None:
    keeper = keep()
    held_elsewhere(keeper)
    begun = time.monotonic()
    with RunLock(keeper, "run", heartbeat_seconds=BEAT_SECONDS) as lease:
        assert time.monotonic() - begun >= 3 * BEAT_SECONDS
        lease.check()


def test_an_owner_elsewhere_that_beats_is_alive(keep: Callable[[], Keeper]) -> None:
    keeper = keep()
    held_elsewhere(keeper)
    timer = threading.Timer(BEAT_SECONDS, held_elsewhere, (keeper, 1))
    timer.start()
    with pytest.raises(RunInUseError, match="process 7 on host far"):
        RunLock(keeper, "run", heartbeat_seconds=BEAT_SECONDS).acquire()
    timer.join()


def test_a_replaced_owner_raises_at_its_next_save_and_leaves_the_note(keep: Callable[[], Keeper]) -> None:
    keeper = keep()
    lease = RunLock(keeper, "run", heartbeat_seconds=60)
    lease.acquire()
    held_elsewhere(keeper)
    for _ in range(2):
        with pytest.raises(RunInUseError, match="host far"):
            lease.check()
    lease.release()
    found = lease_module._read_record(lease._backend)
    assert found is not None
    assert found.host == "far"


def test_of_two_at_the_same_moment_one_goes_on(keep: Callable[[], Keeper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_live_owner", lambda backend: None)  # neither has seen the other
    for _ in range(5):
        leases = [RunLock(keep(), "run", heartbeat_seconds=60) for _ in range(4)]
        barrier = threading.Barrier(len(leases))
        outcomes: list[str] = []

        def take(lease: RunLock, barrier: threading.Barrier = barrier, outcomes: list[str] = outcomes) -> None:
            barrier.wait()
            try:
                lease.acquire()
            except RunInUseError:
                outcomes.append("refused")

        threads = [threading.Thread(target=take, args=(lease,)) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        going_on = 0
        for lease in leases:
            if lease._thread is not None:
                try:
                    lease.check()
                    going_on += 1
                except RunInUseError:
                    outcomes.append("replaced")
        assert going_on == 1
        assert len(outcomes) == len(leases) - 1
        for lease in leases:
            lease.release()


def test_a_store_that_is_away_or_emptied_stops_nobody(server: LocalServer) -> None:
    with open_store(server.url, timeout_seconds=5) as inner:
        store = FaultyStore(inner)
        with RunLock(store, "run", heartbeat_seconds=BEAT_SECONDS) as lease:
            store.fail_from("*", 0, StoreUnavailableError("gone"))
            calls = store.num_faults["get_many"]
            lease.check()
            while store.num_faults["get_many"] < calls + 3:
                time.sleep(0.01)
            lease.check()
            server.ask("FLUSHALL")
            store.heal()
            deadline = time.monotonic() + 20
            while lease_module._read_record(lease._backend) is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            lease.check()
            with pytest.raises(RunInUseError):
                RunLock(inner, "run", heartbeat_seconds=BEAT_SECONDS).acquire()


def test_nobody_to_keep_it_is_an_error_at_the_start(server: LocalServer) -> None:
    with open_store(server.url, timeout_seconds=5) as inner:
        store = FaultyStore(inner).fail_from("*", 0, StoreUnavailableError("gone"))
        with pytest.raises(StoreUnavailableError):
            RunLock(store, "run").acquire()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"owner": 1, "more": 2}'])
def test_a_note_that_is_none_is_nobodys(content: bytes) -> None:
    assert LockRecord.parse(content) is None


@pytest.mark.multiprocess
def test_a_zombie_holds_nothing(keep: Callable[[], Keeper]) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    assert child.pid is not None
    keeper = keep()
    lease = RunLock(keeper, "run", heartbeat_seconds=60)
    lease.acquire()
    mine = lease_module._read_record(lease._backend)
    lease.release()
    assert mine is not None
    from shade.process import start_of

    note = LockRecord("child", mine.machine, mine.host, child.pid, start_of(child.pid) or "", 60, 0)
    lease._backend.write(json.dumps(asdict(note)).encode())
    child.kill()  # and not waited for
    deadline = time.monotonic() + 20
    while start_of(child.pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with RunLock(keeper, "run", heartbeat_seconds=60):
        pass
    child.join()
