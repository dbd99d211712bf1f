"""Shared memory: buffers outlive a process, records outlive nothing they should not, one process at a time."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shade import process
from shade.checkpoint._buffer import shared_memory_tier as stage_module
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._tiers.tier import Shard
from shade.errors import ConfigError, RunInUseError, StorageFullError
from tests.simulation.torture.ledger import Saved, saved

RUN = "run"


def keep(stages: list[SharedMemoryTier], one: Saved) -> str:
    """Puts a snapshot into shared memory, as the protocol does."""
    for stage, manifest, chunks in zip(stages, one.manifests, one.chunks, strict=True):
        place, buffer = stage.begin(manifest.num_bytes)
        buffer[: manifest.num_bytes] = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)
        assert stage.prepare(one.record.step, []) == place
        stage.put(place, Shard(manifest, ()))
    for stage in stages:
        stage.commit(place, one.record)
    return place


def is_whole(stage: SharedMemoryTier, place: str, one: Saved) -> bool:
    return all(
        stage.read_manifest(place, rank) == manifest.to_bytes()
        and [bytes(each or b"") for each in stage.read_chunks(place, manifest, range(len(chunks)))] == list(chunks)
        for rank, (manifest, chunks) in enumerate(zip(one.manifests, one.chunks, strict=True))
    )


def test_another_process_finds_what_a_dead_one_left(tmp_path: Path) -> None:
    one = saved(10, 1, 2, RUN)
    stages = [SharedMemoryTier(RUN, rank, folder=tmp_path) for rank in range(2)]
    place = keep(stages, one)
    for stage in stages:
        stage.close()
    later = SharedMemoryTier(RUN, 5, folder=tmp_path)
    assert later.held() == {place: one.record}
    assert is_whole(later, place, one)


def test_a_buffer_that_is_begun_holds_nothing_and_a_second_one_closes_the_gap(tmp_path: Path) -> None:
    single = SharedMemoryTier(RUN, 0, folder=tmp_path / "1")
    keep([single], saved(10, 1, 1, RUN))
    single.begin(100)
    assert single.held() == {}
    double = SharedMemoryTier(RUN, 0, num_buffers=2, folder=tmp_path / "2")
    first = keep([double], saved(10, 1, 1, RUN))
    second = keep([double], saved(20, 2, 1, RUN))
    assert first != second
    place, _ = double.begin(100)
    assert place == first
    assert {each: record.step for each, record in double.held().items()} == {second: 20}
    assert is_whole(double, second, saved(20, 2, 1, RUN))


@pytest.mark.parametrize("num_bytes", [100, 5 * 2**20])
def test_after_a_restart_the_newest_stays_whole_until_its_turn(num_bytes: int, tmp_path: Path) -> None:
    """The state of the restarted run may be longer or shorter."""
    newest = saved(30, 3, 1, RUN, shard_bytes=3 * 2**20)
    double = SharedMemoryTier(RUN, 0, num_buffers=2, folder=tmp_path)
    for one in (saved(10, 1, 1, RUN), saved(20, 2, 1, RUN)):
        keep([double], one)
    place = keep([double], newest)
    double.close()
    again = SharedMemoryTier(RUN, 0, num_buffers=2, folder=tmp_path)
    again.reserve(num_bytes)
    begun, _ = again.begin(num_bytes)
    assert begun != place
    assert again.held() == {place: newest.record}
    assert is_whole(again, place, newest)


def test_what_a_reader_beside_the_run_has_verified_stays_as_it_is(tmp_path: Path) -> None:
    one = saved(10, 1, 1, RUN)
    owner, reader = (SharedMemoryTier(RUN, 0, folder=tmp_path) for _ in range(2))
    owner.claim()
    place = keep([owner], one)
    (manifest,) = one.manifests
    found = reader.read_chunks(place, manifest, range(len(manifest.chunks)))
    assert reader.in_place(place, manifest) is None
    assert owner.in_place(place, manifest) is not None
    _, buffer = owner.begin(manifest.num_bytes)  # the next save
    buffer.fill_(7)
    assert [bytes(each or b"") for each in found] == list(one.chunks[0])
    owner.close()


def test_a_turn_that_passes_keeps_ranks_in_step(tmp_path: Path) -> None:
    stages = [SharedMemoryTier(RUN, rank, num_buffers=2, folder=tmp_path) for rank in range(2)]
    stages[0].begin(10)
    stages[1].skip()
    assert stages[0].prepare(1, []) == stages[1].prepare(1, []) == "0"
    keep(stages, saved(20, 2, 2, RUN))


def test_of_two_records_for_a_place_the_newer_counts(tmp_path: Path) -> None:
    stages = [SharedMemoryTier(RUN, rank, folder=tmp_path) for rank in range(2)]
    keep(stages, saved(10, 1, 2, RUN))
    stages[0].commit("0", saved(20, 2, 2, RUN).record)  # rank 1 died before it could
    assert stages[1].held()["0"].step == 20


def test_a_larger_state_gets_a_larger_buffer(tmp_path: Path) -> None:
    stage = SharedMemoryTier(RUN, 0, folder=tmp_path)
    _, small = stage.begin(100)
    assert len(small) == 2 * 2**20
    _, large = stage.begin(3 * 2**20)
    assert len(large) == 4 * 2**20
    large.fill_(7)
    _, again = stage.begin(100)
    assert again.data_ptr() == large.data_ptr(), "made once"


def open_files(folder: Path) -> list[int]:
    """The descriptors of this process's open files in a folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(folder)):
                found.append(int(name))
    return found


