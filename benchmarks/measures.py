"""What several benchmarks measure with, and how they say where: files on and off the disk, percentiles, reports."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

SLOW_STATS: Final = ".slowfs-stats"
"""The file that holds a mount's counts (`scripts/slowfs`)."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4
"""Of mallopt(3)."""


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


def touch_free_memory(num_bytes: int) -> None:
    """Touches so much new memory, and gives it back. A virtual machine's host may take memory that is free for seconds,
    and whoever touches it next waits for the host: after a `forget` of many bytes nobody does, else everybody."""
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for place in range(0, num_bytes, mmap.PAGESIZE):
            memory[place] = 1


def written_bytes(folder: Path) -> int:
    """Returns what was written so far: by all, where the folder lies behind `scripts/slowfs`; elsewhere by this process
    to storage, as the kernel counts it; 0 where that is not counted."""
    for above in folder.parents:
        if (above / SLOW_STATS).exists():
            return int(json.loads((above / SLOW_STATS).read_text())["written_bytes"])
    return _counted("write_bytes")


def read_bytes() -> int:
    """Returns what this process has read so far from files and connections, as the kernel counts it, the page cache's
    part included; 0 where that is not counted."""
    return _counted("rchar")


def _counted(name: str) -> int:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = {key: int(value) for key, _, value in (line.partition(":") for line in lines)}
    return counts[name]


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; not a number where there is one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least that share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def commit() -> str:
    """The one that is checked out; in a copy without git, the one that scripts/wheelhouse has noted."""
    words, root = ["git", "rev-parse", "--short", "HEAD"], Path(__file__).parent.parent
    with contextlib.suppress(OSError):  # no git
        told = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
        if told and (root / ".git").exists():  # not of a repository that the copy lies in
            return told
    noted = root / "wheelhouse" / "commit"
    return noted.read_text().strip() if noted.exists() else "unknown"


def processors() -> str:
    """How many and which: family and model, too, as a cloud gives machines twice as fast the same name."""
    path = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in path.read_text().splitlines()] if path.exists() else []
    told = {name.strip(): text.strip() for name, _, text in lines}
    family = f" (family {told['cpu family']}, model {told['model']})" if "cpu family" in told else ""
    return f"{os.cpu_count()} cores of {told.get('model name', '?')}{family}"


def machine() -> str:
    """Python and processors."""
    return f"Python {platform.python_version()}, {processors()}"


class Child:
    """A process of its own that holds one object and answers calls of it, one after another. It is forked: what this
    process has imported costs it nothing. This process must not have computed with torch, whose threads no child has.
    What the child frees stays with it, so that its steps are alike (`_keep_freed_memory`).

    Args:
        make: Gives the object, in the child, with the first call.
        words: Its arguments.
    """

    def __init__(self, make: Callable[..., Any], *words: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._process = context.Process(
            target=_answer_calls, args=(theirs, self._ours, self._printed.fileno(), make, words)
        )
        self._process.start()
        theirs.close()

    def call(self, name: str, *words: Any) -> dict[str, Any]:
        """Calls a method of the object.

        Args:
            name: Of the method, which gives figures.
            words: Its arguments.

        Returns:
            The figures.

        Raises:
            RuntimeError: It raised, and the child goes on; or the child died, with the end of what it printed.
        """
        self.ask(name, *words)
        return self.answer()

    def ask(self, name: str, *words: Any) -> None:
        """Begins a call; `answer` waits for it."""
        with contextlib.suppress(ConnectionError):  # it died: `answer` says so
            self._ours.send((name, words))

    def answer(self) -> dict[str, Any]:
        """Returns the figures of the call begun last, as `call` does."""
        try:
            raised, answer = self._ours.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            self._printed.seek(0)
            told = self._printed.read().decode(errors="replace").strip()[-2000:]
            raise RuntimeError(f"exit code {self._process.exitcode}\n{told}".strip()) from None
        if raised:
            raise RuntimeError(answer)
        found: dict[str, Any] = answer
        return found

    def close(self) -> None:
        """Ends the child, and waits for its end."""
        self._ours.close()
        self._process.join()
        self._printed.close()


class Children:
    """Children that do everything together, such as the ranks of a training.

    Args:
        num_children: How many.
        make: Gives each child's object, called with its number and `words`.
        words: Further arguments.
    """

    def __init__(self, num_children: int, make: Callable[..., Any], *words: Any) -> None:
        self._children = [Child(make, number, *words) for number in range(num_children)]

    def call(self, name: str, *words: Any) -> list[dict[str, Any]]:
        """Calls a method of every object at once; see `Child.call`.

        Args:
            name: Of the method.
            words: Its arguments.

        Returns:
            The figures of each.

        Raises:
            RuntimeError: One of them raised or died; the first one's reason.
        """
        for child in self._children:
            child.ask(name, *words)
        answers: list[dict[str, Any]] = []
        failures: list[RuntimeError] = []
        for child in self._children:
            try:
                answers.append(child.answer())
            except RuntimeError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def close(self) -> None:
        """Ends them, the last one first: it inherited the others' pipes, which would keep those waiting."""
        for child in reversed(self._children):
            child.close()


def in_child(act: Callable[..., dict[str, Any]], *words: Any) -> dict[str, Any]:
    """What a function finds in a process of its own, which ends with it: see `Child`.

    Args:
        act: Gives figures.
        words: Its arguments.

    Returns:
        The figures.

    Raises:
        RuntimeError: It raised or died.
    """
    return in_children(1, lambda _, *given: act(*given), *words)[0]


def in_children(num_children: int, act: Callable[..., dict[str, Any]], *words: Any) -> list[dict[str, Any]]:
    """Returns what a function finds in each of several processes at once; see `in_child`. The function gets a process's
    number and `words`."""
    made = lambda number: types.SimpleNamespace(act=lambda: act(number, *words))  # noqa: E731
    with contextlib.closing(Children(num_children, made)) as children:
        return children.call("act")


def _answer_calls(calls: Any, others: Any, printed: int, make: Callable[..., Any], words: Sequence[Any]) -> None:
    others.close()  # else the other end would never be seen to close
    _keep_freed_memory()
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    sys.stdout = sys.stderr = os.fdopen(printed, "w", buffering=1, closefd=False)
    held = None
    with contextlib.suppress(EOFError):
        while True:
            name, given = calls.recv()
            try:
                held = make(*words) if held is None else held
                calls.send((False, getattr(held, name)(*given)))
            except Exception:  # noqa: BLE001 - whatever it is, whoever asked is told
                calls.send((True, traceback.format_exc().strip()[-2000:]))


def _keep_freed_memory() -> None:
    """What this process frees stays with it. glibc gives large blocks back, and a training step frees all gradients and
    asks for them again: GPT-2 of 124 M parameters meets 216,000 page faults a step, and its steps take 1.1 to 2.5 s
    instead of 0.8 to 0.95 s, which is more noise than a snapshot costs. Nothing is done where there is no glibc."""
    with contextlib.suppress(OSError, AttributeError):
        glibc = ctypes.CDLL(None)
        glibc.mallopt(_M_MMAP_MAX, 0)
        glibc.mallopt(_M_TRIM_THRESHOLD, -1)


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
