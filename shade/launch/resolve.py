"""Parses the launcher's command line, and resolves it to one `RunConfig` and the stores' URLs.

Precedence: what was typed; then, on ``--resume``, what the saved run said; then the default. So no flag has a default
in the parser: a flag that was not typed stays absent. The original's network and batch (``resnet18``, 256) apply if a
script is named; with no script named, the digits are trained. A `RunConfig` must not contain passwords; those are in
the URLs. The run directory of machine 0 is what ``--out`` says; machine 3 uses ``node3`` inside it.

The parser knows every flag of SHADE's original launcher in its spellings, before, between and after the script.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from typing_extensions import override

from shade.config import CACHE_URL, WORKING_SET_FRACTION, RunConfig
from shade.control.profile import Profile
from shade.errors import ConfigError, shown_url
from shade.launch.bundled import DIGITS, EXAMPLES
from shade.store import StoreURL
from shade.store.disk import disk_url
from shade.terminal import CommandParser
from shade.tracking.sinks import TRACKERS

_DESCRIPTION = """\
Trains SCRIPT on TRAIN_PATH through a cache, on every rank of this node, and ends with a report.

With no arguments: real handwritten digits and a small CNN, twice, over storage slowed down to 20 ms an open and
25 MB/s: with a plain DataLoader, and through a private cache. It ends with both side by side.
On several nodes, run the same command on each with its own -nr.
"""

_EXAMPLES = """\
examples:
  %(prog)s                                             the digits, plain and through shade
  %(prog)s bench_cifar10.py /mnt/nfs/cifar10/train --val_paths /mnt/nfs/cifar10/test \\
      --network resnet18 --epochs 5 --batch_size 64 -g 2 -wss 0.2
  %(prog)s bench_cifar10.py /mnt/nfs/cifar10/train -n 4 -g 2 -nr 0 -master_address 10.0.0.1 --nodedist \\
      --host_ip 10.0.0.1 --port_num 7000 -cn 4 -rep 3.0 -wss 0.2
  %(prog)s … --dry-run                                 shows the plan and starts nothing
  %(prog)s … --checkpoint redis://10.0.0.1:6379 --persist-to /mnt/nfs/snapshots --checkpoint-every 20
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


def _original(name: str) -> list[str]:
    """Spells a flag of the original launcher: ``--val_paths``, ``-val_paths``, ``--val-paths``."""
    return list(dict.fromkeys([f"--{name}", f"-{name}", f"--{name.replace('_', '-')}"]))


