"""A rank is killed in the middle of a run with ``--restarts``: all start anew from the newest snapshot."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shade.config import RunConfig
from shade.launch.run import main
from tests.support.launching import Family, forget, make_images, rows, run, saved_step, start, wait_for

pytestmark = pytest.mark.multiprocess

EPOCHS = 14
WORDS = (
    *("--network", "cnn", "--workers", "0", "--cache", "none", "--batch_size", "8", "-g", "2", "--sampling", "uniform"),
    *("--gradient", "threshold-v", "--density", "0.1", "--staleness", "1", "--epochs", str(EPOCHS), "--out", "out"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"), per_class=24)


def losses(out: Path) -> dict[int, str]:
    """Rank 0's, by step; of a step taken twice the last time counts."""
    return {row["step"]: row["loss"] for row in map(json.loads, (out / "trail.jsonl").read_text().splitlines())}


def kill_a_rank(data: Path, here: Path, *more: str) -> tuple[int, str]:
    """Starts, kills rank 1 when there is a snapshot, and waits; the exit code and what the launcher said."""
    launcher = start("bench_cifar10.py", data, *WORDS, "--checkpoint-every", "5", *more, cwd=here)
    wait_for(lambda: (here / "out" / "run.json").exists() and saved_step(here / "out") >= 20)
    ranks = [each for each in Family(launcher).named("bench_cifar10.py") if each.environ().get("RANK") == "1"]
    ranks[-1].send_signal(signal.SIGKILL)
    _, said = launcher.communicate(timeout=240)
    return launcher.returncode, said


@pytest.mark.slow
def test_a_run_outlives_a_rank_and_ends_as_if_nothing_had_been(data: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for here in (whole, broken):
        here.mkdir()
    told = run("bench_cifar10.py", data, *WORDS, cwd=whole)
    assert told.returncode == 0, told.stderr
    status, said = kill_a_rank(data, broken, "--restarts", "1")
    assert status == 0, said
    assert "rank 1 was killed by SIGKILL" in said
    assert "the ranks are restarted (0 more times after that)" in said
    assert losses(broken / "out") == losses(whole / "out")
    assert [row["epoch"] for row in rows(broken / "out") if row["rank"] == 0] == list(range(EPOCHS))
    forget(broken / "out")


def test_a_run_that_was_killed_before_its_first_snapshot_starts_over_and_a_later_one_does_not(
    data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = start("bench_cifar10.py", data, *WORDS, "--epochs", "1", cwd=tmp_path)
    family = wait_for(lambda: (tmp_path / "out" / "run.json").exists() and Family(launcher))
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not family.running())
    told = run("--resume", "out", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "has no snapshot yet; it starts from the beginning" in told.stderr
    assert [row["epoch"] for row in rows(tmp_path / "out") if row["rank"] == 0] == [0]
    assert (tmp_path / "out" / "has-snapshots").exists()
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    forget(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    assert main(["--resume", "out", "--epochs", "2"]) == 2
    assert "a checkpoint to resume from" in capsys.readouterr().err


def test_ranks_are_started_anew_as_often_as_was_asked(
    data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun: list[tuple[bool, bool]] = []

    def launch(config: RunConfig, stores: Any, remind: Any, headline: str = "") -> tuple[int, str]:
        out = Path(config.out)
        begun.append((config.resume, (out / "train.log").exists()))
        out.mkdir(exist_ok=True)
        (out / "train.log").write_text("miss 1\n")
        return 1, f"rank 1 was killed by SIGKILL for the {len(begun)}. time"

    monkeypatch.setattr("shade.launch.run._launch", launch)
    monkeypatch.setattr("shade.launch.preflight.has_snapshots", lambda config, url: len(begun) > 1)
    assert main(["bench_cifar10.py", str(data), *WORDS, "--restarts", "2"]) == 1
    assert begun == [(False, False), (False, False), (True, True)]  # nothing to go on from yet: as if it had not been
    said = capsys.readouterr().err
    assert "for the 1. time; the ranks are restarted (1 more times after that)" in said
    assert "for the 3. time; continue with --resume" in said


def test_fewer_than_no_restarts_are_refused(
    data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench_cifar10.py", str(data), "--cache", "none", "--restarts", "-1"]) == 2
    assert "--restarts of at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_what_a_rank_complained_of_before_it_was_started_again_is_over(
    code: int, data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.distributed.run starts ranks again for --min_nodes: the run may end well."""

    def watch(poll: Any, config: RunConfig, **options: Any) -> int:
        (Path(config.out) / "failure-0.txt").write_text("expected a rank that is lost\n")
        return code

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shade.launch.run.watch", watch)
    ranks = contextlib.nullcontext(SimpleNamespace(was_killed=False))
    monkeypatch.setattr("shade.launch.run.Ranks", lambda *given: ranks)
    assert main(["bench_cifar10.py", str(data), "--cache", "none", "--batch_size", "8"]) == 2 * code
    assert ("expected a rank that is lost" in capsys.readouterr().err) == bool(code)


@pytest.mark.slow
def test_data_that_vanish_in_mid_run_leave_a_run_to_resume(tmp_path: Path) -> None:
    data = make_images(tmp_path / "images", per_class=24)
    launcher = start("bench_cifar10.py", data, *WORDS, "--checkpoint-every", "5", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "out" / "run.json").exists() and saved_step(tmp_path / "out") >= 20)
    data.rename(tmp_path / "away")
    _, said = launcher.communicate(timeout=240)
    assert launcher.returncode == 1, said
    assert said.endswith(f"; continue with --resume {tmp_path / 'out'}\n")
    (tmp_path / "away").rename(data)
    told = run("bench_cifar10.py", "--resume", tmp_path / "out", cwd=tmp_path)  # the cure
    assert told.returncode == 0, told.stderr
    assert max(row["epoch"] for row in rows(tmp_path / "out") if "epoch" in row) == EPOCHS - 1
    forget(tmp_path / "out")
