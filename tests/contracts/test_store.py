"""What every store promises, asked of every registered URL scheme, with real servers behind it.

A scheme without servers of its own (``memory``) is left out of the tests that hurt servers, by name and not by chance.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext

import pytest

from shade.errors import StoreAuthError, StoreClosedError, StoreUnavailableError, UnknownNameError
from shade.store import STORES, Store, StoreURL, open_store
from shade.store._servers.local_cluster import LocalCluster
from shade.store._servers.server import LocalServer
from shade.store.keys import SampleKeys, placement_tags
from tests.conftest import PASSWORD, WRONG, Place

pytestmark = pytest.mark.redis

TIMEOUT_SECONDS = 0.25
PATIENCE = 8
"""A failing call may take so many timeouts: connect, log in, ask, ask the others."""

_names = itertools.count()


@pytest.fixture(params=sorted(STORES))
def place(request: pytest.FixtureRequest, get_place: Callable[[str], Place]) -> Place:
    return get_place(request.param)


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with open_store(place.url, timeout_seconds=TIMEOUT_SECONDS) as opened:
        yield opened
        with contextlib.suppress(StoreClosedError, StoreUnavailableError):
            opened.delete_many(list(opened.scan("shade:")))


@pytest.fixture
def keys() -> SampleKeys:
    """A namespace that no other test uses."""
    return SampleKeys(f"contract-{os.getpid()}-{next(_names)}")


@pytest.fixture
def servers(place: Place, store: Store) -> list[LocalServer]:
    found = place.servers(store)
    if not found:
        pytest.skip(f"{place.scheme}:// has no server to hurt")
    return found


# ------------------------------------------------------------------------------------------------ bytes by key


def test_a_batch_comes_back_in_the_order_asked_for(store: Store, keys: SampleKeys) -> None:
    names = keys.many(range(300))
    assert all(store.set_many({name: name.encode() for name in names}))
    shuffled = names[::-7] + names[::3] + names[:1] * 2
    assert store.get_many(shuffled) == [name.encode() for name in shuffled]


def test_a_miss_is_none_in_its_place(store: Store, keys: SampleKeys) -> None:
    assert store.get_many(keys.many([1, 2])) == [None, None]
    store.set_many({keys.key(2): b"two"})
    assert store.get_many(keys.many([1, 2, 3])) == [None, b"two", None]


def test_set_overwrites_and_add_does_not(store: Store, keys: SampleKeys) -> None:
    old, new = keys.many([1, 2])
    assert store.set_many({old: b"first"}) == [True]
    assert store.add_many({old: b"second", new: b"second"}) == [False, True]
    assert store.get_many([old, new]) == [b"first", b"second"]
    assert store.set_many({old: b"third"}) == [True]
    assert store.get_many([old]) == [b"third"]


def test_delete_tells_the_length_of_what_went(store: Store, keys: SampleKeys) -> None:
    empty, long, absent = keys.many([1, 2, 3])
    store.set_many({empty: b"", long: b"x" * 70_000})
    assert store.delete_many([absent, long, empty]) == [-1, 70_000, 0]
    assert store.delete_many([long]) == [-1]
    assert store.get_many([empty, long]) == [None, None]


def test_empty_batches(store: Store) -> None:
    assert store.get_many([]) == []
    assert store.set_many({}) == []
    assert store.add_many({}) == []
    assert store.delete_many([]) == []


@pytest.mark.parametrize(
    "value",
    [b"", b"\r\n", b"$-1\r\n", b"-OOM full\r\n", b"\x00\xff" * 100, bytes(range(256)) * 200, b"q" * 8_000_000],
    ids=["empty", "line-end", "like-a-miss", "like-an-error", "binary", "50-kB", "8-MB"],
)
def test_any_bytes_come_back_as_they_were(store: Store, keys: SampleKeys, value: bytes) -> None:
    around = dict(zip(keys.many([1, 2, 3]), [b"before", value, b"after"], strict=True))
    assert store.set_many(around) == [True] * 3
    assert store.get_many(list(around)) == [b"before", value, b"after"]


@pytest.mark.parametrize("size", [10, 100_000])
def test_takes_whatever_holds_bytes(store: Store, keys: SampleKeys, size: int) -> None:
    whole = os.urandom(size * 2)
    forms = [whole, bytearray(whole), memoryview(whole), memoryview(whole)[::2], memoryview(whole).cast("H")]
    names = keys.many(range(len(forms)))
    assert all(store.set_many(dict(zip(names, forms, strict=True))))
    assert store.get_many(names) == [bytes(form) for form in forms]


def test_a_batch_larger_than_one_round(store: Store, keys: SampleKeys) -> None:
    names = keys.many(range(2500))
    values = [b"%d" % i + b"." * (20_000 if i % 500 == 0 else 0) for i in range(2500)]
    assert all(store.set_many(dict(zip(names, values, strict=True))))
    assert store.get_many(names) == values
    assert store.delete_many(names) == list(map(len, values))


@pytest.mark.parametrize("size", [0, 1, 5, 99, 100_000, 5_000_000])
def test_large_values_come_straight_into_memory(store: Store, keys: SampleKeys, size: int) -> None:
    names = keys.many(range(6))
    values = [os.urandom(size) for _ in names[:4]]
    store.set_many(dict(zip(names, values, strict=False)) | {names[5]: b"of another length"})
    whole = bytearray(size * 6 + 6)
    buffers = [memoryview(whole)[i * size + i : (i + 1) * size + i] for i in range(6)]
    assert store.get_many_into(dict(zip(names, buffers, strict=True))) == [True] * 4 + [False] * 2
    assert [bytes(buffer) for buffer in buffers[:4]] == values
    assert all(whole[(i + 1) * size + i] == 0 for i in range(6))
    assert store.get_many(names[:2]) == values[:2]
    assert store.get_many_into({}) == []


def test_a_counter_comes_straight_into_memory_too(store: Store) -> None:
    buffer = memoryview(bytearray(10))
    store.increment("shade:counter", 5)
    assert store.get_many_into({"shade:counter": buffer[:1], "shade:counters": buffer}) == [True, False]
    assert bytes(buffer[:1]) == b"5"


def test_placement_names_each_server_once(store: Store, place: Place) -> None:
    tags = store.placement()
    assert tags == store.placement()
    assert len(tags) == (len(place.owner.servers) if isinstance(place.owner, LocalCluster) else 1)
    assert [tag for tag in placement_tags() if tag in tags] == tags
    names = [f"shade:placed:{{{tag}}}" for tag in tags]
    before = {node.address: node.num_keys for node in store.stats().nodes}
    assert store.add_many(dict.fromkeys(names, b"x")) == [True] * len(tags)
    assert [node.num_keys - before[node.address] for node in store.stats().nodes] == [1] * len(tags)


def test_scan_finds_each_key_of_a_prefix_once(store: Store, keys: SampleKeys) -> None:
    other = SampleKeys(keys.namespace + "0")
    names = keys.many(range(3000))
    store.set_many(dict.fromkeys(names, b""))
    store.set_many({other.key(1): b""})
    found = list(store.scan(keys.prefix))
    assert sorted(found) == sorted(names)
    assert list(store.scan("shade:*")) == []


def test_stats_count_keys_and_bytes(store: Store, keys: SampleKeys) -> None:
    before = store.stats()
    items = dict.fromkeys(keys.many(range(200)), b"v" * 100000)
    store.set_many(items)
    after = store.stats()
    assert after.num_keys - before.num_keys == 200
    deadline = time.monotonic() + 10
    while not 200 * 99_000 < (grown := store.stats().used_bytes - before.used_bytes) < 200 * 120_000:
        assert time.monotonic() < deadline, grown  # what is not data, clients' buffers, a server measures now and then
        time.sleep(0.05)
    assert all(node.address for node in after.nodes)


# ------------------------------------------------------------------------------------------------ processes


def _read(store: Store, name: str, results: multiprocessing.SimpleQueue[bytes | None]) -> None:
    results.put(store.get_many([name])[0])
    store.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_process_sees_the_same_bytes(store: Store, keys: SampleKeys, method: str) -> None:
    if not store.shared:
        pytest.skip("not shared, and says so")
    store.set_many({keys.key(1): b"from the parent"})
    context = multiprocessing.get_context(method)
    results: multiprocessing.SimpleQueue[bytes | None] = context.SimpleQueue()
    child = context.Process(target=_read, args=(store, keys.key(1), results))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get() == b"from the parent"
    results.close()
    assert store.get_many([keys.key(1)]) == [b"from the parent"]  # the child closed its own connections, not ours


def _talk(store: Store, name: str, rounds: int) -> None:
    for number in range(rounds):
        value = name.encode() * 1000 + b"%d" % number
        store.set_many({name: value})
        assert store.get_many([name]) == [value]
        store.increment(f"{name}:total", 1)


def test_processes_and_threads_do_not_hear_each_other(store: Store, keys: SampleKeys) -> None:
    fork: BaseContext = multiprocessing.get_context("fork")
    children = [fork.Process(target=_talk, args=(store, keys.key(i), 100)) for i in range(3)] if store.shared else []
    for child in children:
        child.start()
    threads = [threading.Thread(target=_talk, args=(store, keys.key(10 + i), 100)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    finished = [*range(len(children)), *(10 + i for i in range(3))]
    assert [store.increment(f"{keys.key(i)}:total", 0) for i in finished] == [100] * len(finished)


def _count(store: Store, name: str) -> None:
    for _ in range(50):
        store.increment(name, 3)


def test_increments_of_many_clients_add_up(store: Store, keys: SampleKeys) -> None:
    name = keys.counter_key("hits")
    assert store.increment(name, -5) == -5
    context = multiprocessing.get_context("fork")
    others = [
        context.Process(target=_count, args=(store, name))
        if store.shared
        else threading.Thread(target=_count, args=(store, name))
        for _ in range(4)
    ]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert store.increment(name, 0) == -5 + 4 * 50 * 3


def test_pickles_as_its_address(store: Store, keys: SampleKeys) -> None:
    store.set_many({keys.key(1): b"one"})
    with pickle.loads(pickle.dumps(store)) as copy:
        assert copy.url == store.url
        assert copy.get_many([keys.key(1)]) == [b"one" if store.shared else None]
    assert store.get_many([keys.key(1)]) == [b"one"]


# ------------------------------------------------------------------------------------------------ refusals


def test_a_closed_store_says_so(store: Store, keys: SampleKeys) -> None:
    store.set_many({keys.key(1): b"one"})
    store.close()
    store.close()
    for use in (
        lambda: store.get_many([keys.key(1)]),
        lambda: store.set_many({keys.key(1): b""}),
        lambda: store.add_many({keys.key(1): b""}),
        lambda: store.delete_many([keys.key(1)]),
        lambda: store.increment(keys.counter_key("n"), 1),
        lambda: list(store.scan("shade:")),
        store.stats,
        store.ping,
    ):
        with pytest.raises(StoreClosedError):
            use()


@contextlib.contextmanager
def _nearly_full(place: Place, store: Store) -> Iterator[Store]:
    """The store with room for about 8 MB more, a node."""
    servers = place.servers(store)
    if not servers:
        with open_store(place.url.partition("?")[0] + "?capacity=8MB") as small:
            yield small
        return
    before = [server.ask("CONFIG", "GET", "maxmemory")[1].decode() for server in servers]
    for server in servers:
        used = next(line for line in server.ask("INFO", "memory").decode().split() if line.startswith("used_memory:"))
        server.ask("CONFIG", "SET", "maxmemory", int(used.partition(":")[2]) + 8_000_000)
    try:
        yield store
    finally:
        for server, limit in zip(servers, before, strict=True):
            server.ask("CONFIG", "SET", "maxmemory", limit)


def test_a_full_store_refuses_in_its_place_and_recovers(place: Place, store: Store, keys: SampleKeys) -> None:
    with _nearly_full(place, store) as full:
        items = {name: os.urandom(100_000) for name in keys.many(range(400))}
        written = full.set_many(items)
        assert True in written
        assert False in written
        assert full.get_many(list(items)) == [
            value if kept else None for value, kept in zip(items.values(), written, strict=True)
        ]
        assert full.add_many({keys.key(1000 + i): b"x" * 1_000_000 for i in range(30)}).count(False) > 0
        full.delete_many(list(full.scan(keys.prefix)))
        assert full.set_many({keys.key(1): b"y" * 100_000}) == [True]


def test_a_wrong_password_is_refused_as_such(place: Place) -> None:
    if place.wrong_password_url == place.url:
        pytest.skip(f"{place.scheme}:// has no password")
    with open_store(place.wrong_password_url, timeout_seconds=TIMEOUT_SECONDS) as store:
        for use in (
            store.ping,
            store.stats,
            lambda: store.get_many(["shade:a"]),
            lambda: store.set_many({"shade:a": b""}),
        ):
            with pytest.raises(StoreAuthError) as refused:
                use()
            assert WRONG not in str(refused.value)


def test_the_password_is_in_no_text(place: Place) -> None:
    secret = StoreURL.parse(place.url).password
    if secret is None:
        pytest.skip(f"{place.scheme}:// has no password")
    assert secret == PASSWORD
    with open_store(place.url) as store:
        texts = [store.url, str(store), repr(store), str(StoreURL.parse(place.url)), repr(StoreURL.parse(place.url))]
    with open_store(place.url.replace("127.0.0.1", "127.0.0.2").replace(".sock", ".none")) as absent:
        for use in (absent.ping, lambda: absent.get_many(["shade:a"])):
            with pytest.raises(StoreUnavailableError) as failed:
                use()
            texts += [str(failed.value), repr(failed.value), repr(failed.value.__cause__)]
    for text in texts:
        assert "s3cr" not in text


def test_an_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as refused:
        open_store("rediss+clutser://h:1")
    assert all(scheme in str(refused.value) for scheme in STORES)


# ------------------------------------------------------------------------------------------------ faults


def _fails_in_time(store: Store, keys: SampleKeys) -> None:
    for use in (
        lambda: store.get_many(keys.many(range(10))),
        lambda: store.set_many({keys.key(1): b"lost"}),
        lambda: store.increment(keys.counter_key("n"), 1),
        store.ping,
    ):
        begin = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            use()
        assert time.monotonic() - begin < PATIENCE * TIMEOUT_SECONDS


def _serves_again(store: Store, keys: SampleKeys) -> None:
    deadline = time.monotonic() + 30
    while True:  # a cluster takes its time to agree that all are back
        with contextlib.suppress(StoreUnavailableError):
            if all(store.set_many(dict.fromkeys(keys.many(range(30)), b"back"))):
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert store.get_many(keys.many(range(30))) == [b"back"] * 30


def test_stopped_servers_cost_a_timeout_and_are_found_again(
    store: Store, servers: list[LocalServer], keys: SampleKeys
) -> None:
    store.ping()
    for server in servers:
        server.signal(signal.SIGSTOP)
    try:
        _fails_in_time(store, keys)
    finally:
        for server in servers:
            server.signal(signal.SIGCONT)
    _serves_again(store, keys)


def test_killed_servers_are_unavailable_until_restarted_at_the_same_address(
    place: Place, store: Store, servers: list[LocalServer], keys: SampleKeys
) -> None:
    store.set_many({keys.key(1): b"one"})
    for server in servers:
        server.signal(signal.SIGKILL)
    _fails_in_time(store, keys)
    if place.owner is None:
        return  # a private server is not restarted: its run reads the origin from here on
    for server in servers:
        server.stop()
        server.start()
    _serves_again(store, keys)
    assert isinstance(place.owner, LocalCluster) or store.get_many([keys.key(100)]) == [None]