def _ours(name: str) -> list[str]:
    """Spells a flag of ours: ``--dry-run``, ``--dry_run``."""
    return list(dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"]))


_GREEDY = {"--resume", *_original("val_paths"), *_original("host_ip"), *_original("port_num")}
"""Flags that take several words, and so would take the script for one of them."""


def parse(argv: Sequence[str], prog: str = "runshade.py") -> argparse.Namespace:
    """Parses a command line without the program's name; a flag that was not typed is absent from the result.
    ``prog`` is what the user typed to get here. Raises SystemExit: 2 after one line about an invalid flag, 0 after
    ``--help``."""
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
    top = CommandParser(
        prog=prog,
        usage="%(prog)s [SCRIPT TRAIN_PATH ...] [flags]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=lambda prog: _Help(prog, max_help_position=38, width=118),
        argument_default=argparse.SUPPRESS,
    )
    add = top.add_argument_group("what to train").add_argument
    add("script", nargs="?", metavar="SCRIPT", help="training script (bench_cifar10.py)")
    add("train_paths", nargs="*", metavar="TRAIN_PATH", help="folders in ImageFolder layout")
    add(*_original("val_paths"), nargs="+", metavar="PATH", help="validation folders")
    add(*_original("network"), metavar="NAME", help="architecture, see examples/networks.py (resnet18)")
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
    add("--disk", metavar="FOLDER", help="keep samples on this machine's disk too: /nvme/shade?capacity=500GiB")
    working_set = ("-wss", "--working_set_size", "--working-set-size")
    add(*working_set, type=float, metavar="F", help=f"cached share ({WORKING_SET_FRACTION})")
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
    add("--persist-to", metavar="DIR", help="durable storage for them, a path or URL (DIR/checkpoints of --out)")
    every = "50 (steps), 30s, 5m, 2%% or never (30s, if the strategy has no other)"
    add(*_ours("checkpoint_every"), metavar="SPEC", help=every)
    add(*_ours("checkpoint_keep"), metavar="SPEC", help="last=2,every=1000,best=val_loss … (last=2)")
    strategy = "how snapshots are copied: overlap (default), copy, …; an unknown name lists all"
    add(*_ours("checkpoint_strategy"), metavar="NAME", help=strategy)
    notice = "file or http:// address that announces this machine's end, beside SIGTERM"
    add("--notice", metavar="SOURCE", help=notice)

    add = top.add_argument_group("gradient (across a slow link; see docs/how-to/gradient-options.md)").add_argument
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
    trackers = "send events to otlp, mlflow, wandb, trackio, separated by commas; see docs/how-to/track-a-run.md (none)"
    add("--track", metavar="NAMES", help=trackers)
    add(*_ours("dry_run"), action="store_true", help="print the resolved plan and stop")
    return top


_EMBEDDED: dict[str, Any] = {"network": "cnn", "epochs": 10, "batch_size": 64}
_TYPED_AS = {"gpus": "processes", "nr": "node_rank", "working_set_size": "working_set_fraction"}


@dataclass(frozen=True)
class StoreURLs:
    """URLs with any password: for the ranks' environment, never for a file."""

    cache: str
    """A URL, or ``none``."""
    checkpoint: str | None = None


def resolve(args: argparse.Namespace, directory: Path) -> tuple[RunConfig, StoreURLs]:
    """Resolves the flags that `parse` returned, in the user's working directory, to the run and the URLs of its
    stores. Raises ConfigError for an impossible combination."""
    typed = {_TYPED_AS.get(name, name): value for name, value in vars(args).items()}
    out = _out(typed, directory)
    known = {field.name for field in fields(RunConfig)}
    chosen: dict[str, Any] = {}
    if "resume" in typed:
        chosen = _saved(out, typed)
    elif "script" not in typed:
        chosen = _EMBEDDED | {"train_paths": (str(DIGITS / "train"),), "val_paths": (str(DIGITS / "val"),)}
    # What was typed wins over the saved run and the defaults.
    chosen |= {name: value for name, value in typed.items() if name in known and value not in (None, [])}
    chosen |= {"out": str(out), "resume": "resume" in typed}
    chosen["script"] = str(_find_script(chosen.get("script", "bench_cifar10.py"), directory))
    for name in ("train_paths", "val_paths"):
        chosen[name] = tuple(str((directory / path).resolve()) for path in chosen.get(name, ()))
    if chosen.get("profile"):
        chosen["profile"] = str((directory / Path(chosen["profile"]).expanduser()).resolve())
        Profile.load(chosen["profile"])
    if "replication_factor" in typed:
        if typed.get("sampling", "pads") != "pads":
            raise ConfigError.of("--sampling pads with -rep", typed["sampling"], "leave one of the two out")
        chosen["sampling"] = "pads"
    if chosen.get("disk"):
        text = chosen["disk"]
        chosen["disk"] = str(disk_url(text if "://" in text else str(directory / Path(text).expanduser())))
    stores = StoreURLs(_cache_url(typed, chosen), _unmasked(chosen["checkpoint"]) if chosen.get("checkpoint") else None)
    chosen["cache"] = "none" if stores.cache == "none" else str(StoreURL.parse(stores.cache))
    if stores.checkpoint is not None:
        chosen["checkpoint"] = str(StoreURL.parse(stores.checkpoint))
    variables = "fsspec reads it from variables, such as AWS_SECRET_ACCESS_KEY or FSSPEC_SFTP_PASSWORD"
    _check_no_login("--persist-to", chosen.get("persist_to"), variables)
    _check_no_login("--notice", chosen.get("notice"), "a notice is no secret")
    if "://" not in (chosen.get("persist_to") or "://"):
        chosen["persist_to"] = str((directory / Path(chosen["persist_to"]).expanduser()).resolve())
    if chosen.get("nodes", 1) == 1 and "master_port" not in typed:
        chosen["master_port"] = 0
    config = RunConfig(**chosen)
    if config.gradient is None and "density" in typed:
        raise ConfigError.of("--gradient beside --density", None, "add --gradient threshold-v16")
    _check(config)
    return config, stores


def _saved(out: Path, typed: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the run to resume, its global batch shared by the present number of ranks."""
    if not (out / "run.json").is_file():
        raise ConfigError.of("a run to resume", str(out), "name its directory: --resume DIR")
    before = RunConfig.load(out / "run.json")
    chosen = dict(vars(before))
    if "batch_size" not in typed:
        ranks = typed.get("processes", before.processes) * typed.get("nodes", before.nodes)
        global_batch = before.batch_size * before.processes * before.nodes
        if ranks < 1 or global_batch % ranks:
            expected = f"a number of ranks that divides the run's global batch of {global_batch}"
            raise ConfigError.of(expected, ranks, "choose -n and -g so that their product does")
        chosen["batch_size"] = global_batch // ranks
    return chosen


def _out(typed: dict[str, Any], directory: Path) -> Path:
    inner = f"node{typed['node_rank']}" if typed.get("nodes", 1) > 1 and typed.get("node_rank", 0) > 0 else ""
    named: str | None = typed.get("resume") or typed.get("out")
    if named:
        return (directory / named / inner).resolve()
    runs = directory / "runs"
    if "resume" in typed:
        candidates = [run for run in runs.glob("*") if (run / inner / "run.json").is_file()]
        if not candidates:
            raise ConfigError.of("a run to resume", str(runs), "name its directory: --resume DIR")
        return (max(candidates, key=lambda run: (run / inner / "run.json").stat().st_mtime) / inner).resolve()
    name = time.strftime("%Y%m%d-%H%M%S")
    if not inner:
        names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
        name = next(each for each in names if not (runs / each).exists())
    return (runs / name / inner).resolve()


def _find_script(script: str, directory: Path) -> Path:
    for candidate in (directory / script, EXAMPLES / script):
        if candidate.is_file():
            return candidate.resolve()
    if (directory / script).is_dir():
        raise ConfigError.of("a training script first", script, f"write bench_cifar10.py {script}")
    raise ConfigError.of("a training script", script, "give its path; shade example writes one to start from")


def _cache_url(typed: dict[str, Any], chosen: dict[str, Any]) -> str:
    """Returns the cache named by --cache, or by the original's --host_ip, --port_num and -cn, or the default."""
    nodes, named = chosen.get("nodes", 1), typed.get("host_ip") or typed.get("port_num")
    if "cache" in typed:
        if named:
            raise ConfigError.of("either --cache or --host_ip/--port_num", "both", "leave one of the two out")
        return str(typed["cache"])
    if named:
        host = typed.get("host_ip") or "0.0.0.0"
        host = "127.0.0.1" if host == "0.0.0.0" else host
        cluster = typed.get("cache_nodes", 3 if typed.get("nodedist") else 1) > 1
        return f"{'redis+cluster' if cluster else 'redis'}://{host}:{typed.get('port_num') or 6379}"
    if CACHE_URL in os.environ:
        return os.environ[CACHE_URL]
    if nodes > 1 and "cache" not in chosen:
        cure = "pass --cache redis+cluster://host:port or --cache none"
        raise ConfigError.of("a cache that all machines reach", "local:// on each", cure)
    return _unmasked(chosen.get("cache", "local://"))


def _unmasked(url: str) -> str:
    """Removes the mask for a password from a saved URL: the environment completes it again."""
    return url.replace(":***@", "@").replace("//@", "//")


def _check_no_login(flag: str, url: str | None, why: str) -> None:
    """Raises ConfigError for a URL with a password or options: run.json keeps the URL as it is."""
    rest = (url or "").partition("://")[2]
    if url and (":" in rest.rpartition("@")[0] or "?" in rest or shown_url(url).endswith("://***")):
        raise ConfigError.of(f"a {flag} without a login, as run.json keeps it", shown_url(url), f"leave it out: {why}")


def _check(config: RunConfig) -> None:
    def require(good: bool, expected: str, got: object, cure: str) -> None:
        if not good:
            raise ConfigError.of(expected, got, cure)

    require(config.nodes >= 1, "-n of at least 1", config.nodes, "count the machines")
    require(config.processes >= 1, "-g of at least 1", config.processes, "one rank per GPU, or per CPU share")
    below = f"-nr below -n {config.nodes}"
    require(0 <= config.node_rank < config.nodes, below, config.node_rank, "machines count from 0: -nr 0 on the first")
    require(config.epochs >= 1, "--epochs of at least 1", config.epochs, "give a positive number")
    require(config.batch_size >= 1, "--batch_size of at least 1", config.batch_size, "give a positive number")
    require(config.workers >= 0, "--workers of at least 0", config.workers, "0 loads in the training process")
    if config.min_nodes is not None:
        few = config.min_nodes
        require(1 <= few <= config.nodes, f"--min_nodes from 1 to -n {config.nodes}", few, "leave it out to need all")
        require(config.restarts > 0, "--restarts beside --min_nodes", config.restarts, "add --restarts 3")
        for nodes in range(few, config.nodes):
            config.shared_by(nodes * config.processes)
    require(config.restarts >= 0, "--restarts of at least 0", config.restarts, "0 ends the run when a rank is lost")
    require(config.steps is None or config.steps >= 1, "--steps of at least 1", config.steps, "leave it out for all")
    require(config.profile is None or config.controller, "--controller beside --profile", None, "add --controller")
    typed = config.controller or config.staleness
    good = config.gradient is not None or not typed
    require(good, "--gradient beside its settings", None, "--gradient threshold-v16")
    require(0 < config.density <= 1, "--density in (0, 1]", config.density, "0.01 sends one element in a hundred")
    if config.gradient is not None:
        from shade.gradient._compress.compressor import COMPRESSORS

        COMPRESSORS.get(config.gradient)
    fraction = config.working_set_fraction
    require(0 < fraction <= 1, "-wss in (0, 1], the cached share", fraction, "-wss 0.2 caches a fifth")
    require(0 <= config.master_port < 65536, "--master_port below 65536", config.master_port, "choose another port")
    good = config.metrics_port is None or 0 <= config.metrics_port < 65536
    cure = "9464 is customary, 0 takes any that is free"
    require(good, "--metrics-port below 65536", config.metrics_port, cure)
    unknown = [name for name in (config.track or "").split(",") if name and name not in TRACKERS]
    require(not unknown, f"--track with names of {', '.join(TRACKERS)}", config.track, "separate them by commas")
    require(bool(config.train_paths), "a TRAIN_PATH", "none", "name a folder with one sub-folder per class")
