"""Defines the command ``shade`` and its verbs.

Each verb imports what it needs when it is used, so ``shade --help`` is quick. Every error is one line on standard error
and exit code 2; ``shade doctor`` exits with 1 if something would stop a run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from shade import __version__
from shade.cli import _checkpoint, simulation, top, tune
from shade.errors import ShadeError
from shade.terminal import CommandParser, status_line

_DESCRIPTION: Final = "A training-aware distributed caching data loader for PyTorch."
_EXAMPLES: Final = """\
examples:
  shade doctor                                          is this machine ready?
  shade run                                             trains digits from slow storage, plain and through shade
  shade run bench_cifar10.py /mnt/nfs/train -wss 0.2    trains on your images; see shade run --help
  shade example                                         lists training scripts to start from
  shade cache up --nodes 3 --memory 8GiB                a Redis cluster on this machine; prints its URL
  shade run … --cache redis+cluster://127.0.0.1:7000    and a run that uses it
  shade top http://127.0.0.1:9090                       a live look at what each rank of a run does
  shade report runs/20250101-120000                     writes and shows a run's report again
  shade checkpoint list --persist-to /mnt/ckpt          what snapshots there are, and where
  shade tune --command=… --metric accuracy              which batch and density train best; see shade tune --help
  shade quality runs/20250101-120000                    which samples have likely a wrong label
  shade simulate runs/20250101-120000 --add-cache 20GiB --add-workers 4
                                                        what more cache or more workers would give
"""
_CACHE_EXAMPLES: Final = """\
examples:
  shade cache up                                        one server, any free port, no memory limit; later, starts
                                                        again what has died
  shade cache up --nodes 3 --replicas 1 --memory 8GiB   a cluster: three primaries, a replica of each
  SHADE_REDIS_PASSWORD=… shade cache up --join 10.0.0.1:7000 --nodes 3 --memory 8GiB
                                                        on each of three machines: a node on each, one cluster
  SHADE_REDIS_PASSWORD=… shade cache up --join 10.0.0.1:7000
                                                        later, on a fourth: it takes over its share
  SHADE_REDIS_PASSWORD=… shade cache up                 with a password; the run reads it from the same place
  shade cache status                                    what runs, and what to do about what does not
  shade cache down
  shade cache warm train:data --seconds 600             fills the cache of the data set and sampler that the function
                                                        data() in train.py returns, before the job begins

Without --join servers listen on this machine only. For servers of your own see redis.conf.
"""
_QUALITY_EXAMPLES: Final = """\
examples:
  shade quality runs/20250101-120000
  shade quality runs/20250101-120000 && xdg-open runs/20250101-120000/quality.png

suspicion   0: the model believes in the label as it does in others of the class; 1: it never did
confidence  the probability that the model gave the label, averaged over the run

The most suspicious come first. Three epochs will do; ten are better.
"""
_DOCTOR_EXAMPLES: Final = """\
examples:
  shade doctor
  shade doctor --cache redis://10.0.0.1:6379 --data /mnt/nfs/train

exit code: 0 when a run can start (warnings may cost speed), 1 when it cannot
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the words after ``shade``, by default the process's own, and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["run"]:
            with status_line("shade run: loading"):
                from shade.launch.run import main as launch

            return launch(words[1:], prog="shade run")
        if not words:
            parser().print_help(sys.stderr)
            return 2
        given = parser().parse_args(words)
        answer: Callable[[argparse.Namespace], int] = given.answer
        return answer(given)
    except ShadeError as error:
        sys.stderr.write(f"shade {words[0]}: {' '.join(str(error).split())}\n")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has closed the pipe
        return 0


