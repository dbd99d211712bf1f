"""Buckets when something is wrong: the line is cut, the server dies, the login is none, the library is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from shade.errors import StorageError, StorageFullError
from shade.storage import Volume, open_volume
from shade.storage.base import partial_name
from shade.storage.fsspec_volume import UPLOAD_BYTES
from tests.support.storage_servers import BUCKET, Cable, S3Server, point_at


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server, pytest.MonkeyPatch.context() as monkeypatch:
        server.make_bucket(monkeypatch)
        yield server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    point_at(s3.endpoint, monkeypatch)
    with open_volume(f"s3://{BUCKET}/{os.urandom(4).hex()}") as volume:
        yield volume


@pytest.mark.multiprocess
def test_a_line_cut_in_the_middle_of_a_write_leaves_the_old(
    s3: S3Server, bucket: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.ping()  # connects it, past the cable
    cable = Cable(s3.port)
    try:
        point_at(cable.endpoint, monkeypatch)
        far = open_volume(bucket.url)
        far.write("run/step-1/name", [b"old"])

        def parts() -> Iterator[bytes]:
            for number in range(4):
                if number == 3:
                    cable.cut()
                yield bytes(UPLOAD_BYTES)

        with pytest.raises(StorageError, match="see that it is reachable"):
            far.write("run/step-1/name", parts())
    finally:
        cable.cut()
    assert bucket.read("run/step-1/name") == b"old"
    assert bucket.list() == ["run/step-1/name"]
    assert bucket.leftovers() == bucket.leftovers("run/") == ["run/step-1/name"]
    assert bucket.leftovers("run/step-2") == []
    assert bucket.sweep("run/step-2") == 0
    assert bucket.sweep("run/") == 1
    assert bucket.leftovers() == []
    assert bucket.read("run/step-1/name") == b"old"


@pytest.mark.multiprocess
def test_a_server_that_is_killed_is_an_error_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as server:
        server.make_bucket(monkeypatch)
        volume = open_volume(f"s3://{BUCKET}/x")
        volume.write("a", [b"x"])
        server.kill()
        for use in (lambda: volume.write("a", [b"y"]), lambda: volume.read("a", 0, 1), volume.list, volume.ping):
            with pytest.raises(StorageError) as caught:
                use()
            assert "\n" not in str(caught.value)


@pytest.mark.multiprocess
def test_a_login_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(INITIAL_NO_AUTH_ACTION_COUNT="1000") as server:
        server.make_bucket(monkeypatch)
        server.ask_for_logins()
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
        with open_volume(f"s3://{BUCKET}/x") as volume, pytest.raises(StorageError) as caught:
            volume.ping()
    assert "login in your environment" in str(caught.value)
    assert "wrong-secret" not in str(caught.value)


def test_a_bucket_that_is_none(bucket: Volume) -> None:
    with open_volume("s3://no-such-bucket/x") as volume, pytest.raises(StorageError, match="no-such-bucket"):
        volume.ping()


def test_an_upload_is_one_request_or_several(bucket: Volume) -> None:
    for length in (UPLOAD_BYTES - 1, UPLOAD_BYTES, UPLOAD_BYTES + 1, 2 * UPLOAD_BYTES):
        content = os.urandom(length)
        bucket.write("name", [content[: length // 2], content[length // 2 :]])
        assert bucket.read("name") == content
    assert bucket.leftovers() == []


WITHOUT = """
import sys
from shade.errors import ConfigError
for module in ("s3fs", "gcsfs", "pyarrow", "pyarrow.fs"):
    sys.modules[module] = None
from shade.storage import open_volume
try:
    open_volume(sys.argv[1])
except ConfigError as error:
    print(error)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(("scheme", "cure"), [("s3", "torch-shade[s3]"), ("gs", "gcsfs"), ("hdfs", "pyarrow")])
def test_a_library_that_is_missing(scheme: str, cure: str) -> None:
    words = [sys.executable, "-c", WITHOUT, f"{scheme}://host/x"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert f"pip install '{cure}'" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


class FailingFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Has a login in its URL, and repeats it in its complaints."""

    protocol = "failing"
    error: Exception = OSError("nothing yet")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].partition("/")[2] if "://" in path else path

    def _open(self, path: str, mode: str = "rb", **options: object) -> object:
        raise self.error


fsspec.register_implementation("failing", FailingFileSystem, clobber=True)


def test_a_login_in_the_url_is_in_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"failing://somebody:s3cr3t@host{tmp_path}/x"
    volume = open_volume(url)
    monkeypatch.setattr(FailingFileSystem, "error", RuntimeError(f"cannot reach {url}"))
    with pytest.raises(StorageError) as caught:
        volume.write("a", [b"x"])
    for text in (str(caught.value), volume.url, repr(caught.value)):
        assert "***" in text
        assert "s3cr3t" not in text
        assert "somebody" not in text
    assert caught.value.__suppress_context__


def test_nor_are_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"failing://host{tmp_path}/x?secret=s3cr3t"
    volume = open_volume(url)
    monkeypatch.setattr(FailingFileSystem, "error", RuntimeError(f"cannot reach {url}"))
    with pytest.raises(StorageError) as caught:
        volume.write("a", [b"x"])
    assert f"host{tmp_path}/x?***" in str(caught.value)
    assert "s3cr3t" not in f"{caught.value} {volume.url}"


def test_a_full_remote_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingFileSystem, "error", OSError(28, "No space left on device"))
    with pytest.raises(StorageFullError, match="free some space"):
        open_volume(f"failing://host{tmp_path}/x").write("a", [b"x"])


@pytest.mark.parametrize("scheme", ["renaming", "refusing"])
def test_a_writer_that_died_is_swept(tmp_path: Path, scheme: str) -> None:
    volume = open_volume(f"{scheme}://{tmp_path}")
    volume.write("run/1/name", [b"x"])
    for folder in ("run/1", "run/2", ""):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / partial_name(folder)).write_bytes(b"half")
    assert volume.list() == ["run/1/name"]
    assert len(volume.leftovers()) == 3
    assert len(volume.leftovers("run/1")) == 1
    assert volume.sweep("run/") == 2
    assert volume.sweep() == 1
    assert volume.list() == ["run/1/name"]
