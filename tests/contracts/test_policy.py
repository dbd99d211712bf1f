"""What every cache policy promises, whatever its name: each registered one runs all of this unasked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.policy import POLICIES, CachePolicy, EpochPlan, Verdict
from shade.policy.base import EMPTY
from shade.policy.simulator import simulate
from shade.policy.trace import Trace

every_policy = pytest.mark.parametrize("name", list(POLICIES))
few = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class Case:
    """A small trace and a capacity."""

    trace: Trace
    capacity_bytes: int


@st.composite
def cases(draw: st.DrawFn, *, equal_sizes: bool = False) -> Case:
    """Traces with duplicates, epochs of different lengths, scores or none, samples larger than the cache, no cache."""
    num_samples = draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = (
        np.full(num_samples, 7) if equal_sizes else rng.integers(1, draw(st.sampled_from([2, 20, 1000])), num_samples)
    )
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    shuffled = draw(st.booleans())
    orders = tuple(
        rng.permutation(num_samples)[:length] if shuffled else rng.integers(0, num_samples, length)
        for length in lengths
    )
    scores = tuple(rng.random(num_samples, dtype=np.float32) for _ in orders) if draw(st.booleans()) else ()
    capacity = draw(st.integers(0, int(sizes.sum()) + 5))
    return Case(Trace(sizes, orders, draw(st.integers(1, 9)), scores), capacity)


def plan_of(trace: Trace, epoch: int, cursor: int = 0, *, following: bool = True) -> EpochPlan:
    """Returns what a policy gets as that epoch begins, or as it resumes at ``cursor``."""
    ahead = (*trace.orders[epoch + 1 :], EMPTY)
    score_N = trace.score_of(epoch)
    next_order_K = ahead[0] if following else None
    return EpochPlan(epoch, trace.orders[epoch], next_order_K, score_N, ahead[1:-1], start=cursor)


def batches(trace: Trace, epoch: int, cursor: int = 0) -> list[np.ndarray]:
    """The rest of an epoch, batch by batch."""
    order_K = trace.orders[epoch]
    return [order_K[start : start + trace.global_batch] for start in range(cursor, len(order_K), trace.global_batch)]


def fresh(name: str, case: Case) -> CachePolicy:
    """An empty cache's policy."""
    return POLICIES.get(name)(case.trace.size_bytes_N, case.capacity_bytes)


def walk(policy: CachePolicy, trace: Trace, *, following: bool = True) -> list[object]:
    """All that a policy says of a trace."""
    said: list[object] = []
    for epoch in range(trace.num_epochs):
        said.append(policy.begin_epoch(plan_of(trace, epoch, following=following)).tolist())
        said += [in_words(policy.access_many(index_B)) for index_B in batches(trace, epoch)]
    return said


def in_words(verdict: Verdict) -> tuple[list[bool], list[bool], list[int]]:
    """A verdict that compares."""
    return verdict.hit_B.tolist(), verdict.stay_B.tolist(), verdict.victims.tolist()


def check_bytes(policy: CachePolicy) -> None:
    """The residents fit, and are counted right."""
    assert policy.used_bytes == int(policy.size_bytes_N[policy.resident_N].sum())
    assert policy.used_bytes <= policy.capacity_bytes


@every_policy
@pytest.mark.parametrize("following", [True, False])
@few
@given(case=cases())
def test_the_capacity_in_bytes_holds_after_every_batch(name: str, following: bool, case: Case) -> None:
    policy = fresh(name, case)
    for epoch in range(case.trace.num_epochs):
        policy.begin_epoch(plan_of(case.trace, epoch, following=following))
        check_bytes(policy)
        for index_B in batches(case.trace, epoch):
            policy.access_many(index_B)
            check_bytes(policy)


@every_policy
@few
@given(case=cases())
def test_a_verdict_tells_exactly_how_residency_changed(name: str, case: Case) -> None:
    policy = fresh(name, case)
    for epoch in range(case.trace.num_epochs):
        before_N = policy.resident_N.copy()
        left = policy.begin_epoch(plan_of(case.trace, epoch))
        assert sorted(left.tolist()) == np.flatnonzero(before_N & ~policy.resident_N).tolist()
        assert not (policy.resident_N & ~before_N).any(), "nobody arrives before being read"
        for index_B in batches(case.trace, epoch):
            before_N = policy.resident_N.copy()
            verdict = policy.access_many(index_B)
            after_N = policy.resident_N
            outside_N = np.ones_like(after_N)
            outside_N[index_B] = False
            assert verdict.stay_B.tolist() == after_N[index_B].tolist()
            assert sorted(verdict.victims.tolist()) == np.flatnonzero(before_N & ~after_N & outside_N).tolist()
            assert not (after_N & ~before_N & outside_N).any(), "only a sample that was read can arrive"
            met: set[int] = set()
            for index, hit in zip(index_B.tolist(), verdict.hit_B.tolist(), strict=True):
                assert not hit or before_N[index] or index in met, "a hit was resident, or came earlier in the batch"
                met.add(index)


@every_policy
@few
@given(case=cases(equal_sizes=True))
def test_nobody_beats_belady_with_equal_sizes(name: str, case: Case) -> None:
    optimum = simulate(case.trace, "belady", case.capacity_bytes)
    assert simulate(case.trace, name, case.capacity_bytes).hits.sum() <= optimum.hits.sum()


