"""Defines the launcher's command line: every flag of SHADE's original launcher in its spellings, and ours.

No flag has a default here. A flag that was not typed stays absent, so that `resolve` can distinguish what the user
said from what it may choose.

The script and its paths may stand before, between and after the flags. argparse cannot know that a flag which takes
several values, or perhaps none, must not take the script for one of them. So a list of values ends at a word that ends
in ``.py``: scripts do, and data sets, hosts and run directories do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

_DESCRIPTION = """\
Trains SCRIPT on TRAIN_PATH through a cache, on every rank of this node, and ends with a report.

With no arguments: real handwritten digits, a small CNN, and a private Redis server, so that you can see it work.
On several nodes, run the same command on each with its own -nr.
"""

_EXAMPLES = """\
examples:
  %(prog)s                                             the embedded default
  %(prog)s bench_cifar10.py /mnt/nfs/cifar10/train --val_paths /mnt/nfs/cifar10/test \\
      --network resnet18 --epochs 5 --batch_size 64 -g 2 -wss 0.2
  %(prog)s bench_cifar10.py /mnt/nfs/cifar10/train -n 4 -g 2 -nr 0 -master_address 10.0.0.1 --nodedist \\
      --host_ip 10.0.0.1 --port_num 7000 -cn 4 -rep 3.0 -wss 0.2
  %(prog)s … --dry-run                                 shows the plan and starts nothing
  %(prog)s … --checkpoint redis://10.0.0.1:6379 --persist /mnt/nfs/snapshots --checkpoint-every 20
  %(prog)s --resume                                    resumes the latest run

hit ratio:  grep -c hitting train.log;  grep -c miss train.log
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows a flag's value once, and not once a spelling."""

    @override
    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        shortest_first = sorted(action.option_strings, key=len)
        takes = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(shortest_first)} {takes}"


class _LauncherParser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def _original(name: str) -> list[str]:
    """Spells a flag of the original launcher: ``--val_paths``, ``-val_paths``, ``--val-paths``."""
    return list(dict.fromkeys([f"--{name}", f"-{name}", f"--{name.replace('_', '-')}"]))


