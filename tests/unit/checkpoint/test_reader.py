"""Reading from all tiers at once: nearest first, each chunk from wherever it is right, what was lost given back."""

from __future__ import annotations

import pytest

from shade.checkpoint._restore.reader import BATCH, Reader, Snapshot
from shade.checkpoint._tiers.tier import Shard
from shade.errors import CorruptCheckpointError, StorageError, StoreUnavailableError
from tests.simulation.torture.ledger import Saved, saved
from tests.support.snapshots import make, save
from tests.support.tiers import Near


@pytest.fixture
def tiers() -> tuple[Near, Near]:
    found = Near("near"), Near("far")
    for tier in found:
        for step in (10, 20):
            save(tier, make("run", step, shard_bytes=(200_000, 100_001)))
    return found


def content(reader: Reader, snapshot: Snapshot) -> list[list[bytes]]:
    return [
        [bytes(chunk) for _, chunk in reader.chunks(snapshot, reader.manifest(snapshot, rank))]
        for rank in range(snapshot.record.world_size)
    ]


def right(step: int) -> list[list[bytes]]:
    return [list(chunks) for chunks in make("run", step, shard_bytes=(200_000, 100_001)).data]


def test_snapshots_are_those_of_all_tiers_newest_first(tiers: tuple[Near, Near]) -> None:
    save(tiers[1], make("run", 30))
    found = Reader(tiers).snapshots()
    assert [(each.record.step, each.tiers) for each in found] == [
        (30, ["far"]),
        (20, ["near", "far"]),
        (10, ["near", "far"]),
    ]


def test_a_chunk_is_read_from_the_nearest_place_that_has_it_right(tiers: tuple[Near, Near]) -> None:
    near, far = tiers
    reader = Reader(tiers)
    newest = reader.snapshots()[0]
    assert content(reader, newest) == right(20)
    assert far.read == []
    near.chunks["20", 0, 3] = b"x" + near.chunks["20", 0, 3][1:]
    del near.chunks["20", 0, 5]
    near.chunks["20", 1, 0] += b"x"
    assert content(reader, newest) == right(20)
    assert far.read == [3, 5, 0]


def test_filling_goes_the_same_way(tiers: tuple[Near, Near]) -> None:
    near, far = tiers
    reader = Reader(tiers)
    newest = reader.snapshots()[0]
    near.chunks["20", 0, 1] = bytes(30_000)
    manifest = reader.manifest(newest, 0)
    buffers = [memoryview(bytearray(manifest.chunks[number].num_bytes)) for number in (1, 6)]
    reader.fill(newest, manifest, [1, 6], buffers)
    assert [bytes(each) for each in buffers] == [right(20)[0][1], right(20)[0][6]]
    assert far.read == [1]


def test_what_is_right_nowhere_is_an_error_that_names_it(tiers: tuple[Near, Near]) -> None:
    reader = Reader(tiers)
    newest = reader.snapshots()[0]
    for tier in tiers:
        tier.chunks["20", 1, 2] = bytes(30_000)
    with pytest.raises(CorruptCheckpointError, match=r"step 20: chunk 2 of rank 1 .*\(near, 20; far, 20\)"):
        content(reader, newest)
    for tier in tiers:
        tier.manifests["20", 0] = b"{}"
    with pytest.raises(CorruptCheckpointError, match="step 20: the manifest of rank 0 is lost or damaged"):
        reader.manifest(newest, 0)


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), StorageError("on fire")])
def test_a_tier_that_fails_is_left_out_and_noted(tiers: tuple[Near, Near], error: Exception) -> None:
    reader = Reader(tiers)
    newest = reader.snapshots()[0]
    tiers[0].failing["held"] = error
    assert [each.tiers for each in reader.snapshots()] == [["far"], ["far"]]
    assert reader.unreachable == {"near": str(error)}
    del tiers[0].failing["held"]
    assert reader.snapshots()[0].tiers == ["near", "far"]
    assert reader.unreachable == {}
    tiers[0].failing["read"] = error
    assert content(reader, newest) == right(20)


def test_examining_finds_every_damage_and_mending_ends_it(tiers: tuple[Near, Near]) -> None:
    near, far = tiers
    reader = Reader(tiers)
    newest = reader.snapshots()[0]
    assert not any(reader.examine(newest))
    near.chunks["20", 0, 3] = b""
    near.manifests["20", 1] = b"{}"
    del far.chunks["20", 0, 0]
    report = reader.examine(newest)
    assert [str(each) for each in report] == [
        "near, 20: manifest of rank 1, 1 chunks of rank 0",
        "far, 20: 1 chunks of rank 0",
    ]
    assert reader.repair(newest, report) == 2
    assert not any(reader.examine(newest))


def test_mending_gives_back_what_it_can(tiers: tuple[Near, Near]) -> None:
    near, far = tiers
    reader = Reader(tiers)
    newest = reader.snapshots()[0]
    for tier in tiers:
        del tier.chunks["20", 0, 0]
    del near.chunks["20", 1, 1]
    with pytest.raises(CorruptCheckpointError, match="chunk 0 of rank 0"):
        reader.repair(newest, reader.examine(newest))
    assert near.chunks["20", 1, 1] == far.chunks["20", 1, 1]


def test_many_chunks_are_asked_for_in_batches() -> None:
    tier = Near("near")
    one: Saved = saved(10, 1, 1, shard_bytes=700 * (2 * BATCH + 1))
    tier.prepare(10, [])
    tier.put("10", Shard(one.manifests[0], one.chunks[0]))
    tier.commit("10", one.record)
    reader = Reader([tier])
    (snapshot,) = reader.snapshots()
    taken = reader.chunks(snapshot, reader.manifest(snapshot, 0))
    next(taken)
    assert len(tier.read) == BATCH, "no more than a batch is in memory"
    assert [number for number, _ in taken] == list(range(1, 2 * BATCH + 1))