@every_policy
@few
@given(case=cases(), data=st.data())
def test_what_follows_a_restore_is_what_would_have_followed(name: str, case: Case, data: st.DataObject) -> None:
    trace = case.trace
    epoch = data.draw(st.integers(0, trace.num_epochs - 1))
    step = data.draw(st.integers(0, len(batches(trace, epoch))))
    policy = fresh(name, case)
    for earlier in range(epoch):
        policy.begin_epoch(plan_of(trace, earlier))
        for index_B in batches(trace, earlier):
            policy.access_many(index_B)
    policy.begin_epoch(plan_of(trace, epoch))
    for index_B in batches(trace, epoch)[:step]:
        policy.access_many(index_B)
    cursor = step * trace.global_batch

    restored = fresh(name, case)
    restored.load_state_dict(policy.state_dict())
    assert restored.begin_epoch(plan_of(trace, epoch, cursor)).tolist() == []
    assert restored.used_bytes == policy.used_bytes
    for index_B in batches(trace, epoch, cursor):
        assert in_words(restored.access_many(index_B)) == in_words(policy.access_many(index_B))
    rest = Trace(trace.size_bytes_N, trace.orders[epoch + 1 :], trace.global_batch, trace.scores[epoch + 1 :])
    assert walk(restored, rest) == walk(policy, rest)
    np.testing.assert_array_equal(restored.resident_N, policy.resident_N)


@every_policy
@few
@given(case=cases())
def test_two_ranks_reach_the_same_verdicts(name: str, case: Case) -> None:
    assert walk(fresh(name, case), case.trace) == walk(fresh(name, case), case.trace)


@every_policy
@few
@given(case=cases(), data=st.data())
def test_a_capacity_may_change_between_any_two_batches(name: str, case: Case, data: st.DataObject) -> None:
    trace = case.trace
    policy, other_rank = fresh(name, case), fresh(name, case)
    for epoch in range(trace.num_epochs):
        for each in (policy, other_rank):
            each.begin_epoch(plan_of(trace, epoch))
        for index_B in batches(trace, epoch):
            capacity = data.draw(st.sampled_from([None, 0, case.capacity_bytes // 3, case.capacity_bytes]))
            if capacity is not None:
                before_N = policy.resident_N.copy()
                left = policy.resize(capacity)
                assert left.tolist() == other_rank.resize(capacity).tolist()
                assert sorted(left.tolist()) == np.flatnonzero(before_N & ~policy.resident_N).tolist()
                assert not (policy.resident_N & ~before_N).any(), "nobody arrives before being read"
                check_bytes(policy)
            assert in_words(policy.access_many(index_B)) == in_words(other_rank.access_many(index_B))
            check_bytes(policy)


@every_policy
@few
@given(case=cases())
def test_a_capacity_that_stays_changes_nothing_online(name: str, case: Case) -> None:
    policy, undisturbed = fresh(name, case), fresh(name, case)
    for epoch in range(case.trace.num_epochs):
        for each in (policy, undisturbed):
            each.begin_epoch(plan_of(case.trace, epoch))
        for index_B in batches(case.trace, epoch):
            assert not policy.resize(case.capacity_bytes).size
            assert in_words(policy.access_many(index_B)) == in_words(undisturbed.access_many(index_B))


@every_policy
def test_no_more_than_need_be_leave_a_cache_that_shrinks(name: str) -> None:
    policy = POLICIES.get(name)(np.full(8, 10), 60)
    policy.adopt(np.arange(6))
    assert len(policy.resize(35)) == 3
    assert policy.used_bytes == 30
    assert not policy.resize(60).size


@every_policy
@few
@given(case=cases(), data=st.data())
def test_adopting_starts_from_what_fits_and_names_the_rest(name: str, case: Case, data: st.DataObject) -> None:
    num_samples = case.trace.num_samples
    found = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), unique=True)), dtype=np.int64)
    policy = fresh(name, case)
    policy.adopt(np.arange(num_samples))
    refused = policy.adopt(found)
    check_bytes(policy)
    assert sorted([*refused.tolist(), *np.flatnonzero(policy.resident_N).tolist()]) == sorted(found.tolist())
    if case.trace.size_bytes_N[found].sum() <= case.capacity_bytes:
        assert not refused.size
    policy.begin_epoch(plan_of(case.trace, 0))
    for index_B in batches(case.trace, 0):
        policy.access_many(index_B)
        check_bytes(policy)


@every_policy
def test_an_adopted_sample_is_a_hit(name: str) -> None:
    trace = Trace(np.full(4, 10), (np.array([2, 0, 1, 3]), np.array([0, 1, 2, 3])), 2)
    policy = POLICIES.get(name)(trace.size_bytes_N, 20)
    assert not policy.adopt(np.array([0, 2])).size
    policy.begin_epoch(plan_of(trace, 0))
    assert policy.access_many(np.array([2, 0])).hit_B.tolist() == [True, True]


@every_policy
def test_a_cache_that_holds_everything_reads_everything_once(name: str) -> None:
    rng = np.random.default_rng(0)
    trace = Trace(np.full(50, 10), tuple(rng.permutation(50) for _ in range(4)), 8)
    assert simulate(trace, name, 500).hits.tolist() == [0, 50, 50, 50]


@every_policy
def test_sizes_and_capacity_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match="capacity ≥ 0 bytes, got -1"):
        POLICIES.get(name)(np.full(3, 10), -1)
    with pytest.raises(ValueError, match="sizes > 0 bytes, got 0"):
        POLICIES.get(name)(np.array([1, 0, 2]), 10)
