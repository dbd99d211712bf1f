"""Servers in the background: `up` leaves them running, `down` ends those and no others; and redis.conf starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
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
from shade.store._servers.local_cluster import free_ports, promote_replicas
from shade.store._servers.server import LocalServer, find_server_binary, wait_until_serving
from shade.store._servers.service import down, heal, status, up
from shade.store.link import Endpoint
from tests.conftest import REPOSITORY
from tests.support.launching import STREAM, make_images, run, wait_for

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
    assert main(["cache", "up", *at, "--nodes", "3", "--replicas", "1", "--memory", "64MiB"]) == 0
    again = capsys.readouterr()
    assert again.out.strip() == url
    assert "nothing was started" in again.err
    assert main(["cache", "up", *at, "--nodes", "5"]) == 2
    assert f"end those servers first (shade cache down {' '.join(at)})" in capsys.readouterr().err
    assert main(["cache", "down", *at]) == 0
    assert main(["cache", "down", *at]) == 2
    assert list(directory.iterdir()) == []


def kill(directory: Path, position: int) -> None:
    """Ends a server that this test has started, as the system does when memory runs out."""
    process_id = status(directory)[1][position].process_id
    os.kill(process_id, signal.SIGKILL)
    while is_running(process_id):
        time.sleep(0.01)


def test_up_brings_a_dead_server_back_with_its_settings(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ["--dir", str(directory)]
    url = up(directory, memory_bytes=64 << 20)
    monkeypatch.setenv("SHADE_REDIS_PASSWORD", "of another server")
    kill(directory, 0)
    assert main(["cache", "status", *at]) == 1
    cure = capsys.readouterr().out.splitlines()[-1]
    assert cure.startswith("→ shade cache up --dir ")
    assert main(cure.split()[2:6]) == 0
    assert "is back, empty: its samples are read from the data set again" in capsys.readouterr().err
    again, (server,) = status(directory)
    assert again == url
    assert server.stats is not None
    assert server.stats.max_bytes == 64 << 20
    (directory / f"{server.port}.conf").unlink()
    kill(directory, 0)
    with pytest.raises(ConfigError, match="start anew: shade cache down"):
        heal(directory)
    assert down(directory) == 0


def test_a_server_that_hangs_is_named_with_its_process(directory: Path) -> None:
    up(directory)
    (server,) = status(directory)[1]
    os.kill(server.process_id, signal.SIGSTOP)
    with pytest.raises(StoreError, match=rf"runs but does not answer; wait, or end it \(kill -9 {server.process_id}\)"):
        heal(directory)


def test_a_cluster_survives_its_seed_and_up_brings_it_back(
    directory: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    url = up(directory, nodes=3, replicas=1)
    names = [f"shade:{number}" for number in range(60)]
    with open_store(url, timeout_seconds=2) as store:
        assert all(store.set_many(dict.fromkeys(names, b"kept")))
        wait_for(lambda: sorted(node.num_keys for node in store.stats().nodes if node.role == "replica")[0] > 0)
    kill(directory, 0)
    # At once, before any election: a primary that came back empty would have emptied its replica.
    assert main(["cache", "up", "--dir", str(directory)]) == 0
    assert "is back as a replica of 127.0.0.1:" in capsys.readouterr().err
    with open_store(url, timeout_seconds=2) as store:
        store.ping()
        assert store.get_many(names) == [b"kept"] * len(names)
    assert not caplog.records

    now_primary = next(
        position
        for position, server in enumerate(status(directory)[1][3:], start=3)
        if server.stats is not None and server.stats.role == "primary"
    )
    kill(directory, now_primary)
    dead = url.addresses[now_primary]
    promote_replicas([Endpoint.of(url, *address) for address in url.addresses if address != dead], {dead})
    with open_store(url) as store:
        store.ping()
    assert "others have its keys; `shade cache up` on its machine starts it again" in caplog.text
    assert main(["doctor", "--cache", str(url)]) == 0
    assert "is away" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_starts_without_the_seed_and_up_says_what_was_lost(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = up(directory, nodes=3)
    kill(directory, 0)
    assert main(["doctor", "--cache", str(url)]) == 0
    assert "start it again (shade cache up on its machine)" in capsys.readouterr().out
    (tmp_path / "log").mkdir()
    words = (make_images(tmp_path / "data"), "--cache", str(url), "--batch_size", "8", "--out", "out")
    told = run(STREAM, *words, cwd=tmp_path, STREAM_LOG=str(tmp_path / "log"))
    assert told.returncode == 0, told.stderr
    assert "does not answer: its share of the keys is missing; `shade cache up` on its machine" in told.stderr
    assert main(["cache", "up", "--dir", str(directory)]) == 0
    assert "is back, empty" in capsys.readouterr().err
    with open_store(url, timeout_seconds=2) as store:
        store.ping()
        names = [f"shade:{number}" for number in range(60)]
        assert all(store.set_many(dict.fromkeys(names, b"again")))
    one = f"redis+cluster://127.0.0.1:{url.addresses[0][1]}"
    kill(directory, 0)
    with open_store(one) as store, pytest.raises(StoreError, match="a URL that names several nodes survives"):
        store.ping()


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


def test_a_taken_port_is_one_line_and_another_one_will_do(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free, taken = free_ports(2)
    at = ["--dir", str(directory)]
    with socket.create_server(("127.0.0.1", taken)):
        assert main(["cache", "up", *at, "--ports", str(taken)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    cure = "name others (--ports), or end the program that listens there"
    assert told == f"shade cache: port {taken} of this machine, or its bus port, is taken; {cure}\n"
    assert main(["cache", "up", *at, "--ports", str(free)]) == 0


def test_a_server_that_does_not_start_says_why_without_its_banner(directory: Path) -> None:
    up(directory)
    (server,) = status(directory)[1]
    kill(directory, 0)
    with (directory / f"{server.port}.conf").open("a") as settings:
        settings.write("maxmemory much\n")
    with pytest.raises(StoreError, match=r"did not start: .*maxmemory much.*argument must be") as told:
        heal(directory)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 300


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
