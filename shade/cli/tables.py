"""Lays out the tables that the commands print: plain text in a pipe or a file, fitted to the width on a terminal.

A pipe or a file gets each row whole, columns two spaces apart, the same text whatever the terminal: programs may read
it. On a terminal `rich` sets the heading bold and fits the table to the width: it folds columns of text, and drops the
last columns of a table of numbers, which are the least important ones.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.table import Table

_SHORT: Final = 20
"""Longest text of a column that is not folded: a date with its time."""


def table(rows: Sequence[Sequence[str]], align: str, *, markdown: bool = False) -> str:
    """Returns rows, the heading first, as ended lines with columns side by side, for standard output. ``align`` has
    ``<`` or ``>`` for each column; ``markdown`` draws a Markdown table on any output."""
    from rich.console import Console  # imported here: most commands print no table

    fits = sys.stdout.isatty() and not markdown
    width = shutil.get_terminal_size().columns if fits else sum(len(cell) + 4 for row in rows for cell in row)
    console = Console(width=width, color_system="auto" if fits else None, markup=False, highlight=False, emoji=False)
    made = _laid_out(rows, align, markdown)
    if set(align) == {">"}:
        while len(align) > 1 and console.measure(made, options=console.options.update(max_width=10**6)).maximum > width:
            align = align[:-1]
            made = _laid_out(rows, align, markdown)
    with console.capture() as capture:
        console.print(made)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def _laid_out(rows: Sequence[Sequence[str]], align: str, markdown: bool) -> Table:
    """Returns as many columns as there are sides in ``align``."""
    from rich import box
    from rich.table import Table

    padding = (0, 1) if markdown else (0, 2, 0, 0)
    made = Table(box=box.MARKDOWN if markdown else None, padding=padding, pad_edge=markdown, header_style="bold")
    for number, (head, side) in enumerate(zip(rows[0], align, strict=False)):
        stays = side == ">" or max(len(row[number]) for row in rows) <= _SHORT
        made.add_column(printable(head), justify="right" if side == ">" else "left", no_wrap=stays, overflow="fold")
    for row in rows[1:]:
        made.add_row(*map(printable, row[: len(align)]))
    return made


def printable(text: object) -> str:
    """Returns a text in which a question mark replaces each character that a terminal obeys."""
    return "".join(each if each.isprintable() else "?" for each in str(text))


def size(num_bytes: float) -> str:
    """Returns bytes for people, in powers of ten, as the sizes of disks and the rates of links are given."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
