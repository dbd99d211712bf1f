"""Starts the command ``shade``, or says that another distribution's package `shade` has taken the place of ours.

It lies outside the package, because in that case the package cannot say so.
"""

from __future__ import annotations

import sys
from importlib import metadata


def main() -> int:
    """Runs the command with the process's arguments; returns the exit code."""
    try:
        from shade.cli import main as command
    except ImportError:
        others = [
            each
            for each in metadata.distributions(name="shade")
            if "\nshade/" in "\n" + (each.read_text("RECORD") or "")
        ]
        if not others:
            raise
        sys.stderr.write(
            f"shade: expected the package of torch-shade, got that of the distribution shade {others[0].version} "
            f"({others[0].metadata['Summary']}); pip uninstall -y shade, then "
            "pip install --force-reinstall --no-deps torch-shade\n"
        )
        return 2
    return command()
