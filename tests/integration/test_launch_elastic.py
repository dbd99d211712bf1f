"""A machine dies in mid-epoch and the others go on: same samples, the same global batch, from the newest snapshot.

The machines are network namespaces (`scripts/testbed`) with a node of the cache on each, so that a third of the cache
dies with the machine. Where namespaces cannot be made, that test is skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shade.config import RunConfig
from shade.errors import ConfigError
from shade.launch.ranks import command, free_port
from tests.support.launching import ROOT, RUNSHADE, STREAM, environment, make_images, run, start, stream_of, wait_for

pytestmark = pytest.mark.multiprocess

TESTBED = ROOT / "scripts" / "testbed"
NOT_HERE = 3
SHADE = "import sys; from shade.cli import main; sys.exit(main())"
HOSTS, BATCH, EPOCHS = 3, 4, 6
CONFIG = RunConfig("out", "script.py", ("data",), nodes=3, processes=2, batch_size=4, master_address="127.0.0.1")


def test_fewer_ranks_share_the_global_batch() -> None:
    assert [CONFIG.shared_by(ranks).batch_size for ranks in (6, 4, 3, 2)] == [4, 6, 8, 12]
    assert CONFIG.shared_by(4).nodes == 3, "what was asked for stays what was asked for"
    with pytest.raises(ConfigError, match="global batch of 24"):
        CONFIG.shared_by(5)


def test_the_command_names_the_fewest_and_the_most() -> None:
    words = command(RunConfig(**(vars(CONFIG) | {"min_nodes": 2, "restarts": 4, "node_rank": 1})))
    given = dict(itertools.pairwise(words))
    assert (given["--nnodes"], given["--max_restarts"]) == ("2:3", "4")
    assert (given["--rdzv_endpoint"], given["--local_addr"]) == ("127.0.0.1:8888", "127.0.0.1")
    assert "is_host=0," in given["--rdzv_conf"]
    assert "--node_rank" not in words
    assert "--node_rank" in command(CONFIG)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--min_nodes", "4", "--restarts", "1"], "--min_nodes from 1 to -n 3"),
        (["--min_nodes", "0", "--restarts", "1"], "--min_nodes from 1 to -n 3"),
        (["--min_nodes", "2"], "--restarts beside --min_nodes"),
        (["--min_nodes", "2", "--restarts", "1", "--batch_size", "3"], "share a global batch of 9"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path, words: list[str], sentence: str) -> None:
    make_images(tmp_path / "data")
    place = ["-n", "3", "-nr", "0", "--cache", "none", "--batch_size", "4"]
    told = run("bench_cifar10.py", "data", *place, *words, cwd=tmp_path)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert sentence in told.stderr


class Bed:
    """Three hosts, and Python on them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def call(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TESTBED), verb, "--name", self.name, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def start(self, host: int, *words: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
        there = [sys.executable, str(TESTBED), "exec", "--name", self.name, str(host), "--", sys.executable, *words]
        return subprocess.Popen(
            there,
            cwd=cwd,
            env=environment(SHADE_REDIS_PASSWORD="secret", **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self, host: int) -> int:
        """Ends everything on a host at once; how many processes that were."""
        (row,) = [row for row in json.loads(self.call("status", "--json").stdout) if row["host"] == host]
        for pid in row["processes"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(row["processes"])


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed(f"elastic{os.getpid()}")
    made = bed.call("up", "--hosts", str(HOSTS), "--rate", "1gbit")
    if made.returncode == NOT_HERE:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    yield bed
    bed.call("down")


def lines_of(log: Path, rank: int) -> list[dict[str, Any]]:
    path = log / f"rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lived(log: Path) -> dict[int, list[int]]:
    """Step → samples: of all three ranks at first, of two after the last start."""
    last = {rank: lines_of(log, rank)[-1]["pid"] for rank in (0, 1)}
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for rank in range(HOSTS):
        for row in lines_of(log, rank):
            steps = after if row["pid"] == last.get(rank) else before
            steps.setdefault(row["step"], []).extend(row["ids"])
    return {step: sorted(ids) for step, ids in (before | after).items()}


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_machine_dies_and_the_others_go_on(bed: Bed, tmp_path: Path) -> None:
    data, log, reference = make_images(tmp_path / "data"), tmp_path / "log", tmp_path / "reference"
    log.mkdir()
    reference.mkdir()
    alone = f"{STREAM} {data} --cache none --sampling uniform --epochs {EPOCHS} --workers 0".split()
    told = run(*alone, "--batch_size", str(HOSTS * BATCH), cwd=reference, STREAM_LOG=str(reference))
    assert told.returncode == 0, told.stderr

    ups = []
    for host in range(HOSTS):
        words = ["--dir", str(tmp_path / f"redis{host}"), "--join", "10.77.0.1:7000", "--nodes", "3"]
        ups.append(bed.start(host, "-c", SHADE, "cache", "up", *words, cwd=tmp_path))
    urls = {up.communicate(timeout=120)[0].strip().partition("?")[0] for up in ups}
    (url,) = urls

    launchers = []
    for host in range(HOSTS):
        place = tmp_path / str(host)
        place.mkdir()
        words = f"{STREAM} {data} -n {HOSTS} -nr {host} -g 1 -master_address 10.77.0.1 -master_port 8899 --nodedist "
        words += f"--cache {url} -wss 0.4 --sampling uniform --epochs {EPOCHS} --batch_size {BATCH} --workers 0 "
        words += f"--min_nodes 2 --restarts 3 --out {tmp_path / 'out'}"
        more = {"STREAM_LOG": str(log), "STREAM_PAUSE": "0.2"}
        launchers.append(bed.start(host, str(RUNSHADE), *words.split(), cwd=place, **more))
    wait_for(lambda: len(lines_of(log, 0)) >= 6)
    assert bed.kill(2) >= 3, "launcher, rank and a Redis node died"
    told_by = [launcher.communicate(timeout=240) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers[:2]] == [0, 0], told_by
    assert launchers[2].returncode != 0
    rows = lines_of(log, 0)
    assert len({row["pid"] for row in rows}) == 2, "rank 0 was started twice"
    assert len(rows[-1]["ids"]) == HOSTS * BATCH // 2
    wanted = {step: sorted(ids) for step, ids in stream_of(reference, 1).items()}
    assert lived(log) == wanted, "which rank gets which sample of a step is decided by where it is cached"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_that_comes_back_is_taken_in(tmp_path: Path) -> None:
    """Two launchers on this machine: one is killed with its rank, the other goes on alone, until the first is back."""
    data, log, port = make_images(tmp_path / "data"), tmp_path / "log", free_port()
    log.mkdir()

    def started(number: int, *more: str) -> subprocess.Popen[str]:
        words = f"{STREAM} {data} -n 2 -nr {number} -g 1 -master_address 127.0.0.1 -master_port {port} --nodedist "
        words += f"--cache none --sampling uniform --epochs 60 --batch_size {BATCH} --workers 0 "
        words += f"--min_nodes 1 --restarts 3 --out {tmp_path / 'out'} --persist-to {tmp_path / 'snapshots'}"
        place = tmp_path / f"{number}{len(more)}"
        place.mkdir()
        return start(*words.split(), *more, cwd=place, STREAM_LOG=str(log), STREAM_PAUSE="0.2")

    def lives(rank: int) -> list[int]:
        return list(dict.fromkeys(row["pid"] for row in lines_of(log, rank)))

    first, second = launchers = [started(0), started(1)]
    try:
        wait_for(lambda: len(lines_of(log, 0)) >= 6, seconds=300)
        for process in [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]:
            process.kill()
        wait_for(lambda: len(lives(0)) > 1 and len(lines_of(log, 0)[-1]["ids"]) == 2 * BATCH, seconds=300)
        launchers.append(started(1, "--resume"))
        told_by = [launcher.communicate(timeout=300) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()
    assert [launcher.returncode for launcher in (first, launchers[-1])] == [0, 0], told_by
    assert len(lives(0)) == 3, "together, alone, together"
    assert len(lines_of(log, 0)[-1]["ids"]) == BATCH
