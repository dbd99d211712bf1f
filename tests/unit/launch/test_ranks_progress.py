"""Progress: a bar on a terminal, silence on a pipe."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shade.config import RunConfig
from shade.launch import ranks
from shade.terminal import status_line


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def script(out: Path, states: list[tuple[int, int] | None], status: int) -> Callable[[], int | None]:
    """Ranks that pass through these (epoch, step) of 3 × 10 and end; None: a torn progress file."""

    def poll() -> int | None:
        if not states:
            return status
        state = states.pop(0)
        fields = {"samples_per_second": 1234.5, "hit_ratio": 0.25, "waiting_fraction": 0.5, "num_steps": 10}
        told = "{" if state is None else json.dumps({"epoch": state[0], "step": state[1], **fields})
        (out / "progress.json").write_text(told)
        return None

    return poll


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of three epochs."""
    monkeypatch.setattr(ranks, "_POLL_SECONDS", 0.0)
    return RunConfig(out=str(tmp_path), script="s.py", train_paths=("d",), epochs=3)


STATES = [(0, 1), (0, 5), None, (0, 9), (1, 2), (1, 8), (2, 3)]


def test_a_pipe_gets_nothing(config: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ranks.watch(script(tmp_path, list(STATES), 0), config) == 0
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "progress.json").exists()


def test_a_pipe_gets_lines_if_asked_for(
    config: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LINE_SECONDS", 0.0)
    assert ranks.watch(script(tmp_path, list(STATES), 0), config, in_lines=True) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "  starting 1 rank (importing PyTorch)"
    assert told[2].startswith("  epoch 1/3 · ")
    assert "\r" not in "".join(told)


@pytest.mark.parametrize(("status", "last"), [(0, "100% |"), (1, " 77% |")])
def test_a_terminal_gets_a_bar(
    status: int, last: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert ranks.watch(script(tmp_path, list(STATES), status), config) == status
    drawn = terminal.getvalue().split("\r")
    assert "starting 1 rank (importing PyTorch)" in terminal.getvalue()
    assert len(drawn) < 12
    assert drawn[-1].startswith(last)
    assert drawn[-1].rstrip().endswith("done" if status == 0 else "stopped")


def test_the_bar_has_loss_time_left_hits_and_speed_of_the_storage_within_80_columns(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    fields = {"samples_per_second": 9.0, "hit_ratio": 0.25, "waiting_fraction": 0.5, "num_steps": 10, "loss": 0.1234}
    states: list[dict[str, object]] = [{"note": "plain DataLoader: trying 8 workers"}]
    states += [{"epoch": 1, "step": step, **fields, "origin_bytes_per_second": 2.5e6} for step in (2, 6)]

    def poll() -> int | None:
        if not states:
            return 0
        (tmp_path / "progress.json").write_text(json.dumps(states.pop(0)))
        time.sleep(0.15)  # longer than the bar rests between two drawings
        return None

    assert ranks.watch(poll, config) == 0
    drawn = terminal.getvalue().split("\r")
    assert any("plain DataLoader: trying 8 workers · 0 s" in each for each in drawn)
    shown = next(each for each in drawn if "left" in each)
    assert len(shown.rstrip()) <= 80
    assert re.search(r"epoch 2/3 · loss 0\.123 · 00:0\d left · hits 25% · storage 2\.5 MB/s$", shown.rstrip())


def test_a_wider_terminal_shows_more_and_a_slow_storage_is_not_called_zero(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    fields = {"samples_per_second": 9.0, "hit_ratio": 0.25, "waiting_fraction": 0.5, "num_steps": 10}
    states = [{"epoch": 1, "step": 2, **fields, "origin_bytes_per_second": 3e4}]

    def poll() -> int | None:
        if not states:
            return 0
        (tmp_path / "progress.json").write_text(json.dumps(states.pop(0)))
        time.sleep(0.15)
        return None

    assert ranks.watch(poll, config) == 0
    assert "storage 0.03 MB/s · 9 samples/s · waiting 50%" in terminal.getvalue()


@pytest.mark.parametrize("terminal", [Terminal(), io.StringIO()])
def test_a_status_line_is_removed_and_only_on_a_terminal(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", terminal)
    with contextlib.suppress(ValueError), status_line("checking"):
        assert ("checking …" in terminal.getvalue()) == terminal.isatty()
        raise ValueError  # the line is removed after an error too
    assert terminal.getvalue().endswith("\r\x1b[K" if terminal.isatty() else "")
    assert bool(terminal.getvalue()) == terminal.isatty()
