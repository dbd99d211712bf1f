"""Checks names, names unfinished files, and words failures.

A name is a relative path with ``/`` that means the same in a folder, in a bucket and in HDFS. An unfinished file has a
name that no caller can use, beginning with `PARTIAL`, in the folder of its final name. So a sweep after a crash
recognises it, and a rename never crosses file systems.
"""

from __future__ import annotations

import errno
import os
import secrets
from typing import Final

from shade.errors import StorageError, StorageFullError

PARTIAL: Final = ".partial-"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


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
    errno.EACCES: "give this user the right to write there, or choose another place",
    errno.EPERM: "give this user the right to write there, or choose another place",
    errno.EROFS: "mount it writable, or choose another place",
    errno.ENOTDIR: "a file is where a folder should be: move it away, or choose another place",
    errno.EEXIST: "a file is where a folder should be: move it away, or choose another place",
    errno.EISDIR: "a folder is where the file should be: move it away, or choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "see whether it was removed or unmounted",
}
