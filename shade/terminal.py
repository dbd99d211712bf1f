"""A bar on the terminal for whatever takes long; silence where nobody looks."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: float, **options: Any) -> tqdm[Any]:
    """A bar on standard error; nothing where that is no terminal.

    Args:
        total: How much there is to do.
        **options: As tqdm takes them.

    Returns:
        To be told of progress, and closed.
    """
    width, height = shutil.get_terminal_size()  # tqdm's own look at a terminal that knows no size comes to nothing
    silent = not sys.stderr.isatty()
    return tqdm(total=total, file=sys.stderr, disable=silent, ncols=width, nrows=height, **options)
