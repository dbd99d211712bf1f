"""`shade simulate` offers no more cache than the data set has bytes, and says each piece of advice once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shade.cli import main
from shade.policy.trace import Trace

N, BYTES, EPOCHS = 100, 1000, 6


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a data set of 97.7 KiB, with a cache for a fifth of it, that waits for its storage."""
    rng = np.random.default_rng(0)
    Trace(np.full(N, BYTES), tuple(rng.permutation(N) for _ in range(EPOCHS)), 10).save(tmp_path / "trace.npz")
    row = {
        "kind": "epoch", "rank": 0, "num_samples": N, "samples": N, "hits": 20, "misses": 80, "origin_reads": 80,
        "cache_reads": 20, "epoch_seconds": 9.0, "step_seconds": 1.0, "cpus": 2, "capacity_bytes": N * BYTES // 5,
        "busy_seconds": {"origin": 16.0, "cache": 0.2, "decode": 0.4, "transform": 0.2},
    }  # fmt: skip
    lines = [json.dumps(row | {"epoch": epoch}) + "\n" for epoch in range(EPOCHS)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "run.json").write_text(json.dumps({"sampling": "uniform", "policy": "lru", "workers": 2}))
    return tmp_path


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["simulate", *words]) == 0
    return capsys.readouterr().out.partition("a later epoch")[2]


def test_more_cache_than_the_data_set_has_bytes_is_not_offered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer([str(run), "--add-cache", "20GiB"], capsys)
    assert "all of it cached  100.0%" in told
    assert "20.0 GiB more cache" not in told
    assert "20.0 GiB more is not needed: 78.1 KiB more hold all 97.7 KiB." in told


def test_what_fits_is_offered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer([str(run), "--add-cache", "20KiB", "--add-workers", "3"], capsys)
    assert "20.0 KiB more cache" in told
    assert "3 more workers" in told
    assert "not needed" not in told


def test_an_advice_is_given_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer([str(run)], capsys)
    waiting = [line for line in told.splitlines() if "  origin (" in line]
    assert len(waiting) >= 3
    assert told.count("fewer reads help most") == 1
    assert max(map(len, told.splitlines())) <= 80


def test_a_cache_that_holds_all_is_not_enlarged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace(f'"capacity_bytes": {N * BYTES // 5}', f'"capacity_bytes": {N * BYTES}'))
    told = answer([str(run)], capsys)
    assert "all of it cached" not in told
    assert "twice the cache" not in told
    assert "4 workers" in told
