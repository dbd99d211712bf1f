"""Draws progress bars on the terminal, for work that takes long; prints nothing elsewhere."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: float, **options: Any) -> tqdm[Any]:
    """Returns a bar of tqdm's options on standard error, for the caller to update and close; silent without a
    terminal."""
    width, height = shutil.get_terminal_size()  # tqdm itself reads no size from a terminal that has none
    silent = not sys.stderr.isatty()
    return tqdm(total=total, file=sys.stderr, disable=silent, ncols=width, nrows=height, **options)
