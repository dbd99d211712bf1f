"""What may be typed: every flag of SHADE's original launcher in both spellings, and ours.

No flag has a default here. A flag that was not typed stays absent, so that `resolve` can tell what the user said from
what it may choose.

The script and its paths may stand before, between and after the flags. One thing argparse cannot know: a flag that
takes several values, or perhaps none, would take the script for one of them. So a list of values ends at a word that
ends in ``.py``: scripts do, and data sets, hosts and run directories do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

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
  %(prog)s --resume                                    goes on with the latest run

hit ratio, as ever:  grep -c hitting train.log;  grep -c miss train.log
"""


_GREEDY = {
    "--val_paths", "-val_paths", "--val-paths", "--host_ip", "-host_ip", "--host-ip",
    "--port_num", "-port_num", "--port-num", "--resume",
}  # fmt: skip
"""Flags that take what follows, be it one value too many."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Names what a flag takes once, and not once a spelling."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        shortest_first = sorted(action.option_strings, key=len)
        takes = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(shortest_first)} {takes}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def parse(argv: Sequence[str], prog: str = "runshade.py") -> argparse.Namespace:
    """Reads a command line.

    Args:
        argv: Without the program's name.
        prog: What the user typed to get here, for help and errors.

    Returns:
        What was typed, and nothing else; a flag that was not typed is absent.

    Raises:
        SystemExit: 2 after one line about a flag that cannot be, 0 after ``--help``.
    """
    return parser(prog).parse_intermixed_args(_scripts_first(argv))


def _scripts_first(argv: Sequence[str]) -> list[str]:
    """The words with a script that a greedy flag would take, and the paths after it, moved to the front."""
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
    """The launcher's parser; absent flags are absent from its namespace."""
    top = _Parser(
        prog=prog,
        usage="%(prog)s [SCRIPT TRAIN_PATH ...] [flags]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=lambda prog: _Help(prog, max_help_position=38, width=118),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    what = top.add_argument_group("what to train")
    what.add_argument("script", nargs="?", metavar="SCRIPT", help="training script (bench_cifar10.py)")
    what.add_argument("train_paths", nargs="*", metavar="TRAIN_PATH", help="folders in ImageFolder layout")
    what.add_argument("--val_paths", "-val_paths", "--val-paths", nargs="+", metavar="PATH", help="validation folders")
    what.add_argument(
        "--network", "-network", metavar="NAME", help="architecture, see benchmarks/networks.py (resnet18)"
    )
    what.add_argument("--epochs", "-epochs", type=int, metavar="N", help="epochs in all (1)")
    what.add_argument("--batch_size", "-batch_size", "--batch-size", type=int, metavar="B", help="per rank (256)")
    what.add_argument("--steps", type=int, metavar="N", help="stop after N steps in all")
    what.add_argument("--seed", type=int, metavar="N", help="seed of everything (0)")
    what.add_argument("--workers", type=int, metavar="N", help="DataLoader workers per rank (2)")
    what.add_argument(
        "--on-bad-sample", "--on_bad_sample", choices=("stop", "skip"), help="for unreadable files (stop)"
    )

    cache = top.add_argument_group("cache")
    cache.add_argument(
        "--cache",
        metavar="URL",
        help="local:// (default), unix:///…, redis://…, rediss://…, redis+cluster://h:p,h:p, none",
    )
    cache.add_argument(
        "-wss", "--working_set_size", "--working-set-size", type=float, metavar="F", help="cached share (0.1)"
    )
    cache.add_argument(
        "--policy", metavar="NAME", help="plan, lru, lfu, fifo, static or shade (default: what suits the sampling)"
    )
    cache.add_argument(
        "--cache_training_data", "-cache_training_data", "--cache-training-data", action="store_true",
        help="kept for old command lines: caching is on unless --cache none",
    )  # fmt: skip
    cache.add_argument(
        "--host_ip",
        "-host_ip",
        "--host-ip",
        nargs="?",
        const="0.0.0.0",
        metavar="HOST",
        help="Redis host; with --port_num",
    )
    cache.add_argument(
        "--port_num", "-port_num", "--port-num", nargs="?", const="6379", metavar="PORT", help="Redis port (6379)"
    )
    cache.add_argument(
        "-cn", "--cache_nodes", "--cache-nodes", type=int, metavar="N", help="Redis nodes; > 1: a cluster"
    )

    sampling = top.add_argument_group("sampling")
    sampling.add_argument("--sampling", metavar="MODE", help="unbiased (default), pads or uniform")
    sampling.add_argument("--keep", type=float, metavar="F", help="unbiased: share of the data an epoch draws (0.7)")
    sampling.add_argument(
        "-rep",
        "--replication_factor",
        "--replication-factor",
        type=float,
        metavar="R",
        help="pads: repeats of cached samples",
    )

    snapshots = top.add_argument_group("checkpoints")
    snapshots.add_argument(
        "--checkpoint", metavar="URL", help="store whose memory takes snapshots; it must outlive the run (none)"
    )
    snapshots.add_argument(
        "--persist", metavar="DIR", help="durable storage for them, a path or URL (DIR/checkpoints of --out)"
    )
    snapshots.add_argument(
        "--checkpoint-every",
        "--checkpoint_every",
        metavar="SPEC",
        help="50 (steps), 30s, 5m, 2%% or never (30s, where the strategy has no other)",
    )
    snapshots.add_argument(
        "--checkpoint-keep", "--checkpoint_keep", metavar="SPEC", help="last=2,every=1000,best=val_loss … (last=2)"
    )
    snapshots.add_argument(
        "--checkpoint-strategy",
        "--checkpoint_strategy",
        metavar="NAME",
        help="how snapshots are copied: overlap (default), auto, …; an unknown name lists all",
    )
    snapshots.add_argument(
        "--notice", metavar="SOURCE", help="file or http:// address that announces this machine's end, beside SIGTERM"
    )

    gradient = top.add_argument_group("gradient (across a slow link; see the README)")
    gradient.add_argument(
        "--gradient", metavar="NAME", help="threshold-v16, threshold-v, topk or random-k (none: whole gradients)"
    )
    gradient.add_argument("--density", type=float, metavar="F", help="share of the gradient that is sent (0.01)")
    gradient.add_argument("--staleness", type=int, choices=(0, 1), help="1 hides the exchange behind the next step (0)")
    gradient.add_argument("--controller", action="store_true", help="adapt the density to the link")
    gradient.add_argument("--profile", metavar="FILE", help="what shade tune has found out, for the controller")

    ranks = top.add_argument_group("ranks")
    ranks.add_argument("-n", "--nodes", type=int, metavar="N", help="machines (1)")
    ranks.add_argument("-g", "--gpus", type=int, metavar="N", help="ranks on each machine; CPU ranks without GPUs (1)")
    ranks.add_argument("-nr", "--nr", type=int, metavar="R", help="this machine's number, from 0 (0)")
    ranks.add_argument("-master_address", "--master_address", "--master-address", metavar="HOST", help="of machine 0")
    ranks.add_argument(
        "-master_port", "--master_port", "--master-port", type=int, metavar="PORT", help="free on machine 0 (8888)"
    )
    ranks.add_argument(
        "-master_socket", "--master_socket", "--master-socket", metavar="IFNAME", help="interface, as eno1"
    )
    ranks.add_argument(
        "--restarts", type=int, metavar="N", help="start all ranks anew, from the newest snapshot, when one is lost (0)"
    )
    ranks.add_argument(
        "--min_nodes", "-min_nodes", "--min-nodes", type=int, metavar="M",
        help="with --restarts: go on with as few machines as M when others are lost; machine 0 must stay",
    )  # fmt: skip
    ranks.add_argument(
        "--nodedist", "-nodedist", action="store_true", help="several machines; implied by -n 2 and more"
    )

    run = top.add_argument_group("run")
    run.add_argument("--out", metavar="DIR", help="run directory (runs/<time>)")
    run.add_argument("--resume", nargs="?", const="", metavar="DIR", help="go on with a run (--out, else the latest)")
    run.add_argument(
        "--metrics-port", "--metrics_port", type=int, metavar="PORT",
        help="serve Prometheus at 127.0.0.1:PORT/metrics; 0: any, see output.log (files only)",
    )  # fmt: skip
    run.add_argument("--dry-run", "--dry_run", action="store_true", help="print the resolved plan and stop")
    return top
