"""A file is replaced whole or stays; nothing is left beside it."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from shade import process
from shade.process import remove_leftovers, replacing


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_the_old_content_stays_until_the_new_one_is_whole(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text("old")
    with replacing(path, durable=durable) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
        assert beside.parent == path.parent
    assert path.read_text() == "new"
    assert names(tmp_path) == ["page"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_the_file_and_nothing_else(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as beside:
            beside.write_text("ne")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["page"]


def test_what_has_to_outlive_a_power_cut_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "folder", list[tuple[str, bool]]()

    def sync(each: Path) -> None:
        synced.append((each.name if path.exists() or each.name == "part" else "beside", path.exists()))

    monkeypatch.setattr(process, "_sync", sync)
    with replacing(path, durable=True) as beside:
        beside.mkdir()
        (beside / "part").write_text("x")
    assert synced == [("beside", False), ("part", False), (tmp_path.name, True)]
    with replacing(tmp_path / "page") as beside:
        beside.write_text("x")
    assert len(synced) == 3


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path, both_write = tmp_path / "page", threading.Barrier(2)

    def write(letter: str) -> None:
        with replacing(path) as beside, beside.open("w") as file:
            file.write(letter * 10)
            file.flush()
            both_write.wait(60)
            file.write(letter * 10)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("a" * 20, "b" * 20)
    assert names(tmp_path) == ["page"]


def test_what_a_killed_process_left_is_removed_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for name in (".model.pt.0a.new", ".model.pt.bak", ".other.pt.0a.new", "model.pt"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".model.pt.0b.new").mkdir()
    remove_leftovers(path)
    remove_leftovers(tmp_path / "missing" / "model.pt")
    assert names(tmp_path) == [".model.pt.bak", ".other.pt.0a.new", "model.pt"]


def test_a_file_gets_the_mode_that_new_files_get(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with replacing(tmp_path / "page") as beside:
        beside.write_text("x")
    assert os.stat(tmp_path / "page").st_mode == os.stat(tmp_path / "plain").st_mode


@pytest.mark.parametrize("is_folder", [True, False])
def test_only_a_folder_may_be_one_that_cannot_be_synced(
    is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == is_folder:
            raise OSError(errno.EINVAL, "Invalid argument")

    def write() -> None:
        with replacing(tmp_path / "note", durable=True) as beside:
            beside.write_text("x")

    monkeypatch.setattr(os, "fsync", fsync)
    if is_folder:
        write()
        assert names(tmp_path) == ["note"]
    else:
        with pytest.raises(OSError, match="Invalid argument"):
            write()
        assert names(tmp_path) == []
