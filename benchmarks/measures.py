"""What several benchmarks measure with: files on the disk, files off the page cache, percentiles."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Puts a file, or every file in a folder, on the disk."""
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(folder: Path) -> None:
    """Takes a folder's files out of the page cache. The libraries' code stays: it would slow down all ways alike."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least that share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
