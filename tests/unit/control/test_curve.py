"""A curve passes through its points, never falls, and refuses what is none."""

from __future__ import annotations

import pytest

from shade.control.curve import Curve, power
from shade.errors import ConfigError


def test_a_power_law_is_one_everywhere() -> None:
    curve = power(0.25)
    for density in (0.0005, 0.01, 0.1, 1.0):
        assert curve.at(density) == pytest.approx(density**0.25)


def test_it_passes_through_its_points_and_is_level_outside() -> None:
    curve = Curve((0.001, 0.01, 0.1), (0.2, 0.5, 0.8))
    assert [curve.at(d) for d in (0.001, 0.01, 0.1)] == pytest.approx([0.2, 0.5, 0.8])
    assert (curve.at(0.0001), curve.at(1.0)) == pytest.approx((0.2, 0.8))
    assert 0.2 < curve.at(0.003) < 0.5


def test_a_dip_is_noise() -> None:
    assert Curve((0.01, 0.1, 1.0), (0.5, 0.4, 0.6)).progress == (0.5, 0.5, 0.6)


@pytest.mark.parametrize(
    ("densities", "progress"),
    [((), ()), ((0.1,), (1.0, 2.0)), ((0.1, 0.1), (1.0, 1.0)), ((0.0, 1.0), (1.0, 1.0)), ((0.1, 2.0), (1.0, 1.0)),
     ((0.1, 1.0), (0.0, 1.0)), ((0.1, 1.0), (float("nan"), 1.0))],
)  # fmt: skip
def test_what_is_no_curve_is_refused(densities: tuple[float, ...], progress: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Curve(densities, progress)


@pytest.mark.parametrize("exponent", [-0.1, 1.1, float("nan")])
def test_an_exponent_is_from_0_to_1(exponent: float) -> None:
    with pytest.raises(ConfigError, match="exponent"):
        power(exponent)
