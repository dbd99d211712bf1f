"""Reads an origin behind a URL (``s3://``, ``http://``, ``gs://`` and whatever else fsspec reaches), one file a call.

Login, region and endpoint come from where fsspec and the service's library look for them. A file's entry carries the
version that the server reports (ETag, else time and size), so a data set that changed is another data set.

A server that is busy (429, 503 …) or silent is asked again, for `PATIENCE_SECONDS`: no sample takes the place of one
that is only late. Other errors are retried twice; a missing or forbidden file is not. An object in S3 is read through a
URL that s3fs signs (decision 0054). A training process leaves all that to a process of its own (decision 0060).
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import itertools
import logging
import os
import pickle
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import sync
from typing_extensions import override

from shade.data._origin.bucket_client import BucketClient
from shade.data._origin.hub import HubReads, commit_roots, commits_of, infos_of, is_at_commit, is_hub
from shade.data._origin.origin import ByteRange, FileOrRange, Origin
from shade.data._origin.read_pool import MOST
from shade.data._origin.reader_process import ReaderLostError, ReaderProcess, UnansweredError
from shade.errors import ConfigError, DataError, shown_url, without_login
from shade.installation import install_hint
from shade.process import keep_fsspec_from_forks

logger = logging.getLogger("shade.data")

T = TypeVar("T")
ALONE = 64
"""Files that a process reads by itself before it starts another one for that: a look at a few costs no process."""
PATIENCE_SECONDS = 120.0
"""How long a server that is busy or silent is asked again for one file."""
_LONGEST_SECONDS = 360.0
"""How long it is asked at most if it wants a longer pause: the Hub counts requests over five minutes."""
PAUSES_SECONDS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Between the requests for one file; the last one again and again."""
_RETRIES = 2
"""Of errors that are not known to pass."""
_SAID_SECONDS = 60.0
"""A server's trouble is said once in so long, by each process."""
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_SILENT = (TimeoutError, asyncio.TimeoutError, ConnectionError)
_SILENT_OF_LIBRARIES = ("ClientConnectionError", "ClientPayloadError", "ConnectError", "ConnectionError", "ReadTimeout")
_BUSY_ERRNOS = (errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO))
"""What s3fs makes of SlowDown, ServiceUnavailable and InternalError."""
_ASKERS = 32
_CHECKSUMS = ("blob_id", "xet_hash", "ETag", "etag", "e_tag", "md5Hash", "Content-MD5", "Digest", "checksum")
_VERSIONS = (*_CHECKSUMS, "Last-Modified", "LastModified", "last_modified", "mtime", "created")
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, TypeError)
_APART = ("s3fs", "gcsfs", "adlfs", "shade.data._origin.hub", "fsspec.implementations.http")
"""Libraries whose file systems another process has, too; one that a script registers, or one in memory, it has not."""
_SIGNING = "s3fs"
"""The library that signs; another file system may be registered for ``s3://``, with options of its own."""
_SIGNED_SECONDS = 3600
"""How long a signed URL can be used; it is used once, at once, but the clocks of two machines differ."""
_SIGNATURE = {"signature_version": "s3v4"}
"""Without this, botocore signs URLs of old regions as it did before version 4, which many servers refuse."""
_AS_BOTOCORE = {"trust_env": True, "auto_decompress": False}
"""With these, aiohttp takes proxies from the environment, and leaves an object's bytes as they are stored."""


@dataclass(frozen=True)
class Entry:
    """A file behind a URL, as its server describes it."""

    url: str
    num_bytes: int
    version: str
    """Changes when the content does."""
    named: str = field(default="", compare=False)
    """The URL as the user knows it: with a branch where `url` has a commit of the Hub, or with a table's version."""

    @property
    def fixed_name(self) -> str:
        """Returns the name of a repository at its commit, or of a table at its version, which no other content can
        have; empty if another one can come under the URL."""
        return commits_of([self.url]) or (self.named if self.version.startswith("version=") else "")


