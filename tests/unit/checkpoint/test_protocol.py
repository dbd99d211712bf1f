"""The four steps to a commit: one rank's failure is every rank's, whatever fails and however."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import pytest

from shade.checkpoint._commit.protocol import agree, store
from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._tiers.tier import Shard
from shade.errors import CheckpointError, StorageError
from shade.rank_group import RankGroup, SingleProcessGroup
from tests.simulation.torture.ledger import Saved, saved
from tests.support.stepped_ranks import together
from tests.support.tiers import Shelf

T = TypeVar("T")


class Place(Shelf):
    """A shelf that several ranks use at once."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.fails: dict[str, Exception] = {}

    def put(self, place: str, shard: Shard) -> None:
        if error := self.fails.get(f"put {shard.manifest.rank}"):
            raise error
        with self.lock:
            super().put(place, shard)

    def commit(self, place: str, record: Commit) -> None:
        if error := self.fails.get("commit"):
            raise error
        super().commit(place, record)


def agreed(group: RankGroup, one: Saved, error: str | None = None, **said: Any) -> tuple[Commit, list[int], Pace]:
    manifest = None if error else one.manifests[group.rank]
    more = {"sequence": one.record.sequence, "saved_at": one.record.saved_at, **said}
    return agree(group, manifest, error, **more)


def save(tier: Place, one: Saved, group: RankGroup) -> str:
    manifest = one.manifests[group.rank]
    record, shard_bytes, _ = agreed(group, one)
    assert record == one.record
    assert shard_bytes == [each.stored_bytes for each in one.manifests]
    return store(tier, group, record, shard_bytes, manifest, lambda: one.chunks[group.rank])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_all_ranks_learn_where_it_is(num_ranks: int) -> None:
    tier, one = Place(), saved(10, 1, num_ranks)
    found = together(num_ranks, lambda group: save(tier, one, group))
    assert found == ["10"] * num_ranks
    assert [each for each in tier.done if each.startswith(("prepare", "commit"))] == ["prepare 10", "commit 10"]
    assert tier.done[-1] == "commit 10", "last of all"
    assert tier.held() == {"10": one.record}


@pytest.mark.parametrize("failing", ["prepare", "put 0", "put 2", "commit"])
@pytest.mark.parametrize("error", [StorageError("the disk is on fire"), ValueError("a bug"), OSError(5, "EIO")])
def test_one_that_fails_fails_for_all_and_leaves_nothing(failing: str, error: Exception) -> None:
    tier, one = Place(), saved(10, 1, 3)
    tier.fails[failing] = error
    if failing == "prepare":
        tier.failing["prepare"] = error
    found = together(3, lambda group: save(tier, one, group))
    assert [type(each) for each in found] == [CheckpointError] * 3
    assert len({str(each) for each in found}) == 1
    assert str(error) in str(found[0])
    if failing != "prepare":
        assert tier.done[-1] == "discard 10"
    assert tier.held() == {}


def test_one_without_a_snapshot_is_an_error_everywhere_with_its_rank() -> None:
    one = saved(10, 1, 3)

    def act(group: RankGroup) -> Any:
        if group.rank == 1:
            return agreed(group, one, "'model/x' changed")
        return agreed(group, one)

    found = together(3, act)
    assert {str(each) for each in found} == {"rank 1: 'model/x' changed"}
    assert all(isinstance(each, CheckpointError) for each in found)


def test_ranks_that_save_different_steps_or_models_are_refused() -> None:
    def steps(group: RankGroup) -> Any:
        one = saved(10 + group.rank, 1, 2)
        return agreed(group, one)

    assert all("every rank to save the same step" in str(each) for each in together(2, steps))

    def models(group: RankGroup) -> Any:
        one = saved(10, 1, 3)
        return agreed(group, one, replica="other" if group.rank == 2 else "same")

    assert all("got 'others on ranks [2] than on 0'" in str(each) for each in together(3, models))


def test_the_record_is_rank_0s_and_newer_than_what_any_rank_sees() -> None:
    one = saved(10, 7, 2)

    def act(group: RankGroup) -> Any:
        rank = group.rank
        return agreed(group, one, sequence=7 + rank, saved_at=7.0 + rank, metrics={"loss": float(rank)})

    first, second = together(2, act)
    assert first == second
    assert (first[0].sequence, first[0].saved_at, first[0].metrics) == (8, 7.0, {"loss": 0.0})


def test_a_dead_rank_is_an_error_and_no_commit() -> None:
    tier, one = Place(), saved(10, 1, 2)

    def act(group: RankGroup) -> Any:
        manifest = one.manifests[group.rank]
        record, shard_bytes, _ = agreed(group, one)
        if group.rank == 1:
            raise SystemError("gone")
        return store(tier, group, record, shard_bytes, manifest, lambda: one.chunks[group.rank])

    first, second = together(2, act)
    assert isinstance(first, RuntimeError)
    assert isinstance(second, SystemError)
    assert tier.held() == {}


def test_alone_there_is_nobody_to_wait_for() -> None:
    tier, one = Place(), saved(10, 1, 1)
    assert save(tier, one, SingleProcessGroup()) == "10"
