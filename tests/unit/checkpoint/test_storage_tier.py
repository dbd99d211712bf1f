"""Snapshots in a volume: laid out as documented, in the right order, read in ranges, mended, swept."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shade.checkpoint._commit.protocol import retire
from shade.checkpoint._format.manifest import ALIGNMENT, Commit, Manifest, TensorEntry, safetensors_header
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Shard
from shade.errors import CheckpointError, CorruptCheckpointError, StorageError, StorageFullError
from shade.storage.directory import DirectoryVolume
from shade.types import Bytes
from tests.support.snapshots import CHUNK, damages, make, readable, save

RUN = "run-1"


class WatchedVolume(DirectoryVolume):
    """A folder that notes what is asked of it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asked: list[tuple[str, object]] = []
        self.free: int | None = None

    def write(self, name, parts):  # type: ignore[no-untyped-def]
        self.asked.append(("write", name))
        return super().write(name, parts)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.asked.append(("read_into", (start, len(buffer))))
        super().read_into(name, start, buffer)

    def list(self, prefix: str = "") -> list[str]:
        self.asked.append(("list", prefix))
        return super().list(prefix)

    def delete_many(self, names: Sequence[str]) -> int:
        self.asked += [("delete", name) for name in names]
        return super().delete_many(names)

    def free_bytes(self) -> int | None:
        return super().free_bytes() if self.free is None else self.free


@pytest.fixture
def volume(tmp_path: Path) -> WatchedVolume:
    return WatchedVolume(str(tmp_path))


@pytest.fixture
def tier(volume: WatchedVolume) -> Iterator[StorageTier]:
    tier = StorageTier(volume, RUN)
    yield tier
    tier.close()


def test_the_layout_is_the_documented_one(tier: StorageTier, volume: WatchedVolume, tmp_path: Path) -> None:
    snapshot = make(RUN, 120)
    place = save(tier, snapshot)
    assert place == "run-1/step-0000000120"
    files = ["commit.json", "rank-0.json", "rank-0.safetensors", "rank-1.json", "rank-1.safetensors"]
    assert volume.list() == [f"{place}/{file}" for file in files]
    written = [name.removeprefix(f"{place}/") for verb, name in volume.asked if verb == "write"]  # type: ignore[attr-defined]
    assert written == ["rank-0.safetensors", "rank-0.json", "rank-1.safetensors", "rank-1.json", "commit.json"]
    assert (tmp_path / place / "rank-1.json").read_bytes() == snapshot.manifests[1].to_bytes()
    assert Commit.parse((tmp_path / place / "commit.json").read_bytes()) == snapshot.record
    assert tier.held() == {place: snapshot.record}
    assert list(damages(tier, place, snapshot)) == []


