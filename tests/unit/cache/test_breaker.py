"""The breaker, on a clock that stands still: when it opens, who probes, how it closes, what it says."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shade.cache import breaker as module
from shade.cache.breaker import (
    ASKED_SHARE,
    BYTE_SECONDS,
    ENTRY_SECONDS,
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    SLOW_SECONDS,
    SLOW_WRITES,
    WINDOW_WRITES,
    Breaker,
)
from shade.cache.residency_map import ResidencyMap
from shade.errors import StoreUnavailableError
from shade.testing import ManualClock

GONE = StoreUnavailableError("the server is gone")
SLOW = 2 * SLOW_SECONDS
B = 10


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIGNING_SECONDS", 0.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def residency() -> ResidencyMap:
    return ResidencyMap(4)


class Server:
    """Answers questions, or does not."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.num_asked, self.seconds = clock, 0, 0.0
        self.error: Exception | None = None

    def __call__(self) -> None:
        self.num_asked += 1
        self.clock.advance(self.seconds)
        if self.error is not None:
            raise self.error


@pytest.fixture
def server(clock: ManualClock) -> Server:
    return Server(clock)


def at_once(action: Callable[[], None]) -> None:
    action()


@pytest.fixture
def make(residency: ResidencyMap, clock: ManualClock, server: Server) -> Callable[[], Breaker]:
    """Another process's breaker on the same residency map; its questions are answered at once."""
    return lambda: Breaker(residency, server, clock, at_once)


@pytest.fixture
def breaker(make: Callable[[], Breaker]) -> Breaker:
    return make()


def let_through(breaker: Breaker, clock: ManualClock) -> None:
    """Waits out the pause, asks, and takes the one batch that may try."""
    clock.advance(LONGEST_PAUSE_SECONDS)
    assert not breaker.allows(), "this one only asks"
    assert breaker.allows()


@pytest.mark.redis
def test_closed_lets_everybody_through(breaker: Breaker) -> None:
    assert all(breaker.allows() for _ in range(5))


@pytest.mark.redis
def test_one_failure_opens_it_for_all_processes_of_the_rank(
    residency: ResidencyMap, make: Callable[[], Breaker]
) -> None:
    one, other = make(), make()
    one.store_failed(GONE)
    assert one.is_open
    assert not one.allows()
    assert not other.allows()
    assert residency.trips == 1


@pytest.mark.redis
def test_after_the_pause_one_asks_and_then_one_batch_tries(
    make: Callable[[], Breaker], clock: ManualClock, server: Server
) -> None:
    breakers = [make() for _ in range(3)]
    breakers[0].store_failed(GONE)
    assert server.num_asked == 0
    clock.advance(FIRST_PAUSE_SECONDS)
    assert [b.allows() for b in breakers] == [False, True, False]
    assert server.num_asked == 1


@pytest.mark.redis
def test_a_good_try_closes_it(breaker: Breaker, clock: ManualClock, make: Callable[[], Breaker]) -> None:
    breaker.store_failed(GONE)
    let_through(breaker, clock)
    breaker.store_took(0.01, B)
    assert make().allows()
    breaker.store_failed(GONE)
    clock.advance(FIRST_PAUSE_SECONDS)
    assert not breaker.allows()
    assert breaker.allows(), "after a recovery the pause is the first one again"


@pytest.mark.redis
def test_bad_answers_double_the_pause_up_to_a_minute(breaker: Breaker, clock: ManualClock, server: Server) -> None:
    breaker.store_failed(GONE)
    server.error = GONE
    pauses = []
    for number in range(8):
        start = clock.now
        while server.num_asked == number:
            clock.advance(0.5)
            assert not breaker.allows(), "no batch waits for a dead store"
        pauses.append(clock.now - start)
    assert pauses == [min(FIRST_PAUSE_SECONDS * 2**n, LONGEST_PAUSE_SECONDS) for n in range(8)]


