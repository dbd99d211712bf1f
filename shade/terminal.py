"""Draws progress bars on the terminal, for work that takes long; prints nothing elsewhere."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: float, **options: Any) -> tqdm[Any]:
    """Returns a bar on standard error; a silent one if that is no terminal.

    Args:
        total: The amount of work.
        **options: As tqdm takes them.

    Returns:
        A bar to update, and to close.
    """
    width, height = shutil.get_terminal_size()  # tqdm itself reads no size from a terminal that has none
    silent = not sys.stderr.isatty()
    return tqdm(total=total, file=sys.stderr, disable=silent, ncols=width, nrows=height, **options)
