"""A server that outlives its jobs does not fill with data sets that no process uses."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shade.cli import doctor
from shade.store import SampleKeys, Store, open_store
from shade.store._servers import data_sets as module
from shade.store._servers.data_sets import data_sets_in
from shade.store._servers.server import LocalServer

pytestmark = pytest.mark.redis

MIB = 2**20
ENTRY = bytes(100 * 1024)
TODAY = "today"


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with LocalServer(16 * MIB) as server:
        yield server


@pytest.fixture
def today(server: LocalServer) -> Iterator[Store]:
    with open_store(server.url) as store:
        yield store


def filled(server: LocalServer, namespace: str, num_bytes: int = 5 * MIB) -> Store:
    """A store that uses a data set, and has so much of it, some of it in the slot of a second job."""
    store = open_store(server.url)
    store.enter(namespace, 0)
    count = num_bytes // len(ENTRY)
    for name in (namespace, f"{namespace}.1"):
        assert all(store.set_many(dict.fromkeys(SampleKeys(name).many(range(count // 2)), ENTRY)))
    return store


def there(store: Store) -> set[str]:
    return {key.split(":")[1].partition(".")[0] for key in store.scan("shade:") if ":counter:" not in key}


def test_what_no_process_uses_leaves_for_want_of_room_those_first_that_were_used_longest_ago(
    server: LocalServer, today: Store
) -> None:
    for namespace in ("monday", "tuesday"):
        filled(server, namespace).close()
    assert all(today.set_many({"shade:checkpoint:run:chunk": ENTRY, "another programs": ENTRY}))
    today.enter(TODAY, 8 * MIB)
    assert there(today) == {"checkpoint", "tuesday"}
    assert today.get_many(["shade:checkpoint:run:chunk", "another programs"]) == [ENTRY] * 2
    today.enter("tomorrow", 13 * MIB)
    assert there(today) == {"checkpoint"}


def test_nothing_leaves_while_there_is_room(server: LocalServer, today: Store) -> None:
    filled(server, "monday").close()
    today.enter(TODAY, 8 * MIB)
    filled(server, "tuesday").close()
    today.enter(TODAY, 12 * MIB, 8 * MIB)  # most of what it wants it has
    assert there(today) == {"monday", "tuesday"}


def test_what_a_process_uses_stays_and_the_want_of_room_is_said(
    server: LocalServer, today: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with filled(server, "monday"):
        today.enter(TODAY, 13 * MIB)
        assert there(today) == {"monday"}
        assert "raise maxmemory" in caplog.text
        assert [each.is_used for each in data_sets_in(today)] == [True, True]
    today.enter(TODAY, 13 * MIB)
    assert there(today) == set()


def test_a_store_that_was_collected_uses_nothing(server: LocalServer, today: Store) -> None:
    """As that of a cell which bound its names anew."""
    filled(server, "monday")
    today.enter(TODAY, 13 * MIB)
    assert there(today) == set()


def test_a_process_that_was_killed_uses_nothing(server: LocalServer, today: Store) -> None:
    script = f"""
import os, signal
from shade.store import open_store
store = open_store({server.url.reveal()!r})
store.enter("monday", 0)
store.set_many({{f"shade:monday:{{{{x}}}}{{i}}": bytes(100_000) for i in range(50)}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert there(today) == {"monday"}
    today.enter(TODAY, 13 * MIB)
    assert there(today) == set()


def test_a_process_of_another_machine_uses_what_it_marked_within_the_hour(
    server: LocalServer, today: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = module.this_machine()
    monkeypatch.setattr(module, "this_machine", lambda: "another")
    store = filled(server, "monday")
    monkeypatch.setattr(module.time, "time", lambda: 1e10)
    store._marks._due = 0.0  # type: ignore[attr-defined]
    store.get_many(["shade:any"])  # its next read renews the mark
    monkeypatch.setattr(module, "this_machine", lambda: here)
    today.enter(TODAY, 13 * MIB)
    assert there(today) == {"monday"}
    monkeypatch.setattr(module.time, "time", lambda: 1e10 + module.IN_USE_SECONDS)
    today.enter(TODAY, 13 * MIB)
    assert there(today) == set()
    store.close()


def test_a_mark_that_cannot_be_read_is_nobodys(server: LocalServer, today: Store) -> None:
    filled(server, "monday").close()
    (key,) = [key for key in today.scan("shade:") if ":counter:user-" in key]
    for mark in (b"", b"\xff", b"17", json.dumps(["m", "pid"]).encode()):
        today.set_many({key: mark})
        assert [each.is_used for each in data_sets_in(today)] == [False]


def test_a_server_that_does_not_answer_ends_nothing(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shade.store")
    with open_store(server.url) as store:
        server.stop()
        store.enter(TODAY, 13 * MIB)
        assert "unused data sets keep their entries" in caplog.text


def test_doctor_says_that_a_server_is_full_and_of_what(server: LocalServer, today: Store) -> None:
    with filled(server, "monday", 13 * MIB) as store:
        more = (f"shade:monday:{{x}}{number}" for number in itertools.count())
        while store.set_many({next(more): ENTRY}) == [True]:
            pass
        first, *_ = doctor.look_into(server.url.reveal())
        assert (first.verdict, first.found) == ("warn", "full: 0 MiB free; data sets: 1, 1 of them in use")
        assert "raise maxmemory" in first.cure
    first, *_ = doctor.look_into(server.url.reveal())
    assert first.found.endswith("data sets: 1, 0 of them in use")
    today.enter(TODAY, 8 * MIB)  # the cure: a job begins
    assert {each.verdict for each in doctor.look_into(server.url.reveal())} == {"ok"}
