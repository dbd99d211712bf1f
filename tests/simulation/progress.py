"""Reports the progress of a long campaign on standard error.

On a terminal one line is overwritten; in a log file a new line appears every ten seconds, so that a reader of the log
can tell a slow run from a stuck one.
"""

from __future__ import annotations

import sys
import time
from typing import Final

_LOG_SECONDS: Final = 10.0
_TERMINAL_SECONDS: Final = 0.2


class Progress:
    """Counts what is done and writes it now and then.

    Args:
        total: How many there are.
        unit: What is counted, in the plural.
    """

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit = total, unit
        self._num_done = 0
        self._begun = self._written = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def advance(self) -> None:
        """Counts one more, and writes a line if the last one is old enough."""
        self._num_done += 1
        now = time.monotonic()
        if now - self._written >= (_TERMINAL_SECONDS if self._is_terminal else _LOG_SECONDS):
            self._written = now
            seconds = now - self._begun
            text = f"{self._num_done:,} of {self._total:,} {self._unit}, {seconds:.0f} s"
            sys.stderr.write(f"\r{text}\x1b[K" if self._is_terminal else f"{text}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Clears the line on a terminal."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