@pytest.mark.redis
def test_a_late_answer_is_a_bad_one(breaker: Breaker, clock: ManualClock, server: Server) -> None:
    breaker.origin_took(SLOW / 2, B)
    breaker.store_failed(GONE)
    server.seconds = SLOW
    clock.advance(FIRST_PAUSE_SECONDS)
    assert not breaker.allows()
    clock.advance(FIRST_PAUSE_SECONDS)
    assert not breaker.allows()
    assert server.num_asked == 1, "the pause has doubled"


@pytest.mark.redis
def test_what_waits_for_no_pause_asks_at_once_and_tries(
    breaker: Breaker, server: Server, residency: ResidencyMap
) -> None:
    breaker.store_failed(GONE)
    assert breaker.answers()
    assert server.num_asked == 1
    assert breaker.is_open, "until that try went well"
    breaker.store_took(0.0, 1)
    assert not breaker.is_open
    assert breaker.answers()
    assert server.num_asked == 1, "closed, it asks nothing"


@pytest.mark.redis
def test_vain_questions_that_a_plan_waits_for_take_a_small_part_of_the_time(
    breaker: Breaker, clock: ManualClock, server: Server
) -> None:
    breaker.store_failed(GONE)
    server.error, server.seconds = GONE, 0.25
    begun = clock()
    for _ in range(1000):  # epochs of a second
        assert not breaker.answers()
        clock.advance(1.0)
    assert server.num_asked * 0.25 <= ASKED_SHARE * (clock() - begun)
    clock.advance(0.25 / ASKED_SHARE)
    server.error = None
    assert breaker.answers(), "and the next one that may be asked is asked at once"


@pytest.mark.redis
def test_a_bad_answer_out_of_turn_doubles_the_pause(breaker: Breaker, clock: ManualClock, server: Server) -> None:
    breaker.store_failed(GONE)
    server.error = GONE
    assert not breaker.answers()
    server.error = None
    clock.advance(FIRST_PAUSE_SECONDS)
    assert not breaker.allows()
    assert server.num_asked == 1
    clock.advance(FIRST_PAUSE_SECONDS)
    assert not breaker.allows()
    assert (server.num_asked, breaker.allows()) == (2, True)


@pytest.mark.redis
def test_two_workers_failing_together_pause_once(residency: ResidencyMap, make: Callable[[], Breaker]) -> None:
    one, other = make(), make()
    one.store_failed(GONE)
    other.store_failed(GONE)
    assert (residency.trips, residency.backoff_seconds) == (1, FIRST_PAUSE_SECONDS)


@pytest.mark.redis
def test_slower_than_the_origin_twice_in_a_row_opens_it(breaker: Breaker) -> None:
    breaker.origin_took(SLOW / 2, B)
    assert breaker.store_took(SLOW, B)
    assert breaker.allows()
    assert breaker.store_took(SLOW, B)
    assert not breaker.allows()


@pytest.mark.redis
def test_a_good_batch_between_forgives(breaker: Breaker) -> None:
    breaker.origin_took(SLOW / 2, B)
    for _ in range(5):
        breaker.store_took(SLOW, B)
        assert not breaker.store_took(0.01, B)
    assert breaker.allows()


SLOW_WRITE = 2 * (SLOW_SECONDS + B * ENTRY_SECONDS)


def write_slowly(breaker: Breaker, clock: ManualClock) -> None:
    clock.advance(SLOW_WRITE)
    breaker.store_wrote(SLOW_WRITE, B, 0)


@pytest.mark.redis
def test_most_writes_too_slow_open_it(breaker: Breaker, clock: ManualClock) -> None:
    breaker.origin_took(SLOW / 2, B)
    write_slowly(breaker, clock)
    breaker.store_wrote(0.01, B, 0)
    write_slowly(breaker, clock)
    breaker.store_wrote(0.01, B, 0)
    assert breaker.allows()
    write_slowly(breaker, clock)
    assert not breaker.allows()


