"""``shade checkpoint certify``: whether a run that is resumed from a snapshot goes on bit for bit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from shade.cli.checkpoint_verb import Verb

_EXAMPLES: Final = """\
examples:
  shade checkpoint certify 1200 runs/20260101-120000
  shade checkpoint certify 1200 runs/20260101-120000 --steps 50

Restores the snapshot in a fresh process, lets the run's own script take the steps up to the next snapshot again, and
compares: the loss of each step with the run's trail, every tensor with the next snapshot. The run is not touched.
exit code: 0 the same bit for bit; 1 not, and the first step and tensor that differ are named; 2 it could not be tried
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", type=int, metavar="STEP", help="of the snapshot")
    parser.add_argument("out", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--steps", type=int, metavar="K", help="steps to take again (to the next snapshot, else 10)")


def _answer(given: argparse.Namespace) -> int:
    from shade.launch.certify_resume import certify
    from shade.launch.ranks import Ended, signals_as_exceptions

    try:
        with signals_as_exceptions():
            certificate = certify(given.out.resolve(), given.step, given.steps)
    except Ended as ended:
        return 128 + ended.number
    sys.stdout.write(str(certificate))
    return 0 if certificate.is_good else 1


CERTIFY: Final = Verb(
    "certify",
    "replay steps from a snapshot and compare bit for bit",
    "Proves that a run resumed from a snapshot is the run that it would have been.",
    _EXAMPLES,
    _arguments,
    _answer,
)
