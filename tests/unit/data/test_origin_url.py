"""UrlOrigin and its listings, against a real web server: contents, errors, versions, retries, many at once."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shade.data._origin.url_origin import UrlOrigin, describe_many, entry_of, list_files, open_file_system, root_of
from shade.errors import ConfigError, DataError
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


def test_what_may_pass_is_tried_again_and_then_given_up(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shade.data._origin.url_origin.PAUSES_SECONDS", (0.01, 0.01))
    web.failures = {"/set/c0/2.bin": 2, "/set/c0/4.bin": 100}
    origin = UrlOrigin()
    good, bad = origin.read_many([urls(web)[2], urls(web)[4]])
    assert good == b"2" * 500
    assert isinstance(bad, OSError)
    assert "503" in str(bad)
    assert web.reads.count("/set/c0/4.bin") == 3
    origin.close()


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
