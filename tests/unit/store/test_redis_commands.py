"""The tables of a cluster's slots, as servers of several versions described them, are overhead from the start."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shade.store import redis_commands
from shade.store.keys import NUM_BUCKETS
from shade.store.link import Endpoint
from shade.store.node import Node
from shade.store.redis_commands import Outcome, RemoteStore
from shade.store.url import StoreURL
from shade.store.wire import Command, Reply, ServerError

LIMIT_BYTES, EMPTY_BYTES = 32 << 20, 2 << 20


class Nodes(RemoteStore):
    """Three primaries that are never asked."""

    clustered = True

    def __init__(self) -> None:
        super().__init__(StoreURL.parse("redis+cluster://a:1,b:1,c:1"), 1.0)
        self.nodes = [Node(Endpoint(host=host, port=1), 1.0) for host in "abc"]

    def _round(self, keys: Sequence[str], commands: Sequence[Command], patient: bool = False) -> Sequence[Outcome]:
        raise NotImplementedError

    def _primaries(self) -> Sequence[Node]:
        return self.nodes

    _all_nodes = _primaries

    def placement(self) -> list[str]:
        raise NotImplementedError

    def ping(self) -> None:
        raise NotImplementedError


def described(num_keys: int, data_bytes: int, tables: Reply) -> list[Reply]:
    """What a node answers to INFO, DBSIZE and MEMORY STATS."""
    used_bytes = EMPTY_BYTES + data_bytes
    info = (
        f"used_memory:{used_bytes}\r\nused_memory_startup:{EMPTY_BYTES}\r\nmaxmemory:{LIMIT_BYTES}\r\nrole:master\r\n"
    )
    return [info.encode(), num_keys, tables]


def tables(main: int, expires: int) -> Reply:
    return [b"peak.allocated", 1, b"db.0", [b"overhead.hashtable.main", main, b"overhead.hashtable.expires", expires]]


# The tables of keys, and of keys that expire, of a node that has its first key.
FIRST_KEY = {
    "Redis 7.0.15": (72, 0),
    "Redis 8.0.2": (133_848, 131_312),
    "Redis 8.2.3": (2_744, 216),
    "Valkey 8.1.1": (131_344, 131_176),
    "Valkey 9.1.2": (131_368, 131_192),
}


@pytest.mark.parametrize("server", FIRST_KEY)
def test_the_first_key_shows_what_all_slots_will_take(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main, expires = FIRST_KEY[server]
    slot_bytes = main - expires
    answers = [described(1, 900 + slot_bytes, tables(main, expires)), *[described(0, 0, [b"peak.allocated", 1])] * 2]
    monkeypatch.setattr(redis_commands, "exchange", lambda work: answers)
    stats = Nodes().stats()
    assert stats.used_bytes == 900
    free_bytes = 3 * (LIMIT_BYTES - EMPTY_BYTES) - 900
    assert stats.free_bytes == pytest.approx(free_bytes - NUM_BUCKETS * slot_bytes, abs=slot_bytes)


def test_full_slots_take_what_the_servers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 1365 * 2536 + 3_000_000
    answers = [described(30_000, 20_000_000 + held, tables(131_312 + held, 131_312))] * 3
    monkeypatch.setattr(redis_commands, "exchange", lambda work: answers)
    stats = Nodes().stats()
    assert stats.used_bytes == 3 * 20_000_000
    assert stats.free_bytes == 3 * (LIMIT_BYTES - EMPTY_BYTES - 20_000_000 - held)


@pytest.mark.parametrize(
    "refusal",
    [ServerError("NOPERM this user has no permissions to run 'memory|stats'"), ServerError("ERR unknown"), []],
)
def test_a_server_that_does_not_say_has_no_tables(refusal: Reply, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_commands, "exchange", lambda work: [described(7, 5_000, refusal)] * 3)
    stats = Nodes().stats()
    assert stats.used_bytes == 3 * 5_000
    assert stats.free_bytes == 3 * (LIMIT_BYTES - EMPTY_BYTES - 5_000)