def is_url(path: str) -> bool:
    """Returns whether a path is a URL and not a file system's path."""
    return "://" in path


def open_file_system(url: str, options: Mapping[str, Any]) -> Any:
    """Opens fsspec's file system for a URL with fsspec's options, such as ``endpoint_url``; raises ConfigError if
    fsspec knows no such scheme, or its library is not installed."""
    keep_fsspec_from_forks()
    scheme = url.partition("://")[0]
    try:
        if is_hub(url):
            importlib.import_module("aiohttp")  # `HubReads` reads with it
        return fsspec.filesystem(scheme, **options)
    except (ImportError, ValueError) as error:
        extra = "hf" if is_hub(url) else "http" if scheme.startswith("http") else "s3"
        cure = f"install the library of {scheme}:// (for {extra}: {install_hint(extra)}): {error}"
        raise ConfigError.of("a URL that fsspec understands", shown_url(url), cure) from error


class UrlReads(Origin):
    """Reads files behind URLs of one scheme, in threads of this process.

    Args:
        options: For fsspec.
        num_threads: Upper limit of concurrent reads, ≥ 1.
        never_forks: Whether it may use a client that a fork breaks.
    """

    def __init__(
        self, options: Mapping[str, Any] | None = None, num_threads: int = MOST, *, never_forks: bool = False
    ) -> None:
        self.options, self._never_forks = dict(options or {}), never_forks
        super().__init__(num_threads)

    @override
    def _forget(self) -> None:
        super()._forget()
        self._file_system: Any = None
        self._bucket: BucketClient | None = None
        self._web: Any = None
        """Reads signed URLs, as long as that works."""
        self._has_signed = False
        self._opening = threading.Lock()
        # A network is waited for, so there is nothing to find out: several reads run in threads from the start.
        self._mean_seconds = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "num_threads": self.num_threads}  # not what only a reader's process may do

    @override
    def _content(self, path: FileOrRange) -> bytes:
        url, start, stop = path if isinstance(path, ByteRange) else (path, None, None)
        try:
            return patiently(partial(self._whole, url, start, stop), url)
        except Exception as error:
            raise _as_os_error(error) from error

    def _whole(self, url: str, start: int | None, stop: int | None) -> bytes:
        content = self._once(url, start, stop)
        if stop is not None and start is not None and len(content) != stop - start:
            raise OSError(
                f"{shown_url(url)} gave {len(content)} bytes for the range {start} … {stop}; it has become "
                "shorter, or its server knows no ranges"
            )
        return content

    def _once(self, url: str, start: int | None, stop: int | None) -> bytes:
        file_system = self._opened(url)
        if isinstance(file_system, HubReads):
            return file_system.read(url, start, stop)
        if self._bucket is not None:
            try:
                return self._bucket.read(url, start, stop)
            except BaseException as error:
                # Its panics are no Exception. A busy server is not asked twice; all else is said by the ways below.
                if " status code: 503" in str(error) or " status code: 429" in str(error):
                    raise OSError(errno.EBUSY, "SlowDown", shown_url(url)) from error
                logger.debug("%s could not be read by obstore: %s", shown_url(url), type(error).__name__)
        web = self._web
        # s3fs's own way to an object takes 2 ms of processor time instead of 0.7. It is left for what cannot be read
        # through a signed URL, because it also says what is wrong.
        if web is not None:
            try:
                content = bytes(sync(file_system.loop, _read_signed, file_system, web, url, start, stop))
                self._has_signed = True
                return content
            except Exception as error:
                if _status_of(error) in (429, 503):
                    raise
                # The way below says what is wrong, if anything is.
                logger.debug("%s could not be read through a signed URL: %s", shown_url(url), type(error).__name__)
        content = bytes(file_system.cat_file(url, start=start, end=stop))
        # Where no signed URL ever worked and this did, the next one will not work either.
        if not self._has_signed:
            self._web = None
        return content

    def _opened(self, url: str) -> Any:
        with self._opening:
            if self._file_system is None and is_hub(url):
                self._file_system = HubReads(self.options)
            elif self._file_system is None:
                self._file_system = open_file_system(url, self.options)
                if type(self._file_system).__module__.partition(".")[0] == _SIGNING:
                    signature = {"config_kwargs": _SIGNATURE | self.options.get("config_kwargs", {})}
                    self._file_system = open_file_system(url, self.options | signature)
                    self._web = fsspec.filesystem("http", encoded=True, client_kwargs=_AS_BOTOCORE)
                    self._bucket = BucketClient.of(self._file_system) if self._never_forks else None
            return self._file_system


