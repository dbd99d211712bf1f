"""Reads an origin behind a URL: ``s3://``, ``http://``, ``gs://`` and whatever else fsspec reaches.

fsspec fetches one file a call; `shade.store.origin.ConcurrencyLimit` decides how many calls run at once. Login, region
and endpoint come from where fsspec and the service's library look for them. A file's entry carries the version that the
server reports (ETag, else time and size), so a data set that changed is another data set.

Errors that may pass are retried twice; a missing or forbidden file is not. fsspec costs some tenths of a millisecond of
processor time a file, which is nothing beside the transfer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec

from shade.errors import ConfigError, DataError
from shade.store.origin import MOST, FileOrigin

PAUSES_SECONDS = (0.1, 0.5)
_ASKERS = 32
_CHECKSUMS = ("ETag", "etag", "e_tag", "md5Hash", "Content-MD5", "Digest", "checksum")
_VERSIONS = (*_CHECKSUMS, "Last-Modified", "LastModified", "last_modified", "mtime", "created")
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, TypeError)


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
        cure = f"install the library of {scheme}:// (for s3: pip install 'shade[s3]'): {error}"
        raise ConfigError.of("a URL that fsspec understands", url, cure) from error


class UrlOrigin(FileOrigin):
    """Reads files behind URLs of one scheme.

    Args:
        options: For fsspec.
        num_threads: Upper limit of concurrent reads, ≥ 1.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, num_threads: int = MOST) -> None:
        self.options = dict(options or {})
        super().__init__(num_threads)

    def _forget(self) -> None:
        super()._forget()
        self._file_system: Any = None
        self._opening = threading.Lock()
        self._mean_seconds = 1.0  # a network is waited for; nothing to find out

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "num_threads": self.num_threads}

    def _content(self, url: str) -> bytes:
        file_system = self._opened(url)
        # None marks the last attempt, which raises.
        for pause in (*PAUSES_SECONDS, None):
            try:
                return bytes(file_system.cat_file(url))
            except _FINAL as error:
                raise _as_os_error(error) from error
            except Exception as error:
                if pause is None:
                    raise _as_os_error(error) from error
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _opened(self, url: str) -> Any:
        with self._opening:
            if self._file_system is None:
                self._file_system = open_file_system(url, self.options)
            return self._file_system


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")


def describe_many(urls: Sequence[str], options: Mapping[str, Any]) -> list[Entry]:
    """Asks the server about files of one scheme, many at a time; returns an entry each, in order. Raises DataError if a
    file is missing, or the server does not report its length, and ConfigError as `open_file_system`."""
    file_system = open_file_system(urls[0], options)

    def describe(url: str) -> Entry:
        try:
            return entry_of(url, file_system.info(url))
        except Exception as error:
            if isinstance(error, DataError):
                raise
            raise DataError.of(f"to read {url}", str(error), "restore it or list the folder again") from error

    with ThreadPoolExecutor(min(_ASKERS, len(urls))) as pool:
        return list(pool.map(describe, urls))


def entry_of(url: str, info: Mapping[str, Any]) -> Entry:
    """Makes an entry from fsspec's ``info`` or a detailed listing; raises DataError if it lacks the length."""
    if info.get("size") is None:
        raise DataError.of("a server that says how long a file is", url, "serve Content-Length, or copy the data set")
    version = next((f"{name}={info[name]}" for name in _VERSIONS if info.get(name)), "")
    return Entry(url, int(info["size"]), version)


def list_files(url: str, options: Mapping[str, Any]) -> list[Entry]:
    """Lists all files below a URL, in the order of their names, without the folders' own entries. Raises DataError if
    there are none or they cannot be listed, and ConfigError as `open_file_system`."""
    file_system = open_file_system(url, options)
    try:
        found = file_system.find(url, detail=True)
    except Exception as error:
        raise DataError.of(f"to list {url}", str(error), "check the URL and the login") from error
    infos = {file_system.unstrip_protocol(name): info for name, info in sorted(found.items())}
    if not infos:
        raise DataError.of("files below a URL", url, "check it; a web server has to list its folders")
    if any(info.get("size") is None for info in infos.values()):  # a web page's list has names alone
        return describe_many(list(infos), options)
    return [entry_of(name, info) for name, info in infos.items()]


def root_of(urls: Sequence[str]) -> str:
    """Returns the deepest folder that holds all of at least one URL, with its last slash."""
    first, last = min(urls), max(urls)  # all others lie between them
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:same].rpartition("/")[0] + "/"
