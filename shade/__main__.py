"""Runs the command ``shade`` as ``python -m shade``, where its script is not on PATH."""

import sys

from shade.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
