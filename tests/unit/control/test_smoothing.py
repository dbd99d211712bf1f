"""One hiccup moves nothing, a change is believed within a few steps, noise within a few percent."""

from __future__ import annotations

import random

import pytest

from shade.control.smoothing import Slope, Smoothed


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


@pytest.mark.parametrize(("after", "steps"), [(20.0, 3), (0.05, 6)])
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


def sloped(*places: tuple[float, float]) -> Slope:
    slope = Slope()
    for x, y in places:
        slope.add(x, y)
    return slope


def test_a_slope_is_found_in_noise() -> None:
    draw = random.Random(0)
    found = sloped(*((x, (0.2 + 0.9 * x) * (1 + 0.1 * draw.uniform(-1, 1))) for x in [0.03] * 20 + [0.1] * 20))
    assert found.value == pytest.approx(0.9, rel=0.15)


@pytest.mark.parametrize("places", [[], [(0.03, 1.0)], [(0.03, 1.0), (0.03, 2.0)] * 20, [(0.03, 2.0), (0.1, 1.0)] * 20])
def test_what_does_not_vary_or_falls_has_no_slope(places: list[tuple[float, float]]) -> None:
    assert sloped(*places).value == 0


def test_a_slope_that_has_changed_is_learned_anew() -> None:
    before, after = [(0.03, 1.03), (0.1, 1.1)] * 200, [(0.03, 1.15), (0.1, 1.5)] * 200
    assert sloped(*before).value == pytest.approx(1.0, rel=0.1)
    assert sloped(*before, *after).value == pytest.approx(5.0, rel=0.1)


def test_a_slope_does_not_take_another_level_for_growth() -> None:
    slope, blind = Slope(), Slope()
    for number in range(100):
        if number == 50:
            slope.start_level()
        level, x = (0.2, 0.01) if number < 50 else (0.4, 0.02)
        for each in (slope, blind):
            each.add(x + 0.005 * (number % 2), level + 0.9 * (x + 0.005 * (number % 2)))
    assert slope.value == pytest.approx(0.9, rel=0.3)
    assert blind.value > 5


def test_a_slope_goes_on_where_it_was() -> None:
    places = [(0.1 * number, 0.3 * number**1.5) for number in range(10)]
    resumed = Slope()
    resumed.load_state_dict(sloped(*places[:4]).state_dict())
    for place in places[4:]:
        resumed.add(*place)
    assert resumed.value == sloped(*places).value > 0
