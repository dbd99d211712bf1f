"""What every volume promises, asked of a disk, of a folder in memory, of a real S3 server, and of fsspec's kinds."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shade.errors import ConfigError, StorageError
from shade.storage import VOLUMES, Volume, open_volume
from tests.support.storage_servers import BUCKET, S3Server, point_at

pytestmark = pytest.mark.multiprocess

KINDS = ["disk", "tmpfs", "memory", "renaming", "refusing", "s3"]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server, pytest.MonkeyPatch.context() as monkeypatch:
        server.make_bucket(monkeypatch)
        yield server


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address where nothing is."""
    if request.param == "tmpfs":
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no /dev/shm here")
        folder = tempfile.mkdtemp(dir="/dev/shm")
        yield f"file://{folder}/volume"
        shutil.rmtree(folder)
    elif request.param == "disk":
        yield str(tmp_path / "volume")
    elif request.param == "memory":
        yield f"memory://contract-{next(_numbers)}"
    elif request.param == "s3":
        point_at(request.getfixturevalue("s3").endpoint, monkeypatch)
        yield f"s3://{BUCKET}/contract-{next(_numbers)}"
    else:
        yield f"{request.param}://{tmp_path}/volume"


@pytest.fixture
def volume(url: str) -> Iterator[Volume]:
    with open_volume(url) as opened:
        yield opened


CONTENTS = {
    "empty": [],
    "empty parts": [b"", b""],
    "one byte": [b"x"],
    "many parts": [bytes([number % 256]) * number for number in range(300)],
    "views": [memoryview(b"abcdef")[1:4], bytearray(b"xy"), memoryview(bytes(8)).cast("Q")],
    "a header and pages": [b"h" * 8192, *(os.urandom(1 << 20) for _ in range(3)), b"tail"],
    "long and odd": [b"odd", *(os.urandom((8 << 20) + 1) for _ in range(3))],
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_what_was_written_is_read(volume: Volume, content: list[bytes]) -> None:
    whole = b"".join(content)
    assert volume.write("run/step-1/rank-0", iter(content)) == len(whole)
    assert volume.size_bytes("run/step-1/rank-0") == len(whole)
    assert volume.read("run/step-1/rank-0") == whole
    assert volume.leftovers() == []


@pytest.mark.parametrize("length", [1000, 4096, (1 << 20) + 4096, 6 << 20])
def test_the_memory_of_a_part_is_the_callers_again_when_the_next_is_asked_for(volume: Volume, length: int) -> None:
    memory = mmap.mmap(-1, length)  # page by page, as buffers are

    def parts() -> Iterator[memoryview]:
        for number in range(5):
            memory[:] = bytes([number]) * length
            yield memoryview(memory)
        memory[:] = b"!" * length

    assert volume.write("x", parts()) == 5 * length
    assert volume.read("x") == b"".join(bytes([number]) * length for number in range(5))


def test_ranges(volume: Volume) -> None:
    whole = os.urandom((20 << 20) + 17)  # longer than remote volumes read in one request
    volume.write("x", [whole])
    for start, stop in ((0, 1), (5, 5), (4096, 8192), (len(whole) - 3, len(whole)), (1, len(whole) - 1)):
        assert volume.read("x", start, stop) == whole[start:stop]
    assert volume.read("x", 1_000_000) == whole[1_000_000:]
    buffer = bytearray(b"-" * 100)
    volume.read_into("x", 50, memoryview(buffer)[10:20])
    assert buffer == b"-" * 10 + whole[50:60] + b"-" * 80


def test_what_is_missing_or_too_short(volume: Volume) -> None:
    volume.write("short", [b"four"])
    assert volume.size_bytes("absent") is None
    assert volume.size_bytes("short/absent") is None
    assert volume.read_many(["absent", "short", "absent"]) == [None, b"four", None]
    assert volume.read_many([]) == []
    for name, start, length in (("absent", 0, 1), ("short", 0, 5), ("short", 3, 2), ("short", 9, 1)):
        with pytest.raises(StorageError) as caught:
            volume.read_into(name, start, memoryview(bytearray(length)))
        assert name in str(caught.value)


def test_a_folder_is_no_name(volume: Volume) -> None:
    volume.write("a/b", [b"1"])
    assert volume.size_bytes("a") is None
    assert volume.list("a") == ["a/b"]


def test_a_name_can_be_overwritten(volume: Volume) -> None:
    for content in (b"old" * 1000, b"new", b"n" * (17 << 20), b""):
        volume.write("a/name", [content])
        assert volume.read("a/name") == content
    assert volume.list() == ["a/name"]


class ProducerError(Exception):
    """Something that is none of a volume's business."""


@pytest.mark.parametrize("num_parts", [0, 1, 40])
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_producer_that_fails_leaves_what_was_there(volume: Volume, num_parts: int, old: bytes | None) -> None:
    if old is not None:
        volume.write("a/name", [old])

    def parts() -> Iterator[bytes]:
        for _ in range(num_parts):
            assert volume.read_many(["a/name"]) == [old], "seen before it was whole"
            yield bytes(1 << 20)
        raise ProducerError

    with pytest.raises(ProducerError):
        volume.write("a/name", parts())
    assert volume.read_many(["a/name"]) == [old]
    assert volume.list() == ([] if old is None else ["a/name"])
    assert volume.leftovers() == []


def test_nothing_is_seen_before_it_is_whole(volume: Volume) -> None:
    seen: list[tuple[list[str], bytes | None]] = []

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b"n" * (1 << 20)
            seen.append((volume.list(), volume.read_many(["a/name"])[0]))

    volume.write("a/name", [b"old"])
    volume.write("a/name", parts())
    assert set(map(repr, seen)) == {repr((["a/name"], b"old"))}
    assert volume.size_bytes("a/name") == 40 << 20


def test_names_are_listed_in_order_by_prefix(volume: Volume) -> None:
    names = ["b", "run-2/x", "run/step-10/commit.json", "run/step-1/commit.json", "run/step-1/rank-0", "ru", "é [1]*?"]
    for name in names:
        volume.write(name, [name.encode()])
    assert volume.list() == sorted(names)
    for prefix in ("run/", "run", "run/step-1", "run/step-1/", "run/step-1/c", "r", "absent/", "b/", "é ["):
        assert volume.list(prefix) == sorted(name for name in names if name.startswith(prefix)), prefix
    assert volume.read_many(names) == [name.encode() for name in names]


def test_names_are_deleted_and_counted(volume: Volume) -> None:
    for name in ("run/1/a", "run/1/b", "run/2/a"):
        volume.write(name, [b"x"])
    assert volume.delete_many(["run/1/b", "absent", "run/1/a", "run/1/a", "run"]) == 2
    assert volume.delete_many([]) == 0
    assert volume.list() == ["run/2/a"]
    volume.write("run/1/a", [b"again"])
    assert volume.read("run/1/a") == b"again"


def test_sweeping_leaves_what_is_whole(volume: Volume) -> None:
    volume.write("run/1/a", [b"x"])
    assert volume.sweep() == 0
    assert volume.list() == ["run/1/a"]


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\0b", "a/.partial-1/b", ".partial-2"]
)
@pytest.mark.parametrize("use", ["write", "read", "size_bytes", "delete_many", "read_many"])
def test_what_is_no_name_is_refused(volume: Volume, name: str, use: str) -> None:
    uses: dict[str, Callable[[], object]] = {
        "write": lambda: volume.write(name, [b"x"]),
        "read": lambda: volume.read(name, 0, 1),
        "size_bytes": lambda: volume.size_bytes(name),
        "delete_many": lambda: volume.delete_many([name]),
        "read_many": lambda: volume.read_many([name]),
    }
    with pytest.raises(StorageError, match="expected a relative name") as caught:
        uses[use]()
    assert "\n" not in str(caught.value)
    assert volume.list() == []


