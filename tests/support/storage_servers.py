"""Durable storage of every kind for the tests: a disk, a folder in memory, a real S3 server, file systems that rename.

The S3 server is moto's, in a process of its own, spoken to over HTTP by the same libraries that speak to Amazon's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

BUCKET = "snapshots"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",
}
START_SECONDS = 60


class RenamingFileSystem(LocalFileSystem):  # type: ignore[misc]
    """A file system in the fsspec sense that renames over what is there, as sftp does."""

    protocol = "renaming"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            path = path.removeprefix("renaming://").removeprefix("refusing://")
        return super()._strip_protocol(path)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        os.replace(self._strip_protocol(path1), self._strip_protocol(path2))


class RefusingFileSystem(RenamingFileSystem):
    """One that does not rename over what is there, and says nothing: WebHDFS answers with ``false``."""

    protocol = "refusing"

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        if not os.path.exists(self._strip_protocol(path2)):
            super().mv(path1, path2)


for _file_system in (RenamingFileSystem, RefusingFileSystem):
    fsspec.register_implementation(_file_system.protocol, _file_system, clobber=True)


@contextlib.contextmanager
def public_objects(contents: Mapping[str, bytes]) -> Iterator[S3Server]:
    """Serves objects of these names, which anyone may read; one whose name ends in ``.gz`` is said to be compressed."""
    with S3Server() as server, pytest.MonkeyPatch.context() as variables:
        server.make_bucket(variables)
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        for name, content in contents.items():
            more = {"ContentEncoding": "gzip"} if name.endswith(".gz") else {}
            files.pipe(f"s3://{BUCKET}/{name}", content, ACL="public-read", **more)
        yield server


class S3Server:
    """An S3-compatible server on a port of its own; skips the test where its libraries are not installed."""

    def __init__(self, **environment: str) -> None:
        for module in ("moto", "s3fs", "flask"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed; pip install 'moto[server]' s3fs")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(words, env={**os.environ, **ENVIRONMENT, **environment}, **quiet)
        self._wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=5).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        self.kill()
        pytest.fail("the S3 server did not start")

    def make_bucket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Points this process's environment at the server, and makes the bucket."""
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # of a server before this one, at another port
        import s3fs

        point_at(self.endpoint, monkeypatch)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)

    def ask_for_logins(self) -> None:
        """From now on only those are served who are known, and that is nobody."""
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset-auth", data=b"0", headers=plain)
        urllib.request.urlopen(request, timeout=10).close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user sets to use a server other than Amazon's."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)


class Cable:
    """Carries TCP to a server until it is cut: the server lives on, and so does what it holds."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._cut = False
        self._threads[0].start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._door.getsockname()[1]}"

    def cut(self) -> None:
        """Ends every connection, and takes no more."""
        self._cut = True
        for end in [self._door, *self._ends]:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join()
        for end in [self._door, *self._ends]:
            end.close()

    def _accept(self) -> None:
        while not self._cut:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._carry, args=(source, target)))
                self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while content := source.recv(1 << 16):
                target.sendall(content)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return
