"""Keeps bytes in one Redis server: over a unix socket, TCP, or TLS.

On the same machine the unix socket is a tenth faster than loopback TCP. `link` and `node` hold the connections and
`redis_commands` the commands; a single server needs no routing, so little is left here.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from shade.errors import StoreUnavailableError
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

    def _round(self, keys: Sequence[str], commands: Sequence[Command]) -> Sequence[Outcome]:
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
        for reply in self._node.ask(("PING",), ("GET", PROBE_KEY)):
            if isinstance(reply, ServerError):
                raise reply.as_exception(str(self._node))

    @override
    def close(self) -> None:
        super().close()
        self._node.retire()