def test_ping_writes_reads_and_leaves_nothing(volume: Volume) -> None:
    volume.ping()
    assert volume.list() == []
    assert volume.leftovers() == []


def test_free_bytes_are_known_or_not(volume: Volume, url: str) -> None:
    free_bytes = volume.free_bytes()
    assert (free_bytes is None) == (not url.startswith(("/", "file:")))
    assert free_bytes is None or free_bytes > 0


def test_a_closed_volume_says_so(volume: Volume) -> None:
    volume.write("a", [b"x"])
    volume.close()
    volume.close()
    for use in (
        lambda: volume.write("a", [b"y"]),
        lambda: volume.read("a"),
        lambda: volume.read_many(["a"]),
        lambda: volume.size_bytes("a"),
        lambda: volume.list(),
        lambda: volume.leftovers(),
        lambda: volume.delete_many(["a"]),
        lambda: volume.sweep(),
        volume.ping,
    ):
        with pytest.raises(StorageError, match="close"):
            use()


def test_two_volumes_of_one_address_see_the_same(volume: Volume, url: str) -> None:
    with open_volume(url) as other:
        assert other.list() == []
        volume.write("a/b", [b"1"])
        assert other.list() == ["a/b"]
        other.write("a/b", [b"22"])
        assert (volume.size_bytes("a/b"), volume.read("a/b")) == (2, b"22")
        other.delete_many(["a/b"])
        assert (volume.size_bytes("a/b"), volume.list()) == (None, [])


def test_an_address_that_is_none() -> None:
    for url, sentence in (
        ("", "path of a folder"),
        ("file://", "path of a folder"),
        ("nosuch://x", "nosuch"),
        ("s3://", "a bucket"),
    ):
        if url.startswith("s3"):
            pytest.importorskip("s3fs")
        with pytest.raises(ConfigError, match=sentence):
            open_volume(url)


def test_every_registered_scheme_is_asked() -> None:
    assert set(VOLUMES) == {"*", "file", "local"}, "a new scheme needs a line in KINDS"


def test_a_url_in_a_path_is_refused_and_a_path_is_a_folder(tmp_path: Path) -> None:
    with open_volume(tmp_path) as opened:
        assert opened.url == f"file://{tmp_path}"
    with pytest.raises(ConfigError, match="pass a URL as a string"):
        open_volume(Path("s3://bucket/run"))
