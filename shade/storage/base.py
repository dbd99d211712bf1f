"""What a volume is: named byte strings that survive the machine's end. It knows nothing of checkpoints.

Files are few and large: a name is written once, in long sequential runs, and read in ranges. A name is a relative path
with ``/`` that means the same in a folder, in a bucket and in HDFS. An unfinished file has a name that no caller can
use, beginning with `PARTIAL`, in the folder of its final name; so a sweep after a crash recognises it, and a rename
never crosses file systems. Invariant: once `Volume.write` has returned, the name holds all that it was given. After a
crash at any earlier moment the name holds all of the new content, or all of the old, or, if there was no old one,
nothing.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

from shade.errors import ConfigError, StorageError, StorageFullError
from shade.registry import Registry
from shade.types import Bytes

PARTIAL: Final = ".partial-"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Volume(ABC):
    """Durable bytes by name.

    Raises:
        StorageError: By any method: the storage failed, or the name is invalid. What was there is untouched.
        StorageFullError: By `write`: no space left. What was there is untouched; the unfinished file is removed.
    """

    url: str
    """The address with any password replaced by ``***``: safe to log."""

    _closed = False

    @abstractmethod
    def write(self, name: str, parts: Iterable[Bytes]) -> int:
        """Makes ``name`` hold exactly these bytes; durable when it returns, and never visible in part.

        Args:
            name: Relative path; its folders are made.
            parts: The content in order; consumed once, so it may be produced while earlier parts are written. A part's
                memory may be reused when the next one is asked for.

        Returns:
            Bytes written.
        """

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the bytes from ``start`` on, or raises StorageError if the name is missing or too
        short."""

    def read_directly(self, name: str, start: int, buffer: memoryview) -> None:
        """As `read_into`, past the page cache where there is one: for long ranges that no other process reads soon."""
        self.read_into(name, start, buffer)

    @abstractmethod
    def size_bytes(self, name: str) -> int | None:
        """Returns the length of what the name holds; None if there is none."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Lists every name that starts with ``prefix``, sorted, without what a crash left unfinished."""

    @abstractmethod
    def delete_many(self, names: Sequence[str]) -> int:
        """Deletes names, in this order, durably, and folders that become empty. Returns how many there were."""

    @abstractmethod
    def leftovers(self, prefix: str = "") -> Sequence[str]:
        """Lists unfinished files, sorted, whose path or folder begins with a prefix: those of writers that died, or
        that are writing now. They cannot be read."""

    @abstractmethod
    def sweep(self, prefix: str = "") -> int:
        """Deletes the `leftovers` of a prefix, and its empty folders; returns the number of files. Not while others
        write."""

    @abstractmethod
    def ping(self) -> None:
        """Returns if a small file can be written, read and deleted there, else raises. Called once, at start."""

    def close(self) -> None:
        """Frees its resources. Safe to call twice."""
        self._closed = True

    @abstractmethod
    def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """Returns the contents of small files, read together, in the order of their names; None for a file that is
        missing or unreadable."""

    def file_number(self, name: str) -> int | None:
        """Returns a number that a file has and its copies have not, the same on every machine that mounts the storage;
        None where it has none."""
        return None

    def free_bytes(self) -> int | None:
        """Returns the space left; None if it is unknown, as in a bucket."""
        return None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the bytes ``start`` … ``stop`` of a name, to its end by default, or raises as `read_into` does."""
        end = self.size_bytes(name) if stop is None else stop
        buffer = bytearray(max(0, (end or 0) - start))
        self.read_into(name, start, memoryview(buffer))
        return bytes(buffer)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"expected an open volume, got {self.url} after close(); open it again")

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


VOLUMES: Registry[Volume] = Registry("storage URL scheme")
"""URL scheme → class, built from the URL alone; ``*`` is whatever fsspec knows. A path without a scheme is ``file``."""


_URL_AS_PATH: Final = re.compile(r"[a-z][a-z0-9+.-]+:/", re.ASCII)


def open_volume(url: str | os.PathLike[str]) -> Volume:
    """Opens durable storage at a path, ``file:///path``, or ``scheme://…`` as in fsspec; nothing is touched yet. Raises
    `ConfigError` if it is no address, or its library is missing; the message says which to install."""
    if not isinstance(url, str):
        url, given = os.fspath(url), url
        if _URL_AS_PATH.match(url):
            raise ConfigError.of(
                "a path, or a URL as a string", repr(given), "pass a URL as a string: a Path drops a /"
            )
    scheme = url.partition("://")[0] if "://" in url else "file"
    return VOLUMES.get(scheme if scheme in VOLUMES else "*")(url)  # type: ignore[call-arg]


def check_name(name: str) -> str:
    """Returns the name, or raises StorageError if it is absolute, or has a NUL or a component that is empty, ``.``,
    ``..`` or named like an unfinished file."""
    components = name.split("/")
    if "\0" in name or any(each in ("", ".", "..") or each.startswith(PARTIAL) for each in components):
        raise StorageError(f"expected a relative name such as run/step-1/rank-0.json, got {name!r}; correct the name")
    return name


def partial_name(folder: str) -> str:
    """Makes a unique name for an unfinished file in a folder: ``<folder>/.partial-<16 hex digits>``."""
    return f"{folder}/{PARTIAL}{secrets.token_hex(8)}" if folder else f"{PARTIAL}{secrets.token_hex(8)}"


def is_partial(name: str) -> bool:
    """Returns whether a name is that of an unfinished file."""
    return name.rpartition("/")[2].startswith(PARTIAL)


def failure(expected: str, error: BaseException, cure: str, shown: str = "") -> StorageError:
    """Makes the one-line error of a volume: `StorageFullError` if space or quota ran out, else `StorageError`.

    Args:
        expected: What was tried, as a state: ``"to write run/x in file:///data"``.
        error: The cause; its kind decides the class.
        cure: What to do if the cause has no cure of its own.
        shown: The cause in words that are safe to print; by default the system's own.

    Returns:
        The error.
    """
    number = error.errno if isinstance(error, OSError) else None
    words = shown or (os.strerror(number) if number else f"{type(error).__name__}: {error}")
    words = " ".join(words.split())
    if number in _FULL:
        return StorageFullError(f"expected {expected}, got {words!r}; free some space, keep fewer, or store elsewhere")
    cure = _CURES.get(number or 0, cure)
    return StorageError(f"expected {expected}, got {words!r}; {cure}")


_CURES: Final = {
    errno.EACCES: "give this user the right to write there, or choose another folder",
    errno.EPERM: "give this user the right to write there, or choose another folder",
    errno.EROFS: "mount it writable, or choose another folder",
    errno.ENOTDIR: "a file is where a folder should be: move it away, or choose another folder",
    errno.EEXIST: "a file is where a folder should be: move it away, or choose another folder",
    errno.EISDIR: "a folder is where the file should be: move it away, or choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "see whether it was removed or unmounted",
}
