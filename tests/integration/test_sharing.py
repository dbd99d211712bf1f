"""Several jobs on one cache, step by step in one process: what each may keep, what it reads, what a lost one leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shade.cache import breaker
from shade.cache.cache import SampleCache
from shade.cache.coordinated_read import CoordinatedRead
from shade.cache.entry import FORMAT_ITEM
from shade.cache.job_registry import LEASE_SECONDS, JobRegistry, slot_keys
from shade.cache.sharing import Sharing
from shade.errors import StoreUnavailableError
from shade.policy import POLICIES
from shade.policy.base import EpochPlan
from shade.store import open_store
from shade.store.base import Store
from shade.testing import ManualClock

N, BATCH, SIZE, FRACTION = 600, 10, 300, 0.2
STEP_SECONDS = 0.05


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://") as made:
        yield made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture(autouse=True)
def _nothing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An origin that costs nothing would make any store look slow on a busy machine."""
    monkeypatch.setattr(breaker, "SLOW_SECONDS", float("inf"))


class OneJob:
    """A job of one rank, without threads: a look a step."""

    def __init__(self, store: Store, clock: ManualClock, seed: int, group: str = "") -> None:
        self.cache = SampleCache(store, "data", np.full(N, SIZE), 0, FORMAT_ITEM)
        self.cache.capacity_bytes = int(FRACTION * self.cache.size_bytes_N.sum())
        self.jobs = JobRegistry(store, "data", group=group, clock=clock)
        self.jobs.record = replace(self.jobs.record, machine="another")
        self.sharing = Sharing(self.cache, self.jobs, 0, 1, clock)
        self.sharing.look()
        self.coordinated = CoordinatedRead(self.cache, self.jobs, self.sharing, BATCH) if group else None
        self.cache.use_policy(POLICIES.get("plan"))
        self.rng = np.random.default_rng(seed)
        self.orders = [self.rng.permutation(N), self.rng.permutation(N)]
        self.epoch = self.step = 0
        self.reads: list[int] = [0]

    def _read(self, indices: list[int]) -> list[Any]:
        self.reads[-1] += len(indices)
        return [bytes([index % 256]) * SIZE for index in indices]

    def may_go(self) -> bool:
        """Whether it is its turn, where jobs take one stream."""
        place = (self.epoch, (self.step + 1) * BATCH, N)
        return self.coordinated is None or self.coordinated._may_go(*place)

    def take(self) -> None:
        """One batch."""
        cache, sharing = self.cache, self.sharing
        if self.step == 0:
            plan = EpochPlan(self.epoch, self.orders[0], self.orders[1])
            sharing.begin_epoch(plan)
            if not cache.residency.is_shared:
                cache.adopt(cache.find_residents(), remove_refused=True)
                cache.begin_epoch(plan, remove_leaving=True)
        if sharing.has_company and not cache.residency.is_shared:
            assert cache.policy is not None
            sharing.enter(cache.policy.resident_N)
        index_B = self.orders[0][self.step * BATCH : (self.step + 1) * BATCH]
        if cache.residency.is_shared:
            sharing.dispatch(index_B, BATCH, None, ending=False)
        else:
            sharing.advance(BATCH)
            cache.post(cache.decide(index_B), index_B, slice(0, BATCH), 0, 1)
        payloads, _ = cache.fetch_many(index_B.tolist(), self._read)
        assert [bytes(each) for each in payloads] == [bytes([i % 256]) * SIZE for i in index_B.tolist()]
        self.step += 1
        if self.step * BATCH == N:
            self.epoch, self.step = self.epoch + 1, 0
            self.orders = [self.orders[1], self.rng.permutation(N)]
            self.reads.append(0)
        sharing.look()


def held_bytes(store: Store, one: OneJob, slot: int) -> int:
    keys = slot_keys("data", slot)
    return sum(int(one.cache.size_bytes_N[0]) for key in store.scan(keys.prefix) if keys.index_of(key) is not None)