def parser() -> argparse.ArgumentParser:
    """Makes the parser of all verbs but ``run``, which has its own."""
    whole = CommandParser(prog="shade", description=_DESCRIPTION, epilog=_EXAMPLES)
    whole.add_argument("--version", action="version", version=f"shade {__version__}")
    verbs = whole.add_subparsers(metavar="VERB", required=True)
    verbs.add_parser("run", help="train through a cache (the launcher)", add_help=False)
    example = verbs.add_parser(
        "example",
        help="write a training script to start from",
        description="Writes a training script to start from into this folder; without NAME, lists what there is.",
    )
    example.add_argument("name", nargs="?", metavar="NAME", help="of the list")
    example.set_defaults(answer=_example)
    _add_cache(verbs)
    _checkpoint.add(verbs)
    tune.add(verbs)
    top.add(verbs)
    report = verbs.add_parser("report", help="write and show a run's report", description="Writes a run's report.")
    report.add_argument("run", metavar="RUN_DIR", type=Path, help="holds metrics.jsonl")
    report.set_defaults(answer=_report)
    quality = verbs.add_parser(
        "quality",
        help="samples of a run that are likely mislabelled, never learned, or twice there",
        description="Reads the losses that a run recorded, and writes quality.csv and a contact sheet, quality.png.",
        epilog=_QUALITY_EXAMPLES,
    )
    quality.add_argument("run", metavar="RUN_DIR", type=Path, help="of a script that reports its losses")
    quality.set_defaults(answer=_quality)
    simulation.add(verbs)
    doctor = verbs.add_parser(
        "doctor",
        help="is this machine ready?",
        description="Checks what a run needs; every row that is not ok names its cure.",
        epilog=_DOCTOR_EXAMPLES,
    )
    doctor.add_argument("--cache", metavar="URL", help="a cache to look into")
    doctor.add_argument("--data", metavar="PATH", type=Path, help="a data set to look into, in ImageFolder layout")
    doctor.set_defaults(answer=_doctor)
    return whole


def _add_cache(verbs: Any) -> None:
    cache = verbs.add_parser(
        "cache",
        help="start, inspect and stop Redis servers on this machine; fill a cache before a job",
        description="Redis servers for the cache, on this machine, in the background; and what a job finds in them.",
        epilog=_CACHE_EXAMPLES,
    )
    actions = cache.add_subparsers(metavar="up|status|down|warm", required=True)
    for name, what in (("up", "start"), ("status", "show"), ("down", "stop")):
        action = actions.add_parser(name, help=what, epilog=_CACHE_EXAMPLES)
        action.add_argument(
            "--dir", type=Path, default=Path(".cache/redis"), help="where they are remembered (.cache/redis)"
        )
        action.set_defaults(answer=_cache, action=name)
    up = actions.choices["up"]
    up.add_argument("--nodes", type=int, metavar="N", help="1, or the primaries of a cluster, 3 or more (1)")
    up.add_argument("--replicas", type=int, metavar="N", help="of each primary (0)")
    up.add_argument("--memory", metavar="BYTES", help="limit of each server, as 8GiB (none)")
    up.add_argument("--ports", type=int, nargs="+", default=(), metavar="PORT", help="one for each server (free ones)")
    up.add_argument(
        "--join", metavar="HOST:PORT", help="start one node of a cluster on several machines: the same address on all"
    )
    warm = actions.add_parser("warm", help="fill a cache with what a job's first epoch reads", epilog=_CACHE_EXAMPLES)
    warm.add_argument("function", metavar="MODULE:FUNCTION", help="returns (dataset, sampler), as the job makes them")
    warm.add_argument("--bytes", metavar="BYTES", help="take in at most so much, as 20GiB (what fits)")
    warm.add_argument("--seconds", type=float, metavar="S", help="begin no read after so long (none)")
    warm.add_argument("--machine", default="0/1", metavar="I/N", help="this is machine I of N, from 0 (0/1)")
    warm.set_defaults(answer=_warm)


def _example(given: argparse.Namespace) -> int:
    from shade.launch.bundled import examples, write_example

    if given.name is None:
        known = examples()
        width = max(map(len, known))
        lines = [f"{name:{width}}  {about}" for name, about in known.items()]
    else:
        lines = [f"wrote {path}" for path in write_example(given.name, Path.cwd())]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def _report(given: argparse.Namespace) -> int:
    from shade.report import write_report

    sys.stdout.write(write_report(given.run))
    return 0


def _quality(given: argparse.Namespace) -> int:
    from shade.report.samples import write_quality

    sys.stdout.write(write_quality(given.run))
    return 0


def _cache(given: argparse.Namespace) -> int:
    from shade.cli import caches

    if given.action == "up":
        return caches.up(given.dir, given.nodes, given.replicas, given.memory, given.ports, given.join)
    return caches.status(given.dir) if given.action == "status" else caches.down(given.dir)


def _warm(given: argparse.Namespace) -> int:
    from shade.cli import caches

    return caches.warm(given.function, given.bytes, given.seconds, given.machine)


def _doctor(given: argparse.Namespace) -> int:
    from shade.cli import doctor

    return doctor.answer(given.cache, given.data)
