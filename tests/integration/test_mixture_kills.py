"""Ranks of a packed mixture that are killed: 4, 3, 1 and 6 of them in turn take one stream of tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("num_kills", "seed"), [(12, 0), pytest.param(50, 1, marks=pytest.mark.slow)], ids=["dozen", "fifty"]
)
@pytest.mark.timeout(900)
def test_killed_ranks_take_the_stream_of_an_uninterrupted_run(num_kills: int, seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.mixture_lives", str(tmp_path), str(num_kills), str(seed)]
    errors = tmp_path / "errors"
    with errors.open("w") as written:  # no pipe, which workers of a killed rank would keep open for a while
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=written, timeout=850)
    assert ended.returncode == 0, errors.read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["killed"] == num_kills
    assert found["middles"] >= num_kills // 4  # in the middle of a round
    assert found["finished"]
    assert found["stream"]
    assert not found["beyond"]
    assert found["sequences"] >= 240
    assert len({tuple(shares) for shares in found["shares"]}) == len(found["shares"])  # they followed the losses
    assert found["filled"] >= 0.98
    assert found["hits"] > 0  # of the last ranks, whose documents come from the cache
