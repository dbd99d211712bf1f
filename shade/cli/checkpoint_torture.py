"""``shade checkpoint torture``: everything goes wrong, at every operation, and what was promised is still there."""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Final

from shade.cli.checkpoint_verb import Verb

_EXAMPLES: Final = """\
examples:
  shade checkpoint torture                                  every scenario: some tens of thousands, about 20 minutes
  shade checkpoint torture --sample 500                     500 of them, chosen by the seed
  shade checkpoint torture --ranks 1 --ranks 2
  shade checkpoint torture --seed 7 --scenario 1234         one, seen again
  shade checkpoint torture --persist /mnt/ckpt --store redis://10.0.0.1:6379 --kills 200

Without --persist and --store the commit protocol runs on a virtual disk and virtual servers. Each of its operations
fails in every way: crash of one process or all (before, within, after it), I/O error, full disk, full store, time-out,
lost reply, flipped bit, stall, partition, server gone, away, or back empty. After each the disk loses power in every
way, and then a restore has to give a committed snapshot bit for bit, none older than one that was called durable, and
the next save has to work. With --persist or --store processes that save there are killed instead.

exit code: 0 every promise was kept; 1 one was broken: the line to see it again is printed; 2 it could not begin
"""
_SHOWN: Final = 10


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of interleavings, tears and flips (0)")
    parser.add_argument("--ranks", type=int, action="append", choices=(1, 2, 3), help="so many ranks only (1, 2 and 3)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--scenario", type=int, metavar="K", help="that one alone, with all that was done in it")
    chosen.add_argument("--sample", type=int, metavar="NUM", help="so many of them, chosen at random")
    live = parser.add_argument_group("a real disk, a real store")
    live.add_argument("--persist", metavar="URL", help="durable storage: a path, s3://bucket/path, …")
    live.add_argument("--store", metavar="URL", help="a cluster's memory, as redis+cluster://host:7000")
    live.add_argument("--kills", type=int, default=50, metavar="NUM", help="how often processes are killed (50)")


def _answer(given: argparse.Namespace) -> int:
    if given.persist is not None or given.store is not None:
        return _live(given)
    from shade.checkpoint.torture.campaign import RANKS, quiet, run, scenarios
    from shade.errors import ConfigError
    from shade.terminal import progress_bar

    begun = time.monotonic()
    with quiet():
        chosen = list(scenarios(given.seed, given.ranks or RANKS))
    if given.scenario is not None:
        chosen = [each for each in chosen if each[1].number == given.scenario]
        if not chosen:
            raise ConfigError.of("the number of a scenario", given.scenario, "see a report of that seed")
    elif given.sample is not None and given.sample < len(chosen):
        chosen = sorted(random.Random(given.seed).sample(chosen, given.sample), key=lambda each: each[1].number)
    with progress_bar(len(chosen), unit="scenario") as bar:
        report = run(chosen, given.seed, lambda scenario, verdict: bar.update())
    if given.scenario is not None:
        from shade.checkpoint.torture.scenario import play

        (stand, scenario), *_ = chosen
        with quiet():
            operations = play(stand, scenario.episode, scenario.fault).operations
        sys.stdout.write("".join(f"  {operation}\n" for operation in operations) + f"{scenario}\n")
    for scenario, objections in report.failures[:_SHOWN]:
        sys.stdout.write(f"BROKEN  {scenario}\n")
        sys.stdout.write("".join(f"        {objection}\n" for objection in objections[:3]))
        sys.stdout.write(f"        again: shade checkpoint torture --seed {report.seed} --scenario {scenario.number}\n")
    sys.stdout.write(
        f"{report.num_scenarios:,} scenarios, {report.num_operations:,} operations, "
        f"{report.num_struck:,} faults struck, {len(report.failures):,} promises broken, seed {report.seed}, "
        f"{time.monotonic() - begun:.0f} s\n"
    )
    return 1 if report.failures else 0


def _live(given: argparse.Namespace) -> int:
    from shade.checkpoint.torture.live import torture
    from shade.terminal import progress_bar

    begun = time.monotonic()
    with progress_bar(given.kills, unit="kill") as bar:
        report = torture(
            given.store, given.persist, kills=given.kills, seed=given.seed, told=lambda report: bar.update()
        )
    sys.stdout.write("".join(f"BROKEN  {objection}\n" for objection in report.objections[:_SHOWN]))
    sys.stdout.write(
        f"{report.num_kills:,} kills, {report.num_saves:,} saves begun, {report.num_durable:,} durable, "
        f"{len(report.objections):,} promises broken, seed {report.seed}, {time.monotonic() - begun:.0f} s\n"
    )
    return 1 if report.objections else 0


TORTURE: Final = Verb(
    "torture",
    "make everything go wrong, and see whether promises are kept",
    "Lets every operation of the commit protocol fail in every way, and checks what a restore gives afterwards.",
    _EXAMPLES,
    _arguments,
    _answer,
)
