"""Finding the newest whole snapshot on all ranks together, though each sees something else."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from shade.checkpoint._restore import reader, restore
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import read_newest, read_newest_alone
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import CheckpointError, CorruptCheckpointError, StorageError, StoreUnavailableError
from shade.rank_group import RankGroup, SingleProcessGroup
from tests.simulation.torture.ledger import Saved, saved
from tests.support.stepped_ranks import together
from tests.support.tiers import Near


def put(tier: Near, one: Saved) -> None:
    place = tier.prepare(one.record.step, [])
    for manifest, chunks in zip(one.manifests, one.chunks, strict=True):
        tier.put(place, Shard(manifest, chunks))
    tier.commit(place, one.record)


def storage(*saves: Saved) -> Near:
    tier = Near("storage")
    tier.is_durable = True  # type: ignore[misc]
    for one in saves:
        put(tier, one)
    return tier


def own(*saves: Saved) -> Near:
    tier = Near("shared memory")
    tier.every_rank_commits = True  # type: ignore[misc]
    for one in saves:
        put(tier, one)
    return tier


def found(tiers: list[list[Tier]], only: list[str] | None = None, step: int | None = None) -> list[Any]:
    """What each rank recovers from its own tiers: record and tensors, or the error."""

    def act(group: RankGroup) -> Any:
        got = read_newest(Reader(tiers[group.rank]), group, only, step)
        return got and (got.record, {name: bytes(tensor.numpy()) for name, tensor in got.tensors.items()}, got.tiers)

    if len(tiers) == 1:
        return [act(SingleProcessGroup())]
    return together(len(tiers), act)


FIRST, SECOND = saved(10, 1, 2), saved(20, 2, 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_gets_all_of_the_newest(num_ranks: int) -> None:
    shared = storage(FIRST, SECOND)
    results = found([[shared]] * num_ranks)
    assert all(each[:2] == (SECOND.record, SECOND.tensors) for each in results)
    assert sorted(shared.read) == [0, 0, 1, 1, 2, 2], "a shared link carries each chunk once"


def test_a_rank_reads_on_while_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is under way before the first one is sent, though each is a batch and a part by itself."""
    monkeypatch.setattr(restore, "_BATCH", 1)
    monkeypatch.setattr(reader, "_PART", 1)
    shared, is_read = storage(SECOND), threading.Event()
    read_chunks = shared.read_chunks

    def noted(*args: Any) -> Any:
        found = read_chunks(*args)
        if len(shared.read) == 6:
            is_read.set()
        return found

    monkeypatch.setattr(shared, "read_chunks", noted)

    def act(group: RankGroup) -> Any:
        send, waited = group.broadcast, []

        def broadcast(tensor: torch.Tensor, source: int) -> None:
            waited.append(is_read.wait(30))
            send(tensor, source)

        monkeypatch.setattr(group, "broadcast", broadcast)
        read_newest(Reader([shared]), group)
        return waited

    assert all(map(all, together(2, act)))


def test_what_lies_near_every_rank_is_read_by_each_and_storage_by_none() -> None:
    shared, machine = storage(SECOND), own(SECOND)
    results = found([[machine, shared]] * 2)
    assert all(each == (SECOND.record, SECOND.tensors, ["shared memory"]) for each in results)
    assert shared.read == []


def test_what_lies_near_one_rank_is_passed_on() -> None:
    shared, machine = storage(SECOND), own(SECOND)
    results = found([[shared], [machine, shared]])
    assert all(each[:2] == (SECOND.record, SECOND.tensors) for each in results)
    assert shared.read == []
    assert len(machine.read) == 6


def test_a_rank_that_sees_nothing_is_told() -> None:
    results = found([[storage()], [storage(SECOND)], [storage()]])
    assert all(each[:2] == (SECOND.record, SECOND.tensors) for each in results)


def test_ranks_take_what_was_rank_r_mod_ws() -> None:
    shared = storage(saved(10, 1, 2))

    def act(group: RankGroup) -> Any:
        got = read_newest(Reader([shared]), group)
        assert got is not None
        return got.tree["dict"][1][0]["dict"][1][0]["tensor"]

    assert together(3, act) == ["model/0", "model/1", "model/0"]


def test_damage_seen_by_one_rank_sends_all_to_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    machines = [own(FIRST, SECOND), own(FIRST, SECOND)]
    machines[1].chunks["20", 0, 1] = b"rotten"
    results = found([[each] for each in machines])
    assert all(each[:2] == (FIRST.record, FIRST.tensors) for each in results)
    told = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(told) == 1
    assert "step 20: chunk 1 of rank 0" in told[0]
    assert told[0].endswith("trying the one before")


