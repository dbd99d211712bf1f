"""Young, Daly and the exact optimum agree where they should, and the optimum is one."""

from __future__ import annotations

import math

import pytest

from shade.checkpoint._pacing.schedule import best_cycle


def young(cost_seconds: float, mtbf_seconds: float) -> float:
    """Returns Young's interval, √(2CM), for a cost far below M."""
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


def share_kept(cycle: float, cost: float, mtbf: float) -> float:
    """Returns the share of time that ends up as training, with cycles of that length and failures at random."""
    return (cycle - cost) / (mtbf * math.expm1(cycle / mtbf))


@pytest.mark.parametrize("mtbf", [600.0, 3600.0, 86400.0])
@pytest.mark.parametrize("cost", [0.01, 1.0, 30.0, 400.0])
def test_nothing_keeps_more_than_the_best_cycle(cost: float, mtbf: float) -> None:
    best = best_cycle(cost, mtbf)
    cycles = [factor * best for factor in (0.9, 0.98, 1.0, 1.02, 1.1) if factor * best > cost]
    assert max(cycles, key=lambda cycle: share_kept(cycle, cost, mtbf)) == best


def test_for_a_small_cost_it_is_youngs() -> None:
    assert best_cycle(0.5, 86400) - 0.5 == pytest.approx(young(0.5, 86400), rel=0.003)
    assert young(0.5, 86400) == pytest.approx(math.sqrt(86400))


def test_for_a_large_cost_it_is_dalys() -> None:
    cost, mtbf = 300.0, 3600.0
    daly = math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(cost / (2 * mtbf)) / 3 + cost / (18 * mtbf)) - cost
    assert best_cycle(cost, mtbf) - cost == pytest.approx(daly, rel=0.002)
    assert abs(young(cost, mtbf) - daly) > 0.1 * daly  # where Young's is far off


def test_where_nothing_fails_no_save_is_wanted() -> None:
    assert best_cycle(1.0, math.inf) == math.inf


def test_a_free_save_is_never_too_often() -> None:
    assert best_cycle(0.0, 3600) == 0.0
