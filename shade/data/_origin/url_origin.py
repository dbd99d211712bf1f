"""Reads an origin behind a URL (``s3://``, ``http://``, ``gs://`` and whatever else fsspec reaches), one file a call.

Login, region and endpoint come from where fsspec and the service's library look for them. A file's entry carries the
version that the server reports (ETag, else time and size), so a data set that changed is another data set.

Errors that may pass are retried twice; a missing or forbidden file is not. An object in S3 is read through a URL that
s3fs signs (decision 0054).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.asyn import sync
from typing_extensions import override

from shade.data._origin.origin import ByteRange, FileOrRange, Origin
from shade.data._origin.read_pool import MOST
from shade.errors import ConfigError, DataError, shown_url, without_login
from shade.installation import install_hint

logger = logging.getLogger("shade.data")


PAUSES_SECONDS = (0.1, 0.5)
_ASKERS = 32
_CHECKSUMS = ("ETag", "etag", "e_tag", "md5Hash", "Content-MD5", "Digest", "checksum")
_VERSIONS = (*_CHECKSUMS, "Last-Modified", "LastModified", "last_modified", "mtime", "created")
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, TypeError)
_SIGNED_SCHEMES = ("s3", "s3a")
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


def is_url(path: str) -> bool:
    """Returns whether a path is a URL and not a file system's path."""
    return "://" in path


def open_file_system(url: str, options: Mapping[str, Any]) -> Any:
    """Opens fsspec's file system for a URL with fsspec's options, such as ``endpoint_url``; raises ConfigError if
    fsspec knows no such scheme, or its library is not installed."""
    scheme = url.partition("://")[0]
    try:
        return fsspec.filesystem(scheme, **options)
    except (ImportError, ValueError) as error:
        extra = "http" if scheme.startswith("http") else "s3"
        cure = f"install the library of {scheme}:// (for {extra}: {install_hint(extra)}): {error}"
        raise ConfigError.of("a URL that fsspec understands", shown_url(url), cure) from error


class UrlOrigin(Origin):
    """Reads files behind URLs of one scheme.

    Args:
        options: For fsspec.
        num_threads: Upper limit of concurrent reads, ≥ 1.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, num_threads: int = MOST) -> None:
        self.options = dict(options or {})
        super().__init__(num_threads)

    @override
    def _forget(self) -> None:
        super()._forget()
        self._file_system: Any = None
        self._web: Any = None
        """Reads signed URLs, as long as that works."""
        self._has_signed = False
        self._opening = threading.Lock()
        # A network is waited for, so there is nothing to find out: several reads run in threads from the start.
        self._mean_seconds = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "num_threads": self.num_threads}

    @override
    def _content(self, path: FileOrRange) -> bytes:
        url, start, stop = path if isinstance(path, ByteRange) else (path, None, None)
        # None marks the last attempt, which raises.
        for pause in (*PAUSES_SECONDS, None):
            try:
                content = self._once(url, start, stop)
                if stop is not None and start is not None and len(content) != stop - start:
                    raise OSError(
                        f"{shown_url(url)} gave {len(content)} bytes for the range {start} … {stop}; it has become "
                        "shorter, or its server knows no ranges"
                    )
                return content
            except _FINAL as error:
                raise _as_os_error(error) from error
            except Exception as error:
                if pause is None:
                    raise _as_os_error(error) from error
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _once(self, url: str, start: int | None, stop: int | None) -> bytes:
        file_system, web = self._opened(url), self._web
        # s3fs's own way to an object takes 2 ms of processor time instead of 0.7. It is left for what cannot be read
        # through a signed URL, because it also says what is wrong.
        if web is not None:
            try:
                content = bytes(sync(file_system.loop, _read_signed, file_system, web, url, start, stop))
                self._has_signed = True
                return content
            except Exception as error:  # noqa: BLE001 - the way below says what is wrong, if anything is
                logger.debug("%s could not be read through a signed URL: %s", shown_url(url), type(error).__name__)
        content = bytes(file_system.cat_file(url, start=start, end=stop))
        # Where no signed URL ever worked and this did, the next one will not work either.
        if not self._has_signed:
            self._web = None
        return content

    def _opened(self, url: str) -> Any:
        with self._opening:
            if self._file_system is None:
                options, is_signed = self.options, url.partition("://")[0] in _SIGNED_SCHEMES
                if is_signed:
                    options = options | {"config_kwargs": _SIGNATURE | options.get("config_kwargs", {})}
                self._file_system = open_file_system(url, options)
                if is_signed:
                    self._web = fsspec.filesystem("http", encoded=True, client_kwargs=_AS_BOTOCORE)
            return self._file_system


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")


def describe_many(urls: Sequence[str], options: Mapping[str, Any], *, skips_missing: bool = False) -> list[Entry]:
    """Asks the server about files of one scheme, many at a time; returns an entry each, in order. Raises DataError if a
    file is missing, unless ``skips_missing`` gives it an empty entry, or the server does not report its length, and
    ConfigError as `open_file_system`."""
    file_system = open_file_system(urls[0], options)

    def describe(url: str) -> Entry:
        try:
            return entry_of(url, file_system.info(url))
        except Exception as error:
            if isinstance(error, DataError):
                raise
            if skips_missing and isinstance(error, FileNotFoundError):
                return Entry(url, 0, "missing")
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


def list_files(url: str, options: Mapping[str, Any]) -> list[Entry]:
    """Lists all files below a URL, in the order of their names, without the folders' own entries. Raises DataError if
    there are none or they cannot be listed, and ConfigError as `open_file_system`."""
    file_system = open_file_system(url, options)
    try:
        found = file_system.find(url, detail=True)
    except Exception as error:  # noqa: BLE001 - each library raises its own, whose message may show the login
        words = without_login(str(error), url)
        raise DataError.of(f"to list {shown_url(url)}", words, "check the URL and the login") from None
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
