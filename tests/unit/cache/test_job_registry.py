"""Who has which slot: taken once, kept by a beat, left to the first of the living, never to two for longer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shade.cache.job_registry import LEASE_SECONDS, MAX_JOBS, JobRecord, JobRegistry, slot_keys
from shade.errors import ConfigError
from shade.process import start_of
from shade.store import open_store
from shade.store.base import Store
from shade.testing import ManualClock


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://") as made:
        yield made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def job(store: Store, clock: ManualClock, *, elsewhere: bool = True) -> JobRegistry:
    """A job; as if on another machine, whose processes cannot be looked at."""
    made = JobRegistry(store, "data", clock=clock)
    if elsewhere:
        made.record = replace(made.record, machine="another")
    return made


def test_each_has_a_slot_of_its_own(store: Store, clock: ManualClock) -> None:
    one, two = job(store, clock), job(store, clock)
    assert one.beat().slots_of(one.owner) == [0]
    assert two.beat().slots_of(two.owner) == [1]
    view = one.beat()
    assert (sorted(view.living), view.left) == ([0, 1], {})
    assert [record.owner for record in view.others(one.owner).values()] == [two.owner]
    assert slot_keys("data", 0).prefix != slot_keys("data", 1).prefix
    assert slot_keys("data", 0).index_of(slot_keys("data", 1).key(7)) is None


def test_who_beats_lives_and_who_does_not_is_dead_after_a_lease(store: Store, clock: ManualClock) -> None:
    one, two = job(store, clock), job(store, clock)
    one.beat()
    two.beat()
    for _ in range(20):
        clock.advance(LEASE_SECONDS * 0.9)
        two.beat()
        assert sorted(one.beat().living) == [0, 1]
    clock.advance(LEASE_SECONDS * 0.9)
    assert 1 in one.beat().living, "not yet"
    clock.advance(LEASE_SECONDS * 0.2)
    view = one.beat()
    assert view.slots_of(one.owner) == [0, 1], "it looks after what the dead one has left"
    assert view.others(one.owner) == {}


def test_it_is_the_first_of_the_living_that_looks_after_it(store: Store, clock: ManualClock) -> None:
    one, two, three = (job(store, clock) for _ in range(3))
    for each in (one, two, three):
        each.beat()
    one.leave()
    assert three.beat().left.keys() == {0}, "not the last"
    view = two.beat()
    assert view.slots_of(two.owner) == [1, 0], "it still writes where it did"
    assert three.beat().others(three.owner).keys() == {1}
    two.release(0)
    assert sorted(three.beat().living) == [1, 2]


@pytest.mark.multiprocess
def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(store: Store, clock: ManualClock) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        gone = job(store, clock, elsewhere=False)
        gone.record = replace(gone.record, process_id=child.pid, started=start_of(child.pid) or "")
        gone.beat()
        mine = job(store, clock, elsewhere=False)
        assert mine.beat().slots_of(mine.owner) == [1]
        child.communicate(b"\n")
    assert mine.beat().slots_of(mine.owner) == [1, 0]
    again = job(store, clock, elsewhere=False)
    assert again.beat().slots_of(again.owner) == [2]


def test_a_job_that_is_alone_continues_where_the_last_one_was(store: Store, clock: ManualClock) -> None:
    for _ in range(3):
        one = job(store, clock)
        assert one.beat().slots_of(one.owner) == [0]
        one.leave()


def test_one_that_slept_through_its_lease_takes_another_slot(store: Store, clock: ManualClock) -> None:
    sleeper, other = job(store, clock), job(store, clock)
    sleeper.beat()
    other.beat()
    clock.advance(LEASE_SECONDS * 1.1)
    assert other.beat().slots_of(other.owner) == [1, 0]
    view = sleeper.beat()
    assert view.slots_of(sleeper.owner) == [2]
    assert sorted(other.beat().living) == [0, 1, 2]


def test_an_emptied_store_is_filled_again_by_those_who_live(store: Store, clock: ManualClock) -> None:
    one, two = job(store, clock), job(store, clock)
    one.beat()
    two.beat()
    store.delete_many(list(store.scan("shade:")))
    two.beat()
    one.beat()
    view = two.beat()
    assert {record.owner for record in view.living.values()} == {one.owner, two.owner}
    assert len(view.living) == 2


def test_there_is_an_end_to_it(store: Store, clock: ManualClock) -> None:
    for _ in range(MAX_JOBS):
        job(store, clock).beat()
    with pytest.raises(ConfigError, match="at most 16 jobs"):
        job(store, clock).beat()


def test_jobs_that_come_one_after_the_other_are_never_too_many(store: Store, clock: ManualClock) -> None:
    """As cells of a notebook are: each begins before the last one leaves, and looks after what that one had."""
    last = job(store, clock)
    last.beat()
    for _ in range(3 * MAX_JOBS):
        following = job(store, clock)
        following.beat()
        last.leave()
        view = following.beat()
        assert {record.owner for record in view.living.values()} == {following.owner}
        assert view.slots_of(following.owner)[0] == following.record.home
        last = following


def test_an_unreadable_record_has_no_owner(store: Store, clock: ManualClock) -> None:
    store.set_many({slot_keys("data", 0).counter_key("job-0"): b"[1]"})
    assert JobRecord.parse(b"{}") is None
    one = job(store, clock)
    assert one.beat().slots_of(one.owner) == [0]
