"""Stores bytes by key, in batches, in this process, a Redis server, a Redis Cluster or a folder of a local disk.

Each module that registers a scheme is imported here. Reading order: `base` (what a store is) → `url` → `keys` → `wire`,
`link`, `node` (one server) → `redis_commands`, `redis`, `cluster` → `memory` → `disk_files`, `disk`. `_servers` starts
servers: one here (`server`), several here (`local_cluster`), one on each machine (`service`, `cluster_bootstrap`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from shade.errors import ConfigError
from shade.store.base import STORES, NodeStats, Store, StoreStats
from shade.store.cluster import ClusterStore
from shade.store.disk import DiskStore
from shade.store.keys import SampleKeys
from shade.store.memory import MemoryStore
from shade.store.redis import LocalStore, RedisStore
from shade.store.url import StoreURL

__all__ = [
    "STORES",
    "ClusterStore",
    "DiskStore",
    "LocalStore",
    "MemoryStore",
    "NodeStats",
    "RedisStore",
    "SampleKeys",
    "Store",
    "StoreStats",
    "StoreURL",
    "open_store",
]


def open_store(url: str | StoreURL, *, timeout_seconds: float = 0.25) -> Store:
    """Opens the store at a URL. The first use contacts the servers; `Store.ping` does it now.

    Args:
        url: ``memory://``, ``local://``, ``unix:///path.sock``, ``redis://[user:password@]host:port/db``, ``rediss://``
            (TLS; ``?ca=…&cert=…&key=…``), ``redis+cluster://[user:password@]host:port,host:port`` or
            ``rediss+cluster://``; a cluster's ``?sockets=DIR`` holds the unix sockets of nodes on this machine; or
            ``disk:///folder?capacity=500GiB``.
        timeout_seconds: Bound of each wait for a server, > 0: a dead server delays a batch by at most this.

    Returns:
        The store; ``local://`` has started its server by now.

    Raises:
        UnknownNameError: No such scheme.
        ConfigError: An invalid URL or timeout, or no server binary for ``local://``.
    """
    parsed = url if isinstance(url, StoreURL) else StoreURL.parse(url)
    if not timeout_seconds > 0:
        raise ConfigError.of("a timeout of more than 0 seconds", timeout_seconds, "leave it at 0.25")
    opener = cast("Callable[[StoreURL, float], Store]", STORES.get(parsed.scheme))
    return opener(parsed, timeout_seconds)
