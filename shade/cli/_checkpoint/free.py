"""Implements ``shade checkpoint free`` and ``prune``: what runs have left in this machine's shared memory.

A run that is killed leaves its last snapshot there, for itself to begin again from. A later run removes it after an
hour if another tier has the snapshot as well; ``prune`` removes that now, and ``free`` also what lies nowhere else.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from shade.cli._checkpoint.common import TIMEOUT_SECONDS, Verb, moment
from shade.cli.tables import size, table
from shade.errors import ConfigError, RunInUseError

_EXAMPLES: Final = """\
examples:
  shade checkpoint free                                      what lies in this machine's shared memory
  shade checkpoint free vgg                                  frees what run vgg has left there
  shade checkpoint free vgg --store redis://10.0.0.1:6379    removes run vgg from a cluster's memory

state:
  in use      by a live process: it stays
  elsewhere   another tier has the newest snapshot as well
  only here   no other tier has it

exit code: 0; 1 if what was named is in use, or is not there
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="ids of runs to free (none: list what there is)")
    parser.add_argument("--store", metavar="URL", help="free them in a cluster's memory, not in this machine's")


def _free(given: argparse.Namespace) -> int:
    from shade.checkpoint._buffer.shared_memory_folder import held_here

    if given.store is not None:
        return _free_store(given.store, given.runs)
    left = list(held_here())
    if not given.runs:
        rows = [("run", "belongs to", "bytes", "newest step", "saved", "state")]
        for each in left:
            state = "in use" if each.is_in_use else "elsewhere" if each.is_elsewhere else "only here"
            newest = each.newest
            saved = ("-", "-") if newest is None else (f"{newest.step}", moment(newest.saved_at))
            rows.append((each.run, each.about, size(each.num_bytes), *saved, state))
        sys.stdout.write(table(rows, "<<>><<") if left else "nothing lies in this machine's shared memory\n")
        return 0
    done = True
    for run in given.runs:
        mine = [each for each in left if each.run == run]
        if not mine:
            sys.stderr.write(f"{run}: nothing lies in this machine's shared memory\n")
        done = done and bool(mine)
        for each in mine:
            about, num_bytes = each.about, each.num_bytes
            is_freed = each.free()
            done = done and is_freed
            if is_freed:
                sys.stdout.write(f"{run}: freed {size(num_bytes)} of {about}\n")
            else:
                sys.stderr.write(f"{run}: in use by a live process, of {about}\n")
    return 0 if done else 1


def _prune(given: argparse.Namespace) -> int:
    from shade.checkpoint._buffer.shared_memory_folder import held_here

    num_bytes = 0
    for each in held_here():
        of_run, where = each.num_bytes, "only here" if not each.is_elsewhere else "" if each.free() else "in use"
        num_bytes += 0 if where else of_run
        sys.stdout.write(f"{each.run}: {f'{where}, kept' if where else 'freed'} {size(of_run)}\n")
    sys.stdout.write(f"freed {size(num_bytes)}\n")
    return 0


def _free_store(url: str, runs: list[str]) -> int:
    from shade.checkpoint._tiers.run_lock import TRAINER, is_held, keys_of_run
    from shade.store import open_store

    if not runs:
        raise ConfigError.of("runs to remove from a cluster's memory", "none", "name them; see shade checkpoint list")
    found = True
    with open_store(url, timeout_seconds=TIMEOUT_SECONDS) as store:
        for run in runs:
            if is_held(store, run, TRAINER):
                raise RunInUseError.of("a run that no process saves", run, "end it first")
            keys = keys_of_run(store, run)
            store.delete_many(keys)
            found = found and bool(keys)
            sys.stdout.write(f"{run}: {len(keys)} keys removed from {store.url}\n")
    return 0 if found else 1


FREE: Final = Verb(
    "free",
    "show what killed runs left in memory, and free it",
    "Shows what lies in this machine's shared memory, or frees it.",
    _EXAMPLES,
    _arguments,
    _free,
)
PRUNE: Final = Verb(
    "prune",
    "free what killed runs left in memory and another tier has too",
    "Frees what runs that have ended left in shared memory, if their newest snapshot lies elsewhere too.",
    "examples:\n  shade checkpoint prune\n\nexit code: 0\n",
    lambda parser: None,
    _prune,
)
