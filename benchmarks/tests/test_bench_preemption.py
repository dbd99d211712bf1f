"""The benchmark of preemptions: a trace belongs to its seed, and a training survives real kills and real notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_preemption

    return bench_preemption


def test_a_trace_is_drawn_from_its_seed(program: ModuleType) -> None:
    ends = program.trace(0, 180.0, 30.0)
    assert ends == program.trace(0, 180.0, 30.0) != program.trace(1, 180.0, 30.0)
    moments = [moment for moment, _ in ends]
    assert moments == sorted(moments)
    assert moments[-1] < 180.0 - 30.0 / 4
    assert {is_noticed for number in range(2) for _, is_noticed in program.trace(number, 180.0, 30.0)} == {True, False}


def test_the_interval_is_youngs_and_no_shorter_than_a_save(program: ModuleType) -> None:
    cheap = {"step": 0.1, "cost": 0.001, "stall": 0.001, "durable": 0.0}
    mtbf_seconds = 600.0 / (1 - program.NOTICED)
    young = (2 * cheap["cost"] * mtbf_seconds) ** 0.5 / cheap["step"]
    assert program.best_interval(cheap, 600.0) == pytest.approx(young, abs=1)
    assert program.best_interval(cheap | {"durable": 100.0}, 600.0) == 1000
    assert program.best_interval(cheap | {"cost": 0.1}, 600.0) == pytest.approx(10 * young, abs=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainings_survive_a_trace(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_preemption.py"), "--quick", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "preemption.jsonl").read_text().splitlines()
    found = {row["key"]: row["found"] for row in map(json.loads, lines)}
    flights = {key.split()[1]: each for key, each in found.items() if key.startswith("0 ")}
    for name in ("shade", "dcp-async"):
        flight = flights[name]
        assert flight["steps"] > 0
        assert len(flight["back"]) == sum(map(len, flight["lost"].values())) > 0
        assert all(lost == 0 for lost in flight["lost"]["notice"]), "a notice leaves time for a save"
        assert all(lost >= 0 for lost in flight["lost"]["kill"])
    assert "| shade | " in (tmp_path / "preemption.md").read_text()
    again = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=850, check=False)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "preemption.jsonl").read_text().splitlines() == lines
