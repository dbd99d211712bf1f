"""A machine with next to no shared memory, as a container by default: saves go on, and that tier alone is missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from shade import Checkpointer
from shade.errors import StorageFullError

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    asked: list[int] = []

    def refuse(descriptor: int, offset: int, length: int) -> None:
        asked.append(length)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    return asked


def test_saves_reach_storage_and_it_is_said_once(
    no_room: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(30, 30)
    with Checkpointer(persist_to=str(tmp_path), run="small-shm", every="never") as checkpointer:
        checkpointer.attach(model=model)
        for step in (1, 2, 3):
            checkpointer.step_count = step
            with torch.no_grad():
                model.weight.fill_(step)
            checkpointer.save()
            assert checkpointer.wait_committed() == "storage"
        assert {tuple(snapshot.tiers) for snapshot in checkpointer.list()} == {("storage",)}
    assert no_room
    assert caplog.text.count("shared memory keeps no copy") == 1
    assert "docker run --shm-size" in caplog.text
    again = torch.nn.Linear(30, 30)
    with Checkpointer(persist_to=str(tmp_path), run="small-shm", every="never") as checkpointer:
        checkpointer.attach(model=again)
        assert checkpointer.restore_latest().step == 3
    assert torch.equal(again.weight, torch.full((30, 30), 3.0))


def test_with_nothing_but_shared_memory_it_is_an_error(no_room: list[int]) -> None:
    with Checkpointer(run="small-shm-alone", every="never") as checkpointer:
        checkpointer.attach(model=torch.nn.Linear(3, 3))
        with pytest.raises(StorageFullError, match="bytes of shared memory"):
            checkpointer.save()
        with pytest.raises(Exception, match="bytes of shared memory"):
            checkpointer.close()
