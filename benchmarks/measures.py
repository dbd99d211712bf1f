"""What several benchmarks measure with, and how they say where: files on and off the disk, percentiles, reports."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
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


def in_child(act: Callable[..., dict[str, Any]], *words: Any) -> dict[str, Any]:
    """What a function finds in a process of its own, which ends with it. It is forked: what this process has imported
    costs a short run nothing. This process must not have computed with torch yet, whose threads no child inherits.

    Args:
        act: Gives figures.
        words: Its arguments.

    Returns:
        The figures.

    Raises:
        RuntimeError: It raised or died; with the end of what it printed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile() as printed:
        child = context.Process(target=_answer, args=(sender, printed.fileno(), act, words))
        child.start()
        sender.close()
        try:
            figures: dict[str, Any] = receiver.recv()
        except EOFError:
            child.join()
            printed.seek(0)
            told = printed.read().decode(errors="replace").strip()[-2000:]
            raise RuntimeError(f"exit code {child.exitcode}\n{told}".strip()) from None
        child.join()
    return figures


def _answer(sender: Any, printed: int, act: Callable[..., dict[str, Any]], words: Sequence[Any]) -> None:
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    sys.stdout = sys.stderr = os.fdopen(printed, "w", buffering=1, closefd=False)
    sender.send(act(*words))


class Log:
    """Rows that survive an interruption: one JSON line each, appended and synced.

    Args:
        path: Of the file; None: kept in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last one may be half a line
                    self.rows.append(json.loads(line))

    def add(self, row: dict[str, Any]) -> None:
        """Keeps a row."""
        self.rows.append(row)
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        begins_anew = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as file:
            file.write("\n" * begins_anew + json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Kept:
    """What a long measurement has found so far: stopped and started again, it goes on there.

    Args:
        path: Of its `Log`; None: nothing outlives this process.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._log = path, Log(path)

    def __call__(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found under a name, or is now.

        Args:
            key: Names all that it depends on.
            measure: Called if there is nothing yet.
        """
        found: dict[str, Any] | None = next((row["found"] for row in self._log.rows if row["key"] == key), None)
        if found is None:
            found = measure()
            self._log.add({"key": key, "commit": commit(), "found": found})
        return found

    @property
    def commits(self) -> str:
        """That the figures are of."""
        return ", ".join(dict.fromkeys(row["commit"] for row in self._log.rows))

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
