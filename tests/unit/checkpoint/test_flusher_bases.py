"""The flusher brings what a snapshot builds on before it, and storage keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shade.checkpoint._commit.protocol import agree, check_base, store
from shade.checkpoint._flush.flusher import Flusher
from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._format.retention import Keep
from shade.errors import CheckpointError, CorruptCheckpointError, StorageError, StoreUnavailableError
from shade.rank_group import SingleProcessGroup
from tests.simulation.torture.ledger import Saved, saved
from tests.support.tiers import Shelf


def chain(*steps: int) -> Shelf:
    """A memory with a chain in it, all dirty."""
    memory, base = Shelf(), None
    for step in steps:
        memory.take(step)
        record = replace(memory.records[str(step)], base=base, version=2)
        memory.records[str(step)] = record
        base = record.digest
    return memory


def flusher(memory: Shelf, storage: Shelf, keep: str = "last=1") -> Flusher:
    return Flusher(memory, storage, Keep.parse(keep))  # type: ignore[arg-type]


def commits(storage: Shelf) -> list[str]:
    return [each for each in storage.done if each.startswith("commit")]


def test_the_newest_goes_first_but_for_what_it_builds_on() -> None:
    memory, storage = chain(10, 20, 30), Shelf()
    flushed = flusher(memory, storage).flush_one()
    assert flushed is not None
    assert flushed.record.step == 30
    assert commits(storage) == ["commit 10", "commit 20", "commit 30"]
    assert memory.marks == {}
    assert sorted(storage.records) == ["10", "20", "30"], "nothing is removed that the newest builds on"


def test_a_bit_is_cleared_when_that_snapshot_is_there() -> None:
    memory, storage = chain(10, 20, 30), Shelf()
    storage.failing["commit"] = StorageError("no")
    with pytest.raises(StorageError):
        flusher(memory, storage).flush_one()
    assert sorted(memory.marks) == ["10", "20", "30"]

    class Stops(Shelf):
        def commit(self, place: str, record: object) -> None:
            super().commit(place, record)  # type: ignore[arg-type]
            self.failing["prepare"] = StorageError("full")

    storage = Stops()
    with pytest.raises(StorageError):
        flusher(memory, storage).flush_one()
    assert sorted(memory.marks) == ["20", "30"]
    assert sorted(storage.records) == ["10"]


def test_what_storage_has_is_not_written_again() -> None:
    memory, storage = chain(10, 20), Shelf()
    flusher(memory, storage).flush_one()
    storage.done.clear()
    memory.take(30)
    memory.records["30"] = replace(memory.records["30"], base=memory.records["20"].digest, version=2)
    flusher(memory, storage).flush_one()
    assert commits(storage) == ["commit 30"]


def test_what_storage_has_let_go_is_brought_again_from_memory() -> None:
    memory, storage = chain(10, 20), Shelf()
    memory.mark_clean("10", 10)
    flushed = flusher(memory, storage).flush_one()
    assert flushed is not None
    assert commits(storage) == ["commit 10", "commit 20"]


def test_a_base_that_is_nowhere_is_lost() -> None:
    memory, storage = chain(10, 20, 30), Shelf()
    del memory.records["20"]
    del memory.marks["20"]
    with pytest.raises(CorruptCheckpointError, match="step 30 builds on a snapshot"):
        flusher(memory, storage).flush_one()
    assert storage.records == {}


def test_storage_keeps_what_a_dirty_one_builds_on() -> None:
    """Story: a newer keyframe went to storage directly, and the rules would let the old one go."""
    memory, storage = chain(10, 20), Shelf()
    writer = flusher(memory, storage, "last=1")
    writer.flush_one()
    memory.take(30, sequence=15)
    memory.records["30"] = replace(memory.records["30"], base=memory.records["20"].digest, version=2)
    newer = Shelf()
    newer.take(40)
    storage.records["40"] = replace(newer.records["40"], version=2)
    writer._retain()
    assert sorted(storage.records) == ["10", "20", "40"]
    del memory.marks["30"]
    writer._retain()
    assert sorted(storage.records) == ["40"]


@pytest.mark.parametrize("unreadable", ["in storage", "in memory", "silent memory"])
def test_what_cannot_be_read_keeps_what_it_may_build_on(unreadable: str) -> None:
    memory, storage, plain = Shelf(), Shelf(), Shelf()
    for step in (10, 20, 30):
        plain.take(step)
        storage.records[f"{step}"] = replace(plain.records[f"{step}"], version=1 if step == 10 else 2)
    if unreadable == "silent memory":
        memory.failing["dirty"] = StoreUnavailableError("away")
    else:
        (storage if unreadable == "in storage" else memory).damaged = ["40"]
    flusher(memory, storage, "last=1")._retain()
    assert sorted(storage.records) == ["20", "30"], "nothing can build on 10: it is of version 1"
    storage.damaged, memory.damaged, memory.failing = (), (), {}
    flusher(memory, storage, "last=1")._retain()
    assert sorted(storage.records) == ["30"]


def agreed(one: Saved, base: str | None = None) -> tuple[Commit, list[int]]:
    facts = one.record
    record, shard_bytes, _ = agree(
        SingleProcessGroup(), one.manifests[0], None, sequence=facts.sequence, saved_at=facts.saved_at, base=base
    )
    return record, shard_bytes


def test_a_tier_without_the_base_is_no_place_for_what_builds_on_it() -> None:
    one, storage = saved(10, 1, 1), Shelf()
    record, shard_bytes = agreed(one, "f" * 32)
    assert record.base == "f" * 32
    with pytest.raises(CheckpointError, match="step 10 builds on"):
        store(storage, SingleProcessGroup(), record, shard_bytes, one.manifests[0], lambda: one.chunks[0])
    assert not any(each.startswith("prepare") for each in storage.done), "nothing was touched"


def test_a_base_that_goes_while_its_difference_is_written_is_noticed() -> None:
    base, storage = saved(10, 1, 1), Shelf()
    keyframe, shard_bytes = agreed(base)
    store(storage, SingleProcessGroup(), keyframe, shard_bytes, base.manifests[0], lambda: base.chunks[0])
    one = saved(20, 2, 1)
    building, shard_bytes = agreed(one, keyframe.digest)

    def chunks() -> list[bytes]:
        storage.records.pop("10")
        return list(one.chunks[0])

    with pytest.raises(CheckpointError):
        store(storage, SingleProcessGroup(), building, shard_bytes, one.manifests[0], chunks)
    assert storage.records == {}
    with pytest.raises(CheckpointError, match="not there any more"):
        check_base(storage, building)
