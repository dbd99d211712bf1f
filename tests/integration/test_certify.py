"""A certificate for a run that is resumed bit for bit, and none for one that forgets something."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from shade.train.trail import TRAIL_FILE
from tests.support.launching import STREAM, make_images, run
from tests.support.scripts import load_script

pytestmark = pytest.mark.multiprocess

program = load_script("certify")


class Certified:
    """A finished run with all its snapshots; the replays write their stream elsewhere."""

    def __init__(self, here: Path, ranks: int, forget: str = "") -> None:
        self.here, self.out = here, here / "out"
        data = make_images(here / "images")
        words = ("--epochs", "2", "--workers", "0", "--batch_size", str(8 // ranks), "-g", str(ranks))
        keep = ("--cache", "none", "--checkpoint-keep", "all", "--out", "out")
        told = run(STREAM, data, *words, *keep, cwd=here, STREAM_LOG=str(here), STREAM_FORGET=forget)
        assert told.returncode == 0, told.stderr
        (here / "replays").mkdir()


def certify(
    run: Certified, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forget: str = ""
) -> tuple[int, str]:
    """The program's exit code and what it said."""
    monkeypatch.setenv("STREAM_LOG", str(run.here / "replays"))
    monkeypatch.setenv("STREAM_FORGET", forget)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = program.main([*words.split(), str(run.out)])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    """A run of two ranks that forgets nothing."""
    return Certified(tmp_path_factory.mktemp("whole"), 2)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_that_forgets_nothing_is_certified_and_not_touched(
    whole: Certified, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(whole.out)
    code, said = certify(whole, "3", monkeypatch, capsys)
    assert code == 0, said
    assert "step 3 restored in a fresh process, steps to 6 taken again" in said
    assert "the losses of 3 steps are the same, bit for bit" in said
    assert re.search(r"[1-9]\d* tensors of the snapshot of step 6 are the same", said)
    assert said.endswith("certified\n")
    assert snapshot(whole.out) == before


@pytest.mark.slow
def test_beyond_the_end_of_an_epoch(
    whole: Certified, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = certify(whole, "3 --steps 6", monkeypatch, capsys)
    assert code == 0, said
    assert "the losses of 6 steps are the same" in said
    assert "the snapshot of step 9 are the same" in said


@pytest.mark.slow
def test_a_trail_with_another_loss_says_at_which_step(
    whole: Certified, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trail = (whole.out / TRAIL_FILE).read_text()
    try:
        with (whole.out / TRAIL_FILE).open("a") as file:
            file.write(json.dumps({"step": 5, "loss": (1.5).hex()}) + "\n")
        code, said = certify(whole, "3", monkeypatch, capsys)
    finally:
        (whole.out / TRAIL_FILE).write_text(trail)
    assert code == 1
    assert "step 5 has another loss: 1.5 (0x1.8" in said
    assert said.endswith("not certified: something is not restored, or not deterministic\n")


@pytest.mark.slow
@pytest.mark.parametrize("forget", ["generator", "buffer"])
def test_what_is_forgotten_is_found_and_the_first_tensor_named(
    forget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Certified(tmp_path, 1, forget)
    code, said = certify(run, "3", monkeypatch, capsys, forget)
    assert code == 1, said
    assert "step 4 has another loss" in said
    assert re.search(r"the first that differs at step 6: (model|optimizer)/\S+, and \d+ more", said)


def test_what_cannot_be_tried_says_so(
    whole: Certified, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = certify(whole, "4", monkeypatch, capsys)
    assert code == 2
    assert "a snapshot of step 4" in said
    last = max(program.read_trail(whole.out / TRAIL_FILE))
    code, said = certify(whole, str(last), monkeypatch, capsys)
    assert code == 2
    assert f"steps after {last} to compare with" in said
    assert program.main(["3", str(tmp_path)]) == 2


@pytest.mark.slow
def test_a_replay_that_fails_says_why(
    whole: Certified, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(whole.here / "images", tmp_path / "images")
    try:
        code, said = certify(whole, "3", monkeypatch, capsys)
    finally:
        shutil.move(tmp_path / "images", whole.here / "images")
    assert code == 2
    assert "the replay failed: " in said
    assert "images" in said