def test_others_read_it_without_us(tier: StorageTier, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    snapshot = make(RUN, 1)
    place = save(tier, snapshot)
    for rank, chunks in enumerate(snapshot.data):
        (tensor,) = safetensors.load_file(str(tmp_path / place / f"rank-{rank}.safetensors")).values()
        assert tensor.tobytes() == b"".join(chunks)


@pytest.mark.parametrize("num_tensors", [0, 1, 50, 2000])
def test_the_header_is_pages_and_names_every_tensor(num_tensors: int) -> None:
    tensors = {f"model/é.{n}": TensorEntry("F32", (2, 1), 8 * n, 8 * n + 8) for n in range(num_tensors)}
    manifest = Manifest(RUN, 3, 1, 2, "none", 8 * num_tensors, tensors, (), None)
    header = safetensors_header(manifest)
    assert len(header) % ALIGNMENT == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    entries = json.loads(header[8:])
    metadata = entries.pop("__metadata__")
    assert metadata["format"] == "pt"
    assert (metadata["run"], metadata["step"], metadata["rank"]) == (RUN, "3", "1")
    assert {name: entry["data_offsets"] for name, entry in entries.items()} == {
        name: [tensor.start, tensor.stop] for name, tensor in tensors.items()
    }
    assert all(entry["dtype"] == "F32" and entry["shape"] == [2, 1] for entry in entries.values())


def test_the_data_begins_at_a_page(tier: StorageTier, tmp_path: Path) -> None:
    snapshot = make(RUN, 1)
    file = tmp_path / save(tier, snapshot) / "rank-0.safetensors"
    assert (file.stat().st_size - snapshot.manifests[0].stored_bytes) % ALIGNMENT == 0


def test_encoded_chunks_lie_end_to_end(tier: StorageTier, tmp_path: Path) -> None:
    snapshot = make(RUN, 1, shard_bytes=[100_000])
    manifest = dataclasses.replace(snapshot.manifests[0], codec="zstd", num_bytes=500_000)
    place = tier.prepare(1, [manifest.stored_bytes])
    tier.put(place, Shard(manifest, snapshot.data[0]))
    assert (tmp_path / place / "rank-0.chunks").read_bytes() == b"".join(snapshot.data[0])
    assert [bytes(chunk or b"") for chunk in tier.read_chunks(place, manifest, [3, 0])] == [
        snapshot.data[0][3],
        snapshot.data[0][0],
    ]
    tier.repair(place, manifest, {1: snapshot.data[0][1]})
    assert (tmp_path / place / "rank-0.chunks").read_bytes() == b"".join(snapshot.data[0])


def test_neighbours_are_read_in_one_range(tier: StorageTier, volume: WatchedVolume) -> None:
    snapshot = make(RUN, 1, shard_bytes=[300_000])
    place = save(tier, snapshot)
    volume.asked.clear()
    numbers = [7, 2, 0, 1, 9, 2]
    found = tier.read_chunks(place, snapshot.manifests[0], numbers)
    assert [bytes(chunk or b"") for chunk in found] == [snapshot.data[0][number] for number in numbers]
    lengths = [what[1] for verb, what in volume.asked if verb == "read_into"]  # type: ignore[index]
    assert lengths == [3 * CHUNK, CHUNK, CHUNK]
    assert tier.read_chunks(place, snapshot.manifests[0], []) == []


def test_a_step_saved_again_leaves_the_first_until_the_second_counts(tier: StorageTier, volume: WatchedVolume) -> None:
    first, second = make(RUN, 5, sequence=1), make(RUN, 5, sequence=2)
    place = save(tier, first)
    for _ in range(2):  # one that died before its commit is no reason to look further
        again = tier.prepare(5, [1])
        assert again == f"{place}.2"
        for rank in range(2):
            tier.put(again, second.shard(rank))
        assert tier.held() == {place: first.record}
        assert list(damages(tier, place, first)) == []
    tier.commit(again, second.record)
    assert tier.held() == {place: first.record, again: second.record}
    assert list(damages(tier, again, second)) == []
    tier.discard(place)
    assert tier.held() == {again: second.record}
    assert tier.prepare(5, [1]) == place


@pytest.mark.parametrize("record", [b"rotten", b""])
def test_a_record_that_cannot_be_read_keeps_its_folder(tier: StorageTier, volume: WatchedVolume, record: bytes) -> None:
    place = save(tier, make(RUN, 5))
    path = Path(volume.url.removeprefix("file://")) / place / "commit.json"
    whole = path.read_bytes()
    path.write_bytes(record)
    assert tier.prepare(5, [1]) == f"{place}.2"
    assert tier.held() == {}
    assert tier.damaged == [place]
    path.write_bytes(whole)
    assert readable(tier, place, make(RUN, 5))


def test_what_a_dead_save_left_goes_before_the_next_one(tier: StorageTier, volume: WatchedVolume) -> None:
    place = save(tier, make(RUN, 5))
    folder = Path(volume.url.removeprefix("file://")) / place
    (folder / ".partial-00").write_bytes(b"x")
    (folder / "commit.json").unlink()
    volume.asked.clear()
    assert tier.prepare(5, [1]) == place
    deleted = [what for verb, what in volume.asked if verb == "delete"]
    assert len(deleted) == 4
    assert volume.list() == volume.leftovers() == []
    assert tier.held() == {}


def test_nothing_exists_before_its_commit_nor_after_its_removal(tier: StorageTier, volume: WatchedVolume) -> None:
    snapshot = make(RUN, 5)
    place = tier.prepare(5, [1])
    for rank in range(2):
        assert tier.held() == {}
        tier.put(place, snapshot.shard(rank))
    assert tier.held() == {}
    tier.commit(place, snapshot.record)
    assert set(tier.held()) == {place}
    volume.asked.clear()
    tier.discard(place)
    assert ("delete", f"{place}/commit.json") == next(call for call in volume.asked if call[0] == "delete")
    assert tier.held() == {}
    assert volume.list() == []
    tier.discard(place)


def test_a_commit_looks_whether_all_is_there(tier: StorageTier) -> None:
    snapshot = make(RUN, 5)
    place = tier.prepare(5, [1])
    tier.put(place, snapshot.shard(0))
    with pytest.raises(StorageError, match="rank 1"):
        tier.commit(place, snapshot.record)
    assert tier.held() == {}


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_the_wrong_length_is_refused(tier: StorageTier, change: int) -> None:
    snapshot = make(RUN, 5, shard_bytes=[100_000])
    chunks: list[Bytes] = list(snapshot.data[0])
    chunks = chunks[:-1] if change < 0 else [*chunks, b"x"]
    with pytest.raises(CheckpointError, match="save again"):
        tier.put(tier.prepare(5, [1]), Shard(snapshot.manifests[0], chunks))


def test_the_held_are_listed_at_once_and_the_damaged_left_out(
    tier: StorageTier, volume: WatchedVolume, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = [save(tier, make(RUN, step, shard_bytes=[10])) for step in range(40)]
    save(StorageTier(volume, "run-10"), make("run-10", 1))
    volume.asked.clear()
    assert sorted(tier.held()) == places
    assert [call for call in volume.asked if call[0] == "list"] == [("list", f"{RUN}/step-")]
    record = tmp_path / places[7] / "commit.json"
    content = bytearray(record.read_bytes())
    content[30] ^= 1
    record.write_bytes(content)
    (tmp_path / places[8] / "commit.json").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert sorted(tier.held()) == [place for place in places if place not in places[7:9]]
    assert places[7] in caplog.text
    assert places[8] in caplog.text


def test_retention_reads_a_record_once_and_of_what_stays_all_none(
    tier: StorageTier, volume: WatchedVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = volume.read_many
    monkeypatch.setattr(volume, "read_many", lambda names: read.extend(names) or plain(names))
    known: dict[str, Commit] = {}
    for number in range(1, 9):
        save(tier, make(RUN, number % 4, sequence=number, shard_bytes=(1000,)))
        retire(tier, Keep.parse("last=3"), known=known)
        assert sorted(known) == sorted(tier.held())
        assert known == tier.held()
    read.clear()
    retire(tier, Keep.parse("last=3"), known=known)
    retire(tier, Keep.parse("all"))
    assert read == []


def test_what_is_missing_or_cut_off_is_none(tier: StorageTier, tmp_path: Path) -> None:
    snapshot = make(RUN, 1, shard_bytes=[200_000, 200_000])
    place, manifest = save(tier, snapshot), snapshot.manifests[0]
    data = tmp_path / place / "rank-0.safetensors"
    os.truncate(data, data.stat().st_size - 50_000)
    found = tier.read_chunks(place, manifest, range(7))
    assert [chunk is not None and bytes(chunk) == snapshot.data[0][n] for n, chunk in enumerate(found)] == [
        *[True] * 5, False, False,
    ]  # fmt: skip
    data.unlink()
    assert tier.read_chunks(place, manifest, range(7)) == [None] * 7
    (tmp_path / place / "rank-0.json").unlink()
    assert tier.read_manifest(place, 0) is None
    assert tier.read_manifest(place, 1) == snapshot.manifests[1].to_bytes()


def test_a_sector_that_cannot_be_read_costs_its_chunk(
    tier: StorageTier, volume: WatchedVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make(RUN, 1, shard_bytes=[200_000])
    place = save(tier, snapshot)
    bad = len(safetensors_header(snapshot.manifests[0])) + 3 * CHUNK + 5
    operations = volume._operations
    real = operations.read_into

    def read_into(path: str, start: int, buffer: memoryview) -> int:
        if start <= bad < start + len(buffer):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, start, buffer)

    monkeypatch.setattr(operations, "read_into", read_into)
    found = tier.read_chunks(place, snapshot.manifests[0], range(7))
    assert [chunk is None for chunk in found] == [number == 3 for number in range(7)]


@pytest.mark.parametrize("damage", ["flip", "cut", "removed", "header", "manifest", "manifest removed", "none"])
def test_repair(tier: StorageTier, volume: WatchedVolume, tmp_path: Path, damage: str) -> None:
    snapshot = make(RUN, 1, shard_bytes=[200_000])
    place, manifest = save(tier, snapshot), snapshot.manifests[0]
    whole = {name: volume.read(name) for name in volume.list()}
    data, words = tmp_path / place / "rank-0.safetensors", tmp_path / place / "rank-0.json"
    content = bytearray(data.read_bytes())
    bad: list[int] = []
    if damage in ("flip", "header"):
        content[-100_000 if damage == "flip" else 40] ^= 4
        data.write_bytes(content)
        bad = [3] if damage == "flip" else []
    elif damage == "cut":
        os.truncate(data, len(content) - 70_000)
        bad = [4, 5, 6]
    elif damage == "removed":
        data.unlink()
        bad = list(range(7))
    elif damage == "manifest":
        words.write_bytes(b"{}")
    elif damage == "manifest removed":
        words.unlink()
    found = [number for _, _, number in damages(tier, place, snapshot)]
    assert [number for number in found if number >= 0] == bad
    volume.asked.clear()
    if bad:
        before = data.read_bytes() if data.exists() else None
        with pytest.raises(CorruptCheckpointError, match="is not written again: its chunk"):
            tier.repair(place, manifest, {number: snapshot.data[0][number] for number in range(7) if number not in bad})
        assert (data.read_bytes() if data.exists() else None) == before, "what is unreadable now may be readable later"
    tier.repair(place, manifest, {number: snapshot.data[0][number] for number in bad})
    assert {name: volume.read(name) for name in volume.list()} == whole
    assert readable(tier, place, snapshot)
    writes = [what for verb, what in volume.asked if verb == "write"]
    assert (writes == []) == (damage == "none")
    volume.asked.clear()
    tier.repair(place, manifest, {})
    assert not [call for call in volume.asked if call[0] == "write"], "what is whole is left alone"


def test_a_full_disk_says_no_before_anything_is_lost(tier: StorageTier, volume: WatchedVolume) -> None:
    old = make(RUN, 1)
    place = save(tier, old)
    volume.free = 5_000_000
    for step in (1, 2):
        with pytest.raises(StorageFullError, match=r"expected room for 1\d\.\d MB in file.*; free some space"):
            tier.prepare(step, [5_000_000, 5_000_000])
    assert tier.held() == {place: old.record}
    assert list(damages(tier, place, old)) == []
    tier.prepare(2, [1_000_000, 1_000_000])
    volume.free = 1_100_000  # with what a dead save has left there it is enough
    for rank in range(2):
        tier.put(tier.prepare(3, [1]) if rank == 0 else f"{RUN}/step-0000000003", make(RUN, 3).shard(rank))
    assert tier.prepare(3, [100_000, 100_000]) == f"{RUN}/step-0000000003"


def test_sweeping_removes_what_never_came_to_its_end(tier: StorageTier, volume: WatchedVolume, tmp_path: Path) -> None:
    kept = {step: save(tier, make(RUN, step)) for step in (10, 20)}

    def begin(step: int) -> str:
        place = tier.prepare(step, [1])
        tier.put(place, make(RUN, step).shard(0))
        (tmp_path / place / ".partial-00").write_bytes(b"half")
        return place

    begun = {step: begin(step) for step in (5, 15, 17, 25)}
    (tmp_path / RUN / "step-0000000012").mkdir()
    (tmp_path / RUN / "step-0000000012" / ".partial-00").write_bytes(b"half")
    (tmp_path / RUN / "notes.txt").write_bytes(b"mine")
    assert tier.sweep(keep=[begun[17]]) == [begun[5], f"{RUN}/step-0000000012", begun[15]]
    assert sorted(tier.held()) == sorted(kept.values())
    assert sorted(os.listdir(tmp_path / RUN)) == [
        "notes.txt",
        *(f"step-{step:010d}" for step in (10, 17, 20, 25)),
    ]
    assert len(volume.leftovers()) == 2, "what may be being written is left alone"
    assert tier.sweep(keep=[begun[17]]) == []


def test_without_a_snapshot_nothing_is_swept(tier: StorageTier) -> None:
    tier.put(tier.prepare(5, [1]), make(RUN, 5).shard(0))
    assert tier.sweep() == []


def test_the_only_writer_sweeps_newer_folders_too(tier: StorageTier, volume: WatchedVolume, tmp_path: Path) -> None:
    kept = save(tier, make(RUN, 10))
    damaged = save(tier, make(RUN, 30))
    (tmp_path / damaged / "commit.json").write_bytes(b"{")
    begun = []
    for step in (5, 20, 40):
        begun.append(tier.prepare(step, [1]))
        tier.put(begun[-1], make(RUN, step).shard(0))
        (tmp_path / begun[-1] / ".partial-00").write_bytes(b"half")
    (tmp_path / RUN / "step-0000000004").mkdir()  # a removal was killed before its last operation
    assert tier.sweep(is_only_writer=True) == begun
    assert sorted(os.listdir(tmp_path / RUN)) == [Path(kept).name, Path(damaged).name], (
        "a record that is unreadable now"
    )
    assert list(damages(tier, kept, make(RUN, 10))) == []
    assert volume.leftovers() == []


def test_what_is_committed_while_it_is_swept_stays(tier: StorageTier, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make(RUN, 5)
    place = tier.prepare(5, [1])
    for rank in range(snapshot.record.world_size):
        tier.put(place, snapshot.shard(rank))
    list_names = tier._volume.list
    fired = []

    def list_then_commit(prefix: str = "") -> list[str]:
        names = list(list_names(prefix))
        if not fired:
            fired.append(prefix)
            tier.commit(place, snapshot.record)
        return names

    monkeypatch.setattr(tier._volume, "list", list_then_commit)
    assert tier.sweep(is_only_writer=True) == []
    assert fired
    assert list(damages(tier, place, snapshot)) == []


def test_flips_and_cuts_are_never_taken_for_the_snapshot(tier: StorageTier, tmp_path: Path) -> None:
    snapshot = make(RUN, 1, shard_bytes=[100_000])
    place = save(tier, snapshot)
    files = sorted((tmp_path / place).iterdir())
    dice = random.Random(1)
    for _ in range(300):
        file = dice.choice(files)
        whole = file.read_bytes()
        position = dice.randrange(len(whole))
        if dice.random() < 0.5:
            file.write_bytes(whole[:position])
        else:
            file.write_bytes(
                whole[:position] + bytes([whole[position] ^ 1 << dice.randrange(8)]) + whole[position + 1 :]
            )
        record = tier.held().get(place)
        if file.name == "commit.json":
            assert record is None
        else:
            assert record == snapshot.record
            header_only = file.suffix == ".safetensors" and position < len(safetensors_header(snapshot.manifests[0]))
            # A cut loses chunks even there; a flip of a header that nobody needs loses nothing.
            is_cut = file.stat().st_size < len(whole)
            assert readable(tier, place, snapshot) == (header_only and not is_cut)
        file.write_bytes(whole)
    assert readable(tier, place, snapshot)
