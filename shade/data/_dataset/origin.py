"""Reads whole files of the data set's origin, the only slow place, many at once where that pays.

On a local disk a read takes tens of microseconds and threads only cost; on NFS or object storage it takes milliseconds
of waiting, and a batch must pay that latency once and not once a sample. `FileOrigin` measures which of the two it is;
`read_files` does that where no wait for the interpreter is taken for a wait for storage.

`ConcurrencyLimit` decides how many reads run at once. A link or disk serves so many bytes a second and answers after
some time. Up to the product of the two, one more read under way is one more served, and none takes longer (Little's
law). Beyond it reads queue, which helps no one and holds memory. Neither number is known beforehand, and both change
with the other users. So the limit doubles while reads take their best latency, and halves when they take much longer,
but only if halving shortens the queue: a queue that other processes made would cost a process that backs off as much
waiting, for less.

`ReadPool` serves all batches of a process in the order in which they ask, which is the order in which training wants
them, so the read with the nearest deadline is first in the queue.

Invariants: results come in the order of the paths, and one unreadable file never hides the others; a read runs exactly
once, or its caller gets `StoreClosedError`; no lock is held while it runs.

An origin behind a URL (``s3://``, ``http://``, ``gs://`` and whatever else fsspec reaches) is read one file a call;
login, region and endpoint come from where fsspec and the service's library look for them. A file's entry carries the
version that the server reports (ETag, else time and size), so a data set that changed is another data set.

Errors that may pass are retried twice; a missing or forbidden file is not. An object in S3 is read through a URL that
s3fs signs, because its own way to it takes 2 ms of processor time an object instead of 0.7 (decision 0054). What cannot
be read so is read in s3fs's own way, which also says what is wrong.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Any, NamedTuple, TypeAlias

import fsspec
import numpy as np
from fsspec.asyn import sync
from typing_extensions import override

from shade.data._dataset.file_reads import read_files
from shade.errors import ConfigError, DataError, StoreClosedError, shown_url, without_login
from shade.installation import install_hint

logger = logging.getLogger("shade.data")

PARALLEL_SECONDS = 0.0005
"""A mean read slower than this waits rather than copies: from here on reads run in parallel."""
_MEAN_DECAY = 0.9
_UNKNOWN_BYTES = 128 << 10
"""Assumed size of a file whose size the caller did not give."""
MOST_BYTES = 64 << 20
"""Upper bound of the bytes being read; a file larger than that is read alone."""
LEAST, MOST = 8, 64
"""Limits of concurrency: a disk's own queue is longer than the one; beyond the other, memory matters."""
WINDOW_READS = 16
"""Reads whose mean latency is judged together."""
FREE, QUEUE = 1.25, 2.5
"""Multiples of the best latency: below the one no read waits, above the other there is a queue. A doubled limit at most
doubles the latency, so a step up never asks for a step down."""
EASED = 0.65
"""A halved limit brings the latency below this part of what it was, if this process made the queue."""
PATIENCE_WINDOWS = 8
"""Windows until a step down that did not help is tried again."""
Result = bytes | OSError
_ROOM_BYTES = 1 << 20
"""Small files are read together, as many as fit into this."""
_MOST_OPEN = 128
"""Files that stay open for the next range of them."""


class ByteRange(NamedTuple):
    """The bytes ``start`` … ``stop`` of a file, ``stop`` left out."""

    path: str
    start: int
    stop: int


Place: TypeAlias = "str | ByteRange"
"""A whole file by its path or URL, or a range of one."""


