"""Two machines on one: two launchers with -n 2, a cluster that both use, and the original's flags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shade.store._servers.local_cluster import LocalCluster, free_ports
from tests.support.launching import make_images, rows, run, start

pytestmark = pytest.mark.multiprocess

BATCH, EPOCHS = 4, 2


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Three nodes."""
    with LocalCluster(3) as cluster:
        yield cluster


@pytest.mark.redis
def test_two_machines_train_together_and_the_first_one_reports(cluster: LocalCluster, tmp_path: Path) -> None:
    data = make_images(tmp_path / "data")
    (port,) = free_ports(1)
    host, cache_port = cluster.url.addresses[0]
    words = (
        f"bench_cifar10.py {data} -n 2 -g 1 -master_address 127.0.0.1 -master_port {port} --nodedist -cn 3 -wss 0.4 "
        f"--host_ip {host} --port_num {cache_port} --network cnn --epochs {EPOCHS} --batch_size {BATCH} --workers 0"
    ).split()
    machines = []
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        machines.append(start(*words, "-nr", str(number), "--out", tmp_path / "out", cwd=tmp_path / str(number)))
    told = [machine.communicate(timeout=120) for machine in machines]
    outs = [tmp_path / "out", tmp_path / "out" / "node1"]
    assert [machine.returncode for machine in machines] == [0, 0], told
    assert told[0][0] == (outs[0] / "report.txt").read_text()
    assert (
        told[0][1]
        .partition("\n")[2]
        .startswith(f"2 machines meet at 127.0.0.1:{port}; the others need the same command")
    )
    assert told[1][0] == ""
    assert told[1][1].endswith(f"runshade.py: done; the report is on machine 0, this machine's logs are in {outs[1]}\n")
    found = rows(outs[0])
    assert [(row["epoch"], row["rank"]) for row in found] == [(e, r) for e in range(EPOCHS) for r in range(2)]
    assert not (outs[1] / "metrics.jsonl").exists()
    assert sum(row["hits"] for row in found) > 0
    assert sum(row["samples"] for row in found if row["epoch"] == 0) == 48
    for number, out in enumerate(outs):
        accesses = [x for x in (out / "train.log").read_text().splitlines() if x.startswith(("hitting", "miss"))]
        assert len(accesses) == sum(row["samples"] for row in found if row["rank"] == number)
        assert (tmp_path / str(number) / "train.log").resolve() == out / "train.log"
        assert json.loads((out / "run.json").read_text())["node_rank"] == number


def test_the_launchers_of_several_machines_need_a_cache_in_common(tmp_path: Path) -> None:
    make_images(tmp_path / "data")
    told = run("bench_cifar10.py", "data", "-n", "2", "-nr", "0", cwd=tmp_path)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert "a cache that all machines reach" in told.stderr


@pytest.mark.parametrize(
    "typed",
    [
        "--seed 5",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("--gradient threshold-v", "--val_paths data")),
    ],
)
def test_machines_that_typed_other_flags_are_told_which_and_write_nothing(typed: str, tmp_path: Path) -> None:
    data = make_images(tmp_path / "data")
    (port,) = free_ports(1)
    words = f"bench_cifar10.py {data} -n 2 -master_address 127.0.0.1 -master_port {port} --cache none --network cnn "
    words += f"--batch_size {BATCH} --workers 0 --out out"
    machines = []
    for number, more in enumerate(("", typed.replace("data", str(data)))):
        (tmp_path / str(number)).mkdir()
        machines.append(start(*words.split(), *more.split(), "-nr", str(number), cwd=tmp_path / str(number)))
    told = [machine.communicate(timeout=120)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [2, 2], told
    for number, each in enumerate(told):
        assert f"expected {typed.split()[0]} on all machines to be as on machine 0" in each
        assert "on machine 1" in each
        assert "type the same flags on each" in each
        assert not any((tmp_path / str(number)).iterdir())
