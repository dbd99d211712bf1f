"""Resolves the flags to one `RunConfig`, and to the stores' URLs, whose passwords it must not contain.

Precedence: what was typed; then, on ``--resume``, what the saved run said; then the default. The original's defaults
apply if a script is named (``resnet18``, batch 256, working set 0.1); with nothing named, the embedded default trains
digits. A run may be resumed on another number of ranks: the global batch decides the stream of samples, so unless
``--batch_size`` is typed the ranks share the old one.

The run directory of machine 0 is what ``--out`` says; machine 3 uses ``node3`` inside it, so that machines may share a
file system or not.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from shade.config import CACHE_URL, RunConfig
from shade.control.profile import Profile
from shade.errors import ConfigError
from shade.store import StoreURL

_PACKAGE = Path(str(resources.files("shade")))
_DIGITS = _PACKAGE.with_name(".cache") / "digits"
"""Where `scripts/prepare_digits` puts the embedded default's data, beside the package in a checkout."""
_BENCHMARKS = _PACKAGE.with_name("benchmarks")
_EMBEDDED: dict[str, Any] = {"network": "cnn", "epochs": 10, "batch_size": 64, "working_set_fraction": 0.2}
_TYPED_AS = {"gpus": "processes", "nr": "node_rank", "working_set_size": "working_set_fraction"}


@dataclass(frozen=True)
class StoreURLs:
    """URLs with any password: for the ranks' environment, never for a file."""

    cache: str
    """A URL, or ``none``."""
    checkpoint: str | None = None


def resolve(args: argparse.Namespace, directory: Path) -> tuple[RunConfig, StoreURLs]:
    """Resolves the flags.

    Args:
        args: From `flags.parser`.
        directory: The user's working directory.

    Returns:
        The run, and the URLs of its stores.

    Raises:
        ConfigError: An impossible combination.
    """
    typed = {_TYPED_AS.get(name, name): value for name, value in vars(args).items()}
    out = _out(typed, directory)
    known = {field.name for field in fields(RunConfig)}
    chosen: dict[str, Any] = {}
    if "resume" in typed:
        chosen = _saved(out, typed)
    elif "script" not in typed:
        chosen = _embedded()
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
    stores = StoreURLs(_cache_url(typed, chosen), _unmasked(chosen["checkpoint"]) if chosen.get("checkpoint") else None)
    chosen["cache"] = "none" if stores.cache == "none" else str(StoreURL.parse(stores.cache))
    if stores.checkpoint is not None:
        chosen["checkpoint"] = str(StoreURL.parse(stores.checkpoint))
    if "://" not in (chosen.get("persist") or "://"):
        chosen["persist"] = str((directory / Path(chosen["persist"]).expanduser()).resolve())
    if chosen.get("nodes", 1) == 1 and "master_port" not in typed:
        chosen["master_port"] = 0
    config = RunConfig(**chosen)
    _check(config)
    return config, stores


def _embedded() -> dict[str, Any]:
    """Returns the settings of the embedded default: the digits and a small network."""
    if not _DIGITS.is_dir():
        cure = "run scripts/prepare_digits, or name a SCRIPT TRAIN_PATH"
        raise ConfigError.of("the digits of the embedded default", str(_DIGITS), cure)
    return _EMBEDDED | {"train_paths": (str(_DIGITS / "train"),), "val_paths": (str(_DIGITS / "val"),)}


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
    return (runs / time.strftime("%Y%m%d-%H%M%S") / inner).resolve()


def _find_script(script: str, directory: Path) -> Path:
    for candidate in (directory / script, _BENCHMARKS / script):
        if candidate.is_file():
            return candidate.resolve()
    if (directory / script).is_dir():
        raise ConfigError.of("a training script first", script, f"write bench_cifar10.py {script}")
    raise ConfigError.of("a training script", script, "give its path; benchmarks/bench_cifar10.py is one to copy from")


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
    typed = config.controller or config.staleness or config.density != RunConfig.density
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
    require(bool(config.train_paths), "a TRAIN_PATH", "none", "name a folder with one sub-folder per class")
