"""``shade cache up|status|down``: `shade.store.service` for people.

The address that `up` prints is complete but for a password: that one is read from the environment, here and by the run.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shade.errors import ConfigError
from shade.store import cluster_bootstrap, service
from shade.store.url import PASSWORD_VARIABLE, StoreURL, parse_bytes


def up(directory: Path, nodes: int, replicas: int, memory: str | None, ports: Sequence[int], seed: str | None) -> int:
    """Starts servers and prints the address to pass to ``--cache``."""
    memory_bytes = 0 if memory is None else parse_bytes(memory)
    password = os.environ.get(PASSWORD_VARIABLE)
    try:
        if seed is not None:
            url = _join(directory, seed, nodes, replicas, memory_bytes, ports, password)
        else:
            url = service.up(
                directory,
                nodes=nodes,
                replicas=replicas,
                memory_bytes=memory_bytes,
                ports=ports,
                password=password,
            )
    except OSError as error:
        raise ConfigError.of(
            "a --dir that can be written", f"{directory}: {error.strerror}", "choose another"
        ) from None
    sys.stdout.write(f"{_without_password(url)}\n")
    if url.password:
        sys.stderr.write(f"pass it to --cache, and the password in {PASSWORD_VARIABLE}\n")
    else:
        sys.stderr.write(f"pass it to --cache; `shade cache down --dir {directory}` ends it\n")
    return 0


def _join(
    directory: Path,
    seed: str,
    nodes: int,
    replicas: int,
    memory_bytes: int,
    ports: Sequence[int],
    password: str | None,
) -> StoreURL:
    """One node here, of a cluster on several machines; ``--nodes`` left out is a cluster that is there."""
    (address,) = StoreURL.parse(f"redis://{seed}").addresses
    if len(ports) > 1:
        raise ConfigError.of("one port for the one node of this machine", list(ports), "leave --ports out, or name one")
    return cluster_bootstrap.join_cluster(
        directory,
        address,
        nodes=None if nodes == 1 else nodes,
        replicas=replicas,
        memory_bytes=memory_bytes,
        password=password,
        port=ports[0] if ports else None,
    )


def status(directory: Path) -> int:
    """Prints the address and a line per server; 1 when one does not answer."""
    url, servers = service.status(directory)
    sys.stdout.write(f"{_without_password(url)}\n")
    for server in servers:
        line = f"  port {server.port:<6} pid {server.process_id:<8}"
        if server.stats is None:
            line += "does not answer" if server.running else "is gone"
        else:
            limit = f" of {server.stats.max_bytes / 2**20:,.0f}" if server.stats.max_bytes else ""
            line += f"{server.stats.role:<8} {server.stats.num_keys:>9,} keys  "
            line += f"{server.stats.used_bytes / 2**20:,.1f}{limit} MiB  Redis {server.stats.version}"
        sys.stdout.write(line + "\n")
    return 0 if all(server.stats is not None for server in servers) else 1


def down(directory: Path) -> int:
    """Ends the servers."""
    ended = service.down(directory)
    sys.stdout.write(f"{ended} server{'s' * (ended != 1)} ended\n")
    return 0


def _without_password(url: StoreURL) -> StoreURL:
    return dataclasses.replace(url, password=None)
