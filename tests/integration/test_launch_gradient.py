"""A run whose ranks send the largest elements of their gradients: it trains, stops, and goes on as if it had not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shade.control.profile import Profile
from shade.launch.run import main
from tests.support.launching import forget, make_images, rows, run

pytestmark = pytest.mark.multiprocess

WORDS = (
    *("bench_cifar10.py", "--network", "cnn", "--workers", "0", "--cache", "none", "--batch_size", "8", "-g", "2"),
    *("--sampling", "uniform", "--gradient", "threshold-v16", "--density", "0.1", "--out", "out"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 images."""
    return make_images(tmp_path_factory.mktemp("images"), per_class=24)


def losses(out: Path) -> dict[int, str]:
    """Rank 0's, by step; of a step taken twice the last time counts."""
    return {row["step"]: row["loss"] for row in map(json.loads, (out / "trail.jsonl").read_text().splitlines())}


def words(data: Path, *more: str) -> tuple[str, ...]:
    return (WORDS[0], str(data), *WORDS[1:], *more)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["0", "1"])
def test_a_run_that_stopped_goes_on_as_if_it_had_not(data: Path, tmp_path: Path, staleness: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for here in (whole, parts):
        here.mkdir()
    told = run(*words(data, "--epochs", "3", "--staleness", staleness), cwd=whole)
    assert told.returncode == 0, told.stderr
    assert "of the gradient was sent" in told.stdout
    for row in rows(whole / "out"):
        assert row["gradient"]["gradient_failed_steps"] == 0
        assert 0 < row["gradient"]["gradient_chosen"] < row["gradient"]["gradient_elements"]
    told = run(*words(data, "--epochs", "3", "--staleness", staleness, "--steps", "8"), cwd=parts)
    assert told.returncode == 0, told.stderr
    assert max(losses(parts / "out")) < 9
    told = run("--resume", "out", "--steps", "100", cwd=parts)
    assert told.returncode == 0, told.stderr
    assert losses(parts / "out") == losses(whole / "out")
    forget(parts / "out")


@pytest.mark.slow
def test_the_controller_hears_of_every_rank(data: Path, tmp_path: Path) -> None:
    profile = Profile((16, 32), (0.001, 0.01, 0.1), ((0.5, 0.8, 0.9), (0.4, 0.7, 0.9)), is_loss=False)
    profile.save(tmp_path / "profile.json")
    more = ("--epochs", "4", "--controller", "--staleness", "1", "--density", "0.001", "--profile", "profile.json")
    told = run(*words(data, *more), cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    said = (tmp_path / "out" / "output.log").read_text()
    assert "telemetry at http://127.0.0.1:" in said
    assert "from step" in said  # the profile asks for more than 0.1 %


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--gradient topq", "topk"),
        ("--gradient topk --density 2", "--density in (0, 1]"),
        ("--density 0.5", "--gradient"),
        ("--controller", "--gradient"),
        ("--staleness 1", "--gradient"),
        ("--gradient topk --profile nowhere.json --controller", "nowhere.json"),
        ("--gradient topk --profile nowhere.json", "nowhere.json"),
    ],
)
def test_settings_that_cannot_be(
    data: Path,
    tmp_path: Path,
    given: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench_cifar10.py", str(data), "--cache", "none", *given.split()]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
