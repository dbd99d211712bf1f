"""DeepSpeed's own save_checkpoint and load_checkpoint through our engine, in real ranks, at each ZeRO stage.

Skipped where DeepSpeed is not installed: ``DS_BUILD_OPS=0 pip install deepspeed``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shade.store._servers.local_cluster import free_ports
from shade.store._servers.server import LocalServer

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "programs" / "deepspeed_rank.py"
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


def run(folder: Path, stage: int, verb: str, world_size: int, *store: str) -> list[Any]:
    """What each rank has answered."""
    (port,) = free_ports(1)
    common = os.environ | {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(folder), str(stage), verb, *store]
    ranks = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    told = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(each[-3000:] for each in told)
    return [json.loads((folder / f"{verb}-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (2, 2), (3, 2)])
def test_a_job_goes_on_as_if_it_had_not_ended(tmp_path: Path, stage: int, world_size: int) -> None:
    expected = run(tmp_path, stage, "save", world_size)
    found = run(tmp_path, stage, "load", world_size)
    assert found == expected
    notes = [path for path in (tmp_path / "run").rglob("*.pt") if path.is_file()]
    assert notes
    for note in notes:  # what lies where DeepSpeed looks is a note of some bytes, and no pickle
        assert json.loads(note.read_text())["step"] == 5
    assert (tmp_path / "run" / "latest").read_text() == "global_step5"


def test_through_a_cluster(tmp_path: Path, server: LocalServer) -> None:
    expected = run(tmp_path, 1, "save", 2, server.url.reveal())
    assert run(tmp_path, 1, "load", 2, server.url.reveal()) == expected


def test_a_flipped_bit_is_refused_and_named(tmp_path: Path) -> None:
    run(tmp_path, 1, "save", 1)
    (data,) = (tmp_path / "volume").rglob("rank-0.safetensors")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (told,) = run(tmp_path, 1, "refuse", 1)
    assert told.startswith("CorruptCheckpointError")


def test_a_file_of_another_engine_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 1, "save", 1)
    (note,) = (tmp_path / "run").rglob("mp_rank_00_model_states.pt")
    note.write_bytes(b"PK\x03\x04 what torch.save writes")
    (told,) = run(tmp_path, 1, "refuse", 1)
    assert "expected a note of ours" in told
    assert "leave the engine as DeepSpeed has it" in told
