"""UrlOrigin and its listings, against a real web server: contents, errors, versions, retries, many at once."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shade.data._origin import url_origin
from shade.data._origin.url_origin import UrlOrigin, describe_many, entry_of, list_files, open_file_system, root_of
from shade.errors import BadSampleError, ConfigError, DataError
from tests.support.web_server import WebServer, serving

pytest.importorskip("aiohttp", reason="fsspec needs it for http://")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(30):
        path = tmp_path / "set" / f"c{number % 2}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number * 500)
    return tmp_path


@pytest.fixture
def web(folder: Path) -> Iterator[WebServer]:
    with serving(folder) as server:
        yield server


def urls(web: WebServer) -> list[str]:
    return [f"{web.url}/set/c{number % 2}/{number}.bin" for number in range(30)]


def test_contents_come_in_order_and_errors_in_their_place(web: WebServer, folder: Path) -> None:
    os.unlink(folder / "set" / "c1" / "3.bin")
    origin = UrlOrigin()
    contents = origin.read_many(urls(web))
    assert isinstance(contents[3], FileNotFoundError)
    assert [c for c in contents if isinstance(c, bytes)] == [b"%d" % n * 500 for n in range(30) if n != 3]
    assert len([path for path in web.reads if path.endswith("/3.bin")]) == 1, "what is not there is not asked for twice"
    origin.close()


def test_a_batchs_latency_is_paid_in_parallel(web: WebServer) -> None:
    web.seconds = 0.05
    origin = UrlOrigin()
    origin.read_many(urls(web), [1500] * 30)
    assert web.most >= 4
    origin.close()
    assert not any(thread.name.startswith("shade-origin") for thread in threading.enumerate())


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again_until_it_serves(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(url_origin, "PAUSES_SECONDS", (0.01,))
    web.refuses_with, web.failures = status, {"/set/c0/2.bin": 6}
    origin = UrlOrigin()
    assert origin.read_many([urls(web)[2]]) == [b"2" * 500]
    assert web.reads.count("/set/c0/2.bin") == 7
    origin.close()


def test_a_server_that_stays_busy_ends_the_read_by_name(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no bad sample, in whose place another one could be taken."""
    monkeypatch.setattr(url_origin, "PAUSES_SECONDS", (1.0,))
    monkeypatch.setattr(url_origin, "PATIENCE_SECONDS", 0.05)
    web.failures = {"/set/c0/4.bin": 100}
    origin = UrlOrigin()
    with pytest.raises(
        DataError, match=r"4\.bin to be served, got for .*503.* no other sample takes its place"
    ) as told:
        origin.read_many([urls(web)[2], urls(web)[4]])
    assert not isinstance(told.value, BadSampleError)
    assert "is busy or silent" in caplog.text
    web.failures = {}
    assert origin.read_many([urls(web)[4]]) == [b"4" * 500]  # the cure
    origin.close()


def test_a_server_that_was_there_and_is_silent_is_asked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_origin, "PAUSES_SECONDS", (0.01,))
    origin = UrlOrigin()
    with serving(folder) as server:
        address, asked = server.server_address, f"{server.url}/set/c0/2.bin"
        assert origin.read_many([asked]) == [b"2" * 500]
    read: list[object] = []
    reader = threading.Thread(target=lambda: read.extend(origin.read_many([asked])))
    reader.start()
    with serving(folder, port=address[1]):
        reader.join()
    assert read == [b"2" * 500]
    origin.close()


