"""A cluster whose nodes are near, slow, full, cut off, on the move, or half there: what the store makes of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from shade.errors import StoreAuthError, StoreFullError, StoreUnavailableError
from shade.store import ClusterStore, SampleKeys, open_store
from shade.store._servers.cluster_bootstrap import Move, take_share
from shade.store._servers.local_cluster import LocalCluster, agrees, free_ports, node_settings
from shade.store._servers.server import LocalServer
from shade.store.link import socket_path
from tests.simulation.cluster_chaos import RelayedCluster

pytestmark = pytest.mark.multiprocess

TIMEOUT_SECONDS = 0.25
KEYS = SampleKeys("nodes")
NAMES = KEYS.many(range(60))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RelayedCluster]:
    with RelayedCluster(3) as running:
        yield running


@pytest.fixture
def store(cluster: RelayedCluster) -> Iterator[ClusterStore]:
    with open_store(cluster.url, timeout_seconds=TIMEOUT_SECONDS) as opened:
        assert isinstance(opened, ClusterStore)
        assert all(opened.set_many({name: name.encode() for name in NAMES}))
        yield opened
    for node in range(3):
        cluster.door(node, "mend")
    with open_store(cluster.url, timeout_seconds=5) as opened:
        opened.delete_many(list(opened.scan("shade:")))


def owner_of(name: str) -> int:
    """Which of three equal shares of the slots a key is in."""
    return next(node for node in range(3) if key_slot(name.encode()) < 16384 * (node + 1) // 3)


def lost(node: int) -> list[bytes | None]:
    """The values without those of a node."""
    return [None if owner_of(name) == node else name.encode() for name in NAMES]


WHOLE: list[bytes | None] = [name.encode() for name in NAMES]


# ------------------------------------------------------------------------------------------------ near


def clients_of(server: LocalServer) -> str:
    told = server.ask("CLIENT", "LIST")
    assert isinstance(told, bytes)
    lines = [line for line in told.decode().splitlines() if " name=shade " in line]
    return "\n".join(line for line in lines if " cmd=client" not in line)  # that one is ours, and asks


def test_a_node_on_this_machine_is_spoken_to_over_its_socket() -> None:
    with LocalCluster(3) as here:
        for url, is_near in ((here.url, False), (here.near_url, True)):
            with open_store(url) as store:
                assert all(store.set_many(dict.fromkeys(NAMES, b"x")))
                for server in here.servers:
                    assert (f"{server.socket_path}:0" in clients_of(server)) is is_near
        Path(socket_path(here.sockets, "127.0.0.1", here.ports[0])).unlink()
        dead = Path(socket_path(here.sockets, "127.0.0.1", here.ports[1]))
        dead.unlink()
        dead.touch()  # what a server that was killed leaves behind
        with open_store(here.near_url) as store:
            assert store.get_many(NAMES) == [b"x"] * len(NAMES), "what has no socket has a port"


# ------------------------------------------------------------------------------------------------ slow, cut off


def test_a_slow_node_is_left_alone_and_the_others_are_not(cluster: RelayedCluster, store: ClusterStore) -> None:
    cluster.door(1, "delay", 0.2)
    seconds = []
    for _ in range(6):
        begun = time.monotonic()
        found = store.get_many(NAMES)
        seconds.append(time.monotonic() - begun)
    assert cluster.door(1, "delay", 0.2) > 0, "the fault fired"
    assert found == lost(1)
    assert seconds[0] >= 0.2
    assert min(seconds[3:]) < 0.1, "the others answer at their own pace"
    assert cluster.door(1, "mend") <= 4
    deadline = time.monotonic() + 20
    while store.get_many(NAMES) != WHOLE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_node_that_only_we_cannot_reach_costs_its_own_keys(cluster: RelayedCluster, store: ClusterStore) -> None:
    for verb in ("hold", "refuse"):
        cluster.door(2, verb)
        assert store.get_many(NAMES) == lost(2)
        begun = time.monotonic()
        for _ in range(20):
            assert store.get_many(NAMES) == lost(2)
        assert time.monotonic() - begun < 10 * TIMEOUT_SECONDS
        assert cluster.door(2, "mend") > 0, "the fault fired"
        deadline = time.monotonic() + 20
        while store.get_many(NAMES) != WHOLE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_scan_gives_what_there_is_and_says_that_it_is_not_all(cluster: RelayedCluster, store: ClusterStore) -> None:
    cluster.door(0, "refuse")
    listed: list[str] = []
    with pytest.raises(StoreUnavailableError):
        listed.extend(store.scan(KEYS.prefix))  # keeps what came before the error
    assert sorted(listed) == sorted(name for name in NAMES if owner_of(name) != 0)


def test_counters_that_cannot_be_counted_are_told_apart(cluster: RelayedCluster, store: ClusterStore) -> None:
    names = [next(name for name in NAMES if owner_of(name) == node) + ":n" for node in range(3)]
    assert store.increment_many(names, 5) == [5, 5, 5]
    cluster.door(1, "refuse")
    one, two, three = store.increment_many(names, 2)
    assert (one, three) == (7, 7)
    assert isinstance(two, StoreUnavailableError)


def test_a_refusal_says_whether_the_node_is_full_or_away(cluster: RelayedCluster, store: ClusterStore) -> None:
    cluster.door(1, "refuse")
    cluster.servers[0].ask("CONFIG", "SET", "maxmemory", 1)
    try:
        refusals = store.refusals(dict.fromkeys(NAMES, b"new"))
        told = {(owner_of(name), type(refusal)) for name, refusal in zip(NAMES, refusals, strict=True)}
        assert told == {(0, StoreFullError), (1, StoreUnavailableError), (2, type(None))}
    finally:
        cluster.servers[0].ask("CONFIG", "SET", "maxmemory", 0)


def test_a_full_node_refuses_its_own_keys_only(cluster: RelayedCluster, store: ClusterStore) -> None:
    server = cluster.servers[0]
    server.ask("CONFIG", "SET", "maxmemory", 1)
    try:
        assert store.set_many(dict.fromkeys(NAMES, b"new")) == [owner_of(name) != 0 for name in NAMES]
        assert store.get_many(NAMES) == [name.encode() if owner_of(name) == 0 else b"new" for name in NAMES]
    finally:
        server.ask("CONFIG", "SET", "maxmemory", 0)


# ------------------------------------------------------------------------------------------------ on the move


def test_every_key_is_there_at_every_moment_of_a_move(cluster: RelayedCluster, store: ClusterStore) -> None:
    slots = sorted({key_slot(name.encode()) for name in NAMES if owner_of(name) == 0})
    source, target = (cluster.endpoint(cluster.ports[node]) for node in (0, 1))
    there = Move(source, target, slots)
    there.begin()
    assert store.get_many(NAMES) == WHOLE
    assert there.carry(slots[: len(slots) // 2]) > 0
    assert store.get_many(NAMES) == WHOLE
    there.carry()
    assert store.get_many(NAMES) == WHOLE
    there.finish()
    there.close()
    assert store.get_many(NAMES) == WHOLE
    back = Move(target, source, slots)
    back.begin()
    back.carry()
    back.finish()
    back.close()
    assert store.get_many(NAMES) == WHOLE
    assert store.set_many(dict.fromkeys(NAMES, b"written")) == [True] * len(NAMES)


def test_a_move_that_is_given_up_leaves_the_slots_where_they_were(cluster: RelayedCluster, store: ClusterStore) -> None:
    name = next(name for name in NAMES if owner_of(name) == 0)
    slot = key_slot(name.encode())
    source, target = (cluster.endpoint(cluster.ports[node]) for node in (0, 2))
    move = Move(source, target, [slot])
    move.begin()
    assert move.carry() >= 1
    assert sorted(store.scan(KEYS.prefix)) == sorted(NAMES), "what is on its way is there"
    move.abandon()
    move.close()
    found = store.get_many(NAMES)
    assert found[NAMES.index(name)] is None
    there = [each for each, value in zip(NAMES, found, strict=True) if value is not None]
    assert sorted(store.scan(KEYS.prefix)) == sorted(there), "what nobody could ask for is not listed"
    assert store.set_many({name: b"again"}) == [True]
    assert store.get_many([name]) == [b"again"]


def test_a_newcomer_takes_its_share_with_the_keys_in_it() -> None:
    with LocalCluster(3) as cluster, open_store(cluster.url) as store:
        names = KEYS.many(range(600))
        assert all(store.set_many({name: name.encode() for name in names}))
        server, port = _a_fourth_node(cluster)
        try:
            moved = take_share(cluster.endpoint(port), 4)
            assert abs(moved - 16384 // 4) <= 4
            assert store.get_many(names) == [name.encode() for name in names]
            deadline = time.monotonic() + 20
            while len(store.stats().nodes) < 4:
                assert time.monotonic() < deadline
                store.get_many(names)
                time.sleep(0.1)
            counts = [node.num_keys for node in store.stats().nodes]
            assert sum(counts) == 600
            assert max(counts) - min(counts) <= 30
        finally:
            server.stop()


def _a_fourth_node(cluster: LocalCluster) -> tuple[LocalServer, int]:
    (port,) = free_ports(1)
    folder = Path(cluster.sockets)
    server = LocalServer(directory=folder, settings=node_settings(folder, port, None), name=f"127.0.0.1:{port}")
    server.start()
    server.ask("CLUSTER", "MEET", "127.0.0.1", cluster.ports[0])
    deadline = time.monotonic() + 20
    while not agrees(server.endpoint()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return server, port


# ------------------------------------------------------------------------------------------------ refused


def test_a_user_without_rights_to_the_map_is_refused_as_such() -> None:
    settings = {"user": "loader on >secret ~shade:* -@all +get"}
    with LocalCluster(3, settings=settings) as cluster:
        url = cluster.url.reveal().replace("://", "://loader:secret@")
        with open_store(url) as store, pytest.raises(StoreAuthError):
            store.get_many(NAMES)


def test_no_node_listens_where_another_has_its_bus() -> None:
    ports = free_ports(500)
    assert not set(ports) & {port + 10_000 for port in ports}
