"""Writes a task's data into a folder: what scripts/prepare_glyphs and scripts/prepare_text call."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tasks import glyphs, text
from tasks.packages import PackageError

_TASKS = {"glyphs": glyphs, "text": text}


def main(task: str, argv: list[str]) -> int:
    """Prepares one task; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"scripts/prepare_{task}",
        description=_TASKS[task].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Path(".cache") / task
    parser.add_argument("dest", nargs="?", type=Path, default=default, help=f"folder to fill (default: {default})")
    try:
        print(_TASKS[task].prepare(parser.parse_args(argv).dest))
    except PackageError as error:
        print(f"prepare_{task}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