def _ours(name: str) -> list[str]:
    """Spells a flag of ours: ``--dry-run``, ``--dry_run``."""
    return list(dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"]))


_GREEDY = {"--resume", *_original("val_paths"), *_original("host_ip"), *_original("port_num")}
"""Flags that take the words after them, even one too many."""


def parse(argv: Sequence[str], prog: str = "runshade.py") -> argparse.Namespace:
    """Parses a command line.

    Args:
        argv: Without the program's name.
        prog: What the user typed to get here, for help and errors.

    Returns:
        What was typed, and nothing else; a flag that was not typed is absent.

    Raises:
        SystemExit: 2 after one line about an invalid flag, 0 after ``--help``.
    """
    return parser(prog).parse_intermixed_args(_scripts_first(argv))


def _scripts_first(argv: Sequence[str]) -> list[str]:
    """Moves a script that a greedy flag would take, and the paths after it, to the front."""
    front: list[str] = []
    rest: list[str] = []
    greedy = moving = False
    for word in argv:
        if word.startswith("-"):
            greedy, moving = word in _GREEDY, False
        elif greedy and word.endswith(".py"):
            greedy, moving = False, True
        (front if moving else rest).append(word)
    return front + rest


def parser(prog: str = "runshade.py") -> argparse.ArgumentParser:
    """Makes the launcher's parser; absent flags are absent from its namespace."""
    top = _LauncherParser(
        prog=prog,
        usage="%(prog)s [SCRIPT TRAIN_PATH ...] [flags]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=lambda prog: _Help(prog, max_help_position=38, width=118),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = top.add_argument_group("what to train").add_argument
    add("script", nargs="?", metavar="SCRIPT", help="training script (bench_cifar10.py)")
    add("train_paths", nargs="*", metavar="TRAIN_PATH", help="folders in ImageFolder layout")
    add(*_original("val_paths"), nargs="+", metavar="PATH", help="validation folders")
    add(*_original("network"), metavar="NAME", help="architecture, see benchmarks/networks.py (resnet18)")
    add(*_original("epochs"), type=int, metavar="N", help="epochs in all (1)")
    add(*_original("batch_size"), type=int, metavar="B", help="per rank (256)")
    add("--steps", type=int, metavar="N", help="stop after N steps in all")
    add("--seed", type=int, metavar="N", help="seed of everything (0)")
    add("--workers", type=int, metavar="N", help="DataLoader workers per rank (2)")
    add(*_ours("on_bad_sample"), choices=("stop", "skip"), help="for unreadable files (stop)")

    add = top.add_argument_group("cache").add_argument
    add(
        "--cache",
        metavar="URL",
        help="local:// (default), unix:///…, redis://…, rediss://…, redis+cluster://h:p,h:p, none",
    )
    working_set = ("-wss", "--working_set_size", "--working-set-size")
    add(*working_set, type=float, metavar="F", help="cached share (0.1)")
    add("--policy", metavar="NAME", help="plan, lru, lfu, fifo, static or shade (default: what suits the sampling)")
    kept = "kept for old command lines: caching is on unless --cache none"
    add(*_original("cache_training_data"), action="store_true", help=kept)
    add(*_original("host_ip"), nargs="?", const="0.0.0.0", metavar="HOST", help="Redis host; with --port_num")
    add(*_original("port_num"), nargs="?", const="6379", metavar="PORT", help="Redis port (6379)")
    add("-cn", "--cache_nodes", "--cache-nodes", type=int, metavar="N", help="Redis nodes; > 1: a cluster")

    add = top.add_argument_group("sampling").add_argument
    add("--sampling", metavar="MODE", help="unbiased (default), pads or uniform")
    add("--keep", type=float, metavar="F", help="unbiased: share of the data an epoch draws (0.7)")
    replication = ("-rep", "--replication_factor", "--replication-factor")
    add(*replication, type=float, metavar="R", help="pads: repeats of cached samples")

    add = top.add_argument_group("checkpoints").add_argument
    add("--checkpoint", metavar="URL", help="store whose memory takes snapshots; it must outlive the run (none)")
    add("--persist", metavar="DIR", help="durable storage for them, a path or URL (DIR/checkpoints of --out)")
    every = "50 (steps), 30s, 5m, 2%% or never (30s, if the strategy has no other)"
    add(*_ours("checkpoint_every"), metavar="SPEC", help=every)
    add(*_ours("checkpoint_keep"), metavar="SPEC", help="last=2,every=1000,best=val_loss … (last=2)")
    strategy = "how snapshots are copied: overlap (default), auto, …; an unknown name lists all"
    add(*_ours("checkpoint_strategy"), metavar="NAME", help=strategy)
    notice = "file or http:// address that announces this machine's end, beside SIGTERM"
    add("--notice", metavar="SOURCE", help=notice)

    add = top.add_argument_group("gradient (across a slow link; see the README)").add_argument
    add("--gradient", metavar="NAME", help="threshold-v16, threshold-v, topk or random-k (none: whole gradients)")
    add("--density", type=float, metavar="F", help="share of the gradient that is sent (0.01)")
    add("--staleness", type=int, choices=(0, 1), help="1 hides the exchange behind the next step (0)")
    add("--controller", action="store_true", help="adapt the density to the link")
    add("--profile", metavar="FILE", help="result of shade tune, for the controller")

    add = top.add_argument_group("ranks").add_argument
    add("-n", "--nodes", type=int, metavar="N", help="machines (1)")
    add("-g", "--gpus", type=int, metavar="N", help="ranks on each machine; CPU ranks without GPUs (1)")
    add("-nr", "--nr", type=int, metavar="R", help="this machine's number, from 0 (0)")
    add(*_original("master_address"), metavar="HOST", help="of machine 0")
    add(*_original("master_port"), type=int, metavar="PORT", help="free on machine 0 (8888)")
    add(*_original("master_socket"), metavar="IFNAME", help="interface, as eno1")
    restarts = "restart all ranks, from the newest snapshot, when one is lost (0)"
    add("--restarts", type=int, metavar="N", help=restarts)
    fewer = "with --restarts: continue with as few machines as M when others are lost; machine 0 must stay"
    add(*_original("min_nodes"), type=int, metavar="M", help=fewer)
    add(*_original("nodedist"), action="store_true", help="several machines; implied by -n 2 and more")

    add = top.add_argument_group("run").add_argument
    add("--out", metavar="DIR", help="run directory (runs/<time>)")
    add("--resume", nargs="?", const="", metavar="DIR", help="continue a run (--out, else the latest)")
    port = "serve Prometheus at 127.0.0.1:PORT/metrics; 0: any, see output.log (files only)"
    add(*_ours("metrics_port"), type=int, metavar="PORT", help=port)
    add(*_ours("dry_run"), action="store_true", help="print the resolved plan and stop")
    return top
