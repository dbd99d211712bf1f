"""A folder as a volume: the order of the commit, every operation failing in turn, and what people do to disks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shade.errors import StorageError, StorageFullError
from shade.storage.directory import DirectoryVolume, OSFileOperations

OLD, NEW = [b"old" * 1000], [b"new" * 1000, bytes(3 << 20)]
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
USER_ONLY = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


class Recorder:
    """The real file system, every call noted; one call fails, before or after it is done."""

    def __init__(self, fail_at: int | None = None, number: int = errno.EIO, after: bool = False) -> None:
        self.calls: list[tuple[str, str]] = []
        self.has_failed = False
        self._fail_at, self._number, self._after = fail_at, number, after

    def run(self, name: str, path: str, action: Callable[[], Any]) -> Any:
        fails = len(self.calls) == self._fail_at
        self.calls.append((name, os.path.basename(path)))
        found = action() if self._after or not fails else None
        if fails:
            self.has_failed = True
            if name == "create" and found:
                found.close()
            raise OSError(self._number, os.strerror(self._number), path)
        return found

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(OSFileOperations(), name)

        def call(path: str, *arguments: Any) -> Any:
            found = self.run(name, path, lambda: real(path, *arguments))
            return RecordedFile(found, self, path) if name == "create" else found

        return call


class RecordedFile:
    def __init__(self, file: Any, recorder: Recorder, path: str) -> None:
        self._file, self._recorder, self._path = file, recorder, path

    def write(self, part: memoryview) -> None:
        self._recorder.run("write", self._path, lambda: self._file.write(part))

    def sync(self) -> None:
        self._recorder.run("sync", self._path, lambda: self._file.sync())

    def close(self) -> None:
        self._file.close()  # before the note: a descriptor left open would be a leak of the test's
        self._recorder.run("close", self._path, lambda: None)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_order_of_a_commit(tmp_path: Path) -> None:
    recorder = Recorder()
    DirectoryVolume(str(tmp_path / "v"), recorder).write("run/1/name", [b"a", b"b"])
    partial = recorder.calls[0][1]
    assert partial.startswith(".partial-")
    made = [call for call in recorder.calls if call[0] == "make_directory"]
    assert made[-3:] == [("make_directory", "v"), ("make_directory", "run"), ("make_directory", "1")]
    begin = recorder.calls.index(("write", partial)) - 1
    assert recorder.calls[begin:] == [
        ("create", partial),
        ("write", partial),
        ("write", partial),
        ("sync", partial),
        ("close", partial),
        ("rename", partial),
        ("sync_directory", "1"),
        ("sync_directory", "run"),
        ("sync_directory", "v"),
        ("sync_directory", tmp_path.name),  # it holds the root, which was made
    ]


def test_a_record_is_off_the_disk_before_what_it_speaks_of(tmp_path: Path) -> None:
    DirectoryVolume(str(tmp_path)).write("1/commit", [b"x"])
    DirectoryVolume(str(tmp_path)).write("1/data", [b"x"])
    recorder = Recorder()
    assert DirectoryVolume(str(tmp_path), recorder).delete_many(["1/commit", "1/data"]) == 2
    wanted = [call for call in recorder.calls if call[0] in ("remove", "sync_directory")]
    assert wanted[:4] == [("remove", "commit"), ("sync_directory", "1"), ("remove", "data"), ("sync_directory", "1")]
    assert os.listdir(tmp_path) == [], "empty folders go too"


def num_operations(tmp_path: Path) -> int:
    recorder = Recorder()
    DirectoryVolume(str(tmp_path), recorder).write("run/1/name", NEW)
    return len(recorder.calls)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("old", [None, OLD])
def test_every_operation_of_a_write_fails_in_turn(
    tmp_path: Path, number: int, after: bool, old: list[bytes] | None
) -> None:
    for fail_at in range(num_operations(tmp_path / "dry")):
        folder = tmp_path / str(fail_at)
        sound = DirectoryVolume(str(folder))
        if old is not None:
            sound.write("run/1/name", old)
        recorder = Recorder(fail_at, number, after)
        try:
            DirectoryVolume(str(folder), recorder).write("run/1/name", NEW)
            told: StorageError | None = None
        except StorageError as error:
            told = error
        assert (told is not None) == recorder.has_failed, recorder.calls
        if told is None:  # what should have failed after it was done had failed by itself before
            continue
        assert isinstance(told, StorageFullError) == (number != errno.EIO)
        assert str(told).startswith("expected to ")
        assert "\n" not in str(told)
        failed = recorder.calls[fail_at][0]
        found = sound.read_many(["run/1/name"])[0]
        whole_old, whole_new = (b"".join(old) if old is not None else None), b"".join(NEW)
        # Once it has been renamed the new content stays; before, the old one does.
        is_late = failed == "sync_directory" or (failed == "rename" and after)
        assert found == (whole_new if is_late else whole_old), failed
        left = [name for name in files_below(folder) if ".partial-" in name]
        assert left == [] or (failed == "create" and after), failed  # made, and then denied: swept later
        assert sound.leftovers() == left
        assert sound.sweep() == len(left)
        assert sound.list() == ([] if found is None else ["run/1/name"])


@pytest.mark.parametrize("after", [False, True])
def test_a_removal_that_fails_has_not_touched_the_next(tmp_path: Path, after: bool) -> None:
    volume = DirectoryVolume(str(tmp_path))
    for fail_at in range(2):
        for name in ("1/commit", "1/data"):
            volume.write(name, [b"x"])
        with pytest.raises(StorageError):
            DirectoryVolume(str(tmp_path), Recorder(fail_at, after=after)).delete_many(["1/commit", "1/data"])
        assert "1/data" in volume.list()


KILLED = """
import hashlib, os, random, signal, sys, time
from shade.storage.directory import DirectoryVolume

