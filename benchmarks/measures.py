"""What several benchmarks measure with, and how they say where: files on and off the disk, percentiles, reports."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
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


def commit() -> str:
    """The one that is checked out."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    told = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def machine() -> str:
    """Python and processors."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ":?")
    return f"Python {platform.python_version()}, {os.cpu_count()} cores of {model.partition(':')[2].strip()}"


def publish(name: str, title: str, lines: Sequence[str], out: Path | None) -> None:
    """Prints a report, and writes it.

    Args:
        name: Of the file, without its ending.
        title: Its first line.
        lines: Markdown.
        out: The folder; None: it is printed only.
    """
    where = f"commit {commit()}, {machine()}, load {os.getloadavg()[0]:.2f} at the end"
    page = "\n".join([f"# {title}", "", where, "", *lines, ""])
    print(page)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text(page, encoding="utf-8")