class UrlOrigin(UrlReads):
    """Reads files behind URLs of one scheme: the first ones by itself, then through a process of its own."""

    @override
    def _forget(self) -> None:
        super()._forget()
        self._reader: ReaderProcess | None = None
        self._reads_alone = False
        self._num_asked = 0

    @override
    def read_many(self, paths: Sequence[FileOrRange], sizes: Sequence[int] | None = None) -> list[bytes | OSError]:
        """Reads as `Origin.read_many` does; raises DataError if the server stays busy or silent."""
        if self._pid != os.getpid():
            self._forget()
        self._num_asked += len(paths)
        results = self._read_apart(paths, sizes) if self._num_asked > ALONE else None
        if results is None:
            results = super().read_many(paths, sizes)
        for late in (result for result in results if isinstance(result, UnansweredError)):
            cure = "wait until it is well, and resume from the last checkpoint; no other sample takes its place"
            raise DataError(f"{late}; {cure}") from late
        return results

    def _read_apart(self, paths: Sequence[FileOrRange], sizes: Sequence[int] | None) -> list[bytes | OSError] | None:
        """Reads through the other process; None if there is none, or not yet."""
        reader = self._started()
        if reader is None:
            return None
        try:
            return reader.read(paths, sizes) if reader.is_ready else None
        except ReaderLostError as error:
            with self._making:
                is_news, self._reads_alone = not self._reads_alone, True
            if is_news:
                logger.warning("the process that reads URLs has ended (%s); this process reads them itself", error)
                reader.close()
            return None

    def _started(self) -> ReaderProcess | None:
        # A worker's interpreter does nothing else, and there are many workers.
        workers = sys.modules.get("torch.utils.data")
        with self._making:
            if self._reads_alone or (workers is not None and workers.get_worker_info() is not None):
                return None
            if self._reader is None and not type(self._file_system).__module__.startswith(_APART):
                return None
            if self._reader is None:
                try:
                    self._reader = ReaderProcess(self.options, self.num_threads)
                except (OSError, pickle.PicklingError, TypeError, AttributeError) as error:
                    self._reads_alone = True
                    logger.info("URLs are read in this process: %s", error)
                    return None
                weakref.finalize(self, self._reader.close)
            return self._reader

    @override
    def close(self) -> None:
        super().close()
        if self._reader is not None and self._pid == os.getpid():
            self._reader.close()
        self._reader = None


def patiently(ask: Callable[[], T], url: str, *, is_known: bool = True) -> T:
    """Returns what a request returns. It is repeated while the server is busy and, if it ``is_known`` to be there,
    while it is silent; then `UnansweredError` is raised. Other errors are raised after two retries."""
    begun, patience = time.monotonic(), PATIENCE_SECONDS
    for attempt in itertools.count():
        try:
            return ask()
        except Exception as error:
            is_busy, is_silent = _is_busy(error), _is_silent(error)
            if not (is_busy or is_silent) and (isinstance(error, _FINAL) or attempt >= _RETRIES):
                raise
            wanted, passed = _wanted_pause(error), time.monotonic() - begun
            if wanted > PATIENCE_SECONDS:
                patience = max(patience, min(passed + wanted + 1, _LONGEST_SECONDS))
            left = patience - passed
            cause = list(_chain(error))[-1]
            words = without_login(f"{type(cause).__name__}: {cause}", url)
            if left <= 0 or (is_silent and not is_known and attempt >= _RETRIES):
                got = f"for {passed:.1f} s {words}"
                raise UnansweredError(f"expected {shown_url(url)} to be served, got {got}") from None
            pause = PAUSES_SECONDS[min(attempt, len(PAUSES_SECONDS) - 1)]
            if pause >= 1:
                _say_once_a_minute(url, words, patience)
            # Not the script's own random numbers. Else all workers of all ranks would come back at the same moment.
            pause *= random.SystemRandom().uniform(0.5, 1.0)
            time.sleep(max(0.0, min(left, max(pause, wanted))))
    raise AssertionError("the loop ends by itself")


