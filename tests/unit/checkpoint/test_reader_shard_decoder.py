"""Chunks made out of chains of snapshots: from wherever their parts are right, and never wrong in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._codecs.exact import XorZstandard
from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._restore.reader import Reader, ShardDecoder, Snapshot, check_decodable
from shade.checkpoint._restore.restore import read_newest
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import CorruptCheckpointError
from shade.rank_group import SingleProcessGroup
from tests.simulation.torture.delta import built_on
from tests.simulation.torture.ledger import RUN, Saved
from tests.support.scripts import load_script
from tests.support.tiers import Near

WORLD_SIZE = 2


def chain() -> list[Saved]:
    """Three snapshots, each on the one before."""
    made: list[Saved] = []
    for sequence in (1, 2, 3):
        made.append(built_on(made[-1] if made else None, 10 * sequence, sequence, WORLD_SIZE))
    return made


def put(tier: Tier, one: Saved) -> str:
    place = tier.prepare(one.record.step, [manifest.stored_bytes for manifest in one.manifests])
    for rank, manifest in enumerate(one.manifests):
        tier.put(place, Shard(manifest, one.chunks[rank]))
    tier.commit(place, one.record)
    return place


def built(tiers: Sequence[Tier], number: int = 0) -> list[bytes]:
    """The data of each rank of the newest snapshot, or of one before."""
    reader = Reader(tiers)
    snapshot = reader.snapshots()[number]
    data = []
    for rank in range(WORLD_SIZE):
        manifest = reader.manifest(snapshot, rank)
        chunks = ShardDecoder(reader, snapshot, manifest).chunks(range(len(manifest.chunks)))
        data.append(b"".join(bytes(chunks[each]) for each in range(len(manifest.chunks))))
    return data


def test_a_chain_gives_every_snapshot_in_it() -> None:
    tier, saves = Near("tier"), chain()
    for one in saves:
        put(tier, one)
    for number, one in enumerate(reversed(saves)):
        assert built([tier], number) == list(one.data)
    assert saves[2].manifests[0].stored_bytes < 0.7 * saves[2].manifests[0].num_bytes


def test_snapshots_know_what_they_build_on() -> None:
    tier, saves = Near("tier"), chain()
    for one in saves:
        put(tier, one)
    newest = Reader([tier]).snapshots()[0]
    lineage: list[Commit] = []
    at: Snapshot | None = newest
    while at is not None:
        lineage.append(at.record)
        at = at.base
    assert lineage == [one.record for one in reversed(saves)]


def test_parts_come_from_wherever_they_are_right() -> None:
    near, far, saves = Near("near"), Near("far"), chain()
    put(near, saves[2])
    put(near, saves[1])
    for one in saves:
        put(far, one)
    near.chunks["30", 0, 2] = b"rot"
    near.chunks["20", 1, 1] = b"rot"
    far.chunks["20", 0, 1] = b"rot"
    assert built([near, far]) == list(saves[2].data)


def test_a_base_that_is_nowhere_is_named() -> None:
    tier, saves = Near("tier"), chain()
    put(tier, saves[0])
    put(tier, saves[2])
    with pytest.raises(CorruptCheckpointError, match=f"step 30: its base .{saves[1].record.digest}"):
        built([tier])
    with pytest.raises(CorruptCheckpointError, match="in no tier"):
        check_decodable(Reader([tier]), Reader([tier]).snapshots()[0])
    assert not any(Reader([tier]).examine(Reader([tier]).snapshots()[0])), "what is there is sound"


def test_a_base_that_is_another_one_is_found_out() -> None:
    tier, saves = Near("tier"), chain()
    for one in saves:
        put(tier, one)
    reader = Reader([tier])
    newest, _, keyframe = reader.snapshots()
    wrong = replace(newest, base=keyframe)
    with pytest.raises(CorruptCheckpointError, match="chunk 1 of rank 0 cannot be decoded"):
        ShardDecoder(reader, wrong, reader.manifest(newest, 0)).chunks([0, 1, 2])


def test_a_difference_that_is_added_twice_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, saves = Near("tier"), chain()
    for one in saves:
        put(tier, one)
    decode = XorZstandard.decode
    monkeypatch.setattr(
        XorZstandard,
        "decode",
        lambda self, stored, base, piece: decode(self, stored, decode(self, stored, base, piece), piece),
    )
    with pytest.raises(CorruptCheckpointError, match="not the one that it was encoded against"):
        built([tier])


def test_a_restore_falls_back_on_what_can_be_built(caplog: pytest.LogCaptureFixture) -> None:
    tier, saves = Near("tier"), chain()
    for one in saves:
        put(tier, one)
    tier.discard("20")
    found = read_newest(Reader([tier]), SingleProcessGroup())
    assert found is not None
    assert found.record == saves[0].record
    assert "step 30" in caplog.text


def test_shared_memory_needs_no_base(tmp_path: Path) -> None:
    """It has the data, not the difference; where that is damaged, the other tiers build it."""
    tier, saves = Near("tier"), chain()
    stage = SharedMemoryTier(RUN, 0, folder=tmp_path)
    stage.claim()
    one = saves[2]
    for rank in range(WORLD_SIZE):
        own = stage if rank == 0 else SharedMemoryTier(RUN, rank, folder=tmp_path)
        place, buffer = own.begin(len(one.data[rank]))
        buffer[: len(one.data[rank])] = torch.frombuffer(bytearray(one.data[rank]), dtype=torch.uint8)
        own.put(place, Shard(one.manifests[rank], ()))
        own.commit(place, one.record)
    assert built([stage]) == list(one.data)
    reader = Reader([stage])
    newest = reader.snapshots()[0]
    check_decodable(reader, newest)
    assert not any(reader.examine(newest))
    lying = reader.in_place(newest, one.manifests[0], [0, 1, 2])
    assert lying is not None
    assert bytes(lying) == one.data[0]
    lying[5] ^= 1
    assert reader.in_place(newest, one.manifests[0], [0, 1, 2]) is None
    (damage,) = reader.examine(newest)
    assert damage.chunks == {0: {0}}
    with pytest.raises(CorruptCheckpointError):
        built([stage])
    for each in saves:
        put(tier, each)
    assert built([stage, tier]) == list(one.data)
    stage.close()


def test_what_is_damaged_in_one_place_is_given_back_in_its_stored_form() -> None:
    near, far, saves = Near("near"), Near("far"), chain()
    for tier in (near, far):
        for one in saves:
            put(tier, one)
    near.chunks["30", 0, 1] = b"rot"
    reader = Reader([near, far])
    newest = reader.snapshots()[0]
    assert reader.repair(newest, reader.examine(newest)) == 1
    assert near.chunks["30", 0, 1] == saves[2].chunks[0][1]
    assert built([near]) == list(saves[2].data)


def test_a_snapshot_is_carried_with_what_it_builds_on() -> None:
    near, far, saves = Near("near"), Near("far"), chain()
    for one in saves:
        put(near, one)
    put(far, saves[0])
    reader = Reader([near])
    load_script("certify").copy_snapshot(reader, reader.snapshots()[0], far)
    assert built([far]) == list(saves[2].data)
    assert [each for each in far.done if each.startswith("commit")] == ["commit 10", "commit 20", "commit 30"]


class Mute(Near):
    """Counts what manifests are read."""

    num_manifests = 0

    def read_manifest(self, place: str, rank: int, copy: int = 0) -> bytes | None:
        self.num_manifests += 1
        return super().read_manifest(place, rank, copy)


def test_a_chain_is_parsed_once_a_shard() -> None:
    tier, saves = Mute("tier"), chain()
    for one in saves:
        put(tier, one)
    reader = Reader([tier])
    newest = reader.snapshots()[0]
    shard = ShardDecoder(reader, newest, reader.manifest(newest, 0))
    for number in range(3):
        shard.chunks([number])
    assert tier.num_manifests == 3


def test_nothing_is_asked_of_a_base_for_what_stands_alone() -> None:
    tier, saves = Near("tier"), chain()
    put(tier, saves[1])
    reader = Reader([tier])
    newest = reader.snapshots()[0]
    found: Mapping[int, object] = ShardDecoder(reader, newest, reader.manifest(newest, 0)).chunks([2])
    assert list(found) == [2]
