"""The flusher dies, is stopped, is started twice; its store restarts, its storage fails. Nothing durable is ever lost.

Real processes, a real server, real files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

import psutil
import pytest
import torch

from shade.checkpoint._buffer.shared_memory_folder import flusher_log, open_log, remove_log
from shade.checkpoint._flush.service import Until, is_served, mark_ended, mark_started, serve, start_flusher
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.run_lock import FLUSHER, RunLock, spread_keys
from shade.checkpoint._tiers.storage import StorageTier
from shade.errors import CheckpointError, ConfigError
from shade.process import is_running
from shade.storage import open_volume
from shade.store import Store, open_store
from shade.store._servers.server import LocalServer
from tests.conftest import PASSWORD, REPOSITORY
from tests.support.snapshots import Snapshot, damages, make, save

pytestmark = pytest.mark.multiprocess

WAIT_SECONDS = 60.0
RUN = "vgg"


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with LocalServer(directory=tmp_path_factory.mktemp("s"), password=PASSWORD) as running:
        yield running


@pytest.fixture
def store(server: LocalServer) -> Iterator[Store]:
    with open_store(server.url, timeout_seconds=5) as opened:
        yield opened


@pytest.fixture
def memory(store: Store) -> Iterator[MemoryTier]:
    tier = MemoryTier(store, RUN, num_slots=4, flushed=True)
    yield tier
    tier.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "durable"


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Flushers to be ended, whatever happens."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(is_running, pids)))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def start(server: LocalServer, folder: Path, started: list[int], keep: str = "all") -> int:
    pid = start_flusher(server.url.reveal(), str(folder), RUN, keep, log=folder.parent / "flusher.log")
    started.append(pid)
    return pid


def kill(pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, by)
    until(lambda: not is_running(pid))


def log_of(folder: Path) -> str:
    return (folder.parent / "flusher.log").read_text()


def stored(folder: Path) -> dict[int, str]:
    """Steps that storage holds, with their places."""
    with open_volume(str(folder)) as volume:
        return {record.step: place for place, record in StorageTier(volume, RUN).held().items()}


def is_whole(folder: Path, snapshot: Snapshot) -> bool:
    """Whether storage has every byte of it."""
    with open_volume(str(folder)) as volume:
        tier = StorageTier(volume, RUN)
        places = [place for place, record in tier.held().items() if record == snapshot.record]
        return len(places) == 1 and not list(damages(tier, places[0], snapshot))


def unfinished(folder: Path) -> list[str]:
    with open_volume(str(folder)) as volume:
        return list(volume.leftovers())


def large(step: int) -> Snapshot:
    """So large that writing it takes a moment."""
    return make(RUN, step, shard_bytes=(48 << 20, 48 << 20), chunk=1 << 20)


def test_killed_in_the_middle_of_a_write_it_loses_nothing_and_leaves_nothing(
    server: LocalServer, memory: MemoryTier, folder: Path, started: list[int]
) -> None:
    snapshots = [large(step) for step in (1, 2)]
    for snapshot in snapshots:
        save(memory, snapshot)
    folder.mkdir()
    kills_in_a_write = 0
    for attempt in range(4):
        start(server, folder, started)
        until(lambda: bool(unfinished(folder)) or not memory.dirty())
        time.sleep(attempt * 0.02)
        kill(started[-1])
        durable = stored(folder)
        kills_in_a_write += bool(unfinished(folder))
        dirty = {record.step for _, record in memory.dirty()}
        assert dirty | set(durable) == {1, 2}
        for snapshot in snapshots:
            assert snapshot.record.step not in durable or is_whole(folder, snapshot)
    assert kills_in_a_write, "the fault never fired"
    start(server, folder, started)
    until(lambda: not memory.dirty())
    assert all(is_whole(folder, snapshot) for snapshot in snapshots)
    assert unfinished(folder) == []


def test_told_to_stop_it_stops_at_once_and_leaves_the_slot_dirty(
    server: LocalServer, store: Store, memory: MemoryTier, folder: Path, started: list[int]
) -> None:
    snapshot = large(1)
    save(memory, snapshot)
    folder.mkdir()
    pid = start(server, folder, started)
    until(lambda: bool(unfinished(folder)))
    kill(pid, signal.SIGTERM)
    assert stored(folder) == {}
    assert unfinished(folder) == []
    assert [record for _, record in memory.dirty()] == [snapshot.record]
    assert not any(store.get_many(spread_keys(RUN, FLUSHER)))
    start(server, folder, started)
    until(lambda: not memory.dirty())
    assert is_whole(folder, snapshot)


def test_it_outlives_a_trainer_that_is_killed_and_makes_its_last_snapshot_durable(
    server: LocalServer, memory: MemoryTier, folder: Path, started: list[int]
) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from shade.checkpoint._flush.service import start_flusher\n"
        "from shade.checkpoint._tiers.memory import MemoryTier\n"
        "from shade.store import open_store\n"
        "from tests.support.snapshots import make, save\n"
        "url, folder = sys.argv[1:]\n"
        f"pid = start_flusher(url, folder, {RUN!r}, 'all', log=Path(folder).parent / 'flusher.log')\n"
        "print(pid, flush=True)\n"
        f"save(MemoryTier(open_store(url, timeout_seconds=5), {RUN!r}, flushed=True), make({RUN!r}, 9))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, server.url.reveal(), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    trainer = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, env=environment, check=False
    )
    started.append(int(trainer.stdout))
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    until(lambda: 9 in stored(folder) and not memory.dirty())
    assert is_whole(folder, make(RUN, 9))
    assert is_running(started[0])


def test_it_ends_when_the_run_has_ended_and_all_is_durable(
    server: LocalServer, store: Store, memory: MemoryTier, folder: Path, started: list[int]
) -> None:
    mark_started(store, RUN)
    pid = start(server, folder, started)
    assert is_served(store, RUN)
    save(memory, make(RUN, 3))
    mark_ended(store, RUN)
    until(lambda: not is_running(pid))
    assert is_whole(folder, make(RUN, 3))
    assert memory.dirty() == []
    assert not is_served(store, RUN)
    assert "step 3 is durable" in log_of(folder)


def test_its_password_is_on_no_command_line_and_in_no_log(
    server: LocalServer, folder: Path, started: list[int]
) -> None:
    pid = start(server, folder, started)
    assert PASSWORD.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert RUN.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert PASSWORD not in log_of(folder)


def test_one_that_cannot_begin_says_why(server: LocalServer, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file is where a folder should be"):
        start_flusher(server.url.reveal(), str(tmp_path / "file" / "x"), RUN, log=tmp_path / "log")
    with pytest.raises(ConfigError, match="outlives this process"):
        start_flusher("local://", str(folder), RUN, log=tmp_path / "log")


def test_one_that_is_not_ready_in_time_is_ended(
    server: LocalServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shade.checkpoint._flush.service._START_SECONDS", 0.0)
    run = f"late-{tmp_path.name}"
    with pytest.raises(CheckpointError, match="a flusher that starts"):
        start_flusher(server.url.reveal(), str(folder), run, log=tmp_path / "log")
    until(lambda: not flushers_of(run))


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a machine of the test's own."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr("shade.checkpoint._buffer.shared_memory_folder.shared_memory", lambda: folder)
    return folder


def checkpointer(server: LocalServer, folder: Path, run: str) -> Checkpointer:
    return Checkpointer(server.url.reveal(), persist_to=str(folder), run=run, every="never")


def flushers_of(run: str) -> list[int]:
    of_all = psutil.process_iter(["cmdline"])
    return [process.pid for process in of_all if f"--run={run}" in (process.info["cmdline"] or ())]


def flusher_of(run: str) -> int:
    (found,) = flushers_of(run)
    return found


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_clean_end_leaves_nothing_in_shared_memory(
    server: LocalServer, folder: Path, started: list[int], shared_memory: Path
) -> None:
    with checkpointer(server, folder, RUN) as saving:
        saving.attach(model=torch.nn.Linear(8, 8))
        saving.save()
        started.append(flusher_of(RUN))
        assert flusher_log(RUN).is_file()
        saving.wait_durable()
    until(lambda: not is_running(started[0]))
    assert files_below(shared_memory) == []


def test_the_log_of_a_killed_flusher_goes_when_another_run_begins_and_that_of_a_live_one_stays(
    server: LocalServer, folder: Path, started: list[int], shared_memory: Path
) -> None:
    with checkpointer(server, folder, "killed") as first, checkpointer(server, folder, "live") as second:
        started += [flusher_of("killed"), flusher_of("live")]
        kill(started[0])
        assert flusher_log("killed").is_file(), "it tells why, until something else begins"
        with checkpointer(server, folder, "third"):
            started.append(flusher_of("third"))
            assert not flusher_log("killed").exists()
            assert flusher_log("live").is_file()
            assert flusher_log("third").is_file()
        del first, second
    until(lambda: not any(map(is_running, started)))
    assert files_below(shared_memory) == []


def test_a_flusher_that_ends_leaves_the_log_that_another_one_of_the_run_has_open(tmp_path: Path) -> None:
    path = tmp_path / "flusher.log"
    with open_log(path) as ending, open_log(path) as beginning:
        remove_log(path, ending.fileno())
        assert path.exists()
        beginning.close()
        remove_log(path, ending.fileno())
        assert not path.exists()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(open_log, path)  # another file of that name, which nobody removes
            with waiting.result(WAIT_SECONDS) as again:
                assert os.path.samestat(os.fstat(again.fileno()), path.stat())
                remove_log(path, ending.fileno())
                assert path.exists(), "it is not the one that has ended"


def test_a_log_that_is_removed_while_it_is_opened_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "flusher.log"
    with ThreadPoolExecutor(1) as pool:
        with open_log(path) as ending:
            fcntl.flock(ending, fcntl.LOCK_EX)
            waiting = pool.submit(open_log, path)
            with contextlib.suppress(TimeoutError):
                waiting.result(0.2)
            assert not waiting.done(), "it waits for the one that removes it"
            path.unlink()
        with waiting.result(WAIT_SECONDS) as again:
            again.write(b"here")
            again.flush()
            assert path.read_bytes() == b"here"


class Serving:
    """A flusher in a thread of this process."""

    def __init__(self, server: LocalServer, folder: Path, until: Until = Until.STOPPED, patience: float = 600) -> None:
        self.stop = threading.Event()
        self.answer: bool | Exception | None = None
        self._arguments = (server.url.reveal(), str(folder))
        self._options = {"run": RUN, "keep": Keep.parse("all"), "until": until, "patience_seconds": patience}
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.answer = serve(*self._arguments, stop=self.stop, **self._options)  # type: ignore[arg-type]
        except CheckpointError as error:
            self.answer = error

    def __enter__(self) -> Serving:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        self.thread.join()


def test_a_second_flusher_leaves_the_run_to_the_first(
    server: LocalServer, store: Store, memory: MemoryTier, folder: Path
) -> None:
    with Serving(server, folder):
        until(lambda: any(store.get_many(spread_keys(RUN, FLUSHER))))
        with pytest.raises(CheckpointError, match="without a flusher"):
            serve(server.url.reveal(), str(folder), run=RUN)
        save(memory, make(RUN, 1))
        until(lambda: not memory.dirty())
    assert is_whole(folder, make(RUN, 1))


def test_one_that_stood_still_and_was_replaced_gives_way(server: LocalServer, store: Store, folder: Path) -> None:
    with Serving(server, folder) as old:
        until(lambda: any(store.get_many(spread_keys(RUN, FLUSHER))))
        (note, *_) = store.get_many(spread_keys(RUN, FLUSHER))
        assert note is not None
        other = json.dumps({**json.loads(note), "owner": "somebody else"}).encode()
        store.set_many(dict.fromkeys(spread_keys(RUN, FLUSHER), other))
        old.thread.join(WAIT_SECONDS)
        assert isinstance(old.answer, CheckpointError)
    assert store.get_many(spread_keys(RUN, FLUSHER)) == [other] * 3


def test_a_store_that_restarts_is_waited_for(
    server: LocalServer, memory: MemoryTier, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Serving(server, folder):
        save(memory, make(RUN, 1))
        until(lambda: not memory.dirty())
        server.stop()
        until(lambda: "flushing waits" in caplog.text)
        server.start()
        again = MemoryTier(memory.store, RUN, flushed=True)
        save(again, make(RUN, 2))
        until(lambda: not again.dirty())
        again.close()
    assert is_whole(folder, make(RUN, 1))
    assert is_whole(folder, make(RUN, 2))
    assert caplog.text.count("flushing waits") == 1


def test_a_storage_that_fails_is_waited_for_and_said_once(
    server: LocalServer, memory: MemoryTier, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    with Serving(server, folder):
        until(lambda: "serving" in caplog.text or bool(is_served(memory.store, RUN)))
        (folder / RUN).write_text("in the way")
        save(memory, make(RUN, 1))
        until(lambda: "flushing waits" in caplog.text)
        assert memory.dirty()
        time.sleep(1.0)  # a second attempt
        assert memory.dirty()
        (folder / RUN).unlink()
        until(lambda: not memory.dirty())
    assert is_whole(folder, make(RUN, 1))
    assert caplog.text.count("flushing waits") == 1


def test_a_run_that_is_silent_for_long_is_over_and_one_that_beats_is_not(
    server: LocalServer, store: Store, memory: MemoryTier, folder: Path
) -> None:
    trainer = RunLock(store, RUN)
    trainer.acquire()
    with Serving(server, folder, Until.ENDED, patience=2.0) as each:
        save(memory, make(RUN, 1))
        until(lambda: not memory.dirty())
        each.thread.join(4.0)
        assert each.thread.is_alive()
        trainer.release()
        each.thread.join(WAIT_SECONDS)
        assert each.answer is True


def test_what_memory_has_lost_for_good_is_given_up_at_the_end(
    server: LocalServer, store: Store, memory: MemoryTier, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(memory, make(RUN, 1))
    store.delete_many([key for key in store.scan("shade:checkpoint:") if key.endswith("chunk:0:0:2")])
    mark_ended(store, RUN)
    with Serving(server, folder, Until.ENDED, patience=1.0) as each:
        each.thread.join(WAIT_SECONDS)
        assert each.answer is False
    assert stored(folder) == {}
    assert caplog.text.count("cannot flush") == 1
    assert [record.step for _, record in memory.dirty()] == [1]


def test_all_runs_of_a_store_are_served(server: LocalServer, store: Store, folder: Path) -> None:
    for run in ("a", "b"):
        tier = MemoryTier(store, run, flushed=True)
        save(tier, make(run, 5))
        tier.close()
    assert serve(server.url.reveal(), str(folder), until=Until.DRAINED)
    with open_volume(str(folder)) as volume:
        for run in ("a", "b"):
            (record,) = StorageTier(volume, run).held().values()
            assert record == make(run, 5).record