def test_no_room_is_said_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SharedMemoryTier(RUN, 0, folder=tmp_path)
    with pytest.raises(StorageFullError, match=r"bytes of shared memory in .*, got .* free"):
        stage.begin(2**60)
    assert list(stage.folder.glob("*.data")) == []
    monkeypatch.setattr(stage_module, "map_aligned", _no_room)
    _, private = SharedMemoryTier(RUN, 1, folder=tmp_path, has_others=True).begin(100)
    assert not any(private.data_ptr() in memory for memory in process._file_memory.values())
    assert list(stage.folder.glob("*.data")) == open_files(tmp_path) == []


def _no_room(*_: object) -> torch.Tensor:
    raise OSError(errno.ENOMEM, "no room")


@pytest.mark.parametrize("how", ["closed", "dropped", "made larger"])
def test_a_buffer_may_be_sent_from_its_file_until_it_ends(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "_PAUSES_SECONDS", (0,))  # the thread that makes pages huge holds the buffer
    stage = SharedMemoryTier(RUN, 0, folder=tmp_path)
    _, buffer = stage.begin(100)
    (descriptor,) = open_files(tmp_path)
    memory = process._file_memory[descriptor]
    assert (memory.start, len(memory)) == (buffer.data_ptr(), len(buffer))
    buffer[:7] = 7
    assert os.pread(descriptor, 8, 0) == b"\x07" * 7 + b"\x00"
    if how == "made larger":
        _, larger = stage.begin(3 * 2**20)
        (again,) = open_files(tmp_path)
        assert process._file_memory[again].start == larger.data_ptr()
    if how != "dropped":
        stage.close()
    del stage
    deadline = time.monotonic() + 10
    while open_files(tmp_path) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert open_files(tmp_path) == []
    assert not any(buffer.data_ptr() in each for each in process._file_memory.values())
    assert buffer[6] == 7, "a view keeps the mapping"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="a folder for snapshot buffers"):
        SharedMemoryTier(RUN, 0, folder=tmp_path / "file")


def _claims(folder: Path, run: str, answers: Any) -> None:
    stage = SharedMemoryTier(run, 0, folder=folder)
    stage.claim()
    answers.send("claimed")
    signal.pause()


@pytest.mark.multiprocess
def test_two_processes_cannot_share_buffers_and_the_dead_have_no_claim(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_claims, args=(tmp_path, RUN, theirs), daemon=True)
    process.start()
    assert ours.recv() == "claimed"
    stage = SharedMemoryTier(RUN, 0, folder=tmp_path)
    with pytest.raises(RunInUseError, match="a run id of one's own on this machine, got 'run'"):
        stage.claim()
    SharedMemoryTier(RUN, 1, folder=tmp_path).claim()
    SharedMemoryTier("another", 0, folder=tmp_path).claim()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    stage.claim()
    stage.close()
    ours.close()
    theirs.close()


def test_a_damaged_record_is_reported(tmp_path: Path) -> None:
    stage = SharedMemoryTier(RUN, 0, folder=tmp_path)
    keep([stage], saved(10, 1, 1, RUN))
    assert stage.held()
    assert list(stage.damaged) == []
    (record,) = stage.folder.glob("*.commit")
    record.write_bytes(record.read_bytes()[:-1])
    assert stage.held() == {}
    assert list(stage.damaged) == [record.name]


def test_ending_removes_what_nobody_will_come_back_for(tmp_path: Path) -> None:
    stage = SharedMemoryTier(RUN, 0, folder=tmp_path)
    keep([stage], saved(10, 1, 1, RUN))
    stage.close()
    assert stage.held()
    stage.remove()
    assert not stage.folder.exists()


def test_a_buffer_is_made_huge_once_nobody_is_writing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, is_huge = list[bool](), threading.Event()

    def try_it(memory: torch.Tensor, goes_on: Callable[[], bool]) -> bool:
        asked.append(goes_on())
        if len(asked) == 3:
            is_huge.set()
        return len(asked) == 3

    monkeypatch.setattr(stage_module, "make_huge", try_it)
    monkeypatch.setattr(stage_module, "_PAUSES_SECONDS", (0.01,) * 20)
    stage = SharedMemoryTier(RUN, 0, folder=tmp_path)
    stage.begin(100)
    assert is_huge.wait(10)
    for thread in threading.enumerate():
        if thread.name == "shade-huge-pages":
            thread.join(10)
    assert asked == [True] * 3
    stage.close()


@pytest.mark.parametrize(("is_initialized", "used", "pinned_on"), [(False, 1, []), (True, None, []), (True, 1, [1])])
def test_a_buffer_is_pinned_on_a_gpu_that_is_used_in_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_initialized: bool, used: int | None, pinned_on: list[int]
) -> None:
    """Played: elsewhere it would make a context on GPU 0, and leave a failure to the training's next kernel."""
    here, pinned, unpinned = threading.local(), [], []

    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            assert threading.current_thread() is not threading.main_thread()
            pinned.append(here.device)
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            unpinned.append(address)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: 2**20 if number == used else 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: setattr(here, "device", number))
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    tier = SharedMemoryTier(RUN, 0, folder=tmp_path)
    tier.begin(100)
    tier.close()
    assert (pinned, len(unpinned)) == (pinned_on, len(pinned_on))
