"""Each kind of fault alone, against a cluster in mid-run: it struck, training did not notice, the ledger says what it
cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation import chaos_training
from tests.simulation.chaos_training import EPOCHS, FIRST_EPOCH, live, train, troubled, undisturbed
from tests.simulation.cluster_chaos import Act, RelayedCluster

pytestmark = pytest.mark.multiprocess

MODE = "uniform"
COUNTED = {
    "kill": ("surprises", "store_errors"),
    "pause": ("surprises", "store_errors"),
    "hold": ("surprises", "store_errors"),
    "refuse": ("surprises", "store_errors"),
    "slow": ("surprises", "skipped", "store_errors"),
    "fill": ("declined",),
    "reshard": ("hits",),
    "corrupt": ("corrupt",),
    "flush": ("surprises",),
    "foreign": ("surprises",),
}
RARE = ("hold", "refuse", "foreign", "fill")
"""Left to scripts/soak: each is like another that stays."""
EVERY_KIND = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in RARE)) for kind in COUNTED]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_one_fault_alone(kind: str) -> None:
    mode = "unbiased" if kind == "fill" else MODE  # in a uniform run nothing arrives any more once the cache is warm
    act = Act(troubled(mode).start + 5, kind, 1, 25)
    verdict = live([act], 0, mode, 0, seed=1)
    assert verdict.objections == []
    assert verdict.struck[kind] == 1
    if kind in ("slow", "hold", "refuse"):
        assert verdict.felt["delay" if kind == "slow" else kind] > 0
    assert sum(verdict.totals[name] for name in COUNTED[kind]) > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["failover", "kill"])
def test_a_replica_takes_over(kind: str) -> None:
    """By hand, of the replica of node 0; and by itself, when node 0 is gone for longer than the others wait."""
    act = Act(troubled(MODE).start + 5, kind, 3 if kind == "failover" else 0, 30)
    verdict = live([act], 1, MODE, 0, seed=2)
    assert verdict.objections == []
    assert verdict.struck[kind] == 1


def _from(step: int, action: Callable[[], None]) -> Callable[[int], None]:
    return lambda now: action() if now == step else None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("node", range(3))
def test_a_node_that_is_lost_for_good_costs_its_share_and_no_more(node: int) -> None:
    """Whichever of the three it is: one of them has the counter, and what the others have must remain of use."""
    bare, healthy = undisturbed(MODE)
    with chaos_training.short_pauses(), RelayedCluster(3) as cluster:
        hook = _from(troubled(MODE).start + 5, cluster.servers[node].stop)
        outcome = train(cluster.url.reveal(), MODE, 0, hook)
        assert not cluster.servers[node].process_id, "the fault fired"
    assert outcome.steps == bare.steps
    assert outcome.num_wrong == 0
    assert outcome.totals["surprises"] > 0
    for epoch in range(FIRST_EPOCH + 2, EPOCHS):
        assert outcome.hits[epoch] >= 0.6 * healthy[epoch], outcome.hits
