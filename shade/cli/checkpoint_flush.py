"""``shade checkpoint flush``: the flusher, in the foreground."""

from __future__ import annotations

import argparse
from typing import Final

from shade.cli.checkpoint_verb import Verb

_EXAMPLES: Final = """\
examples:
  shade checkpoint flush redis://10.0.0.1:6379 --persist /mnt/ckpt
  shade checkpoint flush redis+cluster://10.0.0.1:7000 --persist s3://bucket/ckpt --keep last=3,every=1000,best=val_loss
  shade checkpoint flush redis://10.0.0.1:6379 --persist /mnt/ckpt --run vgg --once
  shade checkpoint flush unix:///run/redis.sock --persist /mnt/ckpt 2>> flusher.log &

It belongs on the memory node: whatever happens to trainers, what they committed becomes durable. The newest snapshot
goes first. A store or a storage that fails is tried again until it is back. It may be killed at any moment.

rules of --keep, separated by commas; the newest always stays:
  last=3          the newest three
  every=1000      the first at or after each multiple of 1000 steps
  best=val_loss   the one with the smallest val_loss; best=accuracy:max:3 the three with the largest
  all             everything

exit code: 0 stopped with everything durable; 1 stopped, and something is not; 2 it could not begin
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="URL", help="the cluster; its password is read from SHADE_REDIS_PASSWORD")
    parser.add_argument("--persist", metavar="URL", required=True, help="durable storage: a path, s3://bucket/path, …")
    parser.add_argument("--run", metavar="ID", help="that run only (every run in the store that nobody else serves)")
    parser.add_argument("--keep", metavar="RULES", help="what stays in storage (last=2)")
    ending = parser.add_mutually_exclusive_group()
    ending.add_argument("--once", action="store_true", help="end when everything is durable")
    ending.add_argument("--until-ended", action="store_true", help="end when the --run is over, and durable")


def _answer(given: argparse.Namespace) -> int:
    from shade.checkpoint._flush.service import flush
    from shade.checkpoint._format.retention import DEFAULT

    return flush(
        given.store, given.persist, given.run, given.keep or DEFAULT, once=given.once, until_ended=given.until_ended
    )


FLUSH: Final = Verb(
    "flush",
    "make snapshots durable, behind the training",
    "Moves snapshots from a cluster's memory into durable storage.",
    _EXAMPLES,
    _arguments,
    _answer,
)
