"""`plan`: optimal for what it knows, exact in bytes, cheap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.errors import ConfigError
from shade.policy import EpochPlan
from shade.policy.base import EMPTY
from shade.policy.plan import PlanPolicy, latest_that_fit
from shade.policy.simulator import simulate
from shade.policy.trace import Trace


def naive_belady_hits(
    resident: set[int], order: list[int], following: list[int], capacity: int
) -> tuple[int, set[int]]:
    """Belady's MIN with bypass over ``order``, knowing it and the next one; equal sizes; looks ahead by scanning.

    Returns:
        Hits in ``order``, and who is resident at its end.
    """
    resident, hits, known = set(resident), 0, order + following
    for position, index in enumerate(order):

        def next_use(sample: int, after: int = position + 1) -> int:
            return known.index(sample, after) if sample in known[after:] else len(known)

        hits += index in resident
        resident.add(index)
        if len(resident) > capacity:
            resident.remove(max(resident, key=lambda sample: (next_use(sample), sample == index)))
    return hits, resident


def inclusion_trace(num_samples: int, keep: float, num_epochs: int, seed: int, size_bytes_N: np.ndarray) -> Trace:
    """Epochs that each use a random part of the data set once."""
    rng = np.random.default_rng(seed)
    orders = tuple(rng.permutation(num_samples)[: round(keep * num_samples)] for _ in range(num_epochs))
    return Trace(size_bytes_N, orders, 8)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("keep", "fraction"), [(1.0, 0.25), (0.7, 0.1), (0.7, 0.2), (0.7, 0.3), (0.5, 0.15)])
def test_each_epoch_hits_as_often_as_an_independent_belady(seed: int, keep: float, fraction: float) -> None:
    trace = inclusion_trace(200, keep, 8, seed, np.full(200, 10))
    capacity = int(fraction * 200)
    resident: set[int] = set()
    expected = []
    for epoch, order_K in enumerate(trace.orders):
        following = trace.orders[epoch + 1].tolist() if epoch + 1 < trace.num_epochs else []
        hits, resident = naive_belady_hits(resident, order_K.tolist(), following, capacity)
        expected.append(hits)
    assert simulate(trace, "plan", capacity * 10).hits[2:].tolist() == expected[2:]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_choice_gets_more_hits_out_of_two_known_epochs(data: st.DataObject) -> None:
    num_samples, capacity = data.draw(st.integers(1, 16)), data.draw(st.integers(0, 16))
    some = st.lists(st.integers(0, num_samples - 1), unique=True, min_size=1)
    order, following, before = data.draw(some), data.draw(some), data.draw(some)[:capacity]
    hits_now, at_boundary = naive_belady_hits(set(before), order, following, capacity)
    best = hits_now + len(at_boundary & set(following))

    policy = PlanPolicy(np.ones(num_samples, dtype=np.int64), capacity)
    policy.adopt(np.array(before, dtype=np.int64))
    policy.begin_epoch(EpochPlan(0, np.array(order), np.array(following)))
    hits = np.count_nonzero(policy.access_many(np.array(order)).hit_B)
    assert hits + np.count_nonzero(policy.resident_N[following]) == best


@pytest.mark.parametrize("num_samples", [1000, 1003])
@pytest.mark.parametrize("percent", [0, 10, 29, 50, 100])
def test_full_epochs_hit_exactly_what_the_cache_holds(num_samples: int, percent: int) -> None:
    trace = inclusion_trace(num_samples, 1.0, 5, 0, np.full(num_samples, 100))
    result = simulate(trace, "plan", percent * num_samples)
    assert result.hits.tolist() == [0] + [percent * num_samples // 100] * 4


def test_seven_tenths_of_the_samples_and_a_fifth_of_the_bytes_cost_half_the_reads() -> None:
    trace = inclusion_trace(20_000, 0.7, 8, 1, np.full(20_000, 100))
    capacity = trace.data_set_bytes // 5
    ours, bound = simulate(trace, "plan", capacity), simulate(trace, "belady-1", capacity)
    assert ours.origin_reads_per_sample(2) <= 0.51
    assert ours.origin_reads[2:].tolist() == bound.origin_reads[2:].tolist()


def most_bytes_at_the_boundary(policy: PlanPolicy, order_K: np.ndarray, next_order_K: np.ndarray) -> int:
    """The offline optimum if samples could be cut: each candidate brings what there is room for, as early as it can."""
    sizes, wanted = policy.size_bytes_N.tolist(), set(next_order_K.tolist())
    resident = set(np.flatnonzero(policy.resident_N).tolist())
    staying, leaving = sum(sizes[i] for i in resident & wanted), resident - wanted
    room = policy.capacity_bytes - staying - sum(sizes[i] for i in leaving & set(order_K.tolist()))
    arrived = 0
    for index in order_K.tolist():
        if index in leaving:
            room += sizes[index]
        elif index in wanted and index not in resident:
            arrived = min(arrived + sizes[index], room)
    return staying + arrived


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.6])
def test_mixed_sizes_leave_less_than_two_percent_of_the_bytes(sigma: float, fraction: float) -> None:
    sizes = np.random.default_rng(2).lognormal(9, sigma, 4000).astype(np.int64) + 1
    trace = inclusion_trace(4000, 0.7, 7, 3, sizes)
    policy = PlanPolicy(sizes, int(fraction * sizes.sum()))
    for epoch in range(6):
        order_K, next_order_K = trace.orders[epoch : epoch + 2]
        best = most_bytes_at_the_boundary(policy, order_K, next_order_K)
        policy.begin_epoch(EpochPlan(epoch, order_K, next_order_K))
        for start in range(0, len(order_K), trace.global_batch):
            policy.access_many(order_K[start : start + trace.global_batch])
        wanted = next_order_K[policy.resident_N[next_order_K]]
        assert 0.98 * best <= sizes[wanted].sum() <= best


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_passes_are_the_greedy_walk_from_the_last_candidate_to_the_first(data: st.DataObject) -> None:
    size = np.array(data.draw(st.lists(st.integers(1, 12), max_size=14)), dtype=np.int64)
    grows = data.draw(st.lists(st.integers(0, 10), min_size=len(size), max_size=len(size)))
    room = np.cumsum(np.array(grows, dtype=np.int64))
    left, expected = room.copy(), np.zeros(len(size), dtype=bool)
    for candidate in reversed(range(len(size))):
        if size[candidate] <= left[candidate:].min():
            expected[candidate] = True
            left[candidate:] -= size[candidate]
    assert latest_that_fit(size, room).tolist() == expected.tolist()


def test_arrivals_are_as_late_as_the_room_allows() -> None:
    policy = PlanPolicy(np.ones(8, dtype=np.int64), 3)
    policy.begin_epoch(EpochPlan(0, np.arange(8), np.arange(8)))
    verdicts = [policy.access_many(np.array([index])) for index in range(8)]
    assert [bool(verdict.stay_B[0]) for verdict in verdicts] == [False] * 5 + [True] * 3


def test_a_sample_leaves_at_its_last_use_and_makes_room_for_the_next() -> None:
    policy = PlanPolicy(np.ones(5, dtype=np.int64), 2)
    policy.adopt(np.array([0, 1]))
    gone = policy.begin_epoch(EpochPlan(3, np.array([0, 2, 0, 3, 4]), np.array([3, 2, 4])))
    assert gone.tolist() == [1], "neither epoch uses it, and others need the room"
    assert in_order(policy, [0, 2, 0, 3, 4]) == [
        (True, True),
        (False, False),
        (True, False),
        (False, True),
        (False, True),
    ]


def in_order(policy: PlanPolicy, order: list[int]) -> list[tuple[bool, bool]]:
    """(hit, stay) of each access, one at a time."""
    verdicts = [policy.access_many(np.array([index])) for index in order]
    return [(bool(verdict.hit_B[0]), bool(verdict.stay_B[0])) for verdict in verdicts]


def test_room_that_nobody_needs_is_kept_full() -> None:
    everything = np.full(400, 10)
    trace = inclusion_trace(400, 0.7, 14, 5, everything)
    whole, most = (simulate(trace, "plan", int(fraction * 4000)) for fraction in (1.0, 0.8))
    assert whole.origin_reads[-5:].sum() == 0, "all samples came by, and none had to leave"
    static = simulate(trace, "static", 3200)
    assert most.origin_reads[5:].sum() < static.origin_reads[5:].sum()


def test_with_the_next_epoch_unknown_it_fills_up_once_and_keeps() -> None:
    rng = np.random.default_rng(7)
    policy = PlanPolicy(np.ones(50, dtype=np.int64), 10)
    kept = []
    for epoch in range(3):
        order_K = rng.permutation(50)[:40]
        assert not policy.begin_epoch(EpochPlan(epoch, order_K, None)).size
        policy.access_many(order_K)
        kept.append(np.flatnonzero(policy.resident_N).tolist())
    assert len(kept[0]) == 10
    assert kept[0] == kept[1] == kept[2]


def test_the_last_epoch_leaves_the_cache_as_it_is() -> None:
    policy = PlanPolicy(np.ones(6, dtype=np.int64), 4)
    policy.adopt(np.array([0, 1]))
    assert not policy.begin_epoch(EpochPlan(9, np.array([1, 2, 3]), EMPTY)).size
    assert in_order(policy, [1, 2, 3]) == [(True, True), (False, False), (False, False)]
    assert np.flatnonzero(policy.resident_N).tolist() == [0, 1]


def test_walking_another_order_than_the_planned_one_is_refused() -> None:
    policy = PlanPolicy(np.ones(6, dtype=np.int64), 4)
    with pytest.raises(ConfigError, match="call begin_epoch with the order"):
        policy.access_many(np.array([0]))
    policy.begin_epoch(EpochPlan(0, np.array([3, 1, 2]), np.array([1])))
    with pytest.raises(ConfigError, match=r"\[3, 1\] …, got \[1, 3\]"):
        policy.access_many(np.array([1, 3]))
    assert not policy.resident_N.any()


def test_who_is_used_last_yields_first() -> None:
    order_K, next_order_K = np.array([3, 1, 4, 0, 5, 2]), np.array([1, 2, 3])
    policy = PlanPolicy(np.full(7, 10), 70)
    policy.adopt(np.arange(7))
    policy.begin_epoch(EpochPlan(0, order_K, next_order_K))
    policy.access_many(order_K[:3])
    # Left of this epoch: 0 5 2; then 1 2 3. Nobody uses 4 and 6 any more.
    assert policy.resize(50).tolist() == [6, 4]
    assert policy.resize(20).tolist() == [3, 1, 2]
    assert np.flatnonzero(policy.resident_N).tolist() == [0, 5]


def test_an_epoch_goes_on_with_the_plan_of_the_smaller_cache() -> None:
    rng = np.random.default_rng(0)
    orders = tuple(rng.permutation(300)[:210] for _ in range(3))
    plan, fresh = PlanPolicy(np.full(300, 10), 900), PlanPolicy(np.full(300, 10), 400)
    plan.begin_epoch(EpochPlan(0, orders[0], orders[1]))
    for start in range(0, 120, 10):
        plan.access_many(orders[0][start : start + 10])
    plan.resize(400)
    fresh.adopt(np.flatnonzero(plan.resident_N))
    fresh.begin_epoch(EpochPlan(0, orders[0], orders[1], start=120))
    for start in range(120, 210, 10):
        batch = orders[0][start : start + 10]
        assert plan.access_many(batch).stay_B.tolist() == fresh.access_many(batch).stay_B.tolist()
    assert plan.resident_N.tolist() == fresh.resident_N.tolist()
