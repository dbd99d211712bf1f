"""All ranks fly the same strategy at the same steps, though each measures other times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shade.store._servers.local_cluster import free_ports

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "programs" / "auto_rank.py"


def test_ranks_agree_on_who_saves_and_when(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=250)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(each[-3000:] for each in told)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["flown"] == second["flown"]
    assert len({name for _, name in first["flown"]}) > 1, "nothing but the first was ever tried"
    assert first["equal"]
    assert second["equal"]
