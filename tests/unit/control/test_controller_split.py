"""A division of the global batch is complete, within the limits, and in proportion to the ranks' speeds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.control.controller import split
from shade.errors import ConfigError


def free(ranks: int, most: int = 10_000) -> list[tuple[int, int]]:
    return [(1, most)] * ranks


@pytest.mark.parametrize(
    ("total", "speeds", "expected"),
    [
        (64, [1.0, 1.0], (32, 32)),
        (64, [3.0, 1.0], (48, 16)),
        (10, [1.0, 1.0, 1.0], (4, 3, 3)),
        (7, [5.0, 2.0], (5, 2)),
        (100, [299.0, 101.0, 100.0], (60, 20, 20)),
    ],
)
def test_it_is_proportional_to_speed(total: int, speeds: list[float], expected: tuple[int, ...]) -> None:
    assert split(total, speeds, free(len(speeds))) == expected


def test_what_a_limit_cuts_off_goes_to_the_others_in_proportion() -> None:
    assert split(64, [8.0, 2.0, 1.0], [(1, 34), (1, 64), (1, 64)]) == (34, 20, 10)
    assert split(64, [100.0, 1.0, 1.0], [(1, 64), (8, 64), (8, 64)]) == (48, 8, 8)


@pytest.mark.parametrize(
    ("total", "speeds", "limits"),
    [
        (10, [1.0], [(1, 9)]),
        (1, [1.0, 1.0], free(2)),
        (4, [1.0, 0.0], free(2)),
        (4, [1.0], free(2)),
        (4, [1.0], [(5, 3)]),
    ],
)
def test_what_cannot_be_is_refused(total: int, speeds: list[float], limits: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        split(total, speeds, limits)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-3, 1e6), st.integers(0, 50), st.integers(0, 500)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_the_sum_stays_and_limits_hold(ranks: list[tuple[float, int, int]], share: float) -> None:
    speeds = [speed for speed, _, _ in ranks]
    limits = [(least, least + room) for _, least, room in ranks]
    least, most = sum(low for low, _ in limits), sum(high for _, high in limits)
    total = least + round(share * (most - least))
    sizes = split(total, speeds, limits)
    assert sum(sizes) == total
    assert all(low <= size <= high for size, (low, high) in zip(sizes, limits, strict=True))
    free_W = [size / speed for size, speed, (low, high) in zip(sizes, speeds, limits, strict=True) if low < size < high]
    slack = 1 / min(speeds)
    assert not free_W or max(free_W) - min(free_W) <= 2 * slack  # to a sample, ranks without a limit end together
