"""The digits are all there, split the same way every time, and wrong labels are only where they were asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]


def prepare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "prepare_digits"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def labels(folder: Path) -> dict[int, int]:
    """Sample → the digit whose folder it is in."""
    return {int(path.stem): int(path.parent.name) for path in folder.glob("*/*.png")}


def test_every_digit_is_written_once_and_the_split_is_even(tmp_path: Path) -> None:
    result = prepare(tmp_path)
    assert result.returncode == 0, result.stderr
    train, val = labels(tmp_path / "train"), labels(tmp_path / "val")
    assert (len(train), len(val)) == (1437, 360)
    assert sorted([*train, *val]) == list(range(1797))
    truth = load_digits()
    assert all(truth.target[i] == digit for i, digit in {**train, **val}.items())
    counts = np.bincount(list(val.values()), minlength=10)
    assert counts.min() >= 34
    assert counts.max() <= 38
    index, digit = next(iter(train.items()))
    with Image.open(tmp_path / "train" / str(digit) / f"{index:04d}.png") as image:
        assert (image.size, image.mode) == ((32, 32), "L")
        small = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=float)
    assert np.corrcoef(small.ravel(), truth.images[index].ravel())[0, 1] > 0.95


def test_a_second_run_writes_nothing_and_completes_what_is_missing(tmp_path: Path) -> None:
    assert prepare(tmp_path).returncode == 0
    assert "already complete" in prepare(tmp_path).stdout
    next((tmp_path / "val").glob("*/*.png")).unlink()
    assert "(1 images written)" in prepare(tmp_path).stdout
    assert len(labels(tmp_path / "val")) == 360
    assert not list(tmp_path.rglob(".*.new"))


def test_flipped_labels_are_a_tenth_of_the_training_images_and_listed(tmp_path: Path) -> None:
    assert prepare(tmp_path / "x", "--flip-labels", 0.1, "--seed", 3).returncode == 0
    assert prepare(tmp_path / "y", "--flip-labels", 0.1, "--seed", 4).returncode == 0
    target = load_digits().target
    train = labels(tmp_path / "x" / "train")
    wrong = {i for i, digit in train.items() if digit != target[i]}
    assert len(train) == 1437
    assert len(wrong) == 144
    listed = (tmp_path / "x" / "flipped.txt").read_text().splitlines()
    assert {int(line.split(".png")[0][-4:]) for line in listed} == wrong
    assert all(target[i] == digit for i, digit in labels(tmp_path / "x" / "val").items())
    assert labels(tmp_path / "x" / "val") == labels(tmp_path / "y" / "val")
    assert train != labels(tmp_path / "y" / "train")


def test_variants_never_mix(tmp_path: Path) -> None:
    assert prepare(tmp_path).returncode == 0
    result = prepare(tmp_path, "--flip-labels", 0.1)
    assert result.returncode == 2
    assert "it holds another variant" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert len(labels(tmp_path / "train")) == 1437


def test_bad_arguments_are_one_line(tmp_path: Path) -> None:
    result = prepare(tmp_path, "--flip-labels", 1.5)
    assert result.returncode == 2
    assert "expected 0 <= --flip-labels < 1, got 1.5" in result.stderr
    (tmp_path / "file").write_text("")
    result = prepare(tmp_path / "file" / "below")
    assert result.returncode == 2
    assert "cannot write to" in result.stderr
