"""Cluster memory never gives a slot away that holds what another snapshot in memory builds on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shade.checkpoint._codecs.delta import memory_slots
from shade.checkpoint._tiers.memory import MemoryTier
from shade.errors import StoreFullError
from shade.store import Store, open_store
from tests.support.snapshots import Snapshot, make, save


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://") as opened:
        yield opened


def built(step: int, on: Snapshot | None) -> Snapshot:
    one = make("run", step, shard_bytes=(1000,), chunk=500)
    return replace(one, record=replace(one.record, base=None if on is None else on.record.digest, version=2))


def steps(tier: MemoryTier) -> list[int]:
    return sorted(record.step for record in tier.held().values())


def test_a_keyframe_stays_while_the_newest_builds_on_it(store: Store) -> None:
    tier = MemoryTier(store, "run", num_slots=memory_slots("xor-zstd", 2, 8))
    keyframe = built(1, None)
    save(tier, keyframe)
    for step in range(2, 8):
        save(tier, built(step, keyframe))
        assert {1, step} <= set(steps(tier))
    save(tier, built(8, None))
    save(tier, built(9, None))
    save(tier, built(10, None))
    assert steps(tier) == [8, 9, 10]


def test_a_chain_stays_whole(store: Store) -> None:
    num_slots = memory_slots("topk-delta", 2, 4)
    tier, before, made = MemoryTier(store, "run", num_slots=num_slots), None, []
    for step in range(1, 30):
        before = built(step, None if step % 4 == 1 else before)
        made.append(before)
        save(tier, before)
        held = {record.digest: record for record in tier.held().values()}
        assert all(record.base is None or record.base in held for record in held.values())
        first = (step - 1) // 4 * 4 + 1
        assert set(range(first, step + 1)) <= set(steps(tier)), "all that the newest needs"
        assert len(held) <= num_slots


def test_where_all_are_needed_there_is_no_room(store: Store) -> None:
    tier, before = MemoryTier(store, "run", num_slots=3), None
    for step in (1, 2, 3):
        before = built(step, before)
        save(tier, before)
    with pytest.raises(StoreFullError, match="steps 1, 2, 3"):
        save(tier, built(4, before))
    assert steps(tier) == [1, 2, 3]


def test_nor_is_it_overtaken_while_storage_is_slow(store: Store) -> None:
    tier = MemoryTier(store, "run", num_slots=3, flushed=True)
    keyframe = built(1, None)
    save(tier, keyframe)
    for step in (2, 3, 4, 5):
        save(tier, built(step, keyframe))
        assert {1, step} <= set(steps(tier))
    assert len(tier.dirty()) == 3


def test_the_number_of_slots_follows_from_what_builds_on_what() -> None:
    assert memory_slots("none", 3, 8) == memory_slots("zstd", 3, 8) == 3
    assert memory_slots("xor-zstd", 3, 8) == memory_slots("dedup", 3, 8) == 4
    assert memory_slots("topk-delta", 3, 8) == 17


def test_the_time_of_a_write_is_measured_and_nothing_is_left(store: Store) -> None:
    tier = MemoryTier(store, "run")
    assert tier.time_write(100_000) > 0
    assert list(store.scan("")) == []
