"""SampleCache over a store in memory that fails on command: right bytes, honest counts, capacity, debts."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest

from shade.cache import breaker as breaker_module
from shade.cache.admission import COUNTER
from shade.cache.cache import SampleCache
from shade.cache.entry import FORMAT_ITEM
from shade.cache.ledger import FIELDS
from shade.cache.residency_map import ResidencyMap
from shade.errors import StoreAuthError, StoreUnavailableError
from shade.policy import POLICIES
from shade.policy.base import EpochPlan
from shade.store import open_store
from shade.testing import FaultyStore, ManualClock

N, SIZE = 40, 1000
GONE = StoreUnavailableError("the server is gone")


def payload(index: int) -> bytes:
    return bytes([index]) * SIZE


class Origin:
    """Reads samples, and counts."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.unreadable: set[int] = set()

    def __call__(self, indices: list[int]) -> list[Any]:
        self.reads += indices
        return [OSError("gone") if index in self.unreadable else payload(index) for index in indices]


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    with open_store("memory://") as inner:
        yield FaultyStore(inner)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The breaker's clock; its signing does not wait."""
    clock = ManualClock(100.0)
    real = breaker_module.Breaker.__init__

    def patched(self: breaker_module.Breaker, residency: ResidencyMap, ask: Callable[[], object], name: str) -> None:
        real(self, residency, ask, clock, lambda action: action(), name)

    monkeypatch.setattr(breaker_module.Breaker, "__init__", patched)
    monkeypatch.setattr(breaker_module, "SIGNING_SECONDS", 0.0)
    return clock


@pytest.fixture
def cache(store: FaultyStore, clock: ManualClock) -> SampleCache:
    made = SampleCache(store, "unit", np.full(N, SIZE), 0, FORMAT_ITEM)
    made.capacity_bytes = int(made.size_bytes_N[:10].sum())
    return made


def used(cache: SampleCache) -> tuple[int, int]:
    """What the counter says, and what the entries really take."""
    counter = cache.store.increment(cache.keys.counter_key(COUNTER), 0)
    samples = [key for key in cache.store.scan(cache.keys.prefix) if cache.keys.index_of(key) is not None]
    entries = cache.store.get_many(samples)
    return counter, sum(cache.entry_bytes(len(e) - 16) for e in entries if e is not None)


def resident(cache: SampleCache) -> list[int]:
    found = (cache.keys.index_of(key) for key in cache.store.scan(cache.keys.prefix))
    return sorted(index for index in found if index is not None)


def begin(cache: SampleCache, order: list[int], following: list[int] | None = None, policy: str = "plan") -> None:
    if cache.policy is None:
        cache.use_policy(POLICIES.get(policy))
    next_order = None if following is None else np.array(following, dtype=np.int64)
    cache.begin_epoch(EpochPlan(0, np.array(order), next_order), remove_leaving=True)


def post(cache: SampleCache, index_B: Any, *, ending: bool = False) -> None:
    """Plans one batch of a rank that is alone."""
    cache.post(cache.decide(index_B), index_B, slice(0, len(index_B)), 0, 1, ending=ending)


def fetch_all(cache: SampleCache, origin: Origin, order: list[int], batch: int = 5) -> list[bool]:
    hits = []
    for start in range(0, len(order), batch):
        index_B = np.array(order[start : start + batch])
        post(cache, index_B)
        payloads, hit = cache.fetch_many(index_B.tolist(), origin)
        assert [bytes(p) for p in payloads] == [payload(i) for i in index_B]
        hits += hit
    return hits


# ── without a sampler ───────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_plan_it_fills_up_and_stays(cache: SampleCache, origin: Origin) -> None:
    for start in range(0, N, 5):
        payloads, hits = cache.fetch_many(range(start, start + 5), origin)
        assert [bytes(p) for p in payloads] == [payload(i) for i in range(start, start + 5)]
        assert hits == [False] * 5
    assert resident(cache) == list(range(10))
    assert cache.fetch_many(range(5, 15), origin)[1] == [True] * 5 + [False] * 5
    assert used(cache) == (cache.capacity_bytes, cache.capacity_bytes)


