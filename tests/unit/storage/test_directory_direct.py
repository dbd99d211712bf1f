"""Whatever the lengths and addresses of the parts, the file holds them; where it matters, without the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shade.storage import directory
from shade.storage.directory import ALIGNMENT, GATHER_BYTES, DirectFile, OSFileOperations


@pytest.fixture
def memory() -> Iterator[memoryview]:
    """Page-aligned, as a staging buffer is."""
    with mmap.mmap(-1, 12 << 20) as mapped:
        mapped[:] = os.urandom(12 << 20)
        with memoryview(mapped) as view:
            yield view


def write_all(path: Path, parts: list[memoryview]) -> None:
    file = DirectFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
    for part in parts:
        file.write(part)
    file.sync()
    file.close()
    file.close()


class Calls:
    """Stands before the kernel: notes how each write came, and refuses some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: str = "") -> None:
        self.direct_bytes = self.cached_bytes = self.addresses_off = 0
        self._refuse = refuse
        real_write, real_fcntl = os.pwrite, directory.fcntl.fcntl

        def pwrite(file: int, content: memoryview, offset: int) -> int:
            if real_fcntl(file, directory.fcntl.F_GETFL) & os.O_DIRECT:
                if self._refuse == "write":
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                self.direct_bytes += len(content)
                assert offset % ALIGNMENT == len(content) % ALIGNMENT == 0
            else:
                self.cached_bytes += len(content)
            return real_write(file, content, offset)

        def fcntl(file: int, command: int, argument: int = 0) -> int:
            if self._refuse == "flag" and command == directory.fcntl.F_SETFL and argument & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real_fcntl(file, command, argument)

        monkeypatch.setattr(directory.os, "pwrite", pwrite)
        monkeypatch.setattr(directory.fcntl, "fcntl", fcntl)


@pytest.mark.parametrize("refuse", ["", "flag", "write"])
@pytest.mark.parametrize("seed", range(6))
def test_any_parts_make_the_file(
    memory: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, refuse: str
) -> None:
    Calls(monkeypatch, refuse)
    dice = random.Random(seed)
    parts = []
    for _ in range(40):
        start = dice.choice([dice.randrange(len(memory)), dice.randrange(2048) * ALIGNMENT])
        length = dice.choice([0, 1, 4095, ALIGNMENT, 5 * ALIGNMENT, 1 << 20, GATHER_BYTES, dice.randrange(5 << 20)])
        parts.append(memory[start : start + length])
    write_all(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def can_be_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644))
    except OSError:
        return False
    return True


def test_chunks_of_a_staging_buffer_are_neither_copied_nor_cached(
    memory: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_be_direct(tmp_path):
        pytest.skip("this file system refuses O_DIRECT")
    calls = Calls(monkeypatch)
    header, tail = memoryview(bytes(8192)), memory[: (1 << 20) + 5]
    chunks = [memory[start : start + (4 << 20)] for start in range(0, len(memory), 4 << 20)]
    write_all(tmp_path / "file", [header, *chunks, tail])
    assert calls.direct_bytes == len(memory) + (1 << 20)
    assert calls.cached_bytes == len(header) + 5


def test_other_parts_are_gathered_and_not_cached(
    memory: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_be_direct(tmp_path):
        pytest.skip("this file system refuses O_DIRECT")
    calls = Calls(monkeypatch)
    write_all(tmp_path / "file", [memory[1 : 1 + 100_000] for _ in range(100)])
    assert calls.direct_bytes == 10_000_000 // ALIGNMENT * ALIGNMENT
    assert calls.direct_bytes + calls.cached_bytes == 10_000_000


def test_small_files_take_the_plain_way(memory: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    write_all(tmp_path / "file", [memory[:ALIGNMENT], memory[:300]])
    assert (calls.direct_bytes, calls.cached_bytes) == (0, ALIGNMENT + 300)


def test_what_the_disk_says_is_passed_on(memory: memoryview, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write_all(tmp_path / "file", [memory])


def test_short_writes_are_continued(memory: memoryview, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.pwrite

    def half(file: int, content: memoryview, offset: int) -> int:
        return real(file, content[: len(content) // 2 // ALIGNMENT * ALIGNMENT or len(content)], offset)

    monkeypatch.setattr(directory.os, "pwrite", half)
    write_all(tmp_path / "file", [memory, memory[1:5000]])
    assert (tmp_path / "file").read_bytes() == bytes(memory) + bytes(memory[1:5000])


class Reads:
    """Stands before the kernel: counts bytes by how they were read, and refuses `O_DIRECT` at one of two places."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: str = "") -> None:
        self.direct_bytes = self.cached_bytes = 0
        real_open, real_read = os.open, os.preadv

        def open_(path: str, flags: int, *rest: int, **folder: int) -> int:
            if refuse == "open" and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real_open(path, flags, *rest, **folder)

        def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
            is_direct = bool(directory.fcntl.fcntl(file, directory.fcntl.F_GETFL) & os.O_DIRECT)
            if refuse == "read" and is_direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            num_bytes = real_read(file, buffers, offset)
            self.direct_bytes += num_bytes * is_direct
            self.cached_bytes += num_bytes * (not is_direct)
            return num_bytes

        monkeypatch.setattr(directory.os, "open", open_)
        monkeypatch.setattr(directory.os, "preadv", preadv)


MIB = 1 << 20


@pytest.mark.parametrize("refuse", ["", "open", "read"])
@pytest.mark.parametrize(
    ("start", "length", "shift"),
    [
        (0, 4 * MIB, 0),
        (ALIGNMENT, 4 * MIB - ALIGNMENT, 0),
        (ALIGNMENT, 3 * MIB + 5, 0),
        (ALIGNMENT, 3 * MIB, 1),
        (5, 3 * MIB, 0),
        (8 * MIB, 4 * MIB, 0),
        (9 * MIB, 2 * MIB, 0),
        (0, 300, 0),
    ],
)
def test_reading_directly_gives_the_bytes_of_the_file(
    memory: memoryview,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    length: int,
    shift: int,
    refuse: str,
) -> None:
    path = tmp_path / "file"
    whole = os.urandom(9 * MIB + 4321)
    path.write_bytes(whole)
    is_direct = can_be_direct(tmp_path) and not refuse
    reads, expected = Reads(monkeypatch, refuse), whole[start : start + length]
    buffer = memory[shift : shift + length]
    assert OSFileOperations().read_directly(str(path), start, buffer) == len(expected)
    assert buffer[: len(expected)] == expected
    assert reads.direct_bytes + reads.cached_bytes == len(expected)
    if is_direct and start % ALIGNMENT == shift == 0 and length >= MIB:
        assert reads.cached_bytes < ALIGNMENT


def test_an_error_of_the_disk_is_not_taken_for_a_refusal(
    memory: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * MIB))

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(directory.os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error"):
        OSFileOperations().read_directly(str(tmp_path / "file"), 0, memory[: 2 * MIB])