_said: dict[str, float] = {}


def _say_once_a_minute(url: str, words: str, patience: float) -> None:
    host, now = shown_url(url).partition("://")[2].partition("/")[0], time.monotonic()
    if now - _said.get(host, -_SAID_SECONDS) >= _SAID_SECONDS:
        _said[host] = now
        logger.warning("%s is busy or silent (%s); it is asked again for %g s", host, words, patience)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its causes: fsspec takes a busy web server's file for one that is not there."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _status_of(error: BaseException) -> int | None:
    """Returns the status with which a server refused a request, as the libraries of fsspec say it; None if it did
    not."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, Mapping):  # botocore's
            response = response.get("ResponseMetadata", {})
            return response.get("HTTPStatusCode") if isinstance(response, Mapping) else None
        for place, name in itertools.product((each, response), ("status", "status_code", "code")):
            status = getattr(place, name, None)
            if isinstance(status, int) and 400 <= status < 600:
                return status
    return None


def _is_busy(error: BaseException) -> bool:
    status = _status_of(error)
    if status is not None:
        return status in _BUSY
    return any(isinstance(each, OSError) and each.errno in _BUSY_ERRNOS for each in _chain(error))


def _is_silent(error: BaseException) -> bool:
    if _status_of(error) is not None:
        return False
    names = {kind.__name__ for each in _chain(error) for kind in type(each).__mro__}
    return any(isinstance(each, _SILENT) for each in _chain(error)) or not names.isdisjoint(_SILENT_OF_LIBRARIES)


def _wanted_pause(error: BaseException) -> float:
    """Returns the seconds that a server asks to be left alone (``Retry-After``), 0 if it does not say."""
    for each in _chain(error):
        headers = getattr(each, "headers", None) or getattr(getattr(each, "response", None), "headers", None) or {}
        text = headers.get("Retry-After") if isinstance(headers, Mapping) else None
        if text:
            try:
                return float(text) if text.isdecimal() else _seconds_until(text)
            except ValueError:
                return 0.0
    return 0.0


def _seconds_until(date: str) -> float:
    when = parsedate_to_datetime(date)
    return (when.replace(tzinfo=when.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds()


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")


def at_commits(urls: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the roots of the Hub's repositories as URLs name them, each with the root at its present commit: what all
    processes read, however long. Raises DataError if there is no such repository or revision."""
    if not any(map(is_hub, urls)):
        return {}
    file_system = open_file_system(urls[0], options)
    try:
        return patiently(partial(commit_roots, urls, file_system), urls[0], is_known=False)
    except ImportError as error:
        raise ConfigError.of("a library that knows buckets", str(error), "pip install -U huggingface_hub") from error
    except Exception as error:  # noqa: BLE001 - the library raises its own, whose message may show the login
        raise _not_listed(urls[0], error) from None


