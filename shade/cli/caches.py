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
from shade.store import service
from shade.store.url import PASSWORD_VARIABLE, StoreURL, parse_bytes


def up(directory: Path, nodes: int, replicas: int, memory: str | None, ports: Sequence[int]) -> int:
    """Starts servers and prints the address to pass to ``--cache``."""
    try:
        url = service.up(
            directory,
            nodes=nodes,
            replicas=replicas,
            memory_bytes=0 if memory is None else parse_bytes(memory),
            ports=ports,
            password=os.environ.get(PASSWORD_VARIABLE),
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
