"""A real cluster, hurt in the ways clusters are: a node dies, a slot moves, a replica takes over, all go."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from redis.crc import key_slot

from shade.errors import ConfigError, StoreError, StoreUnavailableError
from shade.store import ClusterStore, SampleKeys, open_store
from shade.store._servers.local_cluster import LocalCluster, free_ports
from shade.store._servers.server import LocalServer

pytestmark = pytest.mark.multiprocess

TIMEOUT_SECONDS = 0.25
KEYS = SampleKeys("cluster")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, password="a b") as running:
        yield running


@pytest.fixture
def store(cluster: LocalCluster) -> Iterator[ClusterStore]:
    with open_store(cluster.url, timeout_seconds=TIMEOUT_SECONDS) as opened:
        assert isinstance(opened, ClusterStore)
        yield opened
        opened.delete_many(list(opened.scan("shade:")))


def _owner_of(cluster: LocalCluster, key: str) -> int:
    """Which of three equal shares of the slots a key is in."""
    return min(2, next(i for i in range(3) if key_slot(key.encode()) < 16384 * (i + 1) // 3))


def test_keys_spread_evenly_and_come_back_in_order(store: ClusterStore) -> None:
    names = KEYS.many(range(6000))
    assert all(store.set_many({name: name.encode() for name in names}))
    assert store.get_many(names) == [name.encode() for name in names]
    counts = [node.num_keys for node in store.stats().nodes]
    assert sum(counts) == 6000
    assert max(counts) - min(counts) <= 20


def test_one_dead_node_costs_its_own_keys_only(cluster: LocalCluster, store: ClusterStore) -> None:
    names = KEYS.many(range(60))
    store.set_many(dict.fromkeys(names, b"kept"))
    dead = cluster.servers[1]
    lost = [_owner_of(cluster, name) == 1 for name in names]
    dead.signal(signal.SIGSTOP)
    try:
        assert store.get_many(names) == [None if gone else b"kept" for gone in lost]
        begin = time.monotonic()
        for _ in range(20):
            assert store.set_many(dict.fromkeys(names, b"new")) == [not gone for gone in lost]
        assert time.monotonic() - begin < 10 * TIMEOUT_SECONDS  # the dead one is left alone, not asked each time
        only_lost = [name for name, gone in zip(names, lost, strict=True) if gone]
        assert store.get_many(only_lost) == [None] * len(only_lost)
        assert store.add_many(dict.fromkeys(only_lost, b"")) == [False] * len(only_lost)
        assert store.delete_many(only_lost) == [-1] * len(only_lost)
        with pytest.raises(StoreUnavailableError):
            store.increment(only_lost[0], 1)
        store.ping()  # a cache with a hole is no reason not to start
        with pytest.raises(StoreUnavailableError):
            list(store.scan("shade:"))
        assert len(store.stats().nodes) == 2
    finally:
        dead.signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while None in store.get_many(names):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    store.ping()


def test_follows_a_slot_while_it_moves_and_after(cluster: LocalCluster, store: ClusterStore) -> None:
    name, newcomer = next(
        (first, f"shade:x:{first[first.index('{') : first.index('}') + 1]}new")
        for first in KEYS.many(range(100))
        if _owner_of(cluster, first) == 0
    )
    slot = key_slot(name.encode())
    store.set_many({name: b"before"})
    source, target = cluster.servers[0], cluster.servers[1]
    source_id, target_id = (server.ask("CLUSTER", "MYID").decode() for server in (source, target))
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    try:
        assert store.get_many([newcomer, name]) == [None, b"before"]  # ASK for the one, an answer for the other
        assert store.set_many({newcomer: b"born on the way"}) == [True]
        port = cluster.ports[1]
        source.ask("MIGRATE", "127.0.0.1", port, name, 0, 5000, "AUTH", "a b")
        assert store.get_many([newcomer, name]) == [b"born on the way", b"before"]
    finally:
        for server in (target, source, cluster.servers[2]):
            server.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)
    assert store.get_many([newcomer, name]) == [b"born on the way", b"before"]  # MOVED
    assert store.delete_many([newcomer, name]) == [15, 6]
    # Who imports a slot takes a newer epoch with it. Without one, an older message of the other node undoes the move.
    source.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", target_id)
    for server in (source, target, cluster.servers[2]):
        server.ask("CLUSTER", "SETSLOT", slot, "NODE", source_id)
    assert store.set_many({name: b"home"}) == [True]


def test_one_living_node_in_the_url_is_enough_to_find_the_others(cluster: LocalCluster) -> None:
    nobody, somebody = "127.0.0.1:1", f"127.0.0.1:{cluster.ports[2]}"
    with open_store(f"redis+cluster://:a%20b@{nobody},{somebody}", timeout_seconds=TIMEOUT_SECONDS) as store:
        assert all(store.set_many(dict.fromkeys(KEYS.many(range(30)), b"x")))
        with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1:"):
            store.ping()  # at start, a named server that does not answer is an error


def test_a_server_that_is_no_cluster_is_told_apart() -> None:
    (port,) = free_ports(1)
    with (
        LocalServer(settings={"port": str(port)}),
        open_store(f"redis+cluster://127.0.0.1:{port}") as store,
        pytest.raises(StoreError, match="write redis://"),
    ):
        store.ping()


def test_a_node_of_a_cluster_is_no_single_server(cluster: LocalCluster) -> None:
    told = []
    for port in cluster.ports:
        with open_store(f"redis://:a%20b@127.0.0.1:{port}") as store:
            try:
                store.ping()
            except StoreError as error:
                told.append(str(error))
    assert len(told) == 2  # the third owns the slot of the key that is tried
    assert all("write redis+cluster://" in text for text in told)


@pytest.mark.slow
def test_a_replica_takes_over() -> None:
    with LocalCluster(3, 1) as cluster, open_store(cluster.url, timeout_seconds=TIMEOUT_SECONDS) as store:
        names = KEYS.many(range(300))
        store.set_many(dict.fromkeys(names, b"copied"))
        time.sleep(0.5)  # replication is asynchronous
        cluster.servers[0].signal(signal.SIGKILL)
        assert store.get_many(names).count(None) in range(95, 106)
        deadline = time.monotonic() + 30
        while None in store.get_many(names):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert all(store.set_many(dict.fromkeys(names, b"written to the new primary")))
        roles = [node.role for node in store.stats().nodes if node.num_keys]
        assert roles.count("primary") == 3


def test_shapes_that_are_no_cluster() -> None:
    for shape in ((2, 0), (0, 0), (3, -1)):
        with pytest.raises(ConfigError):
            LocalCluster(*shape)
