"""Implements ``shade cache up|status|down|warm``; the servers are those of `shade.store._servers`.

The address that `up` prints lacks only the password, which is read from the environment, here and by the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shade.errors import ConfigError
from shade.store._servers import cluster_bootstrap, service
from shade.store.url import PASSWORD_VARIABLE, StoreURL, parse_bytes
from shade.terminal import progress_bar


def up(
    directory: Path,
    nodes: int | None,
    replicas: int | None,
    memory: str | None,
    ports: Sequence[int],
    seed: str | None,
) -> int:
    """Starts servers, or with a seed one node of a cluster on several machines, and prints the address for --cache.

    Servers that were started in the directory before, and died, are started again.
    """
    memory_bytes = None if memory is None else parse_bytes(memory)
    password = os.environ.get(PASSWORD_VARIABLE)
    try:
        if seed is None and service.is_recorded(directory):
            num_servers = None if nodes is None else nodes * (1 + (replicas or 0))
            url, returned = service.heal(directory, num_servers=num_servers, memory_bytes=memory_bytes, ports=ports)
            for line in returned or [f"all servers of {directory} are running; nothing was started"]:
                sys.stderr.write(f"{line}\n")
        elif seed is None:
            url = service.up(
                directory,
                nodes=nodes or 1,
                replicas=replicas or 0,
                memory_bytes=memory_bytes or 0,
                ports=ports,
                password=password,
            )
        else:
            (address,) = StoreURL.parse(f"redis://{seed}").addresses
            if len(ports) > 1:
                cure = "leave --ports out, or name one"
                raise ConfigError.of("one port for the one node of this machine", list(ports), cure)
            url = cluster_bootstrap.join_cluster(
                directory,
                address,
                nodes=None if nodes == 1 else nodes,  # without --nodes the cluster exists already
                replicas=replicas or 0,
                memory_bytes=memory_bytes or 0,
                password=password,
                port=ports[0] if ports else None,
            )
    except OSError as error:
        raise ConfigError.of(f"to write to --dir {directory}", error.strerror, "choose another") from None
    sys.stdout.write(f"{_without_password(url)}\n")
    if url.password:
        sys.stderr.write(f"pass it to --cache, and the password in {PASSWORD_VARIABLE}\n")
    else:
        sys.stderr.write(f"pass it to --cache; `shade cache down --dir {directory}` ends it\n")
    return 0


def status(directory: Path) -> int:
    """Prints the address and a line per server; returns 1 if one does not answer."""
    url, servers = service.status(directory)
    sys.stdout.write(f"{_without_password(url)}\n")
    for server in servers:
        line = f"  port {server.port:<6} pid {server.process_id:<8}"
        if server.stats is None:
            line += "runs, but does not answer" if server.running else "is gone"
        else:
            limit = f" of {server.stats.max_bytes / 2**20:,.0f}" if server.stats.max_bytes else ""
            line += f"{server.stats.role:<8} {server.stats.num_keys:>9,} keys  "
            line += f"{server.stats.used_bytes / 2**20:,.1f}{limit} MiB  Redis {server.stats.version}"
        sys.stdout.write(line + "\n")
    if all(server.stats is not None for server in servers):
        return 0
    for server in servers:
        if server.stats is None and server.running:
            sys.stdout.write(f"→ wait for port {server.port}, or end it: kill -9 {server.process_id}\n")
    if not all(server.running for server in servers):
        sys.stdout.write(f"→ shade cache up --dir {directory} starts again what is gone, and says what was lost\n")
    return 1


def down(directory: Path) -> int:
    """Ends the servers."""
    ended = service.down(directory)
    sys.stdout.write(f"{ended} server{'s' * (ended != 1)} ended\n")
    return 0


def warm(function: str, most_bytes: str | None, most_seconds: float | None, machine: str) -> int:
    """Fills the cache of the data set and sampler that a function returns; prints a line a tier. Returns 1 if the
    origin could not read a sample."""
    from shade.data._dataset.warm import warm as fill

    number, slash, num_machines = machine.partition("/")
    if not (slash and number.isdecimal() and num_machines.isdecimal()):
        raise ConfigError.of("--machine I/N, as 0/4", machine, "count from 0")
    limit = None if most_bytes is None else parse_bytes(most_bytes)
    dataset, sampler = _made_by(function)
    with contextlib.closing(dataset), contextlib.closing(sampler), progress_bar(1.0, unit="samples") as bar:

        def advance(num_done: int, num_wanted: int) -> None:
            bar.total = num_wanted
            bar.update(num_done - bar.n)

        done = fill(
            dataset,
            sampler,
            most_bytes=limit,
            most_seconds=most_seconds,
            machine=int(number),
            num_machines=int(num_machines),
            advance=advance,
        )
    for each in done:
        line = f"{each.url}: {each.num_samples:,} samples, {each.num_read:,} of them read now"
        line += f"; {each.num_left:,} more would fit" if each.num_left else ""
        sys.stdout.write(line + (f"; {each.num_failed:,} could not be read" if each.num_failed else "") + "\n")
    return int(any(each.num_failed for each in done))


def _made_by(function: str) -> tuple[Any, Any]:
    """Returns what a function, ``module:name``, returns; modules are looked for in this folder first."""
    module, _, name = function.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module.removesuffix(".py")), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.of("MODULE:FUNCTION, as train:data", function, f"call it in its folder ({error})") from error
    found = made()
    if not (isinstance(found, tuple) and len(found) == 2):
        raise ConfigError.of(f"(dataset, sampler) from {function}", type(found).__name__, "return both, as the job")
    return found


def _without_password(url: StoreURL) -> StoreURL:
    return dataclasses.replace(url, password=None)
