"""Implements ``shade cache up|status|down`` on top of `shade.store._servers`.

The address that `up` prints lacks only the password, which is read from the environment, here and by the run.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shade.errors import ConfigError
from shade.store._servers import cluster_bootstrap, service
from shade.store.url import PASSWORD_VARIABLE, StoreURL, parse_bytes


def up(directory: Path, nodes: int, replicas: int, memory: str | None, ports: Sequence[int], seed: str | None) -> int:
    """Starts servers, or with a seed one node of a cluster on several machines, and prints the address for --cache."""
    memory_bytes = 0 if memory is None else parse_bytes(memory)
    password = os.environ.get(PASSWORD_VARIABLE)
    try:
        if seed is None:
            url = service.up(
                directory, nodes=nodes, replicas=replicas, memory_bytes=memory_bytes, ports=ports, password=password
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
                replicas=replicas,
                memory_bytes=memory_bytes,
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
