"""Servers in the background: `up` leaves them running, `down` ends those and no others; and redis.conf starts."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shade.cli import main
from shade.errors import ConfigError, StoreError
from shade.process import is_running
from shade.store import open_store
from shade.store._servers.local_cluster import free_ports
from shade.store._servers.server import LocalServer, find_server_binary, wait_until_serving
from shade.store._servers.service import down, status, up
from shade.store.link import Endpoint
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "redis"
    yield folder
    if (folder / "servers.json").exists():
        down(folder)


def test_one_server_up_and_down(directory: Path) -> None:
    url = up(directory, memory_bytes=50_000_000, password='a "b\\ #c')
    with open_store(url) as store:
        assert store.set_many({"shade:a": b"x"}) == [True]
        assert store.stats().nodes[0].max_bytes == 50_000_000
        again, (server,) = status(directory)
        assert again == url
        assert server.running
        assert server.stats is not None
        assert server.stats.num_keys == 1
        assert down(directory) == 1
        with pytest.raises(StoreError):
            store.ping()
    assert not is_running(server.process_id)
    assert list(directory.iterdir()) == []
    with pytest.raises(ConfigError):
        status(directory)


def test_what_is_recorded_is_for_our_eyes_only(directory: Path) -> None:
    up(directory, password="secret")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for file in directory.iterdir():
        if b"secret" in file.read_bytes():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (server,) = status(directory)[1]
    assert b"secret" not in Path(f"/proc/{server.process_id}/cmdline").read_bytes()


def test_a_cluster_up_and_down_from_the_command_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--dir", str(directory)]
    assert main(["cache", "up", *at, "--nodes", "3", "--replicas", "1", "--memory", "64MiB"]) == 0
    url = capsys.readouterr().out.strip()
    with open_store(url) as store:
        store.ping()
        assert [node.role for node in store.stats().nodes] == ["primary"] * 3 + ["replica"] * 3
    assert main(["cache", "status", *at]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == url
    assert sum("primary" in line for line in lines) == sum("replica" in line for line in lines) == 3
    assert main(["cache", "up", *at]) == 2
    assert "take those down first" in capsys.readouterr().err
    assert main(["cache", "down", *at]) == 0
    assert main(["cache", "down", *at]) == 2
    assert list(directory.iterdir()) == []


def test_down_leaves_a_stranger_alone_that_got_a_recorded_id(directory: Path) -> None:
    up(directory)
    state = json.loads((directory / "servers.json").read_text())
    real = state["servers"][0]["process_id"]
    time.sleep(0.05)  # start times are told in hundredths of a second
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        state["servers"][0]["process_id"] = stranger.pid
        (directory / "servers.json").write_text(json.dumps(state))
        assert down(directory) == 0
        assert stranger.poll() is None
        stranger.communicate(b"\n")
    os.kill(real, signal.SIGKILL)


def test_down_ends_a_server_that_does_not_listen(directory: Path) -> None:
    up(directory)
    (server,) = status(directory)[1]
    os.kill(server.process_id, signal.SIGSTOP)
    assert down(directory) == 1
    assert not is_running(server.process_id)


def test_a_failed_start_leaves_nothing_running(directory: Path) -> None:
    free, taken = free_ports(2)
    with LocalServer(settings={"port": str(taken)}), pytest.raises(StoreError):
        up(directory, nodes=3, ports=[free, taken, taken])
    with open_store(f"redis://127.0.0.1:{free}") as store, pytest.raises(StoreError):
        store.ping()
    assert not (directory / "servers.json").exists()


@pytest.mark.parametrize("wrong", [{"nodes": 2}, {"replicas": 1}, {"nodes": 3, "ports": [1]}, {"nodes": 0}])
def test_shapes_that_cannot_be(directory: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        up(directory, **wrong)  # type: ignore[arg-type]


def test_redis_conf_starts_as_it_is_shipped(tmp_path: Path) -> None:
    """But for the port, which somebody may be using here."""
    (port,) = free_ports(1)
    command = [find_server_binary(), str(REPOSITORY / "redis.conf"), "--port", str(port)]
    endpoint = Endpoint(host="127.0.0.1", port=port)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_serving(endpoint, lambda: server.poll() is not None)
            with open_store(f"redis://127.0.0.1:{port}") as store:
                assert store.stats().nodes[0].max_bytes == 8 << 30
        finally:
            server.kill()
    assert list(tmp_path.iterdir()) == []


def test_every_line_that_redis_conf_offers_is_one_that_redis_takes(tmp_path: Path) -> None:
    """The cluster part, uncommented, starts too."""
    text = (REPOSITORY / "redis.conf").read_text()
    single, cluster, _ = re.split(r"^# -{20,}.*$", text, flags=re.MULTILINE)[1:]
    lines = re.findall(r"^# (cluster-[a-z-]+ \S+)$", cluster, re.MULTILINE)
    assert len(lines) == 6
    (port,) = free_ports(1)
    (tmp_path / "node.conf").write_text(single + "\n".join(lines) + f"\nport {port}\n")
    with subprocess.Popen(
        [find_server_binary(), str(tmp_path / "node.conf")], cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as server:
        try:
            wait_until_serving(Endpoint(host="127.0.0.1", port=port), lambda: server.poll() is not None)
        finally:
            server.kill()
