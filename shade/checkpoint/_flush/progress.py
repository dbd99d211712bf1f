"""How far something long has come, for whoever watches: a bar on a terminal, silence elsewhere."""

from __future__ import annotations

from tqdm import tqdm

from shade.terminal import progress_bar


class LongWork:
    """Is told what happens, and keeps it to itself."""

    def begin(self, what: str, num_bytes: int) -> None:
        """Something starts.

        Args:
            what: In a few words.
            num_bytes: How much there is to do.
        """

    def advance(self, num_bytes: int) -> None:
        """So much more is done."""

    def end(self) -> None:
        """It is over, done or not. Safe to call twice."""


class Bar(LongWork):
    """A bar on standard error with rate and time left; nothing where that is no terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def begin(self, what: str, num_bytes: int) -> None:
        """See `LongWork`."""
        self.end()
        self._bar = progress_bar(num_bytes, desc=what, unit="B", unit_scale=True, leave=False)

    def advance(self, num_bytes: int) -> None:
        """See `LongWork`."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def end(self) -> None:
        """See `LongWork`."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
