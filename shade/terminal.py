"""Reads command lines, and draws progress bars and lines of status on the terminal; none are drawn elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm
from typing_extensions import override

from shade.registry import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line on standard error, with the verb, flag or choice that was probably meant."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, extras = super().parse_known_args(args, namespace)
        flags = [word for word in extras if word.startswith("-") and word != "--"]
        if flags:
            # Here and not in `parse_args`: the parser of a verb knows the verb's flags, the whole one does not.
            self.error(f"unrecognized arguments: {' '.join(flags)}")
        return found, extras

    @override
    def error(self, message: str) -> Any:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            words = (word.partition("=")[0] for word in message.split()[2:])
            hint = next(filter(None, (did_you_mean(word, self._option_string_actions) for word in words)), "")
        elif mistyped := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            hint = did_you_mean(mistyped[1], re.findall(r"[^\s,']+", mistyped[2]))
        self.exit(2, f"{self.prog}: {message}{hint}; see --help\n")


def progress_bar(total: float, **options: Any) -> tqdm[Any]:
    """Returns a bar of tqdm's options on standard error, for the caller to update and close; silent without a
    terminal."""
    width, height = shutil.get_terminal_size()  # tqdm itself reads no size from a terminal that has none
    silent = not sys.stderr.isatty()
    return tqdm(total=total, file=sys.stderr, disable=silent, ncols=width, nrows=height, **options)


def bytes_bar(what: str, num_bytes: int) -> tqdm[Any]:
    """Returns a bar of bytes with rate and time left, which disappears at the end; silent without a terminal."""
    return progress_bar(num_bytes, desc=what, unit="B", unit_scale=True, leave=False)


@contextlib.contextmanager
def status_line(text: str) -> Iterator[None]:
    """Shows what is done meanwhile on a terminal, and removes the line at the end; silent without a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"\r\x1b[K{text} …")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
