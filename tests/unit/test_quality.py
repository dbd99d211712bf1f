"""What the losses say of samples: labels the model never came to believe in, classes apart, and files there twice."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shade.cli import main
from shade.report.quality import judge
from shade.report.samples import MOST, Exhibit, find_duplicates, write_quality, write_sheet
from shade.trajectory import LossRecorder, Samples
from shade.types import Floats

EPOCHS = 6


def curves(num_samples: int, wrong: set[int], floor: float = 0.05) -> list[Floats]:
    """Losses that fall to ``floor``, and of the wrong ones that stay."""
    rng = np.random.default_rng(0)
    told = []
    for epoch in range(EPOCHS):
        loss_N = floor + 2.3 * np.exp(-1.2 * epoch) + 0.02 * rng.random(num_samples)
        loss_N[list(wrong)] = 2.5 + rng.random(len(wrong))
        told.append(loss_N.astype(np.float32))
    return told


def test_wrong_labels_come_first() -> None:
    wrong = {3, 50, 77}
    verdicts = judge(curves(100, wrong), EPOCHS)
    assert set(verdicts.by_suspicion[:3].tolist()) == wrong
    assert set(np.flatnonzero(verdicts.mislabelled_N).tolist()) == wrong
    assert set(np.flatnonzero(verdicts.never_learned_N).tolist()) == wrong
    assert verdicts.uses_N.tolist() == [EPOCHS - 1] * 100, "the first epoch is left out"
    assert verdicts.first_loss_N[0] == pytest.approx(2.35, abs=0.03)
    assert verdicts.confidence_N[0] > 0.5 > verdicts.confidence_N[3]


def test_a_hard_class_is_judged_by_itself() -> None:
    """Class 1 is learned only half: its members are no suspects among themselves, but its outlier is."""
    easy, hard = curves(50, set()), curves(50, {7}, floor=0.6)
    both = [np.concatenate(pair) for pair in zip(easy, hard, strict=True)]
    targets = np.repeat([4, 9], 50)
    apart, together = judge(both, EPOCHS, targets), judge(both, EPOCHS)
    assert np.flatnonzero(apart.mislabelled_N).tolist() in ([], [57])
    assert apart.by_suspicion[0] == 57
    assert apart.suspicion_N[50:57].max() < 0.1 < together.suspicion_N[50:57].min()


def test_in_a_class_that_is_not_learned_nobody_is_flagged() -> None:
    verdicts = judge([np.full(20, 4.0, np.float32)] * EPOCHS, EPOCHS)
    assert not verdicts.mislabelled_N.any()
    assert not verdicts.never_learned_N.any()


def test_samples_that_were_hardly_used_get_no_verdict() -> None:
    told = curves(30, {1, 2})
    for loss_N in told[2:]:
        loss_N[1] = np.nan
    for loss_N in told:
        loss_N[0] = np.nan
    verdicts = judge(told, EPOCHS)
    assert np.flatnonzero(verdicts.mislabelled_N).tolist() == [2]
    assert (verdicts.uses_N[0], verdicts.suspicion_N[0]) == (0, 0.0)
    assert np.isnan(verdicts.confidence_N[0])


def test_forgetting_is_counted() -> None:
    up, down = np.float32(0.1), np.float32(3.0)
    verdicts = judge([np.array([v, up]) for v in (down, up, down, down, up, down)], 6)
    assert verdicts.forgotten_N.tolist() == [2, 0]
    assert verdicts.best_N[0] > 0.9


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_run(folder: Path, wrong: set[int], twice: dict[int, int]) -> Path:
    """A run over 40 pictures in two classes."""
    names = []
    for number in range(40):
        path = folder / "data" / f"class{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number in twice:
            shutil.copy(names[twice[number]], path)
        else:
            Image.new("RGB", (8, 8), (6 * number, 100, 0)).save(path)
        names.append(str(path))
    recorder = LossRecorder(folder / "losses", lambda: Samples(tuple(names), tuple(n % 2 for n in range(40))))
    for epoch, loss_N in enumerate(curves(40, wrong)):
        recorder.end_epoch(epoch, loss_N)
    return folder


def test_the_table_the_sheet_and_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, {5, 8}, {21: 5, 30: 2})
    assert main(["quality", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "  2 likely mislabelled" in told
    assert "  2 never learned" in told
    assert "  2 duplicates of another file, 0 of them under another label" in told
    assert told.index("05.png") < told.index("Precision: ") < told.index("quality.csv has all of them")
    assert max(len(line) for line in told.splitlines() if ".png" not in line) <= 80
    with (tmp_path / "quality.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    assert {row["index"] for row in rows[:2]} == {"5", "8"}
    assert {row["index"]: row["duplicate_of"] for row in rows if row["duplicate_of"]} == {"21": "5", "30": "2"}
    assert rows[0]["sample"].endswith(f"{int(rows[0]['index']):02}.png")
    with Image.open(tmp_path / "quality.png") as sheet:
        assert sheet.width > 500
        colours = {colour for _, colour in sheet.convert("RGB").getcolors(1 << 20) or ()}
    assert (30, 100, 0) in colours, "sample 5 is on it"


LINES = ("The most suspicious of 1,437 samples.", "Precision: look at each." + " x" * 55)


def test_a_sheet_has_a_title_and_says_how_precise_it_is(tmp_path: Path) -> None:
    Image.new("L", (30, 10), 128).save(tmp_path / "grey.png")
    exhibits = [Exhibit(str(tmp_path / "grey.png"), "'3'", "1.0% of 95.0%")]
    heights = []
    for heading in ((), ("Samples worth a look: run",), ("Samples worth a look: run", *LINES)):
        write_sheet(exhibits, tmp_path / "sheet.png", heading or ("",))
        with Image.open(tmp_path / "sheet.png") as sheet:
            ink = np.asarray(sheet.convert("L"))
        heights.append(sheet.height)
        assert (ink[:40] < 100).any() == bool(heading), "the title is the darkest text at the top"
        assert not (ink[:, -4:] < 250).any(), "no line is cut off"
    assert heights[2] == heights[1] + 19 * len(LINES)


def test_duplicates_under_two_labels_are_told(tmp_path: Path) -> None:
    make_run(tmp_path, set(), {7: 2})
    assert "1 duplicates of another file, 1 of them under another label" in write_quality(tmp_path)


def test_files_that_are_gone_cost_the_sheet_and_no_more(tmp_path: Path) -> None:
    make_run(tmp_path, {5}, {})
    shutil.rmtree(tmp_path / "data")
    told = write_quality(tmp_path)
    assert "no quality.png: there is no picture" in told
    assert "1 likely mislabelled" in told
    assert not (tmp_path / "quality.png").exists()


def test_a_run_without_losses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "sampler.report" in told.err


def test_equal_length_is_not_equal(tmp_path: Path) -> None:
    names = []
    for number, content in enumerate((b"aaaa", b"bbbb", b"aaaa", b"cc", b"")):
        (tmp_path / str(number)).write_bytes(content)
        names.append(str(tmp_path / str(number)))
    names.append(str(tmp_path / "gone"))
    found = find_duplicates(names, np.arange(6)[::-1].copy())
    assert found.first_of == {2: 0}
    assert found.num_read == 3, "files of a length of their own are not opened"


def test_a_sheet_shows_what_is_a_picture(tmp_path: Path) -> None:
    Image.new("L", (30, 10), 128).save(tmp_path / "grey.png")
    (tmp_path / "text.png").write_text("no picture")
    exhibits = [Exhibit(str(tmp_path / name), "class ö with a long name", "1 %") for name in ("grey.png", "text.png")]
    assert write_sheet(exhibits * 40, tmp_path / "sheet.png") == MOST // 2
    assert write_sheet(exhibits[1:], tmp_path / "sheet.png") == 0
    assert not (tmp_path / "sheet.png").exists()
