"""A handful of seeded schedules of faults against a whole cluster; `scripts/soak` and `scripts/chaos` play hundreds.

Each run trains through three nodes, sometimes with replicas, while nodes are killed, stopped, cut off, slowed, filled,
flushed, resharded, damaged and replaced, several at once. What is promised is in `tests.simulation.chaos_training`.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.chaos_training import play
from tests.simulation.cluster_chaos import LASTING, SUDDEN, Act, schedule

pytestmark = pytest.mark.multiprocess

QUICK_SEEDS = range(4)
SOAK_SEEDS = range(int(os.environ.get("SHADE_CHAOS_FIRST", "1000")), int(os.environ.get("SHADE_CHAOS_END", "1200")))
NOTICED = ("surprises", "corrupt", "store_errors", "skipped", "declined")


def test_a_schedule_is_its_seed() -> None:
    one = schedule(3, range(10, 60), 6, has_replicas=True)
    assert one == schedule(3, range(10, 60), 6, has_replicas=True)
    assert one != schedule(4, range(10, 60), 6, has_replicas=True)
    assert all(10 <= act.step < 60 and act.step + act.lasts <= 60 for act in one)


def test_every_kind_is_drawn_and_failover_only_with_replicas() -> None:
    drawn: Counter[str] = Counter()
    for seed in range(300):
        drawn.update(act.kind for act in schedule(seed, range(10, 60), 6, has_replicas=True))
        assert all(act.kind != "failover" for act in schedule(seed, range(10, 60), 3, has_replicas=False))
    assert set(drawn) == {*LASTING, *SUDDEN}


def test_an_act_says_what_it_is() -> None:
    assert str(Act(7, "pause", 2, 10)) == "step 7: pause node 2 for 10 steps"
    assert str(Act(7, "flush", 0, 10)) == "step 7: flush node 0"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", QUICK_SEEDS)
def test_training_does_not_notice(seed: int) -> None:
    verdict = play(seed)
    assert verdict.objections == [], [verdict.shape, *map(str, verdict.acts)]
    assert verdict.struck.total() > 0, "no fault fired"
    if verdict.struck.keys() - {"failover", "reshard", "slow", "hold", "refuse", "pause"}:
        assert sum(verdict.totals[name] for name in NOTICED) > 0, verdict.struck


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_schedules() -> None:
    verdicts = [play(seed) for seed in SOAK_SEEDS]
    broken = {verdict.seed: verdict.objections for verdict in verdicts if verdict.objections}
    assert broken == {}
    struck = sum((verdict.struck for verdict in verdicts), Counter())
    assert set(struck) == {*LASTING, *SUDDEN}, "each kind fired"