@pytest.mark.redis
def test_a_slow_look_up_after_a_slow_write_opens_it(breaker: Breaker, clock: ManualClock) -> None:
    breaker.origin_took(SLOW / 2, B)
    write_slowly(breaker, clock)
    assert breaker.allows()
    breaker.store_took(SLOW, B)
    assert not breaker.allows()


@pytest.mark.redis
def test_a_stalled_write_now_and_then_is_forgiven(breaker: Breaker, clock: ManualClock) -> None:
    breaker.origin_took(SLOW / 2, B)
    for _ in range(5):
        write_slowly(breaker, clock)
        write_slowly(breaker, clock)
        for _ in range(3):
            breaker.store_wrote(0.01, B, 0)
    assert breaker.allows()


@pytest.mark.redis
def test_a_stall_that_meets_the_writes_of_all_workers_counts_once(
    make: Callable[[], Breaker], clock: ManualClock
) -> None:
    workers = [make() for _ in range(8)]
    workers[0].origin_took(SLOW / 2, B)
    for stalls in range(SLOW_WRITES):
        assert workers[0].allows(), f"after {stalls} stalls"
        clock.advance(SLOW_WRITE)
        for worker in workers:
            worker.store_wrote(SLOW_WRITE, B, 0)
    assert not workers[0].allows()


@pytest.mark.redis
def test_a_write_may_take_longer_than_a_read_of_the_same_samples(breaker: Breaker, clock: ManualClock) -> None:
    """256 files of 700 bytes in the page cache, and a disk of a machine with ten jobs on two cores."""
    breaker.origin_took(0.01, 256)
    for _ in range(WINDOW_WRITES):
        clock.advance(0.98)
        breaker.store_wrote(0.98, 256, 256 * 700)
    assert breaker.allows()


@pytest.mark.redis
@pytest.mark.parametrize(("entries", "size"), [(1000, 10), (10, 5_000_000)], ids=["many", "large"])
def test_a_store_that_writes_too_slowly_opens_it(breaker: Breaker, clock: ManualClock, entries: int, size: int) -> None:
    breaker.origin_took(1e-6 * entries, entries)
    allowed = SLOW_SECONDS + entries * (ENTRY_SECONDS + size * BYTE_SECONDS)
    for factor, is_kept in ((0.9, True), (1.1, False)):
        for _ in range(SLOW_WRITES):
            assert breaker.allows()
            clock.advance(factor * allowed)
            breaker.store_wrote(factor * allowed, entries, entries * size)
        assert breaker.allows() is is_kept


@pytest.mark.redis
def test_slow_writes_are_kept_in_front_of_a_slower_origin(breaker: Breaker, clock: ManualClock) -> None:
    breaker.origin_took(20.0, B)
    for _ in range(WINDOW_WRITES):
        clock.advance(10.0)
        breaker.store_wrote(10.0, B, 1000)
    assert breaker.allows()


@pytest.mark.redis
@pytest.mark.parametrize(
    ("origin_seconds", "seconds"),
    [(2 * SLOW, SLOW), (1e-6, SLOW_SECONDS / 2), (None, SLOW)],
    ids=["origin-is-slower", "below-noise", "origin-unknown"],
)
def test_a_cache_that_pays_its_way_is_kept(
    breaker: Breaker, clock: ManualClock, origin_seconds: float | None, seconds: float
) -> None:
    if origin_seconds is not None:
        breaker.origin_took(origin_seconds, B)
    for _ in range(WINDOW_WRITES):
        clock.advance(seconds)
        breaker.store_took(seconds, B)
    assert breaker.allows()


@pytest.mark.redis
def test_what_another_worker_learned_of_the_origin_counts(make: Callable[[], Breaker]) -> None:
    make().origin_took(SLOW / 2, B)
    fresh = make()
    assert fresh.is_slow(SLOW, B)
    assert not fresh.is_slow(SLOW, 10 * B)


