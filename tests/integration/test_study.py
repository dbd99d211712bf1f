"""A search finds the optimum, survives failures, and resumes after a kill."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shade.control.profile import Profile
from shade.control.study import Evaluation, EvaluationError, Point, Space, Study, read_journal, run, suggest
from shade.errors import ConfigError, DataError

SPACE = Space((32, 1024), (0.0005, 0.1), batch_multiple=8)
FEW = Study(SPACE, seed=3, num_evaluations=7, num_first=4)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a whole search of FEW on the hill."""
    journal = tmp_path_factory.mktemp("few") / "journal"
    assert len(list(run(FEW, hill, journal))) == FEW.num_evaluations
    return journal


def hill(point: Point) -> float:
    """Accuracy with its top, 0.9, at batch 200 and density 0.02."""
    across = math.log(point.batch / 200) / math.log(32)
    up = math.log(point.density / 0.02) / math.log(200)
    return 0.9 * math.exp(-4 * across**2 - 6 * up**2)


def saturating(point: Point) -> float:
    """Accuracy as it usually is: more density is never worse, a great batch is."""
    return 0.95 - 0.02 * (point.density / 0.0005) ** -0.5 * 10 - 0.05 * math.log(point.batch / 32) / math.log(32)


def valley(point: Point) -> float:
    """The same as a loss, with a bent floor."""
    across = math.log(point.batch / 100) / math.log(32)
    up = math.log(point.density / 0.005) / math.log(200)
    return 2.0 + 3 * (up - across**2) ** 2 + 0.5 * across**2


@pytest.mark.parametrize(
    ("objective", "is_loss", "best", "seed"),
    [
        (hill, False, 0.9, 0),
        pytest.param(hill, False, 0.9, 1, marks=pytest.mark.slow),
        pytest.param(saturating, False, 0.936, 0, marks=pytest.mark.slow),
        pytest.param(valley, True, 2.0, 0, marks=pytest.mark.slow),
        pytest.param(valley, True, 2.0, 1, marks=pytest.mark.slow),
    ],
)
def test_it_comes_within_a_twentieth_of_the_best_in_31_evaluations(
    objective: Callable[[Point], float], is_loss: bool, best: float, seed: int, tmp_path: Path
) -> None:
    study = Study(SPACE, is_loss, seed)
    done = list(run(study, objective, tmp_path / "journal.jsonl"))
    found = study.best(done)
    assert len(done) == 31
    assert found is not None
    assert found.quality == pytest.approx(best, rel=0.05)
    assert all(SPACE.batches[0] <= each.batch <= SPACE.batches[1] and each.batch % 8 == 0 for each in done)
    assert len({each.point for each in done}) == 31


def test_it_is_better_than_looking_around(tmp_path: Path) -> None:
    def sharp(point: Point) -> float:
        return hill(point) ** 8

    searched = list(run(Study(SPACE, num_evaluations=20, num_first=6), sharp, tmp_path / "a"))
    around = [sharp(point) for point in SPACE.first(20, 0)]
    assert max(each.quality or 0.0 for each in searched) > max(around)
    assert max(each.quality or 0.0 for each in searched) > 0.97 * 0.9**8


def test_its_profile_is_near_the_truth(tmp_path: Path) -> None:
    study = Study(SPACE)
    profile = study.profile(list(run(study, saturating, tmp_path / "journal")))
    for batch in (64, 256):
        for density in (0.001, 0.01, 0.1):
            assert profile.expected(batch, density) == pytest.approx(saturating(Point(batch, density)), abs=0.03)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").quality == profile.quality
    assert len(profile.evaluations) == 31


def test_the_same_seed_tries_the_same_and_another_another(few: Path, tmp_path: Path) -> None:
    first = [each.point for each in read_journal(few, FEW)]
    assert [each.point for each in run(FEW, hill, tmp_path / "b")] == first
    other = Study(SPACE, seed=4, num_evaluations=7, num_first=4)
    assert [each.point for each in run(other, hill, tmp_path / "c")] != first


@pytest.mark.parametrize("killed_after", [0, 2, 5])
@pytest.mark.parametrize("torn", [b"", b'{"evaluation": {"numb'])
def test_killed_and_resumed_it_tries_the_same(killed_after: int, torn: bytes, few: Path, tmp_path: Path) -> None:
    whole = [each.point for each in read_journal(few, FEW)]
    journal, tried = tmp_path / "killed", list[Point]()

    def dies(point: Point) -> float:
        if len(tried) == killed_after:
            raise KeyboardInterrupt
        tried.append(point)
        return hill(point)

    with pytest.raises(KeyboardInterrupt):
        list(run(FEW, dies, journal))
    with journal.open("ab") as end:
        end.write(torn)
    resumed: list[Point] = []
    done = list(run(FEW, lambda point: (resumed.append(point), hill(point))[1], journal))
    assert tried + resumed == whole == [each.point for each in done]
    assert [each.number for each in done] == list(range(7))
    assert list(run(FEW, dies, journal)) == done  # nothing is left to do


def test_more_evaluations_of_the_same_study_go_on(few: Path, tmp_path: Path) -> None:
    more = Study(SPACE, seed=3, num_evaluations=9, num_first=4)
    shutil.copy(few, tmp_path / "a")
    whole = [each.point for each in run(more, hill, tmp_path / "b")]
    assert [each.point for each in run(more, hill, tmp_path / "a")] == whole
    assert len(list(run(FEW, hill, tmp_path / "a"))) == 7


