"""What runs leave in shared memory: shown, freed, and swept when it is old and lies elsewhere as well."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shade.checkpoint._buffer import shared_memory_folder
from shade.checkpoint._buffer.shared_memory_folder import KEPT_SECONDS, Held, held_here, sweep_memory
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from tests.simulation.torture.ledger import saved
from tests.unit.checkpoint.test_shared_memory_tier import keep


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory_folder, "shared_memory", lambda: tmp_path)
    return tmp_path


def left(run: str, *, age_seconds: float, elsewhere: int | None, sequence: int = 3) -> SharedMemoryTier:
    """A snapshot that a killed run has left; another tier has those up to number ``elsewhere``."""
    stage = SharedMemoryTier(run, 0, identity="one")
    stage.claim(f"file:///{run}")
    keep([stage], saved(10, sequence, 1, run))
    if elsewhere is not None:
        stage.note_elsewhere(elsewhere)
    stage.close()
    for path in stage.folder.iterdir():
        os.utime(path, (time.time() - age_seconds,) * 2)
    return stage


def test_only_what_is_old_and_lies_elsewhere_is_swept(here: Path) -> None:
    left("young", age_seconds=0, elsewhere=3)
    left("only-here", age_seconds=2 * KEPT_SECONDS, elsewhere=2)
    left("never-elsewhere", age_seconds=2 * KEPT_SECONDS, elsewhere=None)
    left("old", age_seconds=2 * KEPT_SECONDS, elsewhere=3)
    used = left("used", age_seconds=2 * KEPT_SECONDS, elsewhere=3)
    used.claim()
    for path in used.folder.iterdir():
        os.utime(path, (0, 0))
    other = here / f"shade-{os.getuid()}" / "0123abcd" / "folder"
    other.mkdir(parents=True)  # another part of shade's
    sweep_memory()
    assert [each.run for each in held_here()] == ["never-elsewhere", "only-here", "used", "young"]
    assert other.exists()
    assert not (here / f"shade-{os.getuid()}" / "old").exists()
    used.close()


def test_a_run_that_is_removed_while_it_is_listed_does_not_keep_another_from_beginning(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left("going", age_seconds=0, elsewhere=3)
    left("staying", age_seconds=0, elsewhere=3)
    scandir = os.scandir

    def removed(path: Any) -> Any:
        if str(path).endswith("going"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed)
    sweep_memory()
    assert [each.run for each in held_here()] == ["staying"]


@pytest.mark.parametrize("call", ["glob", "read_bytes", "read_text", "stat", "iterdir"])
@pytest.mark.parametrize("is_before", [True, False])
def test_what_its_run_removes_meanwhile_is_neither_swept_nor_counted(
    here: Path, monkeypatch: pytest.MonkeyPatch, call: str, is_before: bool
) -> None:
    left("old", age_seconds=2 * KEPT_SECONDS, elsewhere=2)
    (held,) = held_here()
    original = getattr(Path, call)

    def removed(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == held.folder or path.parent == held.folder:
            found = None if is_before else original(path, *arguments, **options)
            found = list(found) if call in ("glob", "iterdir") and found is not None else found
            shutil.rmtree(held.folder, ignore_errors=True)
            if found is not None:
                return found
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, call, removed)
    sweep_memory()
    assert held.num_bytes == 0
    assert held.is_elsewhere
    assert held.newest is None


def test_what_is_left_says_whose_it_is_and_goes_when_it_is_freed(here: Path) -> None:
    stage = left("run", age_seconds=0, elsewhere=None)
    (held,) = held_here()
    assert isinstance(held, Held)
    assert held.newest is not None
    assert (held.run, held.about, held.newest.step, held.is_elsewhere) == ("run", "file:///run", 10, False)
    assert held.num_bytes >= 2**20
    assert not held.is_in_use
    stage.claim("file:///run")
    assert held.is_in_use
    assert not held.free()
    assert stage.held(), "to look takes no lock away"
    stage.close()
    assert held.free()
    assert list(held_here()) == []
