"""A profile reads back as written, says where quality falls, and a file that is none is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shade.control.profile import Profile
from shade.errors import ConfigError

DENSITIES = (0.001, 0.01, 0.1, 1.0)
ACCURACY = Profile((64, 256), DENSITIES, ((0.5, 0.88, 0.9, 0.9), (0.4, 0.8, 0.86, 0.87)), is_loss=False)
LOSS = Profile((64,), DENSITIES, ((4.0, 2.1, 2.0, 2.01),), is_loss=True)


def test_it_reads_back_as_written(tmp_path: Path) -> None:
    told = ({"batch": 64, "density": 0.01, "quality": 0.88}, {"batch": 64, "density": 0.5, "failure": "timeout"})
    profile = Profile((64, 256), DENSITIES, ACCURACY.quality, False, told, {"command": "train {batch}", "seed": 3})
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert list(tmp_path.iterdir()) == [tmp_path / "profile.json"]


def test_grid_points_are_exact_between_them_is_between_and_outside_is_the_edge() -> None:
    assert ACCURACY.expected(64, 0.01) == pytest.approx(0.88)
    assert ACCURACY.expected(128, 0.001) == pytest.approx(0.45)
    assert ACCURACY.expected(64, 0.0316227766) == pytest.approx(0.89)
    assert ACCURACY.expected(1, 1e-6) == pytest.approx(0.5)
    assert ACCURACY.expected(9999, 1.0) == pytest.approx(0.87)
    assert LOSS.expected(64, 0.01) == LOSS.expected(1000, 0.01) == pytest.approx(2.1)


@pytest.mark.parametrize(
    ("profile", "batch", "allowed", "floor"),
    [
        (ACCURACY, 64, 0.0, 0.1),
        (ACCURACY, 64, 0.03, 0.01),
        (ACCURACY, 64, 0.9, 0.001),
        (ACCURACY, 256, 0.02, 0.1),
        (LOSS, 64, 0.02, 0.1),
        (LOSS, 64, 0.06, 0.01),
    ],
)
def test_below_the_floor_quality_falls_by_more_than_it_may(
    profile: Profile, batch: int, allowed: float, floor: float
) -> None:
    assert profile.floor(batch, allowed) == floor
    best = min(profile.shortfall(batch, density) for density in DENSITIES)
    for density in DENSITIES:
        if density < floor:
            assert profile.shortfall(batch, density) > best + allowed


def test_a_dense_end_that_is_a_little_worse_does_not_move_the_floor() -> None:
    assert Profile((64,), DENSITIES, ((2.05, 2.0, 2.3, 2.4),), is_loss=True).floor(64, 0.03) == 0.001


def test_a_step_is_worth_less_where_quality_is_less() -> None:
    curve = ACCURACY.curve(64)
    assert curve.at(1.0) == pytest.approx(1.0)
    assert curve.at(0.01) == pytest.approx(1 / (1 + 50 * 0.02 / 0.9))
    assert curve.at(0.001) < curve.at(0.01) < curve.at(0.1)


def test_a_quality_that_is_zero_at_best_has_a_unit_too() -> None:
    flat = Profile((8,), (0.1, 1.0), ((0.0, 0.0),), is_loss=True)
    assert flat.shortfall(8, 0.1) == 0.0
    assert Profile((8,), (0.1, 1.0), ((3.0, 0.0),), is_loss=True).shortfall(8, 0.1) == 1.0


def broken(**changed: Any) -> str:
    good = {"format": "shade-profile-1", "batches": [8], "densities": [0.1, 1.0], "quality": [[1, 2]], "is_loss": False}
    return json.dumps({**good, **changed})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", '{"format": "other"}', "[" * 5000, broken(batches=[]), broken(batches=[8, 8]),
        broken(batches=[0]), broken(densities=[1.0, 0.1]), broken(densities=[0.1, 7]), broken(quality=[[1]]),
        broken(quality=[[1, None]]), broken(quality=[[1, "x"]]), broken(quality=[["nan", 1]]), broken(batches=None),
        broken(evaluations=[3]), broken(batches=[1e999]),
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ConfigError, match="expected"):
        Profile.load(tmp_path / "profile.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shade tune"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"path for a profile"):
        ACCURACY.save(tmp_path / "none" / "profile.json")