def describe_many(
    urls: Sequence[str], options: Mapping[str, Any], *, skips_missing: bool = False, is_known: bool = False
) -> list[Entry]:
    """Asks the server about files of one scheme, many at a time; returns an entry each, in order. A silent server is
    asked again if it ``is_known`` to be there. Raises DataError if a file is missing, unless ``skips_missing`` gives it
    an empty entry, or the server does not report its length, and ConfigError as `open_file_system`."""
    file_system = open_file_system(urls[0], options)
    info_of = file_system.info
    if is_hub(urls[0]):
        moving = next((url for url in urls if not (is_at_commit(url) or url.startswith("hf://buckets/"))), None)
        if moving is not None:
            cure = "write one, …/name@<commit>/…: each process would read what the branch has at that moment"
            raise ConfigError.of("files of the Hub at a commit", shown_url(moving), cure)
        try:
            info_of = patiently(partial(infos_of, urls, file_system), urls[0], is_known=is_known)
        except Exception as error:  # noqa: BLE001 - as in `list_files`
            raise _not_listed(urls[0], error) from None

    def describe(url: str) -> Entry:
        try:
            return entry_of(url, patiently(partial(info_of, url), url, is_known=is_known))
        except Exception as error:
            if isinstance(error, DataError):
                raise
            if skips_missing and isinstance(error, FileNotFoundError):
                return Entry(url, 0, "missing")
            if isinstance(error, UnansweredError):
                raise DataError(f"{error}; begin again when its server is well") from None
            words = without_login(str(error), url)
            raise DataError.of(f"to read {shown_url(url)}", words, "restore it or list the folder again") from None

    with ThreadPoolExecutor(min(_ASKERS, len(urls))) as pool:
        return list(pool.map(describe, urls))


def entry_of(url: str, info: Mapping[str, Any]) -> Entry:
    """Makes an entry from fsspec's ``info`` or a detailed listing; raises DataError if it lacks the length."""
    if info.get("size") is None:
        cure = "serve Content-Length, or copy the data set"
        raise DataError.of("a server that says how long a file is", shown_url(url), cure)
    version = next((f"{name}={info[name]}" for name in _VERSIONS if info.get(name)), "")
    return Entry(url, int(info["size"]), version)


def list_folder(url: str, options: Mapping[str, Any]) -> list[str]:
    """Lists what lies directly in a folder, folders with a slash at the end; raises as `list_files`."""
    file_system = open_file_system(url, options)
    try:
        found = patiently(partial(file_system.ls, url, detail=True), url, is_known=False)
    except Exception as error:  # noqa: BLE001 - each library raises its own, whose message may show the login
        raise _not_listed(url, error) from None
    ends = ["/" if each["type"] == "directory" else "" for each in found]
    return [file_system.unstrip_protocol(each["name"].rstrip("/")) + end for each, end in zip(found, ends, strict=True)]


def _not_listed(url: str, error: Exception) -> DataError:
    return DataError.of(f"to list {shown_url(url)}", without_login(str(error), url), "check the URL and the login")


def list_files(url: str, options: Mapping[str, Any]) -> list[Entry]:
    """Lists all files below a URL, in the order of their names, without the folders' own entries. Raises DataError if
    there are none or they cannot be listed, and ConfigError as `open_file_system`."""
    file_system = open_file_system(url, options)
    try:
        found = patiently(partial(file_system.find, url, detail=True), url, is_known=False)
    except Exception as error:  # noqa: BLE001 - each library raises its own, whose message may show the login
        raise _not_listed(url, error) from None
    infos = {file_system.unstrip_protocol(name): info for name, info in sorted(found.items())}
    if not infos:
        raise DataError.of("files below a URL", shown_url(url), "check it; a web server has to list its folders")
    # A web page's list has names alone.
    if any(info.get("size") is None for info in infos.values()):
        return describe_many(list(infos), options)
    return [entry_of(name, info) for name, info in infos.items()]


def root_of(urls: Sequence[str]) -> str:
    """Returns the deepest folder that holds all of at least one URL, with its last slash."""
    # All others lie between these two.
    first, last = min(urls), max(urls)
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:same].rpartition("/")[0] + "/"


async def _read_signed(file_system: Any, web: Any, url: str, start: int | None, stop: int | None) -> bytes:
    # Both in one coroutine: one wait for fsspec's thread instead of two.
    signed = await file_system._url(url, expires=_SIGNED_SECONDS)
    content: bytes = await web._cat_file(signed, start=start, end=stop)
    return content
