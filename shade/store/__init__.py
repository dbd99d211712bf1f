"""Bytes by key, in batches: the store, and the one way in.

Every file that registers a scheme is imported here, and nowhere else is a scheme compared with a name. Reading order:
`base` (what a store is) → `url` → `keys`, `sizing` → `wire`, `link`, `node` (one server) → `remote`, `redis`,
`patience`, `cluster` → `memory`, `server`, `local`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from shade.errors import ConfigError
from shade.store.base import STORES, NodeStats, Store, StoreStats
from shade.store.cluster import ClusterStore
from shade.store.keys import SampleKeys
from shade.store.local import LocalStore
from shade.store.memory import MemoryStore
from shade.store.redis import RedisStore
from shade.store.url import StoreURL

__all__ = [
    "STORES",
    "ClusterStore",
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
    """Opens the store at a URL; servers are first spoken to when first needed (`Store.ping` does it now).

    Args:
        url: ``memory://``, ``local://``, ``unix:///path.sock``, ``redis://[user:password@]host:port/db``, ``rediss://``
            (TLS; ``?ca=…&cert=…&key=…``), ``redis+cluster://[user:password@]host:port,host:port`` or
            ``rediss+cluster://``; of a cluster ``?sockets=DIR`` tells where a node on this machine has its unix socket.
        timeout_seconds: Bound of each wait for a server, > 0: so long may a dead one hold up a batch.

    Returns:
        The store; ``local://`` has started its server by now.

    Raises:
        UnknownNameError: No such scheme.
        ConfigError: A URL or a timeout that cannot be, or no server binary for ``local://``.
    """
    parsed = url if isinstance(url, StoreURL) else StoreURL.parse(url)
    if not timeout_seconds > 0:
        raise ConfigError.of("a timeout of more than 0 seconds", timeout_seconds, "leave it at 0.25")
    opener = cast("Callable[[StoreURL, float], Store]", STORES.get(parsed.scheme))
    return opener(parsed, timeout_seconds)
