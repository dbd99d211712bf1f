"""A rank is killed, hangs, or is cut off: the others continue without it, and with it or another once it comes.

Real processes, over real links where the machine can make them. What is lost and kept to the last element is in
tests/integration/test_elastic_engine.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shade.gradient._elastic import rendezvous
from tests.support.network_bed import Bed

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "elastic_training.py"
TIMEOUT_SECONDS, FAULT_STEP, PATIENCE_SECONDS = 8.0, 30, 150.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Cast:
    """The processes of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = rendezvous.serve()
        self.ranks: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, **plan: Any) -> None:
        arguments = [PROGRAM, f"127.0.0.1:{self.store.port}", self.folder, name, json.dumps(plan)]
        with (self.folder / f"{name}.err").open("wb") as said:
            self.ranks[name] = subprocess.Popen([sys.executable, *map(str, arguments)], env=ENVIRONMENT, stderr=said)

    def reached(self, name: str, generation: int) -> None:
        """Returns when a rank has taken a step of a generation."""
        log = self.folder / f"{name}.log"

        def has() -> bool:
            lines = log.read_text().splitlines() if log.exists() else []
            return any(int(line.split()[1]) >= generation for line in lines if line.count(" ") == 2)

        self.until(has, f"{name} in generation {generation}")

    def until(self, what: Callable[[], bool], expected: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not what():
            assert time.monotonic() < deadline, f"not in time: {expected}\n{self.said()}"
            time.sleep(0.1)

    def said(self) -> str:
        return "\n".join(f"--- {each.name}\n{each.read_text()[-2000:]}" for each in self.folder.glob("*.err"))

    def outcomes(self, *names: str) -> list[dict[str, Any]]:
        """What ranks have written at their end."""
        for name in names:
            self.until(lambda name=name: self.ranks[name].poll() is not None, f"{name} ends")
            assert self.ranks[name].returncode == 0, self.said()
        return [json.loads((self.folder / f"{name}.json").read_text()) for name in names]

    def end(self) -> None:
        for each in self.ranks.values():
            each.kill()
            each.wait()


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    made = Cast(tmp_path)
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "staleness"),
    [
        pytest.param("SIGKILL", 1, id="killed-and-replaced"),
        pytest.param("SIGSTOP", 0, id="stopped-and-back"),
        pytest.param("SIGKILL", 0, id="killed-and-replaced-at-once"),
    ],
)
def test_training_outlives_a_rank_and_takes_it_back(cast: Cast, fault: str, staleness: int) -> None:
    plan = {"num_members": 3, "timeout_seconds": TIMEOUT_SECONDS, "goal": 2, "staleness": staleness}
    for name in ("a", "b"):
        cast.start(name, **plan)
    cast.start("c", **plan, fault=fault, fault_step=FAULT_STEP)
    cast.reached("a", 1)
    assert cast.ranks["c"].poll() == (-signal.SIGKILL if fault == "SIGKILL" else None)
    comes = "c"
    if fault == "SIGKILL":
        comes = "d"
        cast.start(comes, **plan)
    else:
        cast.ranks["c"].send_signal(signal.SIGCONT)
    *stayed, came = cast.outcomes("a", "b", comes)
    assert stayed[0]["digest"] == stayed[1]["digest"] == came["digest"]
    for each in stayed:
        changes = each["changes"]  # a busy machine may add one in which nobody comes or goes
        lost, joined = changes[0], next(change for change in changes if change["num_joined"])
        assert (lost["world_size"], lost["num_lost"], joined["world_size"], joined["num_joined"]) == (2, 1, 3, 1)
        assert 0 < lost["lost_share"] < 1
        assert not any(change["num_repaired"] for change in changes)
        assert FAULT_STEP <= lost["step"] < joined["step"]
        assert each["counts"]["gradient_lost_ranks"] == 1
        assert each["counts"]["gradient_generations"] == len(changes)
        assert each["longest"] < 3 * TIMEOUT_SECONDS + 20  # a busy machine takes its time
    if fault == "SIGSTOP":
        assert came["first_step"] == 0
        assert came["changes"][0]["num_joined"] == 1
        assert came["kept"] > 0
    else:
        assert came["first_step"] == next(each["step"] for each in stayed[0]["changes"] if each["num_joined"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_local_updates_outlive_a_rank_and_take_another_or_the_same_one(cast: Cast, fault: str) -> None:
    plan = {"num_members": 3, "timeout_seconds": TIMEOUT_SECONDS, "goal": 2, "every": 6}
    for name in ("a", "b"):
        cast.start(name, **plan)
    cast.start("c", **plan, fault=fault, fault_step=FAULT_STEP)
    cast.reached("a", 1)
    comes = "c" if fault == "SIGSTOP" else "d"
    if fault == "SIGSTOP":
        cast.ranks["c"].send_signal(signal.SIGCONT)
    else:
        cast.start(comes, **plan)
    outcomes = cast.outcomes("a", "b", comes)
    assert len({each["digest"] for each in outcomes}) == 1
    for each in outcomes[:2]:
        lost, joined = each["changes"][0], next(change for change in each["changes"] if change["num_joined"])
        assert (lost["world_size"], lost["num_lost"], joined["world_size"], joined["num_joined"]) == (2, 1, 3, 1)
        assert FAULT_STEP <= lost["step"] < joined["step"]
    assert outcomes[2]["kept"] > 0


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed(f"elastic{os.getpid()}")
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.parametrize("timeout_seconds", [5.0, 60.0])
def test_a_line_that_is_cut_for_20_seconds(bed: Bed, tmp_path: Path, timeout_seconds: float) -> None:
    """With the longer timeout both wait and nothing has been; with the shorter one host 0 goes on, and 1 comes back."""
    bed("up", "--hosts", 2, "--rate", "100mbit")
    place = bed.start(0, sys.executable, "-m", "shade.gradient.rendezvous", 29600)
    assert place.stdout is not None
    assert "ranks meet" in place.stdout.readline()
    is_patient = timeout_seconds > 20
    plan = {"num_members": 2, "timeout_seconds": timeout_seconds, "goal": None if is_patient else 2}
    plan["until"] = 1500 if is_patient else None
    for host in (0, 1):
        arguments = [PROGRAM, "10.77.0.1:29600", tmp_path, f"host{host}", json.dumps(plan)]
        bed.start(host, sys.executable, *map(str, arguments))
    logs = [tmp_path / f"host{host}.log" for host in (0, 1)]

    def steps(log: Path) -> int:
        return len(log.read_text().splitlines()) if log.exists() else 0

    deadline = time.monotonic() + PATIENCE_SECONDS
    while min(map(steps, logs)) < 20:
        assert time.monotonic() < deadline, "they do not begin"
        time.sleep(0.1)
    bed("cut", 1)
    time.sleep(20)
    assert steps(logs[0]) < 1500, "the cut came too late"
    bed("mend", 1)
    for process in bed.started[1:]:
        process.wait(PATIENCE_SECONDS)
        assert process.returncode == 0, process.stderr.read() if process.stderr else ""
    outcomes = [json.loads((tmp_path / f"host{host}.json").read_text()) for host in (0, 1)]
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
    if is_patient:
        assert [each["changes"] for each in outcomes] == [[], []]
        assert all(15 < each["longest"] < 60 for each in outcomes)
    else:
        assert [each["world_size"] for each in outcomes[0]["changes"]][:2] == [1, 2]
        assert outcomes[1]["changes"][0]["num_joined"] == 1
        assert all(each["counts"]["gradient_repaired_buckets"] == 0 for each in outcomes)
