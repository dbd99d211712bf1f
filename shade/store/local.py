"""Keeps bytes in a private Redis server that starts with this run and ends with it.

The embedded default needs no service to install, no port and no password: it is a unix socket that only this user can
open. The process that opens ``local://`` owns the server; `server` guarantees its end. All other processes reach it by
``.url``, the socket's ``unix://`` address. A pickled `LocalStore` becomes that too, so workers and other ranks share
the server and do not end it.
"""

from __future__ import annotations

import os
from typing import Final

from typing_extensions import override

from shade.store._servers.server import LocalServer
from shade.store.base import STORES
from shade.store.redis import RedisStore
from shade.store.url import StoreURL

_HEADROOM_BYTES: Final = 64 << 20
_HEADROOM_DIVISOR: Final = 8
"""``maxmemory`` counts clients' buffers as well as data. Batches in flight must not turn into refused writes, so the
limit is the capacity, an eighth more, and 64 MiB; a cache that plans what to store keeps to the capacity itself."""


@STORES.register("local")
class LocalStore(RedisStore):
    """A private server.

    Args:
        url: ``local://`` with an optional ``?capacity=``; without one the server has no limit.
        timeout_seconds: As in `RemoteStore`.

    Raises:
        ConfigError: There is no server binary.
        StoreUnavailableError: The server does not start; the message has its log.
    """

    def __init__(self, url: StoreURL, timeout_seconds: float) -> None:
        capacity_bytes = url.capacity_bytes
        limit_bytes = 0
        if capacity_bytes is not None:
            limit_bytes = capacity_bytes + capacity_bytes // _HEADROOM_DIVISOR + _HEADROOM_BYTES
        self.server = LocalServer(limit_bytes)
        self.server.start()
        self._owner = os.getpid()
        super().__init__(StoreURL("unix", path=self.server.socket_path, options=url.options), timeout_seconds)

    def __reduce__(self) -> tuple[type[RedisStore], tuple[StoreURL, float]]:
        return RedisStore, (self._url, self._timeout_seconds)

    @override
    def close(self) -> None:
        """Also ends the server, if this process opened the store."""
        super().close()
        self.server.stop()
