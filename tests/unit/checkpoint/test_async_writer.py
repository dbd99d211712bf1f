"""Where the writer writes: memory first, storage if it must, shared memory always; it logs a failing tier once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._save.async_writer import AsyncWriter, CommitResult, SaveHandle, SaveRequest
from shade.checkpoint._save.packing import Packer
from shade.errors import CheckpointError, RunInUseError, StorageError, StoreFullError, TornSnapshotError
from shade.rank_group import SingleProcessGroup
from tests.simulation.torture.ledger import RUN, saved
from tests.support.tiers import Near


class Rig:
    """A writer, its tiers, and what it has reported."""

    def __init__(self, folder: Path, *, has_memory: bool = True, has_storage: bool = True) -> None:
        self.shared_memory = SharedMemoryTier(RUN, 0, folder=folder)
        self.memory, self.storage = Near("cluster memory"), Near("storage")
        self.results: list[CommitResult] = []
        self.may_save: Callable[[], None] = lambda: None
        self.writer = AsyncWriter(
            [SingleProcessGroup()],
            self.shared_memory,
            self.memory if has_memory else None,
            self.storage if has_storage else None,
            Packer(RUN, 0, 1, "none"),
            lambda: self.may_save(),
            self.results.append,
        )

    def send(self, step: int, copied: Exception | None = None) -> SaveHandle:
        one = saved(step, step, 1)
        manifest = one.manifests[0]
        place, buffer = self.shared_memory.begin(manifest.num_bytes)
        buffer[: manifest.num_bytes] = torch.frombuffer(bytearray(b"".join(one.chunks[0])), dtype=torch.uint8)
        handle = SaveHandle(step)
        if copied is None:
            handle.copied.set_result(None)
        else:
            handle.copied.set_exception(copied)
        self.writer.send(
            SaveRequest(
                handle,
                one.record.sequence,
                one.record.saved_at,
                Pace(),
                entries=manifest.tensors,
                tree=manifest.tree,
                num_bytes=manifest.num_bytes,
                buffer=buffer,
                location=place,
            )
        )
        return handle


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**more: Any) -> Rig:
        rigs.append(Rig(tmp_path, **more))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.writer.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_memory_comes_first_and_storage_is_the_flushers(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig()
    result = rig.send(10).committed.result()
    assert (result.tier, result.location, result.sequence) == (rig.memory, "10", 10)
    rig.writer.close()
    assert rig.results == [result]
    assert rig.storage.done == []
    assert [record.step for record in rig.shared_memory.held().values()] == [10]


def test_a_failing_tier_is_logged_when_it_begins_to_fail_and_when_it_works_again(
    open_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig()
    rig.memory.failing["prepare"] = StoreFullError("no memory left")
    for step in (10, 20, 30):
        assert rig.send(step).committed.result().tier is rig.storage
    del rig.memory.failing["prepare"]
    for step in (40, 50):
        assert rig.send(step).committed.result().tier is rig.memory
    assert warnings_of(caplog) == [
        "cluster memory fails; saves go to storage: no memory left",
        "cluster memory works again",
    ]


def test_a_failed_save_is_logged_each_time_and_the_next_one_is_tried(
    open_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig()
    rig.memory.failing["prepare"] = StoreFullError("no memory left")
    rig.storage.failing["commit"] = StorageError("no space left")
    for step in (10, 20):
        with pytest.raises(CheckpointError, match="cluster memory: no memory left; storage: no space left"):
            rig.send(step).committed.result()
        assert [record.step for record in rig.shared_memory.held().values()] == [step], (
            "shared memory has it all the same"
        )
    assert [each for each in warnings_of(caplog) if each.startswith("step")] == [
        f"step {step} is not saved: cluster memory: no memory left; storage: no space left" for step in (10, 20)
    ]
    rig.memory.failing.clear()
    assert rig.send(30).committed.result().tier is rig.memory


@pytest.mark.parametrize("error", [TornSnapshotError("'model/x' moved"), ValueError("a bug"), MemoryError("none left")])
def test_a_failed_copy_is_logged_with_its_reason(open_rig: Callable[..., Rig], error: Exception) -> None:
    rig = open_rig()
    with pytest.raises(CheckpointError, match=f"rank 0: {error}"):
        rig.send(10, error).committed.result()
    assert rig.memory.done == []
    assert rig.shared_memory.held() == {}
    assert rig.send(20).committed.result().location == "20"


def test_one_that_may_not_save_does_not(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig()

    def refuse() -> None:
        raise RunInUseError("another process has taken over")

    rig.may_save = refuse
    with pytest.raises(CheckpointError, match="another process has taken over"):
        rig.send(10).committed.result()
    assert rig.memory.done == rig.storage.done == []


def test_shared_memory_alone_is_enough_where_there_is_nothing_else(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig(has_memory=False, has_storage=False)
    assert rig.send(10).committed.result().tier is rig.shared_memory


def test_tidying_up_that_fails_does_not_end_the_writer(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig()

    def fail(result: CommitResult) -> None:
        raise StorageError("cannot list")

    monkeypatch.setattr(rig.writer, "_after_commit", fail)
    assert rig.send(10).committed.result()
    assert rig.send(20).committed.result()
    rig.writer.close()
    assert warnings_of(caplog) == ["after step 10: cannot list", "after step 20: cannot list"]


def test_closing_waits_for_what_was_sent(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig()
    handles = [rig.send(10)]
    rig.writer.close()
    rig.writer.close()
    assert all(handle.committed.done() for handle in handles)