def run(jobs: list[OneJob], clock: ManualClock, epochs: int) -> None:
    goal, steps = jobs[0].epoch + epochs, 0
    while min(each.epoch for each in jobs) < goal:
        clock.advance(STEP_SECONDS)
        steps += 1
        for each in jobs:
            if each.epoch < goal and each.may_go():
                each.take()
            else:
                each.sharing.look()
        if steps % 20 == 0:
            total = sum(held_bytes(each.cache.store, each, each.jobs.record.home) for each in jobs)
            assert total <= jobs[0].cache.capacity_bytes
        claims = sum(each.jobs.record.claim_bytes for each in jobs)
        assert claims <= jobs[0].cache.capacity_bytes


def test_three_jobs_with_orders_of_their_own_read_much_less_than_alone(store: Store, clock: ManualClock) -> None:
    jobs = [OneJob(store, clock, seed) for seed in range(3)]
    run(jobs, clock, 5)
    reads = [np.mean(each.reads[2:5]) / N for each in jobs]
    assert max(reads) <= 0.6, reads
    assert np.mean(reads) <= 0.57, reads
    for each in jobs:
        assert each.cache.residency.is_shared
        assert each.cache.ledger["borrowed"] > 0.2 * N


def test_one_job_alone_reads_what_the_exact_plan_says(store: Store, clock: ManualClock) -> None:
    one = OneJob(store, clock, 0)
    run([one], clock, 4)
    assert one.reads[1:4] == [N - int(FRACTION * N)] * 3
    assert not one.cache.residency.is_shared
    assert one.cache.ledger["borrowed"] == 0
    assert [key for key in store.scan("shade:") if "order-" in key] == [], "no other job reads them"


def test_each_keeps_an_equal_part(store: Store, clock: ManualClock) -> None:
    jobs = [OneJob(store, clock, seed) for seed in range(3)]
    run(jobs, clock, 3)
    for each in jobs:
        assert each.cache.residency.capacity_bytes == each.cache.capacity_bytes // 3
        kept = held_bytes(store, each, each.jobs.record.home)
        assert 0.7 * each.cache.residency.capacity_bytes <= kept <= each.cache.residency.capacity_bytes


def test_one_that_comes_later_gets_its_part_and_never_more_than_is_free(store: Store, clock: ManualClock) -> None:
    one = OneJob(store, clock, 0)
    run([one], clock, 2)
    two = OneJob(store, clock, 1)
    assert two.cache.residency.capacity_bytes == 0, "all is taken"
    run([one, two], clock, 2)
    assert one.cache.residency.capacity_bytes == two.cache.residency.capacity_bytes == one.cache.capacity_bytes // 2


@pytest.mark.parametrize("how", ["killed", "left"])
def test_what_a_job_leaves_is_taken_over_and_not_lost(store: Store, clock: ManualClock, how: str) -> None:
    one, two = OneJob(store, clock, 0), OneJob(store, clock, 1)
    run([one, two], clock, 3)
    gone = held_bytes(store, two, 1)
    assert gone > 0
    if how == "left":
        two.sharing.close()
    else:
        one.sharing.look()
        clock.advance(LEASE_SECONDS * 0.9)
        one.sharing.look()
        assert one.sharing.view.others(one.jobs.owner), "not dead yet"
        clock.advance(LEASE_SECONDS * 0.2)
    one.sharing.look()
    one.sharing.look()
    assert one.cache.residency.owned_slots == [0, 1]
    assert one.cache.residency.capacity_bytes == one.cache.capacity_bytes, "its part is free at once"
    assert not one.sharing.has_company
    one.cache.residency.is_shared = False  # what settling does as the next epoch begins
    one.step = 0
    one.cache.adopt(one.cache.find_residents(), remove_refused=True)
    kept = int(one.cache.policy.resident_N.sum())  # type: ignore[union-attr]
    assert kept * one.cache.size_bytes_N[0] >= gone, "what it had brought in serves on"
    one.reads.append(0)
    run([one], clock, 3)
    assert one.reads[-2] == N - int(FRACTION * N)
    assert held_bytes(store, one, 0) + held_bytes(store, one, 1) <= one.cache.capacity_bytes


