"""Every row of scripts/gpu_check runs, with the processor in the place of a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_all_parts_run_on_a_processor(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [str(ROOT / "scripts" / "gpu_check"), "--out", str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu.md").read_text()
    assert "stand-in: no figure of a GPU" in page
    assert "Nothing failed." in page
    assert page.count("| stand-in |") >= 12
    assert page.count("| ok |") >= 20
    assert "| met |" not in page
    assert "| missed |" not in page
