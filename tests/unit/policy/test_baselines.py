"""The policies that decide access by access: each does what its name says, and what theory says of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shade.policy import POLICIES, CachePolicy, EpochPlan
from shade.policy.baselines.belady import NEVER, next_uses
from shade.policy.simulator import simulate
from shade.policy.trace import Trace


def started(name: str, size_bytes: list[int], capacity_bytes: int, score: list[float] | None = None) -> CachePolicy:
    """A policy in its first epoch."""
    policy = POLICIES.get(name)(np.array(size_bytes), capacity_bytes)
    scores = None if score is None else np.array(score, dtype=np.float32)
    policy.begin_epoch(EpochPlan(0, np.arange(len(size_bytes)), None, scores))
    return policy


def residents(policy: CachePolicy, *accesses: int) -> list[int]:
    """Who is resident after these accesses."""
    policy.access_many(np.array(accesses))
    return np.flatnonzero(policy.resident_N).tolist()


def shuffles(num_samples: int, num_epochs: int, seed: int = 0) -> Trace:
    """Every sample once an epoch."""
    rng = np.random.default_rng(seed)
    return Trace(np.full(num_samples, 10), tuple(rng.permutation(num_samples) for _ in range(num_epochs)), 32)


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8])
def test_lru_on_shuffles_hits_as_the_formula_says(fraction: float) -> None:
    trace = shuffles(4000, 6)
    measured = simulate(trace, "lru", int(fraction * trace.data_set_bytes)).hit_ratio(1)
    assert measured == pytest.approx(fraction + (1 - fraction) * math.log(1 - fraction), abs=0.01)


@pytest.mark.parametrize("name", ["static", "shade", "plan", "belady-1", "belady"])
@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.4])
def test_the_best_on_shuffles_is_the_cached_fraction(name: str, fraction: float) -> None:
    trace = shuffles(1000, 5)
    assert simulate(trace, name, int(fraction * trace.data_set_bytes)).hits[1:].tolist() == [int(1000 * fraction)] * 4


def test_lru_forgets_the_least_recent_and_fifo_the_first() -> None:
    assert residents(started("lru", [1] * 4, 2), 0, 1, 0, 2) == [0, 2]
    assert residents(started("fifo", [1] * 4, 2), 0, 1, 0, 2) == [1, 2]


def test_lru_evicts_as_many_as_it_takes() -> None:
    policy = started("lru", [4, 4, 2, 9, 11], 10)
    assert residents(policy, 0, 1, 2) == [0, 1, 2]
    verdict = policy.access_many(np.array([3]))
    assert verdict.victims.tolist() == [0, 1, 2]
    assert residents(policy, 4) == [3], "larger than the cache: never admitted, and nobody leaves for it"


def test_lfu_keeps_the_most_used_and_remembers_counts_of_the_evicted() -> None:
    policy = started("lfu", [1] * 4, 2)
    assert residents(policy, 0, 0, 1, 2) == [0, 2]
    assert residents(policy, 1, 1) == [0, 1]
    assert residents(policy, 3) == [1, 3], "0 was used twice, 1 three times"


def test_static_takes_what_still_fits_and_never_changes_its_mind() -> None:
    policy = started("static", [6, 6, 3, 1], 10)
    assert residents(policy, 0, 1, 2, 3) == [0, 2, 3]
    assert residents(policy, 1, 1, 1) == [0, 2, 3]


def test_shade_admits_only_what_is_more_important_than_the_least_resident() -> None:
    policy = started("shade", [1] * 4, 2, score=[5, 3, 3, 4])
    assert residents(policy, 0, 1) == [0, 1]
    assert residents(policy, 2, 2, 2) == [0, 1], "an equal does not displace, however often it is used"
    assert residents(policy, 3) == [0, 3]


def test_among_equals_shade_evicts_the_least_used() -> None:
    policy = started("shade", [1] * 4, 3, score=[3, 3, 3, 4])
    assert residents(policy, 0, 1, 2, 0, 2) == [0, 1, 2]
    assert residents(policy, 3) == [0, 2, 3]


def test_shade_takes_new_scores_at_the_epoch() -> None:
    policy = started("shade", [1] * 3, 1, score=[5, 3, 1])
    assert residents(policy, 0, 1, 2) == [0]
    policy.begin_epoch(EpochPlan(1, np.arange(3), None, np.array([1, float("nan"), 2], dtype=np.float32)))
    assert residents(policy, 1) == [0], "a score that is not a number counts as none"
    assert residents(policy, 2) == [2]


def test_shade_displaces_all_or_nobody() -> None:
    policy = started("shade", [3, 3, 3, 6], 9, score=[1, 2, 9, 8])
    assert residents(policy, 0, 1, 2, 3) == [2, 3]
    policy = started("shade", [3, 3, 3, 6], 9, score=[1, 8, 9, 2])
    assert residents(policy, 0, 1, 2, 3) == [0, 1, 2], "beating one of the two it would displace is not enough"
    assert policy.used_bytes == 9


def test_belady_evicts_the_latest_needed_and_bypasses_what_is_needed_later_still() -> None:
    trace = Trace(np.ones(4, dtype=np.int64), (np.array([0, 1, 2, 0, 1, 3, 0, 2]),), 1)
    assert simulate(trace, "belady", 2).hits.tolist() == [3]


def test_one_epoch_of_lookahead_sees_no_further() -> None:
    orders = tuple(np.array(order) for order in ([0, 1], [2], [3], [0]))
    trace = Trace(np.ones(4, dtype=np.int64), orders, 1)
    assert simulate(trace, "belady", 1).hits.sum() == 1
    orders = tuple(np.array(order) for order in ([0, 1], [1], [2], [0, 2]))
    trace = Trace(np.ones(3, dtype=np.int64), orders, 1)
    assert simulate(trace, "belady-1", 1).hits.tolist() == [0, 1, 0, 1]


def test_next_uses_points_at_the_next_access_of_the_same_sample() -> None:
    later = np.array([NEVER, 9, 8])
    assert next_uses(np.array([0, 1, 0, 2, 1]), later).tolist() == [2, 4, NEVER, 8, 9]