def test_those_who_follow_one_stream_read_it_once(store: Store, clock: ManualClock) -> None:
    jobs = [OneJob(store, clock, seed=7, group="search") for _ in range(3)]
    run(jobs, clock, 4)
    reads = [sum(each.reads[2:4]) / 2 / N for each in jobs]
    assert sum(reads) / 3 <= 0.3, reads
    assert max(reads[1:]) <= 0.02, "followers read next to nothing"
    assert jobs[0].cache.residency.capacity_bytes == jobs[0].cache.capacity_bytes, "the leader keeps for all"
    assert [each.cache.residency.capacity_bytes for each in jobs[1:]] == [0, 0]


def test_a_leader_is_no_further_ahead_than_the_cache_can_hold(store: Store, clock: ManualClock) -> None:
    jobs = [OneJob(store, clock, seed=7, group="search") for _ in range(3)]
    tick = 0
    while min(each.epoch for each in jobs) < 4:
        clock.advance(STEP_SECONDS)
        tick += 1
        for each in jobs:
            is_its_turn = each is jobs[0] or tick % 3 == 0  # the followers are slow
            each.take() if is_its_turn and each.epoch < 4 and each.may_go() else each.sharing.look()
    reads = [sum(each.reads[2:4]) / 2 / N for each in jobs]
    assert max(reads[1:]) <= 0.02, "what the leader brings in stays until the slowest has used it"
    assert reads[0] <= 1 - FRACTION / 2, "and half of the cache is left for what comes in the next epoch"


def test_one_that_waits_looks_at_once(store: Store) -> None:
    first, second = (JobRegistry(store, "data", group="search") for _ in range(2))
    cache = SampleCache(store, "data", np.full(N, SIZE), 0, FORMAT_ITEM)
    cache.capacity_bytes = int(FRACTION * cache.size_bytes_N.sum())
    sharing = Sharing(cache, first, 0, 1, beat_seconds=600)
    sharing.start()
    try:
        second.beat()
        sharing.hurry()
        deadline = time.monotonic() + 10
        while not sharing.has_company and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sharing.has_company
    finally:
        sharing.close()


def test_one_that_waits_does_not_press_a_store_that_does_not_answer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    registry = JobRegistry(store, "data", group="search")
    cache = SampleCache(store, "data", np.full(N, SIZE), 0, FORMAT_ITEM)
    cache.capacity_bytes = int(FRACTION * cache.size_bytes_N.sum())
    sharing = Sharing(cache, registry, 0, 1, beat_seconds=0.2)
    sharing.start()

    def look() -> None:
        looks.append(time.monotonic())
        raise StoreUnavailableError("gone")

    monkeypatch.setattr(sharing, "look", look)
    began = time.monotonic()
    while time.monotonic() < began + 1.0:
        sharing.hurry()
        time.sleep(0.005)
    sharing.close()
    assert 1 <= len(looks) <= 3, "after 0, 0.4 and 0.8 s at the earliest"
    assert all(later - earlier > 0.3 for earlier, later in pairwise(looks))


def test_a_follower_that_dies_is_not_waited_for_and_a_leader_is_replaced(store: Store, clock: ManualClock) -> None:
    jobs = [OneJob(store, clock, seed=7, group="search") for _ in range(3)]
    run(jobs, clock, 1)
    run_without = jobs[:2]
    for _ in range(200):  # the third has stopped: the others stop, too, within the window …
        clock.advance(STEP_SECONDS / 20)
        for each in run_without:
            each.take() if each.may_go() else each.sharing.look()
    assert not jobs[0].may_go()
    clock.advance(LEASE_SECONDS * 1.1)  # … until its lease is over
    for _ in range(2):
        for each in run_without:
            each.sharing.look()
    assert jobs[0].may_go()
    jobs[0].sharing.close()
    for _ in range(3):
        jobs[1].sharing.look()
    assert jobs[1].coordinated is not None
    assert jobs[1].coordinated.leader() is None
    assert jobs[1].may_go()