def test_failures_are_written_down_survived_and_avoided(tmp_path: Path) -> None:
    def breaks(point: Point) -> float:
        if point.batch > 400:
            raise EvaluationError("out of memory")
        return float("nan") if point.density < 0.001 else hill(point)

    study = Study(SPACE, num_evaluations=22)
    done = list(run(study, breaks, tmp_path / "journal"))
    failed = [each for each in done if each.quality is None]
    assert {each.failure for each in failed} == {"out of memory", "the quality is nan"}
    assert read_journal(tmp_path / "journal", study) == done
    assert len([each for each in done[10:] if each.batch > 400]) <= 4
    best = study.best(done)
    assert best is not None
    assert best.quality == pytest.approx(0.9, rel=0.05)


def test_when_everything_fails_it_looks_on_and_says_so(tmp_path: Path) -> None:
    def breaks(point: Point) -> float:
        raise EvaluationError("no such file")

    study = Study(SPACE, num_evaluations=13)
    done = list(run(study, breaks, tmp_path / "journal"))
    assert len({each.point for each in done}) == 13
    assert study.best(done) is None
    with pytest.raises(DataError, match="no such file"):
        study.profile(done)


def test_what_is_neither_a_number_nor_a_failure_ends_the_study(tmp_path: Path) -> None:
    def bug(point: Point) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(run(FEW, bug, tmp_path / "journal"))
    assert read_journal(tmp_path / "journal", FEW) == []


@pytest.mark.parametrize(
    "other",
    [Study(SPACE, seed=4, num_evaluations=7, num_first=4), Study(SPACE, True, 3, 7, 4), Study(SPACE, False, 3, 7, 5),
     Study(Space((32, 512), (0.0005, 0.1), 8), False, 3, 7, 4), Study(SPACE, False, 3, 7, 4, {"command": "x"})],
)  # fmt: skip
def test_another_studys_journal_is_refused(other: Study, few: Path, tmp_path: Path) -> None:
    shutil.copy(few, tmp_path / "journal")
    before = (tmp_path / "journal").read_bytes()
    with pytest.raises(ConfigError, match="this very study"):
        list(run(other, hill, tmp_path / "journal"))
    assert (tmp_path / "journal").read_bytes() == before


def test_a_journal_is_lines_of_json(tmp_path: Path) -> None:
    list(run(Study(SPACE, num_evaluations=2), hill, tmp_path / "journal"))
    rows = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [list(row) for row in rows] == [["study"], ["evaluation"], ["evaluation"]]
    assert Evaluation(**rows[1]["evaluation"]).quality == pytest.approx(hill(Point(*SPACE.first(10, 0)[0])))


@pytest.mark.parametrize("content", [b'{"evaluation": {}}\n', b'{"study": 3}\n', b"[1]\n3\n{}\n"])
def test_what_is_no_journal_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(ConfigError, match="journal"):
        list(run(FEW, hill, tmp_path / "journal"))


def test_a_line_that_stands_twice_counts_once(tmp_path: Path) -> None:
    done = list(run(Study(SPACE, num_evaluations=3), hill, tmp_path / "journal"))
    lines = (tmp_path / "journal").read_text().splitlines(keepends=True)
    (tmp_path / "journal").write_text("".join([*lines[:3], lines[2], *lines[3:], lines[1]]))
    assert read_journal(tmp_path / "journal", Study(SPACE)) == done


def test_a_journal_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in (tmp_path, tmp_path / "file" / "journal"):
        with pytest.raises(ConfigError, match="journal"):
            list(run(FEW, hill, where))


class TestSpace:
    """Logarithms, and what can be tried."""

    def test_corners_and_the_middle(self) -> None:
        assert SPACE.point(0.0, 0.0) == (32, 0.0005)
        assert SPACE.point(1.0, 1.0) == (1024, 0.1)
        assert SPACE.point(0.5, 0.5) == (184, 0.00707)
        assert SPACE.unit(Point(32, 0.1)) == pytest.approx((0.0, 1.0))

    def test_a_side_of_no_length(self) -> None:
        line = Space((64, 64), (0.001, 0.1))
        assert {line.point(place, 0.5).batch for place in (0.0, 0.3, 1.0)} == {64}
        assert line.unit(Point(64, 0.1)) == (0.5, 1.0)
        tried: list[tuple[Point, float | None]] = [(point, point.density) for point in line.first(4, 0)]
        assert suggest(line, tried, seed=0, num_first=4).batch == 64

    def test_first_points_leave_no_row_or_column_empty(self) -> None:
        places = [
            SPACE.unit(point)
            for point in Space((1, 10**6), (1e-6, 1.0)).first(10, 5)
            for SPACE in [Space((1, 10**6), (1e-6, 1.0))]
        ]
        for side in range(2):
            assert sorted(int(min(place[side], 0.999) * 10) for place in places) == pytest.approx(range(10), abs=1)

    def test_when_all_was_tried_it_tries_again(self) -> None:
        tiny = Space((8, 16), (0.1, 0.1), batch_multiple=8)
        tried: list[tuple[Point, float | None]] = [(Point(8, 0.1), 1.0), (Point(16, 0.1), 2.0)]
        assert suggest(tiny, tried, seed=0, num_first=1) in {Point(8, 0.1), Point(16, 0.1)}

    @pytest.mark.parametrize(
        "wrong",
        [{"batches": (0, 8)}, {"batches": (9, 8)}, {"batches": (9, 15), "batch_multiple": 8}, {"batch_multiple": 0},
         {"densities": (0.0, 0.1)}, {"densities": (0.2, 0.1)}, {"densities": (0.1, 1.1)}],
    )  # fmt: skip
    def test_what_is_no_space(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="expected"):
            Space(**{"batches": (8, 64), "densities": (0.001, 0.1), **wrong})
