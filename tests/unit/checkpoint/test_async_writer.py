"""The writer's ways: memory first, storage if it must, own memory always; trouble told once, and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._commit.protocol import SingleProcessGroup
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._save.async_writer import AsyncWriter, CommitResult, SaveHandle, SaveRequest
from shade.checkpoint._save.packing import Packer
from shade.errors import CheckpointError, RunInUseError, StorageError, StoreFullError, TornSnapshotError
from tests.simulation.torture.ledger import RUN, saved
from tests.support.tiers import Near


class Post:
    """A writer, its tiers, and what it has reported."""

    def __init__(self, folder: Path, *, has_memory: bool = True, has_storage: bool = True) -> None:
        self.stage = SharedMemoryTier(RUN, 0, folder=folder)
        self.memory, self.storage = Near("cluster memory"), Near("storage")
        self.results: list[CommitResult] = []
        self.may_save: Callable[[], None] = lambda: None
        self.writer = AsyncWriter(
            RUN,
            [SingleProcessGroup()],
            self.stage,
            self.memory if has_memory else None,
            self.storage if has_storage else None,
            Packer(RUN, 0, 1, "none"),
            lambda: self.may_save(),
            self.results.append,
        )

    def send(self, step: int, copied: Exception | None = None) -> SaveHandle:
        one = saved(step, step, 1)
        manifest = one.manifests[0]
        place, buffer = self.stage.begin(manifest.num_bytes)
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
                place=place,
            )
        )
        return handle


@pytest.fixture
def open_post(tmp_path: Path) -> Iterator[Callable[..., Post]]:
    posts: list[Post] = []

    def make(**more: Any) -> Post:
        posts.append(Post(tmp_path, **more))
        return posts[-1]

    yield make
    for post in posts:
        post.writer.close()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_memory_comes_first_and_storage_is_the_flushers(open_post: Callable[..., Post]) -> None:
    post = open_post()
    result = post.send(10).committed.result()
    assert (result.tier, result.place, result.sequence) == (post.memory, "10", 10)
    post.writer.close()
    assert post.results == [result]
    assert post.storage.done == []
    assert [record.step for record in post.stage.held().values()] == [10]


def test_trouble_is_told_when_it_begins_and_when_it_ends(
    open_post: Callable[..., Post], caplog: pytest.LogCaptureFixture
) -> None:
    post = open_post()
    post.memory.failing["prepare"] = StoreFullError("no memory left")
    for step in (10, 20, 30):
        assert post.send(step).committed.result().tier is post.storage
    del post.memory.failing["prepare"]
    for step in (40, 50):
        assert post.send(step).committed.result().tier is post.memory
    assert told(caplog) == [
        "cluster memory fails; saves go to storage: no memory left",
        "cluster memory works again",
    ]


def test_a_save_that_is_nowhere_is_told_each_time_and_the_next_one_is_tried(
    open_post: Callable[..., Post], caplog: pytest.LogCaptureFixture
) -> None:
    post = open_post()
    post.memory.failing["prepare"] = StoreFullError("no memory left")
    post.storage.failing["commit"] = StorageError("no space left")
    for step in (10, 20):
        with pytest.raises(CheckpointError, match="cluster memory: no memory left; storage: no space left"):
            post.send(step).committed.result()
        assert [record.step for record in post.stage.held().values()] == [step], "own memory has it all the same"
    assert [each for each in told(caplog) if each.startswith("step")] == [
        f"step {step} is not saved: cluster memory: no memory left; storage: no space left" for step in (10, 20)
    ]
    post.memory.failing.clear()
    assert post.send(30).committed.result().tier is post.memory


@pytest.mark.parametrize("error", [TornSnapshotError("'model/x' moved"), ValueError("a bug"), MemoryError("none left")])
def test_a_copy_that_failed_is_told_with_its_reason(open_post: Callable[..., Post], error: Exception) -> None:
    post = open_post()
    with pytest.raises(CheckpointError, match=f"rank 0: {error}"):
        post.send(10, error).committed.result()
    assert post.memory.done == []
    assert post.stage.held() == {}
    assert post.send(20).committed.result().place == "20"


def test_one_that_may_not_save_does_not(open_post: Callable[..., Post]) -> None:
    post = open_post()

    def refuse() -> None:
        raise RunInUseError("another process has taken over")

    post.may_save = refuse
    with pytest.raises(CheckpointError, match="another process has taken over"):
        post.send(10).committed.result()
    assert post.memory.done == post.storage.done == []


def test_own_memory_alone_is_enough_where_there_is_nothing_else(open_post: Callable[..., Post]) -> None:
    post = open_post(has_memory=False, has_storage=False)
    assert post.send(10).committed.result().tier is post.stage


def test_tidying_up_that_fails_does_not_end_the_courier(
    open_post: Callable[..., Post], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    post = open_post()

    def fail(result: CommitResult) -> None:
        raise StorageError("cannot list")

    monkeypatch.setattr(post.writer, "_after_commit", fail)
    assert post.send(10).committed.result()
    assert post.send(20).committed.result()
    post.writer.close()
    assert told(caplog) == ["after step 10: cannot list", "after step 20: cannot list"]


def test_closing_waits_for_what_was_sent(open_post: Callable[..., Post]) -> None:
    post = open_post()
    handles = [post.send(10)]
    post.writer.close()
    post.writer.close()
    assert all(handle.committed.done() for handle in handles)