@pytest.mark.redis
@pytest.mark.parametrize("outcome", ["slow", "failed"])
def test_a_bad_try_opens_it_at_once(
    breaker: Breaker, residency: ResidencyMap, clock: ManualClock, outcome: str
) -> None:
    breaker.origin_took(SLOW / 2, B)
    breaker.store_failed(GONE)
    let_through(breaker, clock)
    if outcome == "slow":
        breaker.store_took(SLOW, B)
    else:
        breaker.store_failed(GONE)
    assert breaker.is_open
    assert residency.backoff_seconds == 2 * FIRST_PAUSE_SECONDS


@pytest.mark.redis
def test_the_log_says_it_once_and_the_return_once(
    breaker: Breaker, clock: ManualClock, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "shade.cache")
    for _ in range(3):
        breaker.store_failed(GONE)
        server.error = GONE
        clock.advance(LONGEST_PAUSE_SECONDS)
        assert not breaker.allows()
        server.error = None
        let_through(breaker, clock)
        breaker.store_took(0.01, B)
    out, back = [r.getMessage() for r in caplog.records]
    assert "out of use" in out
    assert "the server is gone" in out
    assert "back in use" in back


def test_a_question_that_is_never_answered_delays_only_the_end(residency: ResidencyMap, clock: ManualClock) -> None:
    answered = threading.Event()
    breaker = Breaker(residency, answered.wait, clock)
    breaker.store_failed(GONE)
    clock.advance(FIRST_PAUSE_SECONDS)
    assert not breaker.allows()
    assert not breaker.allows()
    assert any(thread.name == "shade-breaker" for thread in threading.enumerate())
    answered.set()
    breaker.close()
    breaker.close()
    assert not any(thread.name == "shade-breaker" for thread in threading.enumerate())


def _fail(breaker: Breaker, barrier: Any, logged: Any) -> None:
    handler = logging.Handler()
    handler.emit = lambda record: logged.put(record.getMessage())  # type: ignore[method-assign]
    module.logger.addHandler(handler)
    barrier.wait()
    breaker.store_failed(GONE)


@pytest.mark.multiprocess
def test_of_workers_that_fail_at_the_same_moment_one_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIGNING_SECONDS", 0.2)
    context = multiprocessing.get_context("fork")
    residency, barrier, logged = ResidencyMap(4), context.Barrier(4), context.SimpleQueue()
    children = [
        context.Process(target=_fail, args=(Breaker(residency, lambda: None), barrier, logged)) for _ in range(4)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    logged.put("end")
    assert "out of use" in logged.get()
    assert logged.get() == "end"
    logged.close()


def _write_row(residency: ResidencyMap, worker: int) -> None:
    residency.ledger(worker).add(samples=worker + 10, hits=1)
    assert residency.flag_N.tolist() == [3, 0, 1, 2]
    residency.open_until = 5.5


@pytest.mark.multiprocess
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_residency_map_is_shared_memory_in_every_child(method: str) -> None:
    residency = ResidencyMap(4)
    residency.post(np.array([0, 2, 3]), np.array([True, True, False]), np.array([True, False, True]), ending=False)
    context = multiprocessing.get_context(method)
    children = [context.Process(target=_write_row, args=(residency, worker)) for worker in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    residency.ledger(-1).add(samples=100)
    assert residency.totals()["samples"] == 10 + 11 + 100
    assert residency.totals()["hits"] == 2
    assert residency.open_until == 5.5


def test_of_duplicates_the_first_access_is_posted() -> None:
    residency = ResidencyMap(3)
    assert not residency.planned
    residency.post(np.array([1, 1, 2]), np.array([False, True, True]), np.array([True, False, False]), ending=False)
    assert residency.planned
    assert residency.flag_N.tolist() == [0, 2, 1]
