"""`bench_time_to_accuracy` reads its targets off the courses as its rule says."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_time_to_accuracy as bench
from bench_time_to_accuracy import BASE, STATIC, WAYS, Epoch
from measures import Log


def course(*errors: float, seconds: float = 2.0) -> list[Epoch]:
    return [Epoch(seconds, error, 1.0) for error in errors]


@pytest.mark.parametrize(
    ("errors", "expected"),
    [((9, 8, 7), 4.0), ((8, 9, 7), 6.0), ((9, 9, 9), math.inf), ((7, 7, 9), math.inf), ((8, 8, 8), 2.0)],
)
def test_a_target_counts_only_if_the_error_stays_there(errors: tuple[float, ...], expected: float) -> None:
    assert bench.seconds_to(course(*errors), 8.0) == expected


def test_ratios_are_to_both_bases_and_a_way_that_stays_above_never_comes() -> None:
    courses = {way: [course(9.0, 8.0), course(9.0, 8.0)] for way in WAYS}
    courses[BASE] = [course(9.0, 8.0, seconds=8.0)] * 2
    courses[STATIC] = [course(9.0, 8.0, seconds=4.0)] * 2
    courses["random"] = [course(12.0, 12.0)] * 2
    rows = {line.split(" | ")[0].strip("| "): line for line in bench.table(courses)}
    assert "| 4.0 (4.00, 2.00) | 4.0 (4.00, 2.00) | 2.0 (4.00, 2.00) | 4.0 | 2.00 | 8.00 ± 0.00 |" in rows["unbiased"]
    assert "| never | never | never |" in rows["random"]
    assert "| 16.0 (1.00, 0.50) |" in rows[BASE]


def test_only_seeds_that_all_ways_have_are_shown(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    for seed, ways in ((0, list(WAYS)), (1, list(WAYS)[:-1])):
        for way in ways:
            log.add({"cell": "glyphs", "way": way, "seed": seed, "course": course(float(seed))})
    courses = bench.courses_of(Log(tmp_path / "log.jsonl"), "glyphs")
    assert {way: len(runs) for way, runs in courses.items()} == dict.fromkeys(WAYS, 1)
    assert courses[BASE] == [course(0.0)]
