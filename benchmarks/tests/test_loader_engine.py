"""The benchmark of the loader's engine works with the engine of today: no batch is lost, with work and without."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1]


def test_a_round_over_few_images(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["bench_loader_engine.py", "--images", "192", "--rounds", "1"])
    runpy.run_path(str(FOLDER / "bench_loader_engine.py"), run_name="__main__")
    rows = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if "| ours |" in line]
    assert [work.strip() for work, *_ in rows] == ["everything", "nothing"]
    assert all(float(milliseconds) > 0 for *_, milliseconds in rows)