class ConcurrencyLimit:
    """Limits the reads under way; arithmetic alone.

    A read counts only if another was waiting when it ended: the speed of an idle origin says nothing about its limit.

    Args:
        most: Upper bound of the limit, ≥ 1.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.limit = min(LEAST, most)
        """Reads that may be under way now."""
        self._best = float("inf")
        """Mean seconds of a read in the best window."""
        self._trial: tuple[int, float] | None = None
        """Limit and seconds a read before the step down that is being tried."""
        self._rest = self._stale = 0
        self.idle()

    def idle(self) -> None:
        """Forgets the current window, because no read is waiting."""
        self._num_reads, self._seconds, self._stale = 0, 0.0, 0

    def finished(self, seconds: float) -> None:
        """Counts a read that took so many seconds and ended while others waited."""
        if self._stale:  # it was begun under another limit
            self._stale -= 1
            return
        self._num_reads += 1
        self._seconds += seconds
        if self._num_reads == WINDOW_READS:
            latency = self._seconds / WINDOW_READS
            self.idle()
            self._judge(latency)

    def _judge(self, latency: float) -> None:
        self._best = min(self._best, latency)
        if self._trial is not None:
            limit, before = self._trial
            self._trial = None
            if latency > EASED * before:  # another process made the queue, or the link got slower
                self._rest = PATIENCE_WINDOWS
                self._set(min(2 * limit, self._most))
                return
        self._rest = max(0, self._rest - 1)
        if latency < FREE * self._best:
            self._set(min(2 * self.limit, self._most))
        elif latency > QUEUE * self._best and not self._rest and self.limit > LEAST:
            self._trial = (self.limit, latency)
            self._set(max(self.limit // 2, LEAST))

    def _set(self, limit: int) -> None:
        # Reads begun under the old limit say nothing about the new one.
        self._stale = self.limit if limit != self.limit else 0
        self.limit = limit


class _ReadBatch:
    """The reads of one caller."""

    def __init__(self, count: int) -> None:
        self.results: list[Result | None] = [None] * count
        self.left = count
        self.done = threading.Event()


class ReadPool:
    """Runs reads in up to ``most`` threads, with up to ``most_bytes`` under way."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self.pace = ConcurrencyLimit(most)
        self._most_bytes = most_bytes
        self._wake = threading.Condition()
        self._waiting: deque[tuple[_ReadBatch, int, Callable[[], Result], int]] = deque()
        self._threads: list[threading.Thread] = []
        self._running = self._bytes = 0
        self._closed = False

    def run(self, reads: Sequence[Callable[[], Result]], sizes: Sequence[int]) -> list[Result]:
        """Runs reads of some expected sizes, each of which returns what it read or the error that it met, and returns
        their results in order. Raises StoreClosedError if the pool is closed meanwhile."""
        mine = _ReadBatch(len(reads))
        with self._wake:
            if self._closed:
                raise StoreClosedError("expected an open origin, got one that is closed; open the data set again")
            for number, (read, size) in enumerate(zip(reads, sizes, strict=True)):
                self._waiting.append((mine, number, read, size))
            while len(self._threads) < min(self.pace.limit, self._running + len(self._waiting)):
                thread = threading.Thread(target=self._work, name=f"shade-origin-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._wake.notify(len(reads))
        mine.done.wait()
        results = [result for result in mine.results if result is not None]
        if len(results) < len(reads):
            raise StoreClosedError("expected an open origin, got one that was closed; open the data set again")
        return results

    def _may_start(self) -> bool:
        if not self._waiting or self._running >= self.pace.limit:
            return False
        # A file larger than the bound must still be read, alone.
        return self._running == 0 or self._bytes + self._waiting[0][3] <= self._most_bytes

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._closed and not self._may_start():
                    self._wake.wait()
                if self._closed:
                    return
                mine, number, read, size = self._waiting.popleft()
                self._running += 1
                self._bytes += size
            begun = time.monotonic()
            try:
                result = read()
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller must not wait forever
                result = OSError(f"{type(error).__name__}: {error}")
            now = time.monotonic()
            with self._wake:
                self._running -= 1
                self._bytes -= size
                if self._waiting:
                    self.pace.finished(now - begun)
                    self._grow()
                    self._wake.notify(2)
                else:
                    self.pace.idle()
                mine.results[number] = result
                mine.left -= 1
                if mine.left == 0:
                    mine.done.set()
            del mine, read, result  # a waiting thread must not keep its last batch alive

    def _grow(self) -> None:
        """Starts one more thread if the limit has risen."""
        if len(self._threads) < self.pace.limit and self._running + 1 >= len(self._threads):
            thread = threading.Thread(target=self._work, name=f"shade-origin-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ends the threads; waiting callers get `StoreClosedError`. Safe to call twice."""
        with self._wake:
            self._closed = True
            for mine, *_ in self._waiting:
                mine.done.set()
            self._waiting.clear()
            self._wake.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


class _Room(threading.local):
    """Memory of each thread, into which it reads small files."""

    def __init__(self) -> None:
        self.bytes_S = np.empty(_ROOM_BYTES, dtype=np.uint8)


class _OpenFile:
    """A file that is open as long as anything refers to it, which a thread that reads it does."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # it never opened
            os.close(self.descriptor)


class Origin(ABC):
    """Reads files of one kind of storage, or ranges of them.

    Belongs to one process, any number of its threads; pickles as its settings.

    Args:
        num_threads: Upper limit of concurrent reads, ≥ 1.
    """

    def __init__(self, num_threads: int = MOST) -> None:
        self.num_threads = num_threads
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._pool: ReadPool | None = None
        self._making = threading.Lock()
        self._mean_seconds = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"num_threads": self.num_threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read_many(self, paths: Sequence[Place], sizes: Sequence[int] | None = None) -> list[bytes | OSError]:
        """Reads whole files, or ranges of them; returns the bytes of each in order, or the error that reading it
        raised. Expected sizes, if known, bound the memory under way."""
        if self._pid != os.getpid():
            self._forget()
        expected = [_UNKNOWN_BYTES] * len(paths) if sizes is None else sizes
        results: list[bytes | OSError] = []
        while (done := len(results)) < len(paths):
            left, left_bytes = paths[done:], expected[done:]
            # The first slow read of a batch sends the rest of it to the threads.
            if len(left) > 1 and self.num_threads > 1 and self._mean_seconds > PARALLEL_SECONDS:
                reads = [partial(self._read, path, size) for path, size in zip(left, left_bytes, strict=True)]
                return results + self._threads().run(reads, left_bytes)
            results += self._read_first(left, left_bytes)
        return results

    def _threads(self) -> ReadPool:
        with self._making:
            if self._pool is None:
                self._pool = ReadPool(self.num_threads)
                weakref.finalize(self, self._pool.close).atexit = False
            return self._pool

    def _read(self, path: Place, size: int) -> bytes | OSError:
        (content,) = self._read_first([path], [size])
        return content

    def _read_first(self, paths: Sequence[Place], sizes: Sequence[int]) -> list[bytes | OSError]:
        """Reads the first place, and those after it that the same call can read."""
        del sizes
        return [self._read_alone(paths[0])]

    def _read_alone(self, path: Place) -> bytes | OSError:
        begun = time.perf_counter()
        try:
            content = self._content(path)
        except OSError as error:
            return error
        self._mean_seconds = _MEAN_DECAY * self._mean_seconds + (1 - _MEAN_DECAY) * (time.perf_counter() - begun)
        return content

    @abstractmethod
    def _content(self, path: Place) -> bytes:
        """Returns a whole file, or a range of one, or raises OSError."""

    def close(self) -> None:
        """Ends the threads. Safe to call twice; the next read starts them again."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.close()
        self._pool = None


class FileOrigin(Origin):
    """Reads files of a mounted file system, small ones together."""

    @override
    def _forget(self) -> None:
        super()._forget()
        self._open_files: dict[str, _OpenFile] = {}
        self._room = _Room()

    @override
    def _read_first(self, paths: Sequence[Place], sizes: Sequence[int]) -> list[bytes | OSError]:
        small = self._small(paths, sizes)
        if small and isinstance(open, BuiltinFunctionType):  # else a script put its own `open` in the place of Python's
            pace = self._mean_seconds, _MEAN_DECAY, PARALLEL_SECONDS
            contents, self._mean_seconds = read_files(small, self._room.bytes_S, *pace)
            if contents:
                return contents
        return super()._read_first(paths, sizes)

    def _small(self, paths: Sequence[Place], sizes: Sequence[int]) -> list[str]:
        """Returns the whole files at the beginning that fit into a thread's memory together."""
        small: list[str] = []
        free = _ROOM_BYTES
        for path, size in zip(paths, sizes, strict=True):
            free -= size + 1
            if isinstance(path, ByteRange) or free < 0:
                break
            small.append(path)
        return small

    @override
    def _content(self, path: Place) -> bytes:
        if isinstance(path, ByteRange):
            return self._range(path)
        with open(path, "rb", buffering=0) as file:
            return file.read()

    def _range(self, place: ByteRange) -> bytes:
        """Reads a range of a file that stays open, because opening may take as long as reading."""
        file = self._open_files.get(place.path) or _OpenFile(place.path)
        with self._making:
            self._open_files.pop(place.path, None)
            self._open_files[place.path] = file  # the last one used is the last in the dict
            unused = next(iter(self._open_files))
            if len(self._open_files) > _MOST_OPEN:
                self._open_files.pop(unused)  # a thread that reads it holds a reference; the last one closes it
        parts, at = [], place.start
        while at < place.stop:
            part = os.pread(file.descriptor, place.stop - at, at)  # one call returns at most 2 GiB
            if not part:
                raise OSError(f"{place.path} ends at byte {at}, before byte {place.stop}")
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @override
    def close(self) -> None:
        super().close()
        self._open_files.clear()


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
        cure = f"install the library of {scheme}:// (for s3: {install_hint('s3')}): {error}"
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
        self._mean_seconds = 1.0  # a network is waited for; nothing to find out

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "num_threads": self.num_threads}

    @override
    def _content(self, path: Place) -> bytes:
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
        if web is not None:
            try:
                content = bytes(sync(file_system.loop, _read_signed, file_system, web, url, start, stop))
                self._has_signed = True
                return content
            except Exception as error:  # noqa: BLE001 - the way below says what is wrong, if anything is
                logger.debug("%s could not be read through a signed URL: %s", shown_url(url), type(error).__name__)
        content = bytes(file_system.cat_file(url, start=start, end=stop))
        if not self._has_signed:  # nor will the next one be, where this works
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


async def _read_signed(file_system: Any, web: Any, url: str, start: int | None, stop: int | None) -> bytes:
    """Signs a URL and reads it: one wait for fsspec's thread instead of two."""
    signed = await file_system._url(url, expires=_SIGNED_SECONDS)
    content: bytes = await web._cat_file(signed, start=start, end=stop)
    return content


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
    if any(info.get("size") is None for info in infos.values()):  # a web page's list has names alone
        return describe_many(list(infos), options)
    return [entry_of(name, info) for name, info in infos.items()]


def root_of(urls: Sequence[str]) -> str:
    """Returns the deepest folder that holds all of at least one URL, with its last slash."""
    first, last = min(urls), max(urls)  # all others lie between them
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:same].rpartition("/")[0] + "/"