folder, seed = sys.argv[1], int(sys.argv[2])
dice = random.Random(seed)
volume = DirectoryVolume(folder)
states = set()
for number in range(30):
    child = os.fork()
    if not child:
        while True:
            content = os.urandom(32) * dice.choice([1, 1000, 100_000])
            volume.write("run/1/name", [hashlib.sha256(content).digest(), content])
    time.sleep(dice.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    content = volume.read_many(["run/1/name"])[0]
    assert content is None or hashlib.sha256(content[32:]).digest() == content[:32], "torn"
    states.add((content is not None, bool(volume.leftovers())))
    assert volume.list() in ([], ["run/1/name"])
volume.sweep()
assert volume.leftovers() == []
assert (True, True) in states, "no child was killed while it wrote"
print("sound")
"""


@pytest.mark.multiprocess
def test_a_writer_killed_at_any_moment_leaves_old_or_new(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path), "7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "sound", done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.multiprocess
@ROOT_ONLY
def test_a_full_disk(small_disk: Path) -> None:
    volume = DirectoryVolume(str(small_disk / "volume"))
    volume.write("a/name", [bytes(1 << 20)])
    free_bytes = volume.free_bytes()
    assert free_bytes is not None
    assert 0 < free_bytes <= 7 << 20
    with pytest.raises(StorageFullError, match="No space left on device'; free some space"):
        volume.write("a/name", (b"n" * (1 << 20) for _ in range(16)))
    assert volume.read("a/name") == bytes(1 << 20)
    assert volume.leftovers() == []
    assert volume.free_bytes() == free_bytes
    volume.write("a/other", [bytes(4 << 20)])


@pytest.mark.multiprocess
@ROOT_ONLY
def test_a_disk_mounted_read_only(small_disk: Path) -> None:
    volume = DirectoryVolume(str(small_disk))
    volume.write("name", [b"old"])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for use in (lambda: volume.write("name", [b"new"]), volume.ping, lambda: volume.delete_many(["name"])):
        with pytest.raises(StorageError, match="Read-only file system'; mount it writable"):
            use()
    assert volume.read("name") == b"old"


@USER_ONLY
def test_a_folder_one_may_not_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied'; give this user the right"):
        DirectoryVolume(str(tmp_path)).ping()
    tmp_path.chmod(0o700)


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for volume, name in ((DirectoryVolume(str(tmp_path / "file")), "x"), (DirectoryVolume(str(tmp_path)), "file/x")):
        with pytest.raises(StorageError, match="a file is where a folder should be"):
            volume.write(name, [b"x"])
        assert volume.size_bytes("x") is None
    with pytest.raises(StorageError, match="a file is where a folder should be"):
        DirectoryVolume(str(tmp_path / "file")).ping()
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_folder_where_a_file_should_be(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    with pytest.raises(StorageError, match="a folder is where the file should be"):
        DirectoryVolume(str(tmp_path)).write("name", [b"x"])
    assert os.listdir(tmp_path) == ["name"]


def test_a_name_too_long_for_the_file_system(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="choose a shorter name"):
        DirectoryVolume(str(tmp_path)).write("x" * 300, [b"x"])
    assert os.listdir(tmp_path) == []


def test_links_in_a_circle_are_listed_once(tmp_path: Path) -> None:
    volume = DirectoryVolume(str(tmp_path))
    volume.write("run/name", [b"x"])
    (tmp_path / "run" / "again").symlink_to("../run")
    assert "run/name" in volume.list()
    assert len(volume.list()) <= 2


def test_sweeping_one_place_leaves_the_others_alone(tmp_path: Path) -> None:
    volume = DirectoryVolume(str(tmp_path))
    for place in ("run/1", "run/10"):
        volume.write(f"{place}/name", [b"x"])
        (tmp_path / place / ".partial-0123456789abcdef").write_bytes(b"x")
    (tmp_path / "run" / "2").mkdir()
    (tmp_path / "run" / "2" / ".partial-0123456789abcdef").write_bytes(b"x")
    assert volume.sweep("run/1/") == 1
    assert volume.sweep("run/2/") == 1
    assert not (tmp_path / "run" / "2").exists()
    assert volume.leftovers("run/") == ["run/10/.partial-0123456789abcdef"]
    assert volume.list() == ["run/1/name", "run/10/name"]


def test_sweeping_removes_the_empty_folders_of_a_prefix_and_no_other(tmp_path: Path) -> None:
    volume = DirectoryVolume(str(tmp_path))
    volume.write("run/step-1/name", [b"x"])
    for folder in ("run/step-2", "run/step-3/deeper", "run/notes", "other"):
        (tmp_path / folder).mkdir(parents=True)
    assert volume.sweep("run/step-") == 0
    assert sorted(os.listdir(tmp_path / "run")) == ["notes", "step-1"]
    assert volume.list() == ["run/step-1/name"]
    assert volume.sweep("run/") == 0
    assert sorted(os.listdir(tmp_path)) == ["other", "run"]
    assert os.listdir(tmp_path / "run") == ["step-1"]


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert DirectoryVolume("runs").url == f"file://{tmp_path}/runs"
    assert DirectoryVolume("~/runs").url == f"file://{tmp_path}/home/runs"
    volume = DirectoryVolume("file://runs")
    monkeypatch.chdir("/")
    volume.write("x", [b"x"])
    assert (tmp_path / "runs" / "x").read_bytes() == b"x"
