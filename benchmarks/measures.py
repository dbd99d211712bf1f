"""What several benchmarks measure with, and how they say where: files on and off the disk, percentiles, reports."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


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


class Kept:
    """What a long measurement has found so far, a line each in a file: stopped and started again, it goes on there.

    Args:
        path: The file; None: nothing outlives this process.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._rows = {row["key"]: row for row in map(json.loads, lines)}

    def __call__(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found under a name, or is now.

        Args:
            key: Names all that it depends on.
            measure: Called if there is nothing yet.
        """
        if key not in self._rows:
            row = self._rows[key] = {"key": key, "commit": commit(), "found": measure()}
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        found: dict[str, Any] = self._rows[key]["found"]
        return found

    @property
    def commits(self) -> str:
        """That the figures are of."""
        return ", ".join(dict.fromkeys(row["commit"] for row in self._rows.values()))

    def done(self) -> None:
        """All is measured and written elsewhere: the next one starts anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


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
