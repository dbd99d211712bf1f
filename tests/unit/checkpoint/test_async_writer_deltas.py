"""Differences on their way: to where their base is, or, where that will not do, standing alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import ReadSnapshot, read_newest
from shade.checkpoint._save.async_writer import AsyncWriter, CommitResult, SaveHandle, SaveRequest
from shade.checkpoint._save.packing import Packer
from shade.errors import CheckpointError, StorageError, StoreFullError
from shade.rank_group import SingleProcessGroup
from tests.support.tiers import Near


class Rig:
    """A writer that is given a weight that moves."""

    def __init__(self, folder: Path, codec: str) -> None:
        self.shared_memory = SharedMemoryTier("run", 0, folder=folder)
        self.memory, self.storage = Near("cluster memory"), Near("storage")
        packer = Packer("run", 0, 1, codec, keyframe_every=100)
        self.writer = AsyncWriter(
            [SingleProcessGroup()],
            self.shared_memory,
            self.memory,
            self.storage,
            packer,
            lambda: None,
            lambda _: None,
        )
        self.weight = torch.randn(5000, generator=torch.Generator().manual_seed(0))

    def send(self, step: int) -> CommitResult:
        self.weight += 1e-3 * torch.randn(5000, generator=torch.Generator().manual_seed(step))
        layout = lay_out({"model/weight": TensorSpec.of(self.weight)}, 0, 1)
        place, buffer = self.shared_memory.begin(layout.num_bytes)
        buffer[: layout.num_bytes] = self.weight.view(torch.uint8)
        handle = SaveHandle(step)
        handle.copied.set_result(None)
        tree = {"dict": [["model"], [{"dict": [["weight"], [{"tensor": "model/weight"}]]}]]}
        self.writer.send(
            SaveRequest(
                handle,
                step,
                float(step),
                Pace(),
                entries=layout.entries,
                tree=tree,
                num_bytes=layout.num_bytes,
                buffer=buffer,
                location=place,
            )
        )
        return handle.committed.result()

    def bases(self, tier: Near) -> dict[int, int | None]:
        """What each step builds on, in one place."""
        steps = {record.digest: record.step for record in tier.records.values()}
        return {record.step: None if record.base is None else steps[record.base] for record in tier.records.values()}

    def restored(self, *tiers: Near) -> ReadSnapshot:
        found = read_newest(Reader(tiers), SingleProcessGroup())
        assert found is not None
        return found

    def check(self, *tiers: Near) -> None:
        found = self.restored(*tiers)
        off = (found.tensors["model/weight"] - self.weight).abs().max()
        assert off <= (found.bounds["model/weight"].max_abs if found.bounds else 0.0) * 1.000001


@pytest.fixture(params=["xor-zstd", "topk-delta"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, request.param)
    yield made
    made.writer.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_differences_go_where_their_base_is(rig: Rig) -> None:
    for step in (10, 20, 30):
        assert rig.send(step).tier is rig.memory
        rig.check(rig.memory)
    in_a_chain = rig.writer._packer._delta.follows_previous
    assert rig.bases(rig.memory) == {10: None, 20: 10, 30: 20 if in_a_chain else 10}
    own = read_newest(Reader([rig.shared_memory]), SingleProcessGroup())
    assert own is not None
    assert torch.equal(own.tensors["model/weight"], rig.restored(rig.memory).tensors["model/weight"]), (
        "shared memory holds what any other tier gives back"
    )


def test_where_memory_fails_the_snapshot_stands_alone_in_storage(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.send(10)
    rig.memory.failing["prepare"] = StoreFullError("no memory left")
    assert rig.send(20).tier is rig.storage
    assert rig.bases(rig.storage) == {20: None}
    rig.check(rig.storage)
    assert warnings_of(caplog)[0] == "cluster memory fails; saves go to storage: no memory left"
    assert rig.send(30).tier is rig.storage, "where its base is, though memory might take it again"
    assert rig.bases(rig.storage) == {20: None, 30: 20}
    rig.check(rig.storage)


def test_a_base_that_is_gone_is_no_failure(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.send(10)
    rig.memory.records.clear()
    assert rig.send(20).tier is rig.memory
    assert rig.bases(rig.memory) == {20: None}
    rig.check(rig.memory)
    assert [each for each in warnings_of(caplog) if "fails" in each] == []
    rig.send(30)
    assert rig.bases(rig.memory) == {20: None, 30: 20}


def test_after_a_save_that_is_nowhere_the_next_stands_alone(rig: Rig) -> None:
    rig.send(10)
    rig.memory.failing["prepare"] = StoreFullError("no memory left")
    rig.storage.failing["prepare"] = StorageError("no space left")
    with pytest.raises(CheckpointError, match="no memory left; storage: no space left"):
        rig.send(20)
    rig.memory.failing.clear()
    assert rig.send(30).tier is rig.memory
    assert rig.bases(rig.memory) == {10: None, 30: None}
    rig.check(rig.memory)


def test_ranks_that_do_not_build_on_the_same_stand_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.send(10)
    gather: Callable[[SingleProcessGroup, object], list[object]] = SingleProcessGroup.gather
    other = "f" * 32

    def gather_two(self: SingleProcessGroup, message: object) -> list[object]:
        found = gather(self, message)
        return [*found, other] if isinstance(message, str) and len(message) == 32 else found

    monkeypatch.setattr(SingleProcessGroup, "gather", gather_two)
    rig.send(20)
    assert rig.bases(rig.memory) == {10: None, 20: None}
