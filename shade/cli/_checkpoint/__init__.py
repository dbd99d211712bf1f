"""Adds ``shade checkpoint …``: list, verify, repair, convert, flush and free snapshots.

A new verb is a `Verb` and a line in `VERBS`. The parser loads the modules of all verbs, so PyTorch, NumPy and Redis are
imported where they are used.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from shade.cli._checkpoint import free, inspect, repair, transfer
from shade.cli._checkpoint.common import Verb
from shade.errors import CorruptCheckpointError

VERBS: Final[tuple[Verb, ...]] = (
    inspect.LIST,
    inspect.SHOW,
    repair.VERIFY,
    repair.REPAIR,
    repair.SCRUB,
    transfer.RESTORE,
    transfer.EXPORT,
    transfer.IMPORT,
    transfer.FLUSH,
    free.FREE,
    free.PRUNE,
)
"""In the order in which they are listed."""
_DESCRIPTION: Final = "Snapshots of training runs, in shared memory, in a cluster's memory and in durable storage."
_EXAMPLES: Final = """\
examples:
  shade checkpoint list --persist-to /mnt/ckpt
  shade checkpoint list --persist-to /mnt/ckpt --store redis://10.0.0.1:6379
  shade checkpoint verify all --persist-to /mnt/ckpt
  shade checkpoint repair 1200 --persist-to /mnt/ckpt --store redis://10.0.0.1:6379
  shade checkpoint restore 1200 --to model.safetensors --only model --persist-to /mnt/ckpt
  shade checkpoint flush redis://10.0.0.1:6379 --persist-to /mnt/ckpt
  shade checkpoint free
  shade checkpoint prune

where to look, for most verbs:
  --persist-to URL   durable storage: a path, s3://bucket/path, …
  --store URL     a cluster's memory; its password is read from SHADE_REDIS_PASSWORD
  --run ID        needed only if there are several runs

exit code: 0 done and intact; 1 damaged or missing; 2 the command could not be carried out
"""


def add(verbs: Any) -> None:
    """Adds ``checkpoint`` and its verbs to the parser."""
    top = verbs.add_parser(
        "checkpoint",
        help="list, verify, repair, convert, flush and free snapshots",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    actions = top.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        parser = actions.add_parser(verb.name, help=verb.help, description=verb.description, epilog=verb.epilog)
        verb.add_arguments(parser)
        parser.set_defaults(answer=_handler(verb))


def _handler(verb: Verb) -> Any:
    def answer(given: argparse.Namespace) -> int:
        try:
            return verb.answer(given)
        except CorruptCheckpointError as error:
            sys.stderr.write(f"shade checkpoint {verb.name}: {' '.join(str(error).split())}\n")
            return 1

    return answer
