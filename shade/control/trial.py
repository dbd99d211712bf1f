"""Runs the user's training command once, for `shade.control.study`, and reads the quality from its output.

The output goes to a file and is read line by line; the last line with the metric counts. A command that takes too long
is killed together with its child processes. So is a command that is running when the study ends, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shade.control.study import EvaluationError, Point
from shade.errors import ConfigError

_MOST_LINE_BYTES: Final = 1 << 16
_SHOWN: Final = 200
"""Characters of a last line that a message shows."""
_TIED: Final = """\
import os, signal, sys
from shade.process import die_with_parent
die_with_parent(int(sys.argv[1]), signal.SIGKILL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""
"""Becomes the command and dies with this process. A `preexec_fn` would be unsafe: the search has started threads."""


class CommandObjective:
    """The quality of a point as a command prints it.

    Args:
        command: Words as for a shell, but run without one; ``{batch}`` and ``{density}`` are replaced.
        folder: Holds the output of each evaluation, ``batch-64-density-0.01.log``; made if it is absent.
        metric: Name of a number in a line of JSON on standard output; the last one counts.
        pattern: Instead: a regular expression with one group, which is the number.
        timeout_seconds: After which a command is killed; None for never.

    Raises:
        ConfigError: An argument cannot be used.
    """

    def __init__(
        self,
        command: str,
        folder: str | os.PathLike[str],
        *,
        metric: str | None = None,
        pattern: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError.of("a command", command, f"{error}") from None
        if not self._words or not all(name in command for name in ("{batch}", "{density}")):
            raise ConfigError.of(
                "a command with {batch} and {density}", command, "as 'python train.py -b {batch} -d {density}'"
            )
        if (metric is None) == (pattern is None):
            raise ConfigError.of("a metric or a regular expression", (metric, pattern), "give one of the two")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ConfigError.of("a timeout above 0 seconds", timeout_seconds, "leave it out for none")
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise ConfigError.of("a regular expression", pattern, f"{error}") from None
        if self._pattern is not None and self._pattern.groups != 1:
            raise ConfigError.of("one group in the regular expression", pattern, "as 'accuracy ([0-9.]+)'")
        self._metric = metric
        self._timeout_seconds = timeout_seconds
        self._folder = Path(folder)

    def __call__(self, point: Point) -> float:
        """Runs the command with the point's values and returns the quality.

        Raises `EvaluationError`, with the command's last line, if it failed, took too long or printed no number.
        """
        values = {"{batch}": str(point.batch), "{density}": f"{point.density:g}"}
        words = [functools.reduce(lambda word, name: word.replace(name, values[name]), values, w) for w in self._words]
        log = self._folder / f"batch-{point.batch}-density-{point.density:g}.log"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as output:
                code = self._run(words, output.fileno())
        except OSError as error:
            raise EvaluationError(f"it cannot be started: {error}") from None
        if code is None:
            raise EvaluationError(f"it took more than {self._timeout_seconds:g} s{_last_words(log)}")
        if code != 0:
            raise EvaluationError(f"{_ending(code)}{_last_words(log)}")
        found = None
        for line in _lines(log):
            number = self._number(line)
            found = found if number is None else number
        if found is None:
            wanted = repr(self._metric or (self._pattern and self._pattern.pattern))
            raise EvaluationError(f"it printed no {wanted}{_last_words(log)}")
        return found

    def _run(self, words: list[str], output: int) -> int | None:
        """Returns the exit code, or None after a timeout."""
        process = subprocess.Popen(
            [sys.executable, "-c", _TIED, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(self._timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the children that it left behind
            process.wait()

    def _number(self, line: str) -> float | None:
        try:
            if self._pattern is not None:
                found = self._pattern.search(line)
                return float(found[1]) if found else None
            row = json.loads(line)
            return float(row[self._metric]) if isinstance(row, dict) and self._metric in row else None
        except (ValueError, TypeError, RecursionError):
            return None


def _lines(log: Path) -> Iterator[str]:
    with log.open("rb") as output:
        while line := output.readline(_MOST_LINE_BYTES):
            yield line.decode(errors="replace").strip()


def _last_words(log: Path) -> str:
    last = ""
    for line in _lines(log):
        last = line or last
    return f"; its last line: {last[:_SHOWN]}" if last else "; it printed nothing"


def _ending(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by signal {-code}"
