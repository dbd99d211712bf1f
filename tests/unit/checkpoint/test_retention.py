"""What the keep rules keep, and what they refuse."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._format.retention import DEFAULT, Keep, lineage
from shade.errors import ConfigError


def record(step: int, sequence: int | None = None, **metrics: float) -> Commit:
    return Commit("run", step, step if sequence is None else sequence, 1, (f"digest-{step}",), 1, 0.0, metrics)


def kept(rules: str, *records: Commit) -> list[int]:
    """Steps that stay, checked against what may go."""
    keep = Keep.parse(rules)
    gone = {each.digest for each in keep.discardable(records)}
    left = [each.step for each in records if each.digest not in gone]
    assert sorted(left) == sorted(each.step for each in keep.kept(records))
    return left


def test_last_keeps_the_newest_so_many() -> None:
    assert kept("last=2", *map(record, [10, 20, 30, 40])) == [30, 40]
    assert kept("last=9", *map(record, [10, 20])) == [10, 20]


def test_the_newest_is_the_one_saved_last_and_not_the_highest_step() -> None:
    """A run that went back to step 10 and saved again there must not lose what it has just saved."""
    assert kept("last=1", record(10, 1), record(30, 2), record(20, 3)) == [20]


def test_the_newest_stays_whatever_the_rules_say() -> None:
    assert kept("best=loss", record(10, loss=0.1), record(20, loss=0.5)) == [10, 20]
    assert kept("every=1000", *map(record, [10, 20])) == [20]


def test_every_keeps_the_first_at_or_after_each_multiple() -> None:
    steps = [90, 100, 150, 190, 210, 290, 400, 410]
    assert kept("every=100", *map(record, steps)) == [100, 210, 400, 410]


def test_what_every_keeps_it_keeps_as_more_come() -> None:
    steps = list(range(30, 2000, 70))
    for end in range(1, len(steps)):
        before, after = kept("every=300", *map(record, steps[:end])), kept("every=300", *map(record, steps[: end + 1]))
        assert set(before) - {steps[end - 1]} <= set(after)


def test_best_keeps_the_smallest_or_the_largest() -> None:
    records = [
        record(1, loss=0.5, right=0.6),
        record(2, loss=0.2, right=0.7),
        record(3, loss=0.3, right=0.9),
        record(4),
    ]
    assert kept("best=loss", *records) == [2, 4]
    assert kept("best=loss:2", *records) == [2, 3, 4]
    assert kept("best=right:max", *records) == [3, 4]
    assert kept("best=right:max:2,best=loss", *records) == [2, 3, 4]


def test_no_number_is_never_the_best() -> None:
    assert kept("best=loss", record(1, loss=math.nan), record(2, loss=9.0), record(3)) == [2, 3]
    assert kept("best=loss:max", record(1, loss=math.nan), record(2, loss=-math.inf), record(3)) == [2, 3]


def test_of_equally_good_ones_the_newer_stays() -> None:
    assert kept("best=loss", record(1, loss=1.0), record(2, loss=1.0), record(3, loss=2.0)) == [2, 3]


def test_all_keeps_all() -> None:
    assert kept("all", *map(record, range(20))) == list(range(20))


def test_nothing_is_kept_of_nothing() -> None:
    assert Keep.parse(DEFAULT).discardable([]) == []


# ── snapshots that build on others ──────────────────────────────────────────────────────────────────────────────────


def chain(*steps: int, on: Commit | None = None) -> list[Commit]:
    """The first stands alone, or builds on another; each builds on the one before."""
    made: list[Commit] = []
    for step in steps:
        base = made[-1] if made else on
        made.append(replace(record(step), base=None if base is None else base.digest, version=2))
    return made


def test_what_is_kept_keeps_what_it_builds_on() -> None:
    first, second = chain(10, 20, 30), chain(40, 50, 60)
    assert kept("last=1", *first) == [10, 20, 30]
    assert kept("last=1", *first, *second) == [40, 50, 60]
    assert kept("last=1", *first, second[0]) == [40]
    assert kept("last=2", *first, second[0]) == [10, 20, 30, 40]
    keyframe = record(1)
    star = [replace(record(step), base=keyframe.digest, version=2) for step in (2, 3, 4)]
    assert kept("last=1", keyframe, *star) == [1, 4]
    assert kept("last=1,every=3", keyframe, *star) == [1, 3, 4]


def test_what_goes_goes_before_what_it_builds_on() -> None:
    records = [*chain(10, 20, 30), *chain(40, 50), record(60)]
    for seed in range(20):
        random.Random(seed).shuffle(records)
        left = {each.digest for each in records}
        for gone in Keep.parse("last=1").discardable(records):
            left.remove(gone.digest)
            assert all(each.base is None or each.base in left for each in records if each.digest in left)
        assert left == {record(60).digest}


def test_what_others_build_on_stays_until_they_are_there() -> None:
    old = chain(10, 20)
    coming = chain(25, on=old[1])
    newer = [record(30), record(40)]
    keep = Keep.parse("last=1")
    assert [each.step for each in keep.discardable([*old, *newer])] == [20, 10, 30]
    assert [each.step for each in keep.discardable([*old, *newer], coming)] == [30]
    assert [each.step for each in keep.kept([*old, *newer], coming)] == [40, 20, 10]


def test_a_lineage_ends_where_a_base_is_not_known() -> None:
    records = chain(10, 20, 30, 40)
    known = {each.digest: each for each in records}
    assert [each.step for each in lineage(records[3], known)] == [30, 20, 10]
    del known[records[1].digest]
    assert [each.step for each in lineage(records[3], known)] == [30]


def test_what_may_go_depends_on_no_order_and_comes_oldest_first() -> None:
    records = [record(step, loss=float(step % 7)) for step in range(0, 500, 10)]
    keep = Keep.parse("last=3,every=100,best=loss:4")
    expected = keep.discardable(records)
    assert [each.sequence for each in expected] == sorted(each.sequence for each in expected)
    for seed in range(20):
        random.Random(seed).shuffle(records)
        assert keep.discardable(records) == expected


@pytest.mark.parametrize("rules", ["last=3", "last=1,every=100", "last=2,best=loss,best=right:max:3", "all"])
def test_rules_read_what_they_write(rules: str) -> None:
    assert str(Keep.parse(rules)) == rules
    assert Keep.parse(str(Keep.parse(rules))) == Keep.parse(rules)


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ("", "last=N"),
        ("3", "'3'"),
        ("last", "'last'"),
        ("last=0", "'0'"),
        ("last=-1", "'-1'"),
        ("last=2.5", "'2.5'"),
        ("last=2,last=3", "once"),
        ("every=x", "'x'"),
        ("best=", "'best='"),
        ("best=:max", "METRIC"),
        ("best=loss:max:min", "METRIC"),
        ("best=loss:2:3", "METRIC"),
        ("best=loss:0", "'0'"),
        ("lats=3", "'lats=3'"),
        ("last=3,,every=1", "''"),
        (3, "got 3; write it in quotes, as in 'last=2'"),
    ],
)
def test_a_wrong_rule_is_named(rules: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Keep.parse(rules)
