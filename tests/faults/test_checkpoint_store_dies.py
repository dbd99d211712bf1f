"""Servers that hold snapshots are killed, stopped, emptied, filled and rearranged, while a snapshot goes in or out."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.tier import Shard
from shade.errors import StoreAuthError, StoreError, StoreFullError, StoreUnavailableError
from shade.store import Store, open_store
from shade.store._servers.local_cluster import LocalCluster
from shade.store._servers.server import LocalServer
from shade.store.keys import NUM_SLOTS
from shade.types import Bytes
from tests.conftest import PASSWORD, WRONG
from tests.support.snapshots import Snapshot, damages, make, readable, save

pytestmark = pytest.mark.multiprocess

TIMEOUT_SECONDS = 0.5
PATIENCE = 12
"""A failing call may take so many timeouts: connecting, asking, asking the others, and the calls under way."""
CHUNK = 1 << 20
SHARD = 12 * CHUNK + 77


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    with LocalServer(directory=tmp_path, password=PASSWORD) as started:
        yield started


@pytest.fixture
def store(server: LocalServer) -> Iterator[Store]:
    with open_store(server.url, timeout_seconds=TIMEOUT_SECONDS) as opened:
        yield opened


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, password=PASSWORD) as started:
        yield started


@pytest.fixture
def cluster_store(cluster: LocalCluster) -> Iterator[Store]:
    with open_store(cluster.url, timeout_seconds=TIMEOUT_SECONDS) as opened:
        yield opened
    with open_store(cluster.url, timeout_seconds=5) as fresh:  # one that leaves no server alone for a while
        fresh.delete_many(list(fresh.scan("shade:")))


def snapshot_of(step: int, run: str = "run") -> Snapshot:
    return make(run, step, shard_bytes=[SHARD], chunk=CHUNK)


def put_with(tier: MemoryTier, snapshot: Snapshot, after: int, deed: Callable[[], None]) -> str:
    """Prepares, and puts the shard; something happens when so many chunks were taken."""
    place = tier.prepare(snapshot.record.step, [snapshot.manifests[0].stored_bytes])

    def chunks() -> Iterator[Bytes]:
        for number, chunk in enumerate(snapshot.data[0]):
            if number == after:
                deed()
            yield chunk

    tier.put(place, Shard(snapshot.manifests[0], chunks()))
    return place


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_dies_in_the_middle_of_a_put(server: LocalServer, store: Store, by: signal.Signals) -> None:
    tier = MemoryTier(store, "run")
    first = snapshot_of(1)
    place = save(tier, first)
    hurt: list[float] = []

    def hit() -> None:
        server.signal(by)
        hurt.append(time.monotonic())

    with pytest.raises(StoreUnavailableError):
        put_with(tier, snapshot_of(2), 5, hit)
    assert time.monotonic() - hurt[0] < PATIENCE * TIMEOUT_SECONDS
    if by == signal.SIGSTOP:
        server.signal(signal.SIGCONT)
        assert tier.held() == {place: first.record}
        assert list(damages(tier, place, first)) == []
    else:
        server.stop()
        server.start()
        assert tier.held() == {}
    second = snapshot_of(2)
    place = save(tier, second)
    assert tier.held()[place] == second.record
    assert list(damages(tier, place, second)) == []
    tier.close()


def test_nobody_there_at_the_start_or_the_wrong_password(server: LocalServer) -> None:
    url = server.url.reveal()
    wrong = url.replace(quote(PASSWORD, safe=""), WRONG)
    assert wrong != url
    with open_store(wrong, timeout_seconds=TIMEOUT_SECONDS) as store, pytest.raises(StoreAuthError):
        MemoryTier(store, "run").held()
    server.stop()
    with open_store(url, timeout_seconds=TIMEOUT_SECONDS) as store, pytest.raises(StoreUnavailableError):
        MemoryTier(store, "run").held()


def test_a_flushed_server_in_mid_put_and_after(server: LocalServer, store: Store) -> None:
    tier = MemoryTier(store, "run")
    place = save(tier, snapshot_of(1))
    lost = put_with(tier, snapshot_of(2), 5, lambda: assert_ok(server.ask("FLUSHALL")))
    with pytest.raises(StoreError, match="was the store emptied"):
        tier.commit(lost, snapshot_of(2).record)
    assert tier.held() == {}
    assert tier.read_chunks(place, snapshot_of(1).manifests[0], [0]) == [None]
    third = snapshot_of(3)
    assert readable(tier, save(tier, third), third)
    tier.close()


def assert_ok(reply: object) -> None:
    assert reply == b"OK"


def test_no_memory_left_in_the_middle_of_a_put(tmp_path: Path) -> None:
    """Somebody else fills the server between the look at its memory and the last chunk."""
    with (
        LocalServer(64 << 20, directory=tmp_path) as server,
        open_store(server.url, timeout_seconds=TIMEOUT_SECONDS) as store,
    ):
        tier = MemoryTier(store, "run")
        first = snapshot_of(1)
        place = save(tier, first)

        def fill() -> None:
            written = [store.set_many({f"shade:other:{number}": bytes(1 << 20)}) for number in range(64)]
            assert [False] in written

        with pytest.raises(StoreFullError, match="no memory left"):
            put_with(tier, snapshot_of(2), 5, fill)
        assert tier.held() == {place: first.record}
        assert list(damages(tier, place, first)) == []
        with pytest.raises(StoreFullError, match="expected room"):
            tier.prepare(3, [SHARD])
        store.delete_many(list(store.scan("shade:other:")))
        second = snapshot_of(2)
        assert readable(tier, save(tier, second), second)
        tier.close()


def test_a_nearly_full_server_takes_what_prepare_promised(tmp_path: Path) -> None:
    """What clients have under way counts as used memory too; a promise includes it. Chunks of the real length."""
    size, most = 3 * (4 << 20), 96 << 20
    with (
        LocalServer(most, directory=tmp_path) as server,
        open_store(server.url, timeout_seconds=2) as store,
    ):
        tier = MemoryTier(store, "run")
        num_saved = num_filled = 0
        refused = False
        while not refused:
            snapshot = make("run", num_saved + 1, shard_bytes=[size], chunk=(4 << 20) - 4096)
            try:
                place = tier.prepare(snapshot.record.step, [size])
            except StoreFullError:
                refused = True
                continue
            tier.put(place, snapshot.shard(0))
            tier.commit(place, snapshot.record)
            assert readable(tier, place, snapshot)
            num_saved += 1
            assert (
                store.set_many({f"shade:other:{num_filled + extra}": bytes(1 << 20) for extra in range(3)})
                == [True] * 3
            )
            num_filled += 3
        assert num_saved >= 8
        assert len(tier.held()) == 2
        tier.close()


@pytest.mark.parametrize("options", [{"replicas": 1}, {"parity": (2, 1)}], ids=["replicas", "parity"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_loss_of_any_server_loses_nothing(
    cluster: LocalCluster, cluster_store: Store, victim: int, options: dict[str, object]
) -> None:
    tier = MemoryTier(cluster_store, "run", flushed=True, **options)  # type: ignore[arg-type]
    snapshots = [snapshot_of(step) for step in (1, 2)]
    places = [save(tier, snapshot) for snapshot in snapshots]
    cluster.servers[victim].signal(signal.SIGKILL)
    try:
        with open_store(cluster.url, timeout_seconds=TIMEOUT_SECONDS) as store:
            late = MemoryTier(store, "run")
            held = late.held()
            assert set(held) == set(places)
            assert [place for place, _ in late.dirty()] == places
            assert all(readable(late, place, snapshot) for place, snapshot in zip(places, snapshots, strict=True))
            late.mark_clean(places[0], 1)
            assert [place for place, _ in late.dirty()] == places[1:]
            with pytest.raises(StoreUnavailableError):
                late.prepare(3, [SHARD])
            assert set(late.held()) == set(places)
            late.close()
    finally:
        restart(cluster, victim)
    deadline = time.monotonic() + 20
    while True:
        try:
            third = snapshot_of(3)
            place = save(tier, third)
            break
        except StoreUnavailableError:
            assert time.monotonic() < deadline, "the cluster does not come back"
            time.sleep(0.1)
    assert list(damages(tier, place, third)) == []
    lost = {number for _, _, number in damages(tier, places[1], snapshots[1]) if number >= 0}
    assert lost
    tier.repair(places[1], snapshots[1].manifests[0], {number: snapshots[1].data[0][number] for number in lost})
    assert list(damages(tier, places[1], snapshots[1])) == []
    tier.close()


def restart(cluster: LocalCluster, victim: int) -> None:
    """Starts a killed node again, empty, with its place in the cluster."""
    server = cluster.servers[victim]
    server.stop()
    server.start()
    deadline = time.monotonic() + 20
    for each in cluster.servers:
        while b"cluster_state:ok" not in (info := each.ask("CLUSTER", "INFO")) or b"cluster_slots_fail:0" not in info:  # type: ignore[operator]
            assert time.monotonic() < deadline, info
            time.sleep(0.05)


def test_a_server_of_a_cluster_stops_in_the_middle_of_a_put(cluster: LocalCluster, cluster_store: Store) -> None:
    tier = MemoryTier(cluster_store, "run", replicas=1)
    first = snapshot_of(1)
    place = save(tier, first)
    begun = time.monotonic()
    try:
        with pytest.raises(StoreUnavailableError):
            put_with(tier, snapshot_of(2), 5, lambda: cluster.servers[1].signal(signal.SIGSTOP))
        assert time.monotonic() - begun < PATIENCE * TIMEOUT_SECONDS
        assert tier.held() == {place: first.record}
        assert readable(tier, place, first)
    finally:
        cluster.servers[1].signal(signal.SIGCONT)
    tier.close()


def test_a_server_of_a_cluster_that_is_slow_is_waited_for(cluster: LocalCluster) -> None:
    """A slow server costs a cache misses; here its chunks would be missing. It stands still for a moment, with several
    chunks under way to it, and answers long before its timeout."""
    with open_store(cluster.url, timeout_seconds=20) as store:
        tier = MemoryTier(store, "run", replicas=1)
        num_hiccups = 0

        def hiccup() -> None:
            nonlocal num_hiccups
            cluster.servers[1].signal(signal.SIGSTOP)
            threading.Timer(0.5, cluster.servers[1].signal, [signal.SIGCONT]).start()
            num_hiccups += 1

        snapshot = snapshot_of(1)
        place = put_with(tier, snapshot, 2, hiccup)
        tier.commit(place, snapshot.record)
        assert num_hiccups == 1
        assert list(damages(tier, place, snapshot)) == []
        tier.discard(place)
        tier.close()


def test_slots_of_the_cluster_move_while_a_snapshot_is_read_and_written(
    cluster: LocalCluster, cluster_store: Store
) -> None:
    """The keys of one tag go to another node, key by key: the reader is sent on, by ASK and then by MOVED."""
    tier = MemoryTier(cluster_store, "run", replicas=1)
    first, second = snapshot_of(1), snapshot_of(2)
    place = save(tier, first)
    slot = home_slot(cluster_store)
    names = [int(server.ask("CLUSTER", "COUNTKEYSINSLOT", slot) or 0) for server in cluster.servers]  # type: ignore[arg-type]
    source = names.index(max(names))
    target = (source + 1) % 3
    ids = [server.ask("CLUSTER", "MYID").decode() for server in cluster.servers]  # type: ignore[union-attr]
    cluster.servers[target].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    cluster.servers[source].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    try:
        keys = cluster.servers[source].ask("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        assert isinstance(keys, list)
        assert len(keys) > 5
        moved = keys[::2]
        for key in moved:
            port = cluster.ports[target]
            assert_ok(cluster.servers[source].ask("MIGRATE", "127.0.0.1", port, key, 0, 5000, "AUTH", PASSWORD))
        assert list(damages(tier, place, first)) == []
        for key in keys[1::2]:
            assert_ok(cluster.servers[source].ask("MIGRATE", "127.0.0.1", port, key, 0, 5000, "AUTH", PASSWORD))
        for number in (target, source, 3 - source - target):
            cluster.servers[number].ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        assert list(damages(tier, place, first)) == []
        fresh = MemoryTier(cluster_store, "run", replicas=1)
        assert fresh.held() == {place: first.record}
        new_place = save(fresh, second)
        assert list(damages(fresh, new_place, second)) == []
        assert list(damages(fresh, place, first)) == []
        fresh.close()
    finally:
        tier.close()
        cluster_store.delete_many(list(cluster_store.scan("shade:")))
        cluster.servers[source].ask("CLUSTER", "BUMPEPOCH")  # else what the target says last may come after, and win
        for number in (target, source, 3 - source - target):
            cluster.servers[number].ask("CLUSTER", "SETSLOT", slot, "STABLE")
            cluster.servers[number].ask("CLUSTER", "SETSLOT", slot, "NODE", ids[source])


def home_slot(store: Store) -> int:
    """The slot of the first server's tag."""
    from redis.crc import key_slot

    slot = key_slot(store.placement()[0].encode())
    assert 0 <= slot < NUM_SLOTS
    return int(slot)


def test_two_runs_side_by_side(cluster_store: Store) -> None:
    tiers = [MemoryTier(cluster_store, run, replicas=1) for run in ("a", "b")]
    snapshots = [snapshot_of(step, run) for step, run in ((1, "a"), (1, "b"))]
    places = [save(tier, snapshot) for tier, snapshot in zip(tiers, snapshots, strict=True)]
    tiers[0].discard(places[0])
    assert tiers[0].held() == {}
    assert tiers[1].held() == {places[1]: snapshots[1].record}
    assert list(damages(tiers[1], places[1], snapshots[1])) == []
    for tier in tiers:
        tier.close()
