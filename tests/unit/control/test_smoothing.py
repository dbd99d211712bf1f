"""One hiccup moves nothing, a change is believed within a few steps, noise within a few percent."""

from __future__ import annotations

import random

import pytest

from shade.control.smoothing import Smoothed


def fed(*values: float) -> Smoothed:
    smoothed = Smoothed()
    for value in values:
        smoothed.add(value)
    return smoothed


def test_it_knows_nothing_at_first() -> None:
    assert Smoothed().value is None
    assert fed(3.0).value == 3.0


def test_one_hiccup_moves_nothing() -> None:
    assert fed(*[1.0] * 10, 1000.0, *[1.0] * 3).value == 1.0


def test_what_is_no_number_is_left_out() -> None:
    assert fed(1.0, float("nan"), float("inf"), 1.0).value == 1.0


@pytest.mark.parametrize(("after", "steps"), [(20.0, 7), (0.05, 8)])
def test_a_change_is_believed(after: float, steps: int) -> None:
    smoothed = fed(*[1.0] * 20)
    for _ in range(steps):
        smoothed.add(after)
    assert smoothed.value == pytest.approx(after, rel=0.2, abs=0.05)


def test_noise_hardly_moves_it() -> None:
    draw = random.Random(0)
    smoothed = fed(*(1 + 0.1 * draw.uniform(-1, 1) for _ in range(20)))
    seen = []
    for _ in range(500):
        smoothed.add(1 + 0.1 * draw.uniform(-1, 1))
        seen.append(smoothed.value or 0.0)
    assert max(abs(value - 1) for value in seen) < 0.05


def test_it_goes_on_where_it_was() -> None:
    values = [1.0, 5.0, 2.0, 8.0, 3.0, 3.0, 9.0]
    whole, half, resumed = fed(*values), fed(*values[:4]), Smoothed()
    resumed.load_state_dict(half.state_dict())
    for value in values[4:]:
        resumed.add(value)
    assert resumed.value == whole.value
