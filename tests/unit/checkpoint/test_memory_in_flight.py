"""Several snapshots on their way into the cluster's memory at once: none takes another's slot, nor the newest's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._tiers.memory import MemoryTier
from shade.errors import StoreFullError
from shade.store import Store, open_store
from tests.support.snapshots import Snapshot, damages, make, save

RUN = "run"


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://") as opened:
        yield opened


@pytest.fixture
def open_tier(store: Store) -> Iterator[Callable[..., MemoryTier]]:
    opened: list[MemoryTier] = []

    def begin(num_slots: int, in_flight: int, **more: bool) -> MemoryTier:
        opened.append(MemoryTier(store, RUN, num_slots=num_slots, in_flight=in_flight, **more))
        return opened[-1]

    yield begin
    for tier in opened:
        tier.close()


def prepare(tier: MemoryTier, one: Snapshot) -> str:
    return tier.prepare(one.record.step, [manifest.stored_bytes for manifest in one.manifests])


def finish(tier: MemoryTier, place: str, one: Snapshot) -> None:
    for rank in range(one.record.world_size):
        tier.put(place, one.shard(rank))
    tier.commit(place, one.record)


def test_each_has_a_slot_of_its_own_and_the_newest_stays_until_one_of_them_counts(
    open_tier: Callable[..., MemoryTier],
) -> None:
    tier = open_tier(3, 2)
    newest = save(tier, make(RUN, 1))
    second, third = make(RUN, 2), make(RUN, 3)
    places = [prepare(tier, second), prepare(tier, third)]
    assert len({newest, *places}) == 3
    assert list(tier.held()) == [newest]
    finish(tier, places[1], third)  # the later one is first
    assert {record.step for record in tier.held().values()} == {1, 3}
    finish(tier, places[0], second)
    assert {record.step for record in tier.held().values()} == {1, 2, 3}
    for place, one in zip(places, (second, third), strict=True):
        assert list(damages(tier, place, one)) == []


def test_a_slot_on_its_way_is_not_taken_however_long_it_takes(open_tier: Callable[..., MemoryTier]) -> None:
    tier = open_tier(3, 2)
    slow = make(RUN, 1)
    place = prepare(tier, slow)
    for step in range(2, 8):
        assert save(tier, make(RUN, step)).partition(".")[0] != place.partition(".")[0]
    finish(tier, place, slow)
    assert list(damages(tier, place, slow)) == []
    assert max(tier.held().values(), key=lambda record: record.sequence).step == 7


def test_what_was_thrown_away_is_free(open_tier: Callable[..., MemoryTier]) -> None:
    tier = open_tier(3, 2)
    save(tier, make(RUN, 1))
    prepare(tier, make(RUN, 2))
    tier.discard(prepare(tier, make(RUN, 3)))
    fourth = make(RUN, 4)
    finish(tier, prepare(tier, fourth), fourth)
    assert {record.step for record in tier.held().values()} == {1, 4}


def test_of_more_than_there_may_be_the_oldest_has_failed(open_tier: Callable[..., MemoryTier]) -> None:
    tier = open_tier(3, 2)
    save(tier, make(RUN, 1))
    lost = [prepare(tier, make(RUN, step)) for step in (2, 3)]  # nobody says that these have failed
    third = prepare(tier, make(RUN, 4))
    assert third.partition(".")[0] == lost[0].partition(".")[0]


def test_without_a_slot_to_take_nothing_is_overwritten(open_tier: Callable[..., MemoryTier]) -> None:
    tier = open_tier(2, 2)
    save(tier, make(RUN, 1))
    second = make(RUN, 2)
    place = prepare(tier, second)
    with pytest.raises(StoreFullError, match="expected one of 2 slots to be free"):
        prepare(tier, make(RUN, 3))
    finish(tier, place, second)
    assert {record.step for record in tier.held().values()} == {1, 2}


@pytest.mark.parametrize("flushed", [False, True])
def test_threads_that_save_at_once_leave_every_snapshot_whole(
    open_tier: Callable[..., MemoryTier], flushed: bool
) -> None:
    tier, num_threads = open_tier(5, 4, flushed=flushed), 4
    whole: dict[str, Snapshot] = {}
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for step in range(first, 40, num_threads):
                one = make(RUN, step, shard_bytes=(70_000,))
                place = save(tier, one)
                if flushed:
                    tier.mark_clean(place, step)
                whole[place] = one
        except BaseException as error:  # noqa: BLE001 - the test shall see it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(1, 1 + num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    held: dict[str, Commit] = dict(tier.held())
    assert max(record.step for record in held.values()) == 39
    for place, record in held.items():
        assert whole[place].record == record
        assert list(damages(tier, place, whole[place])) == []
