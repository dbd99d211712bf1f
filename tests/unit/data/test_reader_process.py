"""UrlOrigin through a process of its own: the same bytes and errors, whatever ends, forks or is busy meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.http import get_client

from shade.data._origin import url_origin
from shade.data._origin.origin import ByteRange
from shade.data._origin.reader_process import ReaderLostError, UnansweredError, described
from shade.data._origin.reader_process import _error as error_of
from shade.data._origin.url_origin import UrlOrigin, UrlReads
from shade.errors import DataError
from shade.process import is_running
from tests.support.storage_servers import BUCKET, S3Server, public_objects
from tests.support.web_server import WebServer, serving

pytestmark = pytest.mark.multiprocess
pytest.importorskip("aiohttp", reason="fsspec needs it for http://")

NAMES = ["plain.bin", "two words+100%.bin", "naïve/ünder=score&more?.bin", "deep/er/~tilde,(1).bin", "a#b%20c.bin"]
CONTENTS = {name: b"%d" % number * 500 for number, name in enumerate(NAMES)} | {"empty.bin": b""}


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Server]:
    with public_objects(CONTENTS | {"said-to-be.gz": b"not compressed"}) as server:
        yield server


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    for number in range(8):
        (tmp_path / f"{number}.bin").write_bytes(b"%d" % number * 500)
    with serving(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def _starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_origin, "ALONE", 4)


def started(url: str, options: dict[str, Any] | None = None) -> UrlOrigin:
    """Returns an origin whose process has started."""
    origin = UrlOrigin(options)
    origin.read_many([url] * (url_origin.ALONE + 1))
    reader = origin._started()
    assert reader is not None
    deadline = time.monotonic() + 60
    while not reader.is_ready:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return origin


def read_apart(origin: UrlOrigin, paths: list[Any]) -> list[Any]:
    """Reads, and makes sure that the other process did."""
    found = origin._read_apart(paths, None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"config_kwargs": {"s3": {"addressing_style": "path"}}}, marks=pytest.mark.slow)]
)
def test_objects_come_as_they_are_stored_also_to_a_fork(bucket: S3Server, options: dict[str, Any]) -> None:
    """A forked child of a process with obstore in it would wait for ever."""
    del bucket
    paths: list[Any] = [f"s3://{BUCKET}/{name}" for name in CONTENTS]
    ranges = [ByteRange(paths[2], 7, 19), ByteRange(paths[1], 0, 1), ByteRange(paths[1], 499, 500)]
    origin = started(paths[0], options)
    assert read_apart(origin, paths) == list(CONTENTS.values())
    assert read_apart(origin, ranges) == [b"2" * 12, b"1", b"1"]
    assert read_apart(origin, [f"s3://{BUCKET}/said-to-be.gz"]) == [b"not compressed"]
    gone, short, good = read_apart(origin, [f"s3://{BUCKET}/gone", ByteRange(paths[0], 490, 510), paths[0]])
    assert isinstance(gone, FileNotFoundError)
    assert isinstance(short, OSError)
    assert "gave 10 bytes" in str(short)
    assert good == CONTENTS[NAMES[0]]
    child = os.fork()
    if child == 0:
        has_read = origin.read_many(paths) == list(CONTENTS.values())
        origin.close()
        os._exit(0 if has_read else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_apart(origin, paths) == list(CONTENTS.values()), "the parent's process goes on"
    origin.close()


def test_pages_and_their_errors_come_as_without_it(web: WebServer) -> None:
    paths = [f"{web.url}/{number}.bin" for number in range(8)]
    origin = started(paths[0])
    assert read_apart(origin, paths) == [b"%d" % number * 500 for number in range(8)]
    web.failures = {"/3.bin": 2}
    assert read_apart(origin, paths[3:4]) == [b"3" * 500], "a busy server is asked again"
    mine, theirs = UrlReads().read_many([f"{web.url}/none"]), read_apart(origin, [f"{web.url}/none"])
    assert type(mine[0]) is type(theirs[0])
    assert str(mine[0]) == str(theirs[0])
    origin.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError("gone"),
        FileNotFoundError(errno.ENOENT, "nothing there", "s3://a/b"),
        UnansweredError("silent"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
    ],
)
def test_an_error_is_the_same_or_the_nearest(error: OSError) -> None:
    made = error_of(*described(error))
    assert isinstance(error, type(made))
    assert str(made) == str(error)


def test_a_server_that_stays_busy_is_named_in_the_parents_log(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    origin = started(f"{web.url}/0.bin")
    reader = origin._started()
    assert reader is not None
    monkeypatch.setattr(reader, "read", lambda paths, sizes: [UnansweredError("0.bin to be served, got 503")])
    with pytest.raises(DataError, match="no other sample takes its place"):
        origin.read_many([f"{web.url}/0.bin"])
    monkeypatch.undo()
    web.failures = {"/1.bin": 3}  # the third pause is long enough to be said
    assert read_apart(origin, [f"{web.url}/1.bin"]) == [b"1" * 500]
    assert "is busy or silent" in caplog.text
    origin.close()


def test_one_that_is_killed_is_said_and_done_without(web: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    paths = [f"{web.url}/{number}.bin" for number in range(8)]
    origin = started(paths[0])
    reader = origin._started()
    assert reader is not None
    os.kill(reader._process.pid, signal.SIGKILL)
    for _ in range(3):
        assert origin.read_many(paths) == [b"%d" % number * 500 for number in range(8)]
    assert caplog.text.count("the process that reads URLs has ended") == 1
    origin.close()


class Reads(torch.utils.data.Dataset[tuple[bytes, bool]]):
    def __init__(self, url: str) -> None:
        self.url, self.origin = url, started(url)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[bytes, bool]:
        self.origin.read_many([self.url] * (url_origin.ALONE + 1))
        return self.origin.read_many([self.url])[0], self.origin._started() is None  # type: ignore[return-value]


def test_a_worker_reads_by_itself(web: WebServer) -> None:
    loader = torch.utils.data.DataLoader(Reads(f"{web.url}/2.bin"), batch_size=None, num_workers=1)
    assert [(content, is_alone) for content, is_alone in loader] == [(b"2" * 500, True)] * 4


def test_what_another_process_does_not_have_is_read_here() -> None:
    fsspec.filesystem("memory").pipe("/apart/one.bin", b"here")
    origin = UrlOrigin()
    for _ in range(2):
        assert set(origin.read_many(["memory://apart/one.bin"] * (url_origin.ALONE + 1))) == {b"here"}
    assert origin._started() is None
    origin.close()


def test_an_option_that_cannot_be_sent_keeps_the_reads_here(web: WebServer) -> None:
    async def client(**words: Any) -> Any:
        return await get_client(**words)

    origin = UrlOrigin({"get_client": client})
    for _ in range(2):
        assert set(origin.read_many([f"{web.url}/1.bin"] * (url_origin.ALONE + 1))) == {b"1" * 500}
    assert origin._started() is None
    origin.close()


def test_a_few_reads_start_no_process(web: WebServer) -> None:
    origin = UrlOrigin()
    origin.read_many([f"{web.url}/1.bin"] * url_origin.ALONE)
    assert origin._reader is None
    origin.close()


PARENT = """
import sys, time
from tests.unit.data.test_reader_process import started
origin = started(sys.argv[1])
print(origin._started()._process.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_a_parent_that_is_killed(web: WebServer) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, f"{web.url}/1.bin"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        reader = int(parent.stdout.readline())
        assert is_running(reader)
        parent.kill()
    deadline = time.monotonic() + 30
    while is_running(reader):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_close_ends_it_and_the_next_reads_start_another(web: WebServer) -> None:
    url = f"{web.url}/1.bin"
    origin = started(url)
    first = origin._started()
    assert first is not None
    origin.close()
    assert first._process.returncode == 0
    with pytest.raises(ReaderLostError):
        first.read([url], None)
    assert origin.read_many([url]) == [b"1" * 500]
    second = origin._started()
    assert second is not None
    assert second is not first
    origin.close()
