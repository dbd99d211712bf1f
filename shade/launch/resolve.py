"""What the flags come to: one `RunConfig`, and the cache URL it must not contain the password of.

Precedence: what was typed; then, on ``--resume``, what the run said before; then the default. The original's defaults
hold when a script is named (``resnet18``, batch 256, working set 0.1); with nothing named, the embedded default trains
digits.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from shade.config import RunConfig
from shade.errors import ConfigError
from shade.store import StoreURL

DIGITS = Path(".cache") / "digits"
"""Where `scripts/prepare_digits` puts the embedded default's data, from the repository's root."""
_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_EMBEDDED: dict[str, Any] = {
    "network": "cnn",
    "epochs": 10,
    "batch_size": 64,
    "working_set_fraction": 0.2,
}
_TYPED_AS = {"gpus": "processes", "nr": "node_rank", "working_set_size": "working_set_fraction"}


def resolve(args: argparse.Namespace, directory: Path) -> tuple[RunConfig, str]:
    """Resolves the flags.

    Args:
        args: From `flags.parser`.
        directory: The user's working directory.

    Returns:
        The run, and the cache URL with any password.

    Raises:
        ConfigError: A combination that cannot be.
    """
    typed = {_TYPED_AS.get(name, name): value for name, value in vars(args).items()}
    out = _out(typed, directory)
    known = {field.name for field in fields(RunConfig)}
    chosen: dict[str, Any] = {}
    if "resume" in typed:
        chosen = dict(vars(RunConfig.load(out / "run.json")).items())
    elif "script" not in typed:
        chosen = dict(_EMBEDDED)
        root = _BENCHMARKS.parent
        chosen["train_paths"], chosen["val_paths"] = (str(root / DIGITS / "train"),), (str(root / DIGITS / "val"),)
    chosen |= {name: value for name, value in typed.items() if name in known and value not in (None, [])}
    chosen |= {"out": str(out), "resume": "resume" in typed}
    chosen["script"] = str(_find_script(chosen.get("script", "bench_cifar10.py"), directory))
    for name in ("train_paths", "val_paths"):
        chosen[name] = tuple(str((directory / path).resolve()) for path in chosen.get(name, ()))
    if "replication_factor" in typed:
        if typed.get("sampling", "pads") != "pads":
            raise ConfigError.of("--sampling pads with -rep", typed["sampling"], "leave one of the two out")
        chosen["sampling"] = "pads"
    url = _cache_url(typed, chosen)
    chosen["cache"] = "none" if url == "none" else str(StoreURL.parse(url))
    if chosen.get("nodes", 1) == 1 and "master_port" not in typed:
        chosen["master_port"] = 0
    config = RunConfig(**chosen)
    _check(config)
    return config, url


def _out(typed: dict[str, Any], directory: Path) -> Path:
    if typed.get("resume"):
        return Path((directory / typed["resume"]).resolve())
    if "out" in typed:
        return Path((directory / typed["out"]).resolve())
    runs = directory / "runs"
    if "resume" in typed:
        candidates = [path.parent for path in runs.glob("*/run.json")]
        if not candidates:
            raise ConfigError.of("a run to resume", str(runs), "name it: --resume DIR")
        return max(candidates, key=lambda path: (path / "run.json").stat().st_mtime).resolve()
    suffix = f"-node{typed['node_rank']}" if typed.get("nodes", 1) > 1 else ""
    return (runs / (time.strftime("%Y%m%d-%H%M%S") + suffix)).resolve()


def _find_script(script: str, directory: Path) -> Path:
    for candidate in (directory / script, _BENCHMARKS / script):
        if candidate.is_file():
            return candidate.resolve()
    raise ConfigError.of("a training script", script, "give its path; benchmarks/bench_cifar10.py is one to copy from")


def _cache_url(typed: dict[str, Any], chosen: dict[str, Any]) -> str:
    """The cache named by --cache, or by the original's --host_ip, --port_num and -cn, or the default."""
    nodes, named = chosen.get("nodes", 1), typed.get("host_ip") or typed.get("port_num")
    if "cache" in typed:
        if named:
            raise ConfigError.of("either --cache or --host_ip/--port_num", typed["cache"], "leave one of the two out")
        return str(typed["cache"])
    if named:
        host = typed.get("host_ip") or "0.0.0.0"
        host = "127.0.0.1" if host == "0.0.0.0" else host
        cluster = typed.get("cache_nodes", 3 if typed.get("nodedist") else 1) > 1
        return f"{'redis+cluster' if cluster else 'redis'}://{host}:{typed.get('port_num') or 6379}"
    if "SHADE_CACHE" in os.environ:
        return os.environ["SHADE_CACHE"]
    if nodes > 1:
        raise ConfigError.of(
            "a cache that all machines reach",
            "local:// on each",
            "pass --cache redis+cluster://host:port or --cache none",
        )
    cache = chosen.get("cache", "local://")
    return "local://" if cache.startswith("local://") else str(cache)


def _check(config: RunConfig) -> None:
    def require(good: bool, expected: str, got: object, cure: str) -> None:
        if not good:
            raise ConfigError.of(expected, got, cure)

    require(config.nodes >= 1, "-n of at least 1", config.nodes, "count the machines")
    require(config.processes >= 1, "-g of at least 1", config.processes, "one rank per GPU, or per CPU share")
    require(
        0 <= config.node_rank < config.nodes,
        f"-nr below -n {config.nodes}",
        config.node_rank,
        "machines count from 0: -nr 0 on the first",
    )
    require(config.epochs >= 1, "--epochs of at least 1", config.epochs, "give a positive number")
    require(config.batch_size >= 1, "--batch_size of at least 1", config.batch_size, "give a positive number")
    require(config.workers >= 0, "--workers of at least 0", config.workers, "0 loads in the training process")
    require(config.steps is None or config.steps >= 1, "--steps of at least 1", config.steps, "leave it out for all")
    fraction = config.working_set_fraction
    require(0 < fraction <= 1, "-wss in (0, 1], the cached share", fraction, "-wss 0.2 caches a fifth")
    require(bool(config.train_paths), "a TRAIN_PATH", "none", "name a folder with one sub-folder per class")
