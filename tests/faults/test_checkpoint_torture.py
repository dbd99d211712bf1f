"""The torture finds nothing in the protocol and every bug that is planted in it; what it stands on is right itself."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import runpy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._codecs.base import Piece
from shade.checkpoint._codecs.exact import XorZstandard
from shade.checkpoint._commit import protocol
from shade.checkpoint._flush import flusher
from shade.checkpoint._flush.flusher import Flusher
from shade.checkpoint._format import retention
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._restore import reader
from shade.checkpoint._restore.reader import Reader, Snapshot
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import ShadeError
from shade.rank_group import RankGroup
from shade.storage.directory import DirectoryVolume
from shade.store._servers.server import LocalServer
from shade.types import Bytes
from tests.simulation.torture import bench, campaign, live, outside
from tests.simulation.torture.campaign import faults, quiet, scenarios
from tests.simulation.torture.disk import OUTCOMES, Disk, DiskView
from tests.simulation.torture.scenario import SETUPS, Stand, episodes, play
from tests.simulation.torture.world import Act, CrashedError, Fault, World

pytestmark = pytest.mark.multiprocess

NUM_FAST = 120
main = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "torture"))["main"]


def setup_named(name: str) -> bench.Setup:
    (found,) = [each for each in SETUPS if each.name == name]
    return found


@pytest.fixture(scope="module")
def every() -> list[Any]:
    """Every scenario of seed 0; taking the list runs each episode once without a fault."""
    with quiet():
        return list(scenarios(0))


def test_a_sample_of_all_scenarios_keeps_every_promise(every: list[Any]) -> None:
    chosen = random.Random(1).sample(every, NUM_FAST)
    report = campaign.run(chosen, 0)
    assert [(str(scenario), told) for scenario, told in report.failures] == []
    assert report.num_scenarios == report.num_struck == NUM_FAST
    assert report.num_operations > 10 * NUM_FAST


@pytest.mark.parametrize("episode", ["next save", "same step again"])
def test_a_record_that_cannot_be_read_costs_no_snapshot(episode: str) -> None:
    """The order in which a folder is listed, and so the fate of a base, depends on the seed."""
    objections, num_struck = [], 0
    with quiet():
        for seed in (9153, 31337):
            stand = Stand(setup_named("storage, in deltas"), 2, seed)
            for operation in play(stand, episode).operations:
                if str(operation).endswith("commit.json") and "read_into" in str(operation):
                    verdict = play(stand, episode, Fault(operation.number, "EIO", "before"))
                    objections += verdict.objections
                    num_struck += verdict.struck is not None
    assert objections == []
    assert num_struck >= 10


def test_every_operation_of_every_episode_is_struck(every: list[Any]) -> None:
    struck: dict[tuple[str, int, str], set[int]] = {}
    for _, scenario in every:
        key = (scenario.setup.name, scenario.world_size, scenario.episode)
        struck.setdefault(key, set()).add(scenario.fault.at)
    assert len(struck) == sum(3 * len(episodes(setup)) for setup in SETUPS)
    for numbers in struck.values():
        assert numbers == set(range(max(numbers) + 1))
    kinds = {scenario.fault.kind for _, scenario in every}
    assert {"crash", "flip", "stall", "EIO", "ENOSPC", "time-out", "full", "partition", "server gone"} <= kinds


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_all_scenarios_keep_every_promise(every: list[Any], part: int) -> None:
    report = campaign.run(every[part::8], 0)
    assert [(str(scenario), told) for scenario, told in report.failures] == []
    assert report.num_struck == report.num_scenarios


def test_the_same_seed_gives_the_same_operations_and_another_other_turns() -> None:
    def told(seed: int) -> list[str]:
        stand = Stand(setup_named("memory and storage"), 3, seed)
        with quiet():
            return [str(each) for each in play(stand, "save while flushing", Fault(40, "crash", "within")).operations]

    assert told(0) == told(0)
    assert told(0) != told(1)


# ── planted bugs ────────────────────────────────────────────────────────────────────────────────────────────────────


def store_record_first(
    tier: Tier,
    group: RankGroup,
    record: Commit,
    shard_bytes: Sequence[int],
    manifest: Manifest,
    chunks: Callable[[], Iterable[Bytes]],
) -> str:
    place = group.share(tier.prepare(record.step, shard_bytes) if group.rank == 0 else None)
    if group.rank == 0:
        tier.commit(place, record)
    group.gather(None)
    tier.put(place, Shard(manifest, chunks()))
    group.gather(None)
    return place


def store_without_a_vote(
    tier: Tier,
    group: RankGroup,
    record: Commit,
    shard_bytes: Sequence[int],
    manifest: Manifest,
    chunks: Callable[[], Iterable[Bytes]],
) -> str:
    place = group.share(tier.prepare(record.step, shard_bytes) if group.rank == 0 else None)
    with contextlib.suppress(ShadeError):  # the bug: nobody hears of it
        tier.put(place, Shard(manifest, chunks()))
    group.gather(None)
    if group.rank == 0:
        tier.commit(place, record)
    group.gather(None)
    return place


def put_without_a_vote(
    tier: Tier, group: RankGroup, place: str, manifest: Manifest, chunks: Callable[[], Iterable[Bytes]]
) -> None:
    with contextlib.suppress(ShadeError):  # the bug: nobody hears of it
        tier.put(place, Shard(manifest, chunks()))
    group.gather(None)
    return place


def plant_record_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bench, "store", store_record_first)


def plant_record_first_unchecked(patch: pytest.MonkeyPatch) -> None:
    plant_record_first(patch)

    def wrong(self: StorageTier, place: str, record: Commit) -> None:
        self._volume.write(f"{place}/commit.json", [record.to_bytes()])

    patch.setattr(StorageTier, "commit", wrong)


def plant_no_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bench, "store", store_without_a_vote)


def plant_no_early_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bench, "put", put_without_a_vote)


def plant_clean_too_early(patch: pytest.MonkeyPatch) -> None:
    write = Flusher._write

    def wrong(self: Flusher, place: str, record: Any) -> int:
        self.memory.mark_clean(place, record.step)
        return write(self, place, record)

    patch.setattr(flusher.Flusher, "_write", wrong)


def plant_record_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedMemoryTier, "discard", lambda self, place: None)


def plant_no_sync(patch: pytest.MonkeyPatch) -> None:
    fill = DirectoryVolume._fill

    class Unsynced:
        def __init__(self, file: Any) -> None:
            self.write, self.close = file.write, file.close

        def sync(self) -> None: ...

    patch.setattr(DirectoryVolume, "_fill", lambda self, file, parts, name: fill(self, Unsynced(file), parts, name))


def plant_no_folder_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DirectoryVolume, "_sync_up", lambda self, folder, made: None)


def plant_one_place_a_step(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: StorageTier, step: int) -> tuple[str, Sequence[str]]:
        place = f"{self._run}/step-{step:010d}"
        return place, self._volume.list(f"{place}/")

    patch.setattr(StorageTier, "_free_location", wrong)


def plant_record_removed_last(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: StorageTier, place: str, names: Iterable[str]) -> None:
        self._volume.delete_many(sorted(names, key=lambda name: name.endswith("/commit.json")))

    patch.setattr(StorageTier, "_remove", wrong)


def plant_blind_reader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reader, "is_sound", lambda manifest, number, content: content is not None)


def plant_base_removed_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "lineage", lambda record, known: iter(()))


def plant_wrong_base(patch: pytest.MonkeyPatch) -> None:
    snapshots = Reader.snapshots

    def wrong(self: Reader) -> list[Snapshot]:
        found = snapshots(self)
        keyframe = next((each for each in found if each.record.base is None), None)
        return [each if each.base is None else dataclasses.replace(each, base=keyframe) for each in found]

    patch.setattr(Reader, "snapshots", wrong)


def plant_difference_added_twice(patch: pytest.MonkeyPatch) -> None:
    decode = XorZstandard.decode

    def wrong(self: XorZstandard, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        return decode(self, stored, decode(self, stored, base, piece), piece)

    patch.setattr(XorZstandard, "decode", wrong)


def plant_twice_and_nobody_looks(patch: pytest.MonkeyPatch) -> None:
    plant_difference_added_twice(patch)
    patch.setattr(reader, "matches_data_digest", lambda manifest, number, data: True)


def plant_difference_without_base(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(protocol, "check_base", lambda tier, record: None)
    patch.setattr(flusher, "check_base", lambda tier, record: None)
    patch.setattr(Flusher, "_missing_chain", lambda self, place, record: [(place, record)])


PLANTED = [
    (plant_record_first_unchecked, "storage", 1, "first save", "crash", "without its snapshot"),
    (plant_record_first, "memory", 2, "next save", "crash", "without its snapshot"),
    (plant_no_vote, "memory", 2, "first save", "full", "without its snapshot"),
    (plant_no_early_vote, "memory and storage, streamed", 2, "first save", "full", "without its snapshot"),
    (plant_clean_too_early, "memory and storage", 1, "flush", "crash", "is clean in memory"),
    (plant_record_stays, "storage", 1, "next save", "crash", "without its snapshot"),
    (plant_no_sync, "storage", 1, "next save", "crash", "had been promised"),
    (plant_no_folder_sync, "storage", 1, "next save", "crash", "had been promised"),
    (plant_one_place_a_step, "storage", 1, "same step again", "crash", "had been promised"),
    (plant_record_removed_last, "storage", 1, "next save", "crash", "without its snapshot"),
    (plant_blind_reader, "storage", 1, "next save", "flip", "with wrong bytes, silently"),
    (plant_base_removed_too_early, "storage, in deltas", 1, "next save", "crash", "without its snapshot"),
    (plant_base_removed_too_early, "memory and storage, in deltas", 1, "flush", "crash", "without its snapshot"),
    (plant_wrong_base, "storage, in deltas", 1, "next save", "crash", "without its snapshot"),
    (plant_difference_added_twice, "memory and storage, in deltas", 1, "next save", "crash", "without its snapshot"),
    (plant_twice_and_nobody_looks, "storage, in deltas", 1, "next save", "crash", "with wrong bytes, silently"),
    (
        plant_difference_without_base,
        "memory and storage, in deltas",
        1,
        "save while flushing",
        "time-out",
        "without its",
    ),
]


@pytest.mark.parametrize(("plant", "setup", "num_ranks", "episode", "kind", "complaint"), PLANTED)
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    setup: str,
    num_ranks: int,
    episode: str,
    kind: str,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = Stand(setup_named(setup), num_ranks, 0)
    with quiet():
        sound = play(stand, episode)
        assert sound.objections == []
        plant(monkeypatch)
        planted = Stand(setup_named(setup), num_ranks, 0)
        tried = [
            fault
            for operation in play(planted, episode).operations
            for fault in faults(operation, num_ranks, has_flusher="flush" in episode)
            if fault.kind == kind
        ]
        for fault in tried:
            told = play(planted, episode, fault).objections
            if any(complaint in each for each in told):
                return
    raise AssertionError(f"{len(tried)} scenarios, and not one objection")


# ── what it stands on ───────────────────────────────────────────────────────────────────────────────────────────────


def written(outcome: str, seed: int = 0) -> dict[str, bytes]:
    """A disk with one file synced, one renamed over it unsynced, and one without anything synced."""
    disk = Disk()
    view = DiskView(World(0), disk, "process")
    DirectoryVolume("/v", view).write("old", [b"o" * 2000])
    file = view.create("/v/new")
    file.write(memoryview(b"n" * 2000))
    view.rename("/v/new", "/v/old")
    view.create("/v/empty").write(memoryview(b"x"))
    left = disk.after_power_failure(outcome, random.Random(seed))
    return {path: bytes(content) for path, content in left.files()}


def test_a_disk_forgets_what_was_not_synced() -> None:
    assert written("kept") == {"/v/old": b"n" * 2000, "/v/empty": b"x"}
    assert written("lost") == {"/v/old": b"o" * 2000}
    assert written("names") == {"/v/old": b"", "/v/empty": b""}
    seen = {tuple(sorted(written("torn", seed).items())) for seed in range(200)}
    assert len(seen) > 20
    assert (("/v/old", b"o" * 2000),) in seen
    assert {path for each in seen for path, _ in each} == {"/v/old", "/v/new", "/v/empty"}
    assert any(b"n" in dict(each).get("/v/old", b"") and b"\0" in dict(each)["/v/old"] for each in seen)


def test_a_synced_file_survives_every_outcome() -> None:
    for outcome in OUTCOMES:
        disk = Disk()
        DirectoryVolume("/v", DiskView(World(0), disk, "process")).write("a/b", [b"x" * 3000])
        left = disk.after_power_failure(outcome, random.Random(0))
        assert dict(left.files()) == {"/v/a/b": bytearray(b"x" * 3000)}


def test_the_virtual_disk_does_what_the_real_one_does(tmp_path: Any) -> None:
    def use(volume: DirectoryVolume) -> list[Any]:
        said: list[Any] = [volume.list(), volume.size_bytes("a"), volume.read_many(["a", "b/c"])]
        said += [
            volume.write("b/c", [b"12", b"34"]),
            volume.write("a", [b""]),
            volume.list("b/"),
            volume.read("b/c", 1, 3),
        ]
        said += [volume.delete_many(["b/c", "x"]), volume.list(), volume.sweep(), volume.write("a/d", [b""])]
        return said

    for volume in (DirectoryVolume(str(tmp_path / "v")), DirectoryVolume("/v", DiskView(World(0), Disk(), "process"))):
        with pytest.raises(ShadeError, match="a file is where a folder should be"):
            use(volume)
    first, second = DirectoryVolume(str(tmp_path / "w")), DirectoryVolume("/w", DiskView(World(0), Disk(), "process"))
    for volume in (first, second):
        volume.write("d/e", [b"12345"])
    assert first.list() == second.list()
    assert first.read("d/e", 2, 4) == second.read("d/e", 2, 4) == b"34"
    assert first.delete_many(["d/e", "d/e"]) == second.delete_many(["d/e", "d/e"]) == 1


def test_one_process_runs_at_a_time_and_the_dead_are_dead() -> None:
    world = World(3, Fault(2, "crash", "after"))
    inside: list[str] = []
    done: list[str] = []

    def process(name: str) -> Callable[[], None]:
        def work() -> None:
            for _ in range(4):
                inside.append(name)
                assert inside == [name], "two at once"
                inside.remove(name)
                world.perform(name, Act("disk", "write", name, lambda: done.append(name)))

        return work

    ends = world.run({name: process(name) for name in ("rank 0", "rank 1", "flusher")})
    assert world.struck is not None
    dead = world.struck.actor
    assert {name for name, end in ends.items() if isinstance(end, CrashedError)} == {dead}
    assert [name for name, end in ends.items() if end is None] == [name for name in ends if name != dead]
    assert len(done) == len(world.operations)
    assert done.count(dead) <= 3


def test_a_collective_with_a_dead_rank_ends_for_the_others() -> None:
    world = World(0, Fault(0, "crash"))
    groups = world.groups(3)

    def rank(number: int) -> Callable[[], None]:
        def work() -> None:
            if number == 1:
                world.perform("rank 1", Act("disk", "write", "x", lambda: None))
            groups[number].gather(number)

        return work

    ends = world.run({f"rank {number}": rank(number) for number in range(3)})
    assert isinstance(ends["rank 1"], CrashedError)
    assert {str(ends["rank 0"]), str(ends["rank 2"])} == {"connection closed by peer"}


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_command_reports_and_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "1", "--sample", "5", "--seed", "2"]) == 0
    assert "5 scenarios" in capsys.readouterr().out
    assert main(["--ranks", "1", "--scenario", "3"]) == 0
    told = capsys.readouterr().out
    assert "operation 0, rank 0: shared memory begin" in told
    assert "1 scenarios" in told


@pytest.mark.slow
def test_the_command_fails_where_a_promise_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "SETUPS", [setup_named("storage")])
    plant_one_place_a_step(monkeypatch)
    assert main(["--ranks", "1", "--sample", "120"]) == 1
    told = capsys.readouterr().out
    assert "BROKEN" in told
    assert "again: scripts/torture --seed 0 --scenario " in told


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_real_processes_on_a_real_disk_and_store(tmp_path: Any, kills: int) -> None:
    with LocalServer() as server:
        report = live.torture(str(server.url.reveal()), str(tmp_path), kills=kills, seed=1)
    assert report.objections == []
    assert report.num_kills == kills
    assert report.num_saves > 0
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "modes", "fault"),
    [
        (5, "before", ""),
        (2, "before", "the old is removed before the new is there"),
        (3, "unsynced", "nothing is synced"),
    ],
)
def test_a_program_that_is_not_ours_finds_what_is_planted_and_nothing_else(
    tmp_path: Path, number: int, modes: str, fault: str
) -> None:
    pytest.importorskip("ckpt_chaos")
    scene = dataclasses.replace(outside.SCENES[number], modes=modes)
    found = outside.play(scene, tmp_path / "out", points=7, options=("--fault", fault) if fault else ())
    assert found.num_struck >= 5
    assert found.verdicts["PASS"] >= 1
    assert bool(found.failures) == bool(fault), found.failures