def test_repeats_in_a_batch_are_read_once(cache: SampleCache, origin: Origin) -> None:
    payloads, hits = cache.fetch_many([3, 4, 3, 3], origin)
    assert [bytes(p) for p in payloads] == [payload(i) for i in (3, 4, 3, 3)]
    assert hits == [False, False, True, True]
    assert origin.reads == [3, 4]
    assert (cache.ledger["hits"], cache.ledger["misses"], cache.ledger["duplicates"]) == (2, 2, 2)


def test_what_the_origin_cannot_read_comes_back_as_its_error(cache: SampleCache, origin: Origin) -> None:
    origin.unreadable = {1}
    payloads, _ = cache.fetch_many([0, 1], origin)
    assert bytes(payloads[0]) == payload(0)
    assert isinstance(payloads[1], OSError)
    assert resident(cache) == [0]


# ── by plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_planned_departures_free_space_for_planned_arrivals(cache: SampleCache, origin: Origin) -> None:
    first, second = list(range(20)), list(range(10, 30))
    begin(cache, first, second)
    fetch_all(cache, origin, first)
    kept = resident(cache)
    assert len(kept) == 10
    assert set(kept) <= set(second)
    begin(cache, second, first)
    hits = fetch_all(cache, origin, second)
    assert [i for i, hit in zip(second, hits, strict=True) if hit] == kept
    assert used(cache) == (cache.capacity_bytes,) * 2
    assert cache.ledger["surprises"] == cache.ledger["declined"] == 0
    assert len(origin.reads) == cache.ledger["misses"] == 30


def test_nothing_is_asked_of_the_store_that_is_known_not_to_be_there(
    cache: SampleCache, store: FaultyStore, origin: Origin
) -> None:
    begin(cache, list(range(20)), [])
    store.num_calls.clear()
    fetch_all(cache, origin, list(range(20)))
    assert not store.num_calls


def test_victims_of_an_online_policy_leave(cache: SampleCache, origin: Origin) -> None:
    order = list(range(30))
    begin(cache, order, policy="lru")
    fetch_all(cache, origin, order)
    assert resident(cache) == list(range(20, 30))
    assert used(cache) == (cache.capacity_bytes,) * 2


def test_arrivals_wait_for_a_slower_neighbours_departures(cache: SampleCache, origin: Origin) -> None:
    order = list(range(15))
    cache.store.increment(cache.keys.counter_key(COUNTER), cache.capacity_bytes)
    begin(cache, order, order)
    fetch_all(cache, origin, order[:10])
    assert resident(cache) == []
    cache.store.increment(cache.keys.counter_key(COUNTER), -cache.capacity_bytes)  # the neighbour is done
    fetch_all(cache, origin, order[10:])
    assert len(resident(cache)) == 10
    assert used(cache) == (cache.capacity_bytes,) * 2


