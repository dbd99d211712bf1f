"""Whatever fsspec reaches as a `Volume`: ``s3://``, ``gs://``, ``abfs://``, ``hdfs://``, ``sftp://``, ``memory://`` …

An object store shows an object when its upload is completed, so the upload is held open and completed last. Everything
else gets an unfinished name, and a rename. The service decides how durable a completed object is. Login, region and
endpoint come from where fsspec and the service's library look for them: its configuration files, and variables such as
``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``FSSPEC_S3_ENDPOINT_URL``. Messages show a URL as `shown_url` does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import fsspec
from typing_extensions import override

from shade.errors import ConfigError, ShadeError, StorageError, shown_url, without_login
from shade.installation import install_hint
from shade.process import keep_fsspec_from_forks
from shade.storage.base import VOLUMES, Volume, check_name, failure, is_partial, partial_name
from shade.types import Bytes

_OBJECT_STORES: Final = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
_S3: Final = ("s3", "s3a")
_PACKAGES: Final = {"gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs"} | {
    "hdfs": "pyarrow", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol", "webhdfs": "requests",
}  # fmt: skip
UPLOAD_BYTES: Final = 16 * 2**20
"""A part of an upload. S3 takes 10,000 of them, so 160 GB a shard, and none but the last below 5 MiB."""
RANGE_BYTES: Final = 8 * 2**20
"""A long read is split into ranges of this length, all requested at once if the library can."""


@VOLUMES.register("*")
class RemoteVolume(Volume):
    """Names are paths below a URL. Connections belong to fsspec, which shares them within the process.

    Args:
        url: As in fsspec, such as ``s3://bucket/prefix``.

    Raises:
        ConfigError: fsspec knows no such scheme, its library is not installed, or the URL is incomplete.
    """

    def __init__(self, url: str) -> None:
        keep_fsspec_from_forks()
        scheme = url.partition("://")[0]
        self._secret_url, self.url = url, shown_url(url)
        try:
            file_system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        except ImportError as error:
            wanted = _PACKAGES.get(scheme) or error.name or "its library"
            cure = install_hint("s3") if scheme in _S3 else f"pip install '{wanted}'"
            raise ConfigError.of(f"the library for {scheme}://", "none", cure) from error
        except Exception as error:
            cure = f"correct it ({self._words(error)})"
            raise ConfigError.of("a storage URL that fsspec understands", self.url, cure) from error
        self._fs: Any = file_system
        self._root = str(root).rstrip("/")
        self._is_object_store = scheme in _OBJECT_STORES
        if not self._root.strip("/") and scheme in _S3:
            raise ConfigError.of("a bucket", self.url, f"write {scheme}://bucket/prefix")

    @override
    def write(self, name: str, parts: Iterable[Bytes]) -> int:
        self._check_open()
        path, folder = self._path(check_name(name)), name.rpartition("/")[0]
        if self._is_object_store:
            return self._upload(name, path, parts)
        partial = self._path(partial_name(folder))
        with self._translating(f"to write {name}"):
            self._fs.makedirs(partial.rpartition("/")[0], exist_ok=True)
        try:
            num_bytes = self._stream(name, partial, parts, hold=False)
            with self._translating(f"to write {name}"):
                self._publish(partial, path)
        except BaseException:
            self._forget(partial)
            raise
        return num_bytes

    @override
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._check_open()
        path, stop = self._path(check_name(name)), start + len(buffer)
        starts = [*range(start, stop, RANGE_BYTES)]
        stops = [*starts[1:], stop]
        if not starts:
            return
        with self._translating(f"to read {name}"):
            pieces = self._fs.cat_ranges([path] * len(starts), starts, stops, on_error="raise")
        if sum(map(len, pieces)) != len(buffer):
            found = f"expected {stop} bytes in {name} of {self.url}, got fewer"
            raise StorageError(f"{found}; it was cut off or is another file")
        for first, piece in zip(starts, pieces, strict=True):
            buffer[first - start : first - start + len(piece)] = piece

    @override
    def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        self._check_open()
        paths = [self._path(check_name(name)) for name in names]
        if not paths:
            return []
        with self._translating(f"to read {names[0]}"):
            everything = [None] * len(paths)
            found = self._fs.cat_ranges(paths, everything, everything, on_error="return")
            for content in found:
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        return [None if isinstance(content, FileNotFoundError) else bytes(content) for content in found]

    @override
    def size_bytes(self, name: str) -> int | None:
        return self._size_of(check_name(name))

    @override
    def list(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._find(prefix) if not is_partial(name) and name.startswith(prefix))

    @override
    def leftovers(self, prefix: str = "") -> Sequence[str]:
        """In S3 these are uploads that were neither completed nor aborted."""
        partial = (name for name in self._find(prefix) if is_partial(name))
        files = (name for name in partial if f"{name.rpartition('/')[0]}/".lstrip("/").startswith(prefix))
        return sorted([*files, *(name for name, _ in self._uploads(prefix))])

    @override
    def delete_many(self, names: Sequence[str]) -> int:
        """Empty folders stay: some of these systems can delete a folder only with its content."""
        self._check_open()
        return sum(self._remove(check_name(name)) for name in names)

    @override
    def sweep(self, prefix: str = "") -> int:
        uploads = self._uploads(prefix)
        with self._translating("to abort uploads"):
            for name, upload in uploads:
                bucket, _, key = self._path(name).partition("/")
                self._fs.abort_mpu(bucket, key, upload)
        return len(uploads) + sum(self._remove(name) for name in self.leftovers(prefix) if is_partial(name))

    @override
    def ping(self) -> None:
        self._check_open()
        name = partial_name("")
        path = self._path(name)
        with self._translating("to write, read and remove a small file"):
            if not self._is_object_store:
                self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(path, b"shade")
            found = self._fs.cat_file(path)
            self._fs.rm_file(path)
        if found != b"shade":
            raise StorageError(f"expected to read back what was written to {self.url}, got {found!r}; mend it")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _words(self, error: BaseException) -> str:
        return without_login(f"{type(error).__name__}: {error}", self._secret_url)

    @contextlib.contextmanager
    def _translating(self, expected: str) -> Iterator[None]:
        try:
            yield
        except ShadeError:
            raise
        except Exception as error:  # noqa: BLE001 - each library raises its own
            cure = "see that it is reachable and that the login in your environment may read and write there"
            # From None: the library's own message may show the login.
            raise failure(f"{expected} in {self.url}", error, cure, self._words(error)) from None

    def _upload(self, name: str, path: str, parts: Iterable[Bytes]) -> int:
        """Writes a small object in one request, a large one as an upload that is completed last."""
        remaining, first = iter(parts), bytearray()
        for part in remaining:
            first += part
            if len(first) >= UPLOAD_BYTES:
                return self._stream(name, path, itertools.chain([first], remaining), hold=True)
        with self._translating(f"to write {name}"):
            self._fs.pipe_file(path, bytes(first))
        return len(first)

    def _stream(self, name: str, path: str, parts: Iterable[Bytes], *, hold: bool) -> int:
        """Writes the parts as they come; with ``hold`` nothing is visible before the commit."""
        # Without autocommit fsspec keeps the upload open until commit().
        options = {"autocommit": False} if hold else {}
        num_bytes = 0
        with self._translating(f"to write {name}"):
            file = self._fs.open(path, "wb", block_size=UPLOAD_BYTES, **options)
        try:
            for part in parts:
                with self._translating(f"to write {name}"):
                    file.write(part)
                num_bytes += memoryview(part).nbytes
            with self._translating(f"to write {name}"):
                file.close()
                if hold:
                    file.commit()
        except BaseException:
            # Left alone, the file would be closed by the garbage collector, which flushes, and so would complete it.
            with contextlib.suppress(Exception):
                if hold:
                    file.discard()
            with contextlib.suppress(AttributeError):
                file.closed = True
            raise
        return num_bytes

    def _publish(self, partial: str, path: str) -> None:
        with contextlib.suppress(OSError):
            self._fs.mv(partial, path)
        self._fs.invalidate_cache()
        if self._fs.exists(partial):  # refused, by an error or, as HDFS does, in silence
            if self._fs.exists(path):
                self._fs.rm_file(path)
            self._fs.mv(partial, path)
            self._fs.invalidate_cache()
            if self._fs.exists(partial):
                raise OSError(f"{partial} could not be renamed")

    def _forget(self, partial: str) -> None:
        with contextlib.suppress(Exception):
            self._fs.rm_file(partial)

    def _find(self, prefix: str) -> Iterator[str]:
        self._check_open()
        folder = prefix.rpartition("/")[0]
        with self._translating("to list the files"):
            # fsspec caches listings; another process may have written meanwhile.
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(folder) if folder else self._root)
            except FileNotFoundError:
                return
        begin = self._root.strip("/")
        for path in found:
            yield str(path).strip("/")[len(begin) :].lstrip("/")

    def _uploads(self, prefix: str) -> Sequence[tuple[str, str]]:
        """Lists names and identifiers of unfinished uploads, if the service can list them."""
        if not hasattr(self._fs, "list_multipart_uploads"):
            return []
        self._check_open()
        bucket, _, key = self._root.partition("/")
        with self._translating("to list the uploads"):
            listed = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/{prefix}".lstrip("/"))
        begin = len(key) + 1 if key else 0
        return [(upload["Key"][begin:], upload["UploadId"]) for upload in listed.get("Uploads", [])]

    def _size_of(self, name: str) -> int | None:
        self._check_open()
        with self._translating(f"to look for {name}"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.info(self._path(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return int(found["size"]) if found["type"] == "file" else None

    def _remove(self, name: str) -> bool:
        if self._size_of(name) is None:
            return False
        with self._translating(f"to remove {name}"):
            self._fs.rm_file(self._path(name))
        return True
