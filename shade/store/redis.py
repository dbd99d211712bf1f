"""Keeps bytes in one Redis server: over a unix socket, TCP or TLS, or a private one that lives as long as the run.

``local://`` is the embedded default: no service to install, no port, no password, but a unix socket that only this user
can open. The process that opens it owns the server, and `_servers.server` guarantees its end. All other processes reach
it by ``.url``, the socket's ``unix://`` address; a pickled `LocalStore` becomes that too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from shade.errors import StoreUnavailableError
from shade.store._servers.server import LocalServer
from shade.store.base import STORES
from shade.store.keys import placement_tags
from shade.store.link import Endpoint
from shade.store.node import Node, exchange
from shade.store.redis_commands import PROBE_KEY, Outcome, RemoteStore
from shade.store.url import StoreURL
from shade.store.wire import Command, ServerError


@STORES.register("unix")
@STORES.register("redis")
@STORES.register("rediss")
class RedisStore(RemoteStore):
    """One server."""

    clustered = False

    def __init__(self, url: StoreURL, timeout_seconds: float) -> None:
        super().__init__(url, timeout_seconds)
        host, port = url.addresses[0] if url.addresses else ("", 0)
        self._node = Node(Endpoint.of(url, host, port), timeout_seconds)

    def _round(self, keys: Sequence[str], commands: Sequence[Command], patient: bool = False) -> Sequence[Outcome]:
        (answer,) = exchange([(self._node, commands)])
        if isinstance(answer, StoreUnavailableError):
            raise answer
        return answer

    def _primaries(self) -> Sequence[Node]:
        return (self._node,)

    def _all_nodes(self) -> Sequence[Node]:
        return (self._node,)

    @override
    def placement(self) -> list[str]:
        self._check_open()
        return [placement_tags()[0]]

    @override
    def ping(self) -> None:
        """Reads a key too: a node of a cluster answers a PING and then refuses most keys."""
        self._check_open()
        try:
            replies = self._node.ask(("PING",), ("GET", PROBE_KEY))
        except StoreUnavailableError:
            self._node.endpoint.check_scheme(self._timeout_seconds)
            raise
        for reply in replies:
            if isinstance(reply, ServerError):
                raise reply.as_exception(str(self._node))

    @override
    def close(self) -> None:
        super().close()
        self._node.retire()


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

    is_private = True

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
    def use_server_of(self, url: str) -> None:
        other = RedisStore(StoreURL.parse(url), self._timeout_seconds)
        other.ping()
        self._node.retire()
        self.url, self._url, self._node = other.url, other._url, other._node
        self.server.stop()

    @override
    def close(self) -> None:
        """Also ends the server, if this process opened the store."""
        super().close()
        self.server.stop()
