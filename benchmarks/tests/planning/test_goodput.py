"""Goodput falls with what a save costs, with how late it is safe, and with the time of a restore."""

from __future__ import annotations

import math

import pytest
from goodput import goodput

from shade.checkpoint._pacing.schedule import best_cycle


@pytest.mark.parametrize("mtbf", [600.0, 3600.0, 86400.0])
@pytest.mark.parametrize("cost", [0.01, 1.0, 30.0, 400.0])
def test_the_best_cycle_is_the_best_whatever_is_late_or_slow_to_recover(cost: float, mtbf: float) -> None:
    best = best_cycle(cost, mtbf)
    kept = [
        goodput(factor * best - cost, cost, mtbf, lag_seconds=2.0, recover_seconds=9.0)
        for factor in (0.9, 0.98, 1.0, 1.02, 1.1)
        if factor * best > cost
    ]
    assert max(kept) == goodput(best - cost, cost, mtbf, lag_seconds=2.0, recover_seconds=9.0)


def test_where_nothing_fails_saving_is_all_loss() -> None:
    assert goodput(9.0, 1.0, math.inf) == pytest.approx(0.9)


def test_what_is_safe_late_or_slow_to_recover_keeps_less() -> None:
    quick = goodput(100.0, 1.0, 3600.0)
    assert goodput(100.0, 1.0, 3600.0, lag_seconds=36.0) == pytest.approx(quick * math.exp(-0.01))
    assert goodput(100.0, 1.0, 3600.0, recover_seconds=36.0) == pytest.approx(quick * math.exp(-0.01))
    assert goodput(1e9, 1.0, 3600.0) == 0.0