def test_a_server_says_how_long_it_wants_to_be_left_alone(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(url_origin.time, "sleep", slept.append)
    web.retry_after, web.failures = "7", {"/set/c0/2.bin": 1}
    origin = UrlOrigin()
    assert origin.read_many([urls(web)[2]]) == [b"2" * 500]
    later = datetime.now(timezone.utc) + timedelta(seconds=50)
    web.retry_after, web.failures = format_datetime(later, usegmt=True), {"/set/c0/4.bin": 1}
    assert origin.read_many([urls(web)[4]]) == [b"4" * 500]
    assert [pause for pause in slept if pause > 1] == [7, pytest.approx(50, abs=10)]
    origin.close()


def test_a_busy_servers_file_is_not_taken_for_a_missing_one(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fsspec does, which says FileNotFoundError of it."""
    monkeypatch.setattr(url_origin, "PAUSES_SECONDS", (0.01,))
    web.failures = {"/set/c0/2.bin": 5}
    (entry,) = describe_many([urls(web)[2]], {}, skips_missing=True)
    assert entry.num_bytes == 500
    monkeypatch.setattr(url_origin, "PATIENCE_SECONDS", 0.05)
    web.failures = {"/set/c0/4.bin": 1000}
    with pytest.raises(DataError, match=r"4\.bin.*503"):
        describe_many([urls(web)[4]], {}, skips_missing=True)


def test_a_copy_reads_in_another_process(web: WebServer) -> None:
    origin = UrlOrigin({"block_size": 2**20}, num_threads=3)
    origin.read_many(urls(web)[:4])
    copy = pickle.loads(pickle.dumps(origin))
    assert (copy.options, copy.num_threads) == ({"block_size": 2**20}, 3)
    assert copy.read_many(urls(web)[:2]) == [b"0" * 500, b"1" * 500]
    copy.close()
    child = os.fork()
    if child == 0:
        good = origin.read_many(urls(web)[:3]) == [b"%d" % n * 500 for n in range(3)]
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    origin.close()


def test_a_child_that_forgets_its_copies_leaves_the_parents_connections_alone(web: WebServer) -> None:
    """A forked worker's garbage collection closed them: the parent's thread then waited for ever."""
    origin = UrlOrigin(num_threads=1)
    assert origin.read_many([urls(web)[2]]) == [b"2" * 500]
    child = os.fork()
    if child == 0:
        origin._file_system = None
        fsspec.filesystem("http", simple_links=False)  # by which fsspec forgets the parent's
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    read: list[object] = []
    reader = threading.Thread(target=lambda: read.extend(origin.read_many([urls(web)[4]])), daemon=True)
    reader.start()
    reader.join(20)
    assert read == [b"4" * 500]
    origin.close()


def test_a_listing_knows_lengths_and_versions(web: WebServer, folder: Path) -> None:
    entries = list_files(f"{web.url}/set", {})
    assert [entry.url for entry in entries] == sorted(urls(web))
    assert {entry.url: entry.num_bytes for entry in entries}[urls(web)[17]] == 1000
    with pytest.raises(DataError, match="nowhere"):
        list_files(f"{web.url}/nowhere", {})
    with pytest.raises(DataError, match="gone"):
        describe_many([f"{web.url}/set/gone.bin"], {})


def test_a_version_is_the_first_thing_that_changes_with_the_content() -> None:
    assert entry_of("s3://b/k", {"size": 3, "ETag": '"abc"', "LastModified": "then"}).version == 'ETag="abc"'
    assert entry_of("x://k", {"size": 3, "mtime": 17.5}).version == "mtime=17.5"
    assert entry_of("x://k", {"size": 3}).version == ""
    with pytest.raises(DataError, match="how long"):
        entry_of("x://k", {"size": None})


def test_a_scheme_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="gopher"):
        list_files("gopher://host/set", {})


class OtherBuckets(MemoryFileSystem):
    """A file system for buckets that is not s3fs, and takes no option of its."""

    protocol = "s3"  # type: ignore[assignment]
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self, **options: Any) -> None:
        if options:
            raise TypeError(f"unknown option {', '.join(options)}")
        super().__init__()


def test_what_is_registered_for_buckets_gets_no_option_of_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", OtherBuckets)
    fsspec.filesystem("s3").pipe_file("s3://bucket/a.bin", b"here")
    assert [entry.url for entry in list_files("s3://bucket", {})] == ["s3://bucket/a.bin"]
    origin = UrlOrigin()
    assert origin.read_many(["s3://bucket/a.bin"]) == [b"here"]
    assert origin._web is None
    origin.close()


def test_the_root_is_a_folder() -> None:
    assert root_of(["s3://b/train/a/1.jpg", "s3://b/train/ab/2.jpg"]) == "s3://b/train/"
    assert root_of(["s3://b/train/a/1.jpg"]) == "s3://b/train/a/"


@pytest.mark.parametrize(("url", "library", "extra"), [("http://h/x", "aiohttp", "http"), ("s3://b/x", "s3fs", "s3")])
def test_a_library_that_is_missing_is_named_with_the_extra_that_brings_it(
    url: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsspec.filesystem", lambda scheme, **options: importlib.import_module(library))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"torch-shade\[{extra}\]"):
        open_file_system(url, {})
