"""Ranks that are killed while a stream is recorded, and after: 4, 3, 1 and 6 of them in turn take one order of ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("num_kills", [4, pytest.param(20, marks=pytest.mark.slow)], ids=["four", "twenty"])
@pytest.mark.timeout(600)
def test_killed_ranks_take_the_ids_of_an_uninterrupted_run(num_kills: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.recorded_lives", str(tmp_path), str(num_kills), "0"]
    errors = tmp_path / "errors"
    with errors.open("w") as written:  # no pipe, which workers of a killed rank would keep open for a while
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=written, timeout=550)
    assert ended.returncode == 0, errors.read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["killed"] >= num_kills * 0.9  # the run may end before the last one
    assert found["while_recorded"] > 0
    assert num_kills < 20 or found["while_recorded"] < num_kills
    assert found["finished"]
    assert found["got"] == found["expected"]
    assert not found["differing"]
    assert found["samples"] > 600
