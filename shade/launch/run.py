"""Runs one training on this machine from its command line to its report.

Exit codes: 0 done · 1 a rank failed, one line says which and why · 2 bad input, one line says what was expected, and
nothing was written · 128+n ended by signal n.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shade.config import ACCESS_LOG, CACHE_URL, CHECKPOINT_URL, RUN_FILE, RunConfig
from shade.errors import ShadeError
from shade.launch import flags, preflight
from shade.launch.ranks import Ended, Ranks, command, free_port, signals_as_exceptions, watch
from shade.launch.resolve import StoreURLs, resolve
from shade.launch.workspace import Workspace
from shade.report import write_report
from shade.store import open_store

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""glibc settings for ranks: what a step frees stays for the next one, up to 1 GiB. Else it goes to the kernel and comes
back page by page, thousands of faults a step (decision 0006). The user's own settings win."""


def main(argv: Sequence[str] | None = None, prog: str = "runshade.py") -> int:
    """Runs the launcher.

    Args:
        argv: Flags; the process's own if None.
        prog: What the user typed, for help and messages.

    Returns:
        The exit code, see the top of the file.
    """
    args = flags.parse(sys.argv[1:] if argv is None else argv, prog)
    dry_run = vars(args).pop("dry_run", False)
    config: RunConfig | None = None
    stores = StoreURLs("none")
    try:
        with signals_as_exceptions() as remind:
            config, stores = resolve(args, Path.cwd())
            preflight.check(config, stores)
            if dry_run:
                sys.stdout.write(describe(config) + "\n")
                return 0
            code, message = _launch(config, stores, remind)
            again = config.restarts if config.min_nodes is None else 0  # else torch.distributed.run does it
            for left in range(again - 1, -1, -1):
                if code != 1:
                    break
                sys.stderr.write(f"{prog}: {message}; the ranks are restarted ({left} more times after that)\n")
                config = _again(config, stores)
                code, message = _launch(config, stores, remind)
    except ShadeError as error:
        code, message = 2, " ".join(str(error).split())
    except Ended as ended:
        code, message = 128 + ended.number, f"stopped by {ended}"
    if code and config is not None and code != 2 and preflight.has_snapshots(config, stores.checkpoint):
        message += f"; continue with --resume {config.out}"
    if message:
        sys.stderr.write(f"{prog}: {message}\n")
    return code


def _again(config: RunConfig, stores: StoreURLs) -> RunConfig:
    """Returns the plan of a restart after ranks were lost: from the newest snapshot, or from the start if there is none
    yet."""
    is_there = preflight.has_snapshots(config, stores.checkpoint)
    if not is_there:
        Workspace(config, Path.cwd(), stores.checkpoint).undo()
    return dataclasses.replace(config, resume=is_there)


def describe(config: RunConfig) -> str:
    """Returns the resolved plan, a line per setting, and the command that starts the ranks."""
    plan = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    plan["master_port"] = config.master_port or "any that is free"
    plan["cache"] = f"{config.cache}  ({config.working_set_fraction:.0%} of the data set)"
    width = max(map(len, plan))
    lines = [
        f"{name:{width}}  {', '.join(value) if isinstance(value, tuple) else value}" for name, value in plan.items()
    ]
    return "\n".join([*lines, f"{'command':{width}}  {' '.join(command(config))}"])


def _launch(config: RunConfig, stores: StoreURLs, remind: Callable[[], None]) -> tuple[int, str]:
    """Trains and reports; returns the exit code and a message."""

    def poll() -> int | None:
        remind()
        return ranks.poll()

    place = Workspace(config, Path.cwd(), stores.checkpoint)
    try:
        with contextlib.ExitStack() as stack:
            if stores.cache.startswith("local:"):
                stores = dataclasses.replace(stores, cache=stack.enter_context(open_store(stores.cache)).url)
            config = dataclasses.replace(config, master_port=config.master_port or free_port())
            environment = _environment(config, stores, place)
            ranks = stack.enter_context(Ranks(config, environment, place.output_log))
            code = watch(poll, config)
    except ShadeError:
        place.undo()
        raise
    # A rank that was killed makes the others complain about their input; that is no bad input.
    if place.failure is not None and not ranks.was_killed:
        message = place.failure
        place.undo()
        return 2, message
    if code != 0:
        return 1, f"{ranks.why()}; all of it is in {place.output_log}"
    if config.node_rank > 0:
        return 0, f"done; the report is on machine 0, this machine's logs are in {config.out}"
    if not place.has_results:
        return 0, f"done; the script reported no epoch, so there is no report in {config.out}"
    sys.stdout.write(write_report(config.out))
    return 0, f"report, picture and logs are in {config.out}"


def _environment(config: RunConfig, stores: StoreURLs, place: Workspace) -> dict[str, str]:
    environment = os.environ | {RUN_FILE: str(config.save()), CACHE_URL: stores.cache, ACCESS_LOG: str(place.train_log)}
    if stores.checkpoint is not None:
        environment[CHECKPOINT_URL] = stores.checkpoint
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.processes)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    for name, value in ALLOCATOR.items():
        environment.setdefault(name, value)
    if config.master_socket:
        environment |= {"GLOO_SOCKET_IFNAME": config.master_socket, "NCCL_SOCKET_IFNAME": config.master_socket}
    return environment
