"""Replaces a file whole: whoever opens it finds the old content or the new one, and never a part of one.

The new content is written beside the file and renamed. The name beside is a new one each time, so that two processes
may write the same file; it begins with a dot and ends in ``.new``, and is removed if writing fails. Only a process that
is killed leaves it.

After a power cut a renamed file may be empty, unless its content was synced before. A sync takes milliseconds, so only
files that something relies on later are synced: ``durable``.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields a path beside a file, or a folder that does not exist; at the end what was written there takes its place.

    Args:
        path: Path of the file or folder. Its parent exists.
        durable: Whether it has to be there after a power cut.

    Yields:
        Where to write. After an exception, nothing is replaced.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        yield beside
        for each in (beside, *beside.rglob("*")) if durable else ():
            _sync(each)
        beside.replace(path)
    except BaseException:
        remove(beside)
        raise
    if durable:
        _sync(path.parent)


def remove_leftovers(path: Path) -> None:
    """Removes what processes that were killed have left beside a path."""
    if path.parent.is_dir():
        for each in path.parent.iterdir():
            if each.name.startswith(f".{path.name}.") and each.name.endswith(".new"):
                remove(each)


def remove(path: Path) -> None:
    """Removes a file or a folder; does nothing if there is none."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
