"""The identity of storage and run: the same for one storage however it is named, another for every other."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

import pytest

from shade.checkpoint._interchange.export import import_state
from shade.checkpoint._tiers import identity
from shade.checkpoint._tiers.memory import MemoryTier
from shade.errors import ConfigError
from shade.storage import open_volume
from shade.store import open_store
from shade.store._servers.server import LocalServer


def made(folder: Path | str, run: str = "run", *, make: bool = True) -> str | None:
    with open_volume(folder) as volume:
        return identity.of_storage(volume, run, make=make)


def test_a_storage_keeps_its_identity_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "storage"
    assert made(folder, make=False) is None
    assert not folder.exists(), "who only reads leaves nothing"
    name = made(folder)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert {made(folder), made("storage"), made(f"file://{folder}/"), made(tmp_path / "link")} == {name}
    folder.rename(tmp_path / "moved")
    assert made(tmp_path / "moved", make=False) == name


def test_another_run_a_copy_and_an_emptied_folder_are_others(tmp_path: Path) -> None:
    first = made(tmp_path / "storage")
    shutil.copytree(tmp_path / "storage", tmp_path / "copy")
    names = [first, made(tmp_path / "storage", "other"), made(tmp_path / "copy", make=False)]
    shutil.rmtree(tmp_path / "storage")
    names.append(made(tmp_path / "storage"))
    assert None not in names
    assert len(set(names)) == 4


def test_a_damaged_name_is_written_again(tmp_path: Path) -> None:
    first = made(tmp_path)
    (tmp_path / "run" / "identity").write_text("")
    assert made(tmp_path, make=False) is None
    second = made(tmp_path)
    assert second is not None
    assert second != first


def test_without_storage_the_run_id_or_the_command_tells_jobs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    named, unnamed = identity.of_job("vgg", None), identity.of_job(None, None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr=0.5"])
    assert identity.of_job("vgg", None) == named
    assert identity.of_job(None, None) not in (named, unnamed)
    assert identity.of_job("vgg", "redis://:secret@host:1") == identity.of_job("vgg", "redis://:other@host:1") != named


@pytest.mark.multiprocess
@pytest.mark.redis
def test_a_store_with_another_storages_snapshots_is_refused_unless_the_run_was_named(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(server.url) as store:
        memory = MemoryTier(store, "run")
        identity.bind(memory, "first", "file:///a", is_named=False)
        identity.bind(memory, "second", "file:///b", is_named=False)  # it holds nothing yet
        import_state({"model": {"x": 1}}, memory, "run", 7)
        identity.bind(memory, "second", "file:///b", is_named=False)
        with pytest.raises(ConfigError, match=r"step 7 of run 'run', saved beside file:///b.*name this run"):
            identity.bind(memory, "third", "file:///c", is_named=False)
        with caplog.at_level(logging.WARNING, "shade.checkpoint"):
            identity.bind(memory, "third", "file:///c", is_named=True)
        assert "to begin afresh: shade checkpoint free run --store" in caplog.text
        identity.bind(memory, "third", "file:///c", is_named=False)
        memory.close()


def test_a_file_system_that_numbers_files_anew_gives_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_volume(tmp_path) as volume:
        volume.write("file", [b"x"])
        numbers = []
        for kind in ("ext4", "nfs4", "fuse.sshfs", "cifs", ""):
            monkeypatch.setattr("shade.storage.directory.file_system_of", lambda path, kind=kind: kind)
            numbers.append(volume.file_number("file"))
        assert numbers == [os.stat(tmp_path / "file").st_ino] * 2 + [None] * 3
