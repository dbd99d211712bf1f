"""``shade checkpoint …``: look at snapshots, check them, mend them, take them elsewhere.

A verb is a `Verb` and its place in `VERBS`. Files of verbs import little at their top, as the parser loads them all;
what needs PyTorch, NumPy or Redis is imported when it is used.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from shade.cli import (
    checkpoint_certify,
    checkpoint_flush,
    checkpoint_look,
    checkpoint_mend,
    checkpoint_move,
    checkpoint_simulate,
)
from shade.cli.checkpoint_verb import Verb
from shade.errors import CorruptCheckpointError

VERBS: Final[tuple[Verb, ...]] = (
    checkpoint_look.LIST,
    checkpoint_look.SHOW,
    checkpoint_mend.VERIFY,
    checkpoint_mend.REPAIR,
    checkpoint_mend.SCRUB,
    checkpoint_certify.CERTIFY,
    checkpoint_move.RESTORE,
    checkpoint_move.EXPORT,
    checkpoint_move.IMPORT,
    checkpoint_flush.FLUSH,
    checkpoint_simulate.SIMULATE,
)
"""In the order in which they are listed; a new verb is a new line."""
_DESCRIPTION: Final = "Snapshots of training runs: in this machine's memory, in a cluster's, in durable storage."
_EXAMPLES: Final = """\
examples:
  shade checkpoint list --persist /mnt/ckpt
  shade checkpoint list --persist /mnt/ckpt --store redis://10.0.0.1:6379
  shade checkpoint verify all --persist /mnt/ckpt
  shade checkpoint repair 1200 --persist /mnt/ckpt --store redis://10.0.0.1:6379
  shade checkpoint restore 1200 --to model.safetensors --only model --persist /mnt/ckpt
  shade checkpoint flush redis://10.0.0.1:6379 --persist /mnt/ckpt

where to look, for every verb:
  --persist URL   durable storage: a path, s3://bucket/path, …
  --store URL     a cluster's memory; its password is read from SHADE_REDIS_PASSWORD
  --run ID        needed only where several runs lie

exit code: 0 done and sound; 1 damage, or it is not there; 2 what was asked cannot be done
"""


def add(verbs: Any) -> None:
    """Adds ``checkpoint`` and its verbs to the command."""
    top = verbs.add_parser(
        "checkpoint", help="list, check, mend, move and flush snapshots", description=_DESCRIPTION, epilog=_EXAMPLES
    )
    actions = top.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        parser = actions.add_parser(verb.name, help=verb.help, description=verb.description, epilog=verb.epilog)
        verb.add_arguments(parser)
        parser.set_defaults(answer=_answering(verb))


def _answering(verb: Verb) -> Any:
    def answer(given: argparse.Namespace) -> int:
        try:
            return verb.answer(given)
        except CorruptCheckpointError as error:
            sys.stderr.write(f"shade checkpoint {verb.name}: {' '.join(str(error).split())}\n")
            return 1

    return answer
