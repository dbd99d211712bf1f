"""The benchmark of one save beside other libraries: a row a method, compression is counted, runs are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_round_of_a_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    methods = ["shade, asymmetric", "shade, asymmetric, compressed", "DCP async_save, stager reused"]
    words = ["--quick", "--rounds", "1", "--out", str(tmp_path), "--methods", *methods]
    (tmp_path / "checkpoint.jsonl").write_text('{"key": "0 some other", "commit": "abc", "found": {}}\n{"key": "0 no')
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_checkpoint.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "checkpoint.json").read_text())
    (plain,), (packed,) = (found["methods"][name] for name in methods[:2])
    assert packed["state_bytes"] == plain["state_bytes"] > 1_000_000
    assert len(packed["durable"]) == len(packed["blocked"]) == 4
    assert len(found["restore"]) == 4
    assert "Time until durable with compression over that without, by round:" in done.stdout
    assert not (tmp_path / "checkpoint.jsonl").exists(), "the table is written"