def test_what_waits_too_long_is_declined(cache: SampleCache, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shade.cache.admission.WAITING_BYTES", 3 * SIZE)
    cache.store.increment(cache.keys.counter_key(COUNTER), cache.capacity_bytes)
    begin(cache, list(range(10)), list(range(10)))
    fetch_all(cache, origin, list(range(10)))
    assert cache.ledger["declined"] == 8


def test_larger_than_planned_is_not_admitted(cache: SampleCache, origin: Origin) -> None:
    begin(cache, [0, 1], [0, 1])
    post(cache, np.array([0, 1]))
    cache.fetch_many([0, 1], lambda indices: [b"x" * (SIZE if i else 5000) for i in indices])
    assert resident(cache) == [1]
    assert cache.ledger["declined"] == 1


def test_a_new_count_of_the_residents_cancels_old_debts(
    cache: SampleCache, store: FaultyStore, origin: Origin, clock: ManualClock
) -> None:
    """1. A departure fails. 2. The next epoch counts and finds the sample still there. 3. It must not be removed."""
    begin(cache, list(range(15)), policy="lru")
    fetch_all(cache, origin, list(range(10)))
    store.fail_from("delete_many", 0, GONE)
    fetch_all(cache, origin, list(range(10, 15)))
    assert store.num_faults["delete_many"] > 0
    assert resident(cache) == list(range(10))
    store.heal()
    clock.advance(1000)
    cache.find_residents()  # asks whether the store is back
    cache.adopt(cache.find_residents(), remove_refused=True)
    begin(cache, list(range(10)))
    assert fetch_all(cache, origin, list(range(10))) == [True] * 10
    assert resident(cache) == list(range(10))


def test_waiting_for_a_neighbour_is_not_the_stores_slowness(
    cache: SampleCache, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that was promised and does not come, near the end of an epoch: the cache stays in use."""
    monkeypatch.setattr("shade.cache.admission.LEAST_PATIENCE_SECONDS", 0.5)
    cache.store.increment(cache.keys.counter_key(COUNTER), cache.capacity_bytes)
    order = list(range(20))
    begin(cache, order, order)
    for start in range(0, 20, 5):
        index_B = np.array(order[start : start + 5])
        cache.residency.origin_seconds = 1e-6
        cache.residency.slow_writes = 0b11
        post(cache, index_B, ending=True)
        cache.fetch_many(index_B.tolist(), origin)
    assert cache.admission.waited_seconds > 0.1
    assert cache.residency.trips == 0


class Watch:
    """Stands for `time` in the fetch: it moves only when a store is slow."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e9)


def slow_down(
    store: FaultyStore, call: str, seconds: Iterator[float], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> Watch:
    """Makes each call of a store take the next of ``seconds``, and none once they are used up."""
    watch, real = Watch(), getattr(store, call)

    def slowly(items: Any) -> Any:
        taken = next(seconds, 0.0)
        watch.now += taken
        clock.advance(taken)
        return real(items)

    monkeypatch.setattr("shade.cache.fetch.time", watch)
    monkeypatch.setattr(store, call, slowly)
    return watch


@pytest.mark.parametrize(("call", "num_stalls"), [("get_many", 1), ("add_many", 2)])
@pytest.mark.parametrize("planned", [False, True])
def test_a_stall_keeps_no_sample_from_the_store(
    cache: SampleCache,
    store: FaultyStore,
    origin: Origin,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    num_stalls: int,
    planned: bool,
) -> None:
    """The next job reads what this one wrote. So a stall must leave no hole."""
    watch = slow_down(store, call, itertools.repeat(3.0, num_stalls), clock, monkeypatch)
    cache.residency.origin_seconds = 1e-6
    for start in range(0, 10, 5):
        if planned:  # by a plan that counts on entries that the store has lost
            cache.residency.post(np.arange(start, start + 5), *np.ones((2, 5), dtype=bool), ending=False)
        cache.fetch_many(range(start, start + 5), origin)
    assert watch.now == 3.0 * num_stalls, "it was slow"
    assert (cache.ledger["declined"], cache.residency.trips) == (0, 0)
    assert resident(cache) == list(range(10))


@pytest.mark.parametrize(
    ("call", "num_rounds"), [("get_many", breaker_module.SLOW_LOOK_UPS), ("add_many", breaker_module.SLOW_WRITES)]
)
def test_a_store_that_is_always_slow_is_left_alone(
    cache: SampleCache,
    store: FaultyStore,
    origin: Origin,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    num_rounds: int,
) -> None:
    watch = slow_down(store, call, itertools.repeat(3.0), clock, monkeypatch)
    for index in range(10):
        cache.residency.origin_seconds = 1e-6
        cache.fetch_many([index], origin)
    assert cache.residency.trips == 1
    assert watch.now == 3.0 * num_rounds


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_damaged_entries_are_misses_and_are_repaired_in_place(cache: SampleCache, origin: Origin) -> None:
    order = list(range(10))
    begin(cache, order, order)
    fetch_all(cache, origin, order)
    one, two, three, four = cache.keys.many([1, 2, 3, 4])
    swapped = dict(zip((one, two), cache.store.get_many([two, one]), strict=True))
    cache.store.set_many({key: value or b"" for key, value in swapped.items()} | {three: b"?" * 9000, four: b""})
    reads = len(origin.reads)
    begin(cache, order, order)
    hits = fetch_all(cache, origin, order)
    assert [i for i, hit in zip(order, hits, strict=True) if not hit] == [1, 2, 3, 4]
    assert origin.reads[reads:] == [1, 2, 3, 4]
    assert cache.ledger["corrupt"] == 4
    begin(cache, order, order)
    assert fetch_all(cache, origin, order) == [True] * 10
    assert used(cache) == (cache.capacity_bytes,) * 2


def test_damaged_entries_that_are_to_leave_leave(cache: SampleCache, origin: Origin) -> None:
    order = list(range(10))
    begin(cache, order, order)
    fetch_all(cache, origin, order)
    cache.store.set_many({cache.keys.key(0): b"?" * 5})
    begin(cache, order, list(range(10, 30)))
    fetch_all(cache, origin, order + list(range(10, 10)))
    counter, truth = used(cache)
    assert counter == truth <= cache.capacity_bytes
    assert cache.ledger["corrupt"] == 1


# ── a store that fails ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["get_many", "add_many", "delete_many", "increment", "*"])
@pytest.mark.parametrize("error", [GONE, StoreAuthError("wrong password")], ids=["gone", "refused"])
@pytest.mark.parametrize("call", [0, 1])
def test_no_failure_of_the_store_is_seen_by_training(
    cache: SampleCache, store: FaultyStore, origin: Origin, clock: ManualClock, method: str, error: Exception, call: int
) -> None:
    first, second, third = list(range(20)), list(range(10, 30)), list(range(20, 40))
    begin(cache, first, second)
    fetch_all(cache, origin, first)
    store.num_calls.clear()
    store.fail_from(method, call, error, num_calls=1)
    begin(cache, second, third)
    fetch_all(cache, origin, second)
    assert sum(store.num_faults.values()) >= 1
    assert cache.ledger["store_errors"] >= 1
    store.heal()
    counter, truth = used(cache)
    assert truth <= counter, "the counter is never below the truth"
    assert truth <= cache.capacity_bytes
    clock.advance(1000)
    cache.find_residents()  # asks whether the store is back
    cache.adopt(cache.find_residents(), remove_refused=True)
    for order, following in ((third, first), (first, first), (first, first)):
        begin(cache, order, following)
        hits = fetch_all(cache, origin, order)
    assert sum(hits) == 10, "all is well again"
    assert len(set(used(cache))) == 1


def test_a_dead_store_is_asked_once_and_logged_once(
    cache: SampleCache, store: FaultyStore, origin: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "shade.cache")
    order = list(range(30))
    begin(cache, order, order)
    store.num_calls.clear()
    store.fail_from("*", 0, GONE)
    fetch_all(cache, origin, order)
    assert sum(store.num_calls.values()) == 1
    assert len(caplog.records) == 1
    assert cache.ledger["declined"] == 10


def test_a_cold_cache_that_was_dead_is_found_again(
    cache: SampleCache, store: FaultyStore, origin: Origin, clock: ManualClock
) -> None:
    """An empty cache is never looked up, so arrivals must probe too."""
    order = list(range(N))
    begin(cache, order, order)
    store.fail_from("*", 0, GONE)
    fetch_all(cache, origin, order[:25])
    store.heal()
    clock.advance(1000)
    fetch_all(cache, origin, order[25:30])  # asks whether the store is back
    fetch_all(cache, origin, order[30:])
    assert resident(cache) == order[30:]


def test_planned_hits_that_are_not_even_asked_for_are_counted(
    cache: SampleCache, store: FaultyStore, origin: Origin
) -> None:
    order = list(range(10))
    begin(cache, order, order)
    fetch_all(cache, origin, order)
    store.fail_from("get_many", store.num_calls["get_many"], GONE)
    begin(cache, order, order)
    assert fetch_all(cache, origin, order) == [False] * 10
    assert (cache.ledger["store_errors"], cache.ledger["skipped"]) == (1, 5)


def test_counting_residents_leaves_a_dead_store_alone(cache: SampleCache, store: FaultyStore, origin: Origin) -> None:
    store.fail_from("get_many", 0, GONE)
    cache.fetch_many([0], origin)
    assert cache.find_residents().tolist() == []
    assert (store.num_calls["get_many"], store.num_calls["scan"]) == (2, 0)
    assert cache.needs_count


def test_an_epoch_that_begins_within_a_pause_counts_what_is_there(
    cache: SampleCache, store: FaultyStore, origin: Origin
) -> None:
    """An empty count would cost the whole epoch its hits, though the store is back within a second."""
    cache.fetch_many(list(range(10)), origin)
    store.fail_from("get_many", store.num_calls["get_many"], GONE, num_calls=1)
    cache.fetch_many([0], origin)
    assert cache.find_residents().tolist() == list(range(10))
    assert not cache.needs_count
    assert cache.fetch_many([0], origin)[1] == [True], "it is in use again"


def test_a_count_that_missed_a_node_is_wanted_again(
    cache: SampleCache, store: FaultyStore, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node comes back with what it had, beyond the plan and beyond the capacity, and no read notices."""
    cache.fetch_many(list(range(10)), origin)
    cache.find_residents()
    assert not cache.needs_count

    def some(prefix: str) -> Iterator[str]:
        names = list(store.inner.scan(prefix))
        yield from names[:4]
        raise GONE

    with monkeypatch.context() as patch:
        patch.setattr(store, "scan", some)
        assert 0 < len(cache.find_residents()) < 10
        assert cache.needs_count
    assert cache.find_residents().tolist() == list(range(10))
    assert not cache.needs_count


def test_a_count_that_was_not_taken_down_everywhere_is_wanted_again(
    cache: SampleCache, store: FaultyStore, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.fetch_many([0], origin)
    with monkeypatch.context() as patch:
        patch.setattr(store, "set_many", lambda entries: [False] * len(entries))
        assert cache.find_residents().tolist() == [0]
        assert cache.needs_count
    cache.find_residents()
    assert not cache.needs_count


def test_a_count_that_failed_is_wanted_again(cache: SampleCache, store: FaultyStore, origin: Origin) -> None:
    cache.fetch_many([0], origin)
    store.fail_from("scan", 0, GONE, num_calls=1)
    assert cache.find_residents().tolist() == []
    assert cache.needs_count


# ── odds and ends ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_residents_of_an_earlier_run_are_found_and_too_many_removed(cache: SampleCache, origin: Origin) -> None:
    cache.fetch_many(list(range(10)), origin)
    cache.store.increment(cache.keys.counter_key(COUNTER), 10**9)  # a process died reserving
    found = cache.find_residents()
    assert found.tolist() == list(range(10))
    cache.capacity_bytes //= 2
    cache.use_policy(POLICIES.get("plan"))
    cache.adopt(found, remove_refused=True)
    assert resident(cache) == list(range(5))
    assert used(cache) == (cache.capacity_bytes,) * 2


def test_a_copy_in_a_worker_has_the_residency_map_and_no_policy(cache: SampleCache, origin: Origin) -> None:
    begin(cache, list(range(5)), [])
    copy = pickle.loads(ForkingPickler.dumps(cache))
    copy.enter_worker(0)
    copy.fetch_many([1, 2], origin)
    assert cache.residency.totals()["samples"] == 2
    assert copy.policy is None
    with pytest.raises(AssertionError):
        _ = copy.size_bytes_N


def test_sizes_of_many_and_of_one_agree(cache: SampleCache) -> None:
    lengths = np.array([0, 10, 10, 99_999])
    assert cache.entry_bytes(lengths).tolist() == [cache.entry_bytes(int(n)) for n in lengths]


def test_every_counter_says_how_to_read_it() -> None:
    assert all(len(sentence) > 15 for name, sentence in FIELDS.items())
