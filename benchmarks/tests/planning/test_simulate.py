"""The simulation on a trace in a file, with costs from a file or measured here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from measure import Costs
from replay import PreemptionTrace
from simulate import main

from shade.store._servers.server import LocalServer

Capture = pytest.CaptureFixture[str]
COSTS = Costs(
    state_bytes=1_500_000_000,
    step_seconds=0.5,
    pass_seconds=0.45,
    copy_rate=8e9,
    burst_rate=12e9,
    hash_rate=20e9,
    copy_drag=0.4,
    work_drag=0.1,
    write_rate=1e9,
)


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    COSTS.save(path)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "spot.csv"
    path.write_text(PreemptionTrace.synthetic(7200.0, 30 * 86400.0, seed=1, down_seconds=60.0).to_csv())
    return path


def told(capsys: Capture) -> list[list[str]]:
    """The table's cells, heading first."""
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("strategy"))
    return [re.split(r"\s{2,}", line.strip()) for line in lines[start:]]


def share(cell: str) -> float:
    return float(cell.removesuffix(" %"))


def test_strategies_are_compared_the_best_first(trace: Path, costs: Path, capsys: Capture) -> None:
    words = ["--trace", str(trace), "--costs", str(costs)]
    assert main([*words, "--strategy", "sync,overlap,copy"]) == 0
    heading, *rows = told(capsys)
    assert {row[0] for row in rows} == {"sync", "overlap", "copy"}
    assert rows[-1][0] == "sync"
    kept = [share(row[heading.index("kept")]) for row in rows]
    assert kept == sorted(kept, reverse=True)
    parts = ("kept", "lost", "saving", "recovering", "down")
    for row in rows:
        assert sum(share(row[heading.index(part)]) for part in parts) == pytest.approx(100, abs=0.01)


def test_intervals_are_compared_and_the_best_is_near_youngs(trace: Path, costs: Path, capsys: Capture) -> None:
    words = ["--trace", str(trace), "--costs", str(costs), "--strategy", "overlap"]
    assert main(words) == 0
    best = int(told(capsys)[1][1])
    assert main([*words, "--every", f"{best},{best * 10},{max(1, best // 10)}"]) == 0
    assert int(told(capsys)[1][1]) == best


def test_all_exact_strategies_by_default_and_a_picture(
    trace: Path, costs: Path, tmp_path: Path, capsys: Capture
) -> None:
    picture = tmp_path / "spot.png"
    words = ["--trace", str(trace), "--costs", str(costs), "--plot", str(picture)]
    assert main(words) == 0
    names = {row[0] for row in told(capsys)[1:]}
    assert {"copy", "overlap", "asymmetric", "sync"} <= names
    assert "dash" not in names, "a class with two names comes once"
    assert "excp" not in names, "it is not exact"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.multiprocess
def test_costs_are_measured_where_snapshots_go(tmp_path: Path, capsys: Capture) -> None:
    made, kept = tmp_path / "made.csv", tmp_path / "costs.json"
    words = ["--mtbf", "2h", "--length", "10d", "--make-trace", str(made)]
    with LocalServer() as server:
        places = ["--persist-to", str(tmp_path / "ckpt"), "--store", server.url.reveal()]
        measured = ["--state", "100MB", "--step", "0.2s", "--save-costs", str(kept)]
        assert main([*words, *places, *measured, "--strategy", "overlap"]) == 0
    assert told(capsys)[1][0] == "overlap"
    found = Costs.load(kept)
    assert found.state_bytes == 10**8
    for rate in (found.copy_rate, found.hash_rate, found.send_rate, found.write_rate):
        assert rate is not None
        assert rate > 1e7
    assert abs(len(PreemptionTrace.load(made).failures) - 120) < 50
    assert [path for path in (tmp_path / "ckpt").rglob("*") if path.is_file()] == []  # the probe is removed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a --trace, or --mtbf"),
        (["--trace", "none.csv"], "name a readable file"),
        (["--mtbf", "2h"], "--costs, or --state and --step"),
        (["--mtbf", "2h", "--costs", "none.json"], "a file of measured costs"),
        (["--mtbf", "2h", "--costs", "COSTS", "--strategy", "copi"], "did you mean 'copy'"),
        (["--mtbf", "2h", "--costs", "COSTS", "--every", "0"], "write --every 10,100"),
    ],
)
def test_what_cannot_be_simulated(words: list[str], message: str, costs: Path, capsys: Capture) -> None:
    given = [str(costs) if word == "COSTS" else word for word in words]
    assert main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--mtbf", "soon"], ["--budget", "2"], ["--step", "0s"]])
def test_what_is_no_time_or_share(wrong: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
    assert "such as" in capsys.readouterr().err
