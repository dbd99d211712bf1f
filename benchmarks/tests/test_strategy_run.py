"""A run of the strategies' benchmark in this process: what was saved is what comes back, and every figure is there."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def given() -> Namespace:
    return Namespace(model="gpt2", size="tiny", every=2, saves=2, data=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "saves"
    path.mkdir()
    return path


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return tmp_path / "reference.pt"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    pytest.importorskip("transformers")
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def runs(benchmarks: None) -> ModuleType:
    import strategy_run

    found: ModuleType = strategy_run
    return found


def turn(runs: ModuleType, given: Namespace, folder: Path, reference: Path | None, name: str) -> dict[str, Any]:
    found: dict[str, Any] = runs.Turns(given, runs.METHODS["none"]).take(name, folder, reference)
    return found


@pytest.mark.parametrize("name", ["asymmetric", "gemini", "torch.save"])
def test_what_is_trained_and_saved_is_restored(
    runs: ModuleType, given: Namespace, folder: Path, reference: Path, name: str
) -> None:
    trained = turn(runs, given, folder, reference, name)
    assert len(trained["stalls"]) == len(trained["durable"]) == 2
    assert len(trained["pairs"]) == 2
    assert all(behind > 0 and without > 0 for behind, without in trained["pairs"])
    assert trained["state_bytes"] > 100_000
    restored = runs.restore(name, given, folder, reference)
    assert restored["equal"]
    assert restored["recovery"] > 0


def test_what_may_differ_is_compared_with_what_was_saved_number_by_number(
    runs: ModuleType, given: Namespace, folder: Path, reference: Path
) -> None:
    turn(runs, given, folder, reference, "excp")
    restored = runs.restore("excp", given, folder, reference)
    assert not restored["equal"]
    assert 0 < restored["error"] <= 1


def test_methods_take_turns_in_one_training(runs: ModuleType, given: Namespace, tmp_path: Path) -> None:
    turns = runs.Turns(given, runs.METHODS["none"])
    state = turns.training.optimizer.state
    for number, name in enumerate(["copy", "asymmetric", "torch.save"]):
        reference, folder = tmp_path / f"{number}.pt", tmp_path / str(number)
        folder.mkdir()
        before = next(iter(state.values()))["step"].item()
        turns.take(name, folder, reference, number)
        assert next(iter(state.values()))["step"].item() == before + 3 + 2 * 2 * given.every
        assert runs.restore(name, given, folder, reference)["equal"]


def test_buffers_wait_for_the_next_turn(
    runs: ModuleType, given: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import strategy_methods
    from checkpoint_methods import run_id

    from shade.checkpoint._buffer.shared_memory_folder import own_folder, shared_memory

    spare = shared_memory() / f"{tmp_path.name}-spare"
    monkeypatch.setenv(strategy_methods.SPARE, str(spare))
    try:
        turns, seen = runs.Turns(given, runs.METHODS["none"]), []
        for number, name in enumerate(["copy", "overlap"]):
            folder = tmp_path / str(number)
            folder.mkdir()
            turns.take(name, folder, None, number)
            seen.append([path.stat().st_ino for path in spare.iterdir()])
            assert not own_folder(run_id()).exists()
        assert len(seen[0]) == 1
        assert seen[0] == seen[1]
    finally:
        shutil.rmtree(spare)


def test_a_wrong_number_is_noticed(runs: ModuleType, given: Namespace, folder: Path, reference: Path) -> None:
    import torch

    turn(runs, given, folder, reference, "torch.save")
    path = max(folder.glob("*.pt"), key=lambda each: int(each.stem))
    saved = torch.load(path, weights_only=True)
    key = next(key for key in saved["model"] if key.endswith("wte.weight"))
    saved["model"][key].view(-1)[7] += 1.0
    torch.save(saved, path)
    assert not runs.restore("torch.save", given, folder, reference)["equal"]


def test_a_turn_without_saves_has_no_stalls(runs: ModuleType, given: Namespace, folder: Path, reference: Path) -> None:
    found = turn(runs, given, folder, reference, "none")
    assert found["stalls"] == []
    assert len(found["pairs"]) == 2
    assert not reference.exists()


def row(number: int, method: str, **figures: Any) -> dict[str, Any]:
    """As it stands in strategies.jsonl."""
    common = {"round": number, "model": "gpt2", "method": method, "commit": "abc", "processors": "2 of X"}
    figures = {"stalls": [0.01, 0.02], "durable": [1.0], "committed": [0.5], "written_bytes": 100.0} | figures
    return common | {"state_bytes": 100, "recovery": 0.3, "equal": True, "error": 0.0} | figures


def test_the_report_ranks_by_what_a_snapshot_costs(benchmarks: None, tmp_path: Path) -> None:
    from strategy_report import Report

    rows = []
    for number in range(3):
        rows += [
            row(number, "none", pairs=[(5.01, 5.0), (4.99, 5.0)], stalls=[]),
            row(number, "asymmetric", pairs=[(5.1, 5.0), (5.1, 5.0)]),
            row(number, "copy", pairs=[(5.4, 5.0), (5.4, 5.2)]),
            row(number, "lossy", pairs=[(5.05, 5.0), (5.05, 4.9)], equal=False, error=0.01),
        ]
    rows.append(row(0, "broken") | {"failed": "RuntimeError: a | b"})
    report = Report(rows, {"size": "tiny"})
    assert [line.method for line in report.lines["gpt2"]] == ["lossy", "asymmetric", "copy", "broken"]
    best = report.best("gpt2")
    assert best is not None
    assert best.method == "asymmetric"
    assert best.cost == pytest.approx(0.1)
    assert best.slow_down == pytest.approx(0.1 / 5)
    text = report.text()
    assert "| **asymmetric** | 3 | 15.0 ms | 20.0 ms | +2.0 % | 100 ± 0 ms |" in text
    assert "Where nothing is saved, steps differ from those around by 0 ± 8 ms (3 runs)." in text
    assert "failed: RuntimeError: a / b" in text
    assert "costs least of all that restored bit for bit on 1 of 1: gpt2" in text
    assert (
        "Of 1 comparisons with a rival on a model, 0 find the rival cheaper by more than twice the difference's" in text
    )
    assert "standard error (none), and 1 find it dearer by as much" in text
    report.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"strategies.md", "strategies.json", "strategies.png"}


def test_models_are_added_up_for_methods_that_restored_all_of_them(benchmarks: None) -> None:
    from strategy_report import Report

    rows = []
    for number in range(3):
        for model, seconds in (("gpt2", 0.1), ("bert", 0.3)):
            rows += [
                row(number, "copy", pairs=[(5.0 + seconds, 5.0)]) | {"model": model},
                row(number, "sync", pairs=[(5.2, 5.0)]) | {"model": model},
                row(number, "lossy", pairs=[(5.0, 5.0)], equal=model == "bert") | {"model": model},
            ]
    text = Report(rows, {"size": "tiny"}).text()
    table = text[text.index("added up") :]
    assert "| copy | 0.40 ± 0.00 s | gpt2 |" in table
    assert "| sync | 0.40 ± 0.00 s |  |" in table
    assert "lossy" not in table


def test_the_default_is_the_first_that_leaves_modules_alone(benchmarks: None) -> None:
    from strategy_report import MTBF_SECONDS, Report

    rows = []
    for number in range(3):
        for model in ("gpt2", "bert"):
            rows += [
                row(number, name, pairs=[(5.0 + seconds, 5.0)] * 2, durable=[seconds]) | {"model": model}
                for name, seconds in (("none", 0.0), ("overlap", 0.4), ("asymmetric", 0.1), ("copy", 0.2))
            ]
        rows.append(row(number, "datastates", pairs=[(5.0, 5.0)]))  # cheapest, but not measured on all models
    text = Report(rows, {"size": "tiny"}).ranking()
    rows_shown = [line.split("|")[1:] for line in text.splitlines() if line.rstrip().endswith(("yes |", "modules |"))]
    assert [cells[0].strip() for cells in rows_shown] == ["asymmetric", "**copy**", "overlap"]
    first = 1 + (2 * 0.1 / MTBF_SECONDS) ** 0.5  # Young's, for a cost far below the time between failures
    assert [cell.strip() for cell in rows_shown[0][1:4]] == [f"{first:.4f} ± 0.0000", "12", "0.20 ± 0.00 s"]


def test_a_turn_is_compared_with_quiet_steps_of_the_turns_around(benchmarks: None) -> None:
    from strategy_report import Report

    rows = [row(0, f"other-{place}", pairs=[(9.0, 5.0 + place / 100)]) | {"at": float(place)} for place in range(20)]
    rows.append(row(0, "copy", pairs=[(5.3, 7.0)]) | {"at": 10.0})
    (line,) = [each for each in Report(rows, {"size": "tiny"}).lines["gpt2"] if each.method == "copy"]
    assert line.cost == pytest.approx(5.3 - 5.1, abs=0.015)  # one long half among seven does not move it


def test_rows_survive_an_interruption(benchmarks: None, tmp_path: Path) -> None:
    from bench_strategies import Runs

    path = tmp_path / "rows.jsonl"
    log = Runs(path)
    log.add(row(0, "copy", written_bytes=1.0))
    log.add(row(0, "overlap") | {"failed": "x"})
    with path.open("a") as file:
        file.write('{"round": 1, "met')
    again = Runs(path)
    assert again.has({"round": 0, "method": "copy"})
    assert not again.has({"round": 0, "method": "overlap"})  # it failed: it is tried again
    again.add(row(0, "overlap", written_bytes=2.0))
    (kept,) = [each for each in Runs(path).of({"model": "gpt2"}) if each["method"] == "overlap"]
    assert kept["written_bytes"] == 2.0
