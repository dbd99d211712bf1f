"""Reports the progress of long work: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

from tqdm import tqdm
from typing_extensions import override

from shade.terminal import progress_bar


class Progress:
    """Receives progress and ignores it."""

    def begin(self, what: str, num_bytes: int) -> None:
        """Starts a task of ``num_bytes``."""

    def advance(self, num_bytes: int) -> None:
        """Adds bytes that are done."""

    def end(self) -> None:
        """Ends the task, done or not. Safe to call twice."""


class ProgressBar(Progress):
    """Shows a bar on standard error with rate and time left, if that is a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    @override
    def begin(self, what: str, num_bytes: int) -> None:
        self.end()
        self._bar = progress_bar(num_bytes, desc=what, unit="B", unit_scale=True, leave=False)

    @override
    def advance(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(num_bytes)

    @override
    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