def test_with_none_whole_the_reasons_are_told_everywhere() -> None:
    shared = storage(FIRST, SECOND)
    shared.chunks.clear()
    errors = found([[shared]] * 2)
    assert all(isinstance(each, CorruptCheckpointError) for each in errors)
    assert all("step 20: chunk" in str(each) and "step 10: chunk" in str(each) for each in errors)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_anywhere_is_a_new_run(num_ranks: int) -> None:
    assert found([[storage()]] * num_ranks) == [None] * num_ranks


def test_a_step_is_that_one_or_none() -> None:
    assert found([[storage(FIRST, SECOND)]], step=10)[0][0] == FIRST.record
    assert found([[storage(FIRST, SECOND)]], step=15) == [None]
    again = saved(10, 3, 2)
    assert found([[storage(SECOND), own(FIRST), own(again)]], step=10)[0][0] == again.record, "of two the newer"


def silent(tier: Near, error: Exception) -> Near:
    tier.failing["held"] = error
    return tier


def test_silent_storage_is_no_reason_to_go_back_to_something_old() -> None:
    for tiers in (
        [own(FIRST), silent(storage(SECOND), StorageError("stale handle"))],
        [silent(storage(), StorageError("x"))],
    ):
        (error,) = together(1, lambda group, tiers=tiers: read_newest(Reader(tiers), group))
        assert isinstance(error, CheckpointError)
        assert "every tier to answer" in str(error)
    seen = found([[silent(storage(), StorageError("stale handle"))], [storage(SECOND)]])
    assert all(each[0] == SECOND.record for each in seen), "another rank sees it"


def test_silent_memory_is_waited_for_only_where_there_is_nothing_else() -> None:
    memory = silent(Near("cluster memory"), StoreUnavailableError("gone"))
    assert found([[memory, storage(FIRST)]])[0][0] == FIRST.record
    (error,) = together(1, lambda group: read_newest(Reader([memory, storage()]), group))
    assert "bring it back" in str(error)


class Moving(Near):
    """Beside a training: while one snapshot is read, it makes place for the next, so many times."""

    def __init__(self, *saves: Saved, num_moves: int) -> None:
        super().__init__("storage")
        self.saves, self.num_moves, self.num_read = saves, num_moves, 0
        put(self, saves[0])

    def read_manifest(self, place: str, rank: int, copy: int = 0) -> bytes | None:
        self.num_read += 1
        if self.num_read <= self.num_moves:
            self.records.clear()
            self.manifests.clear()
            put(self, self.saves[self.num_read % len(self.saves)])
        return super().read_manifest(place, rank, copy)


def test_a_snapshot_that_disappears_in_mid_read_is_given_up_for_the_newer_one() -> None:
    saves = [saved(10 * number, number, 1) for number in range(1, 5)]
    got = read_newest_alone(Reader([Moving(*saves, num_moves=3)]))
    assert got is not None
    assert got.record == saves[3].record
    with pytest.raises(CorruptCheckpointError, match="lost or damaged in every copy"):
        read_newest_alone(Reader([Moving(*saves, num_moves=1000)]))
    damaged = storage(FIRST, SECOND)
    del damaged.chunks["20", 0, 0]
    got = read_newest_alone(Reader([damaged]))
    assert got is not None
    assert got.record == FIRST.record, "no new one comes"
    assert read_newest_alone(Reader([damaged]), step=30) is None


def test_a_part_is_read_by_its_chunks_alone() -> None:
    shared = storage(FIRST)
    for only, tensors in ((["model"], FIRST.tensors), (["other"], {})):
        assert found([[shared]], only=only)[0][1] == tensors
    assert len(shared.read) == 6, "for what is not there nothing is read"


def test_the_newest_sequence_counts_what_could_not_be_read() -> None:
    broken = storage(FIRST, SECOND)
    del broken.chunks["20", 0, 0]
    got = read_newest(Reader([broken]), SingleProcessGroup())
    assert got is not None
    assert (got.record.sequence, got.newest_sequence) == (1, 2)
    broken.damaged = ["30"]
    got = read_newest(Reader([broken]), SingleProcessGroup())
    assert got is not None
    assert got.newest_sequence > 1000, "the unreadable one may have any"
