"""Members agree through the rendezvous server; here they are threads, which can fail at an exact place."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shade.errors import ConfigError, GradientError, PeerLostError
from shade.gradient._elastic import rendezvous
from shade.gradient._elastic.membership import Generation, Membership

QUICK: dict[str, Any] = {"timeout_seconds": 5.0, "patience_seconds": 8.0, "dead_seconds": 0.5, "give_up_seconds": 20.0}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HEARTBEAT_SECONDS", 0.1)


@pytest.fixture
def place() -> Iterator[str]:
    store = rendezvous.serve()
    yield f"127.0.0.1:{store.port}"
    del store


@pytest.fixture
def members(place: str) -> Iterator[Callable[..., Membership]]:
    made: list[Membership] = []

    def make(num_members: int = 3, **settings: Any) -> Membership:
        made.append(Membership(place, num_members, **{**QUICK, **settings}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, or raises, when all are called at the same time."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - handed to the test
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for each in found:
        if isinstance(each, AssertionError):
            raise each
    return found


def fall_silent(member: Membership) -> None:
    """As a process does that is killed, or whose line is cut."""
    member._rendezvous._publish = lambda store: None  # type: ignore[method-assign]


def formed(members: list[Membership], *statuses: Any) -> list[Generation]:
    """All form the next generation together."""
    statuses = statuses or [{"name": number} for number in range(len(members))]
    calls = [lambda each=each, status=status: each.form(status) for each, status in zip(members, statuses, strict=True)]
    return at_once(*calls)  # type: ignore[return-value]


def ids(generation: Generation) -> list[str]:
    return [each.id for each in generation.members]


def gather(member: Membership, purpose: str, field: int) -> list[int]:
    transport = member.connect(purpose)
    try:
        return [int(each) for each in transport.gather_fields(np.array([field], dtype=np.int64))[:, 0]]
    finally:
        transport.close()


def test_all_hold_one_list_and_reach_each_other(members: Callable[..., Membership]) -> None:
    three = [members() for _ in range(3)]
    first = formed(three)
    assert {tuple(ids(each)) for each in first} == {tuple(ids(first[0]))}
    assert sorted(each.rank for each in first) == [0, 1, 2]
    assert [each.number for each in first] == [0, 0, 0]
    by_rank = sorted(zip(first, three, strict=True), key=lambda pair: pair[0].rank)
    assert all(each.status == first[0].members[rank].status for rank, each in enumerate(first[1].members))
    fields = at_once(*[lambda m=member, g=generation: gather(m, "a", 10 + g.rank) for generation, member in by_rank])
    assert fields == [[10, 11, 12]] * 3


def test_a_silent_member_is_dropped_and_its_last_status_is_known(members: Callable[..., Membership]) -> None:
    three = [members() for _ in range(3)]
    for number, each in enumerate(three):
        each.publish(kept=float(number))
    first = formed(three)
    time.sleep(0.5)
    lost = three[2]
    fall_silent(lost)
    began = time.monotonic()
    second = formed(three[:2])
    assert time.monotonic() - began < QUICK["patience_seconds"] - 2
    for before, now in zip(first, second, strict=False):
        assert (now.number, now.world_size) == (1, 2)
        assert now.members[now.rank].rank_before == before.rank
        assert [status["kept"] for status in now.gone] == [2.0]
    assert ids(second[0]) == [each for each in ids(first[0]) if each != lost._rendezvous.id]  # ranks keep their order


def test_words_go_out_at_once(members: Callable[..., Membership], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be killed within a second of its first status."""
    monkeypatch.setattr(rendezvous, "HEARTBEAT_SECONDS", 600.0)
    one = members(1)
    line = f"line/{one._rendezvous.id}"
    for kept in (1.5, 2.5):
        one.publish(kept=kept)
        deadline = time.monotonic() + 30
        while one._rendezvous.ask(lambda store: json.loads(store.get(line)), 5).get("kept") != kept:
            assert time.monotonic() < deadline, "it waits for its next line"
            time.sleep(0.05)


def test_a_live_member_is_waited_for_within_a_limit(members: Callable[..., Membership]) -> None:
    three = [members(patience_seconds=2.0) for _ in range(3)]
    formed(three)
    began = time.monotonic()
    second = formed(three[:2])
    assert 1.5 < time.monotonic() - began < 6
    assert [each.world_size for each in second] == [2, 2]
    back = at_once(
        lambda: three[2].form({}), lambda: (time.sleep(0.7), three[0].form({}))[1], lambda: three[1].form({})
    )
    assert [each.number for each in back] == [2, 2, 2]
    assert back[0].members[back[0].rank].rank_before is None
    assert back[0].rank == 2  # behind those who stayed


def test_a_member_that_leaves_on_purpose_is_not_lost(members: Callable[..., Membership]) -> None:
    two = [members(2) for _ in range(2)]
    formed(two)
    time.sleep(0.3)
    two[1].close()
    (alone,) = formed(two[:1])
    assert (alone.world_size, alone.gone) == (1, ({},))
    assert gather(two[0], "a", 7) == [7]


def test_whoever_has_not_heard_the_good_bye_counts_it_as_the_others_do(members: Callable[..., Membership]) -> None:
    three = [members() for _ in range(3)]
    for each in three:
        each.publish(kept=1.0)
    formed(three)
    time.sleep(0.5)
    assert three[1]._rendezvous.last_status(three[2]._rendezvous.id)["kept"] == 1.0
    fall_silent(three[1])  # it does not look at the others' lines any more, either
    time.sleep(0.2)
    three[2].close()
    assert [each.gone for each in formed(three[:2])] == [({},), ({},)]


def test_a_late_process_requests_to_join_and_is_admitted(members: Callable[..., Membership]) -> None:
    two = [members(2) for _ in range(2)]
    formed(two)
    assert not two[0].is_join_requested
    late = members(2)
    waiting = threading.Thread(target=lambda: late.form({"name": "late"}))
    waiting.start()
    deadline = time.monotonic() + 10
    while not all(each.is_join_requested for each in two) and time.monotonic() < deadline:
        time.sleep(0.05)
    second = formed(two)
    waiting.join(20)
    assert [each.world_size for each in second] == [3, 3]
    assert second[0].members[2].status == {"name": "late"}
    assert late.generation.rank == 2
    assert not two[0].is_join_requested


def test_a_generation_whose_members_are_all_gone_is_followed_by_a_first_one(members: Callable[..., Membership]) -> None:
    two = [members(2) for _ in range(2)]
    formed(two)
    time.sleep(0.3)
    for each in two:
        fall_silent(each)
    fresh = formed([members(2) for _ in range(2)])
    assert [(each.number, each.world_size) for each in fresh] == [(1, 2)] * 2
    assert all(member.rank_before is None for member in fresh[0].members)


def test_a_loss_while_a_group_connects_is_reported_in_time(members: Callable[..., Membership]) -> None:
    two = [members(2, timeout_seconds=1.5) for _ in range(2)]
    formed(two)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"generation 0 to connect within 1\.5 s"):
        two[0].connect("a")
    assert time.monotonic() - began < 15


def test_missing_members_and_a_missing_server_are_reported_in_time(members: Callable[..., Membership]) -> None:
    with pytest.raises(GradientError, match="expected 3 processes at"):
        members(3, dead_seconds=0.1, patience_seconds=0.5, give_up_seconds=1.0).form({})
    nowhere = Membership("127.0.0.1:9", 1, **{**QUICK, "patience_seconds": 0.6, "give_up_seconds": 1.0})
    began = time.monotonic()
    with pytest.raises(GradientError, match=r"rendezvous server at .* to answer"):
        nowhere.form({})
    nowhere.close()
    assert time.monotonic() - began < 5


def test_the_thread_has_ended_when_its_member_is_closed(
    members: Callable[..., Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came back from the store's client while the interpreter ends would abort the process."""
    ask = rendezvous.Rendezvous._try

    def slowly(line: rendezvous.Rendezvous, store: Any, question: Any) -> Any:
        time.sleep(0.3)
        return ask(line, store, question)

    monkeypatch.setattr(rendezvous.Rendezvous, "_try", slowly)
    member = members(1)
    member.close()
    assert not member._rendezvous._thread.is_alive()


@pytest.mark.multiprocess
def test_a_process_that_closes_nothing_says_good_bye_all_the_same(place: str) -> None:
    program = f"""
from shade.gradient._elastic.membership import Membership
member = Membership({place!r}, 1)
member.form({{}})
print(member._rendezvous.id)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    (other,) = done.stdout.split()
    member = Membership(place, 1, **QUICK)
    member._rendezvous.follow("", [other])
    deadline = time.monotonic() + 10
    while member._rendezvous.silence_seconds(other) != float("inf") and time.monotonic() < deadline:
        time.sleep(0.05)
    member.close()
    assert member._rendezvous.silence_seconds(other) == float("inf")


def test_runs_at_one_place_do_not_see_each_other(members: Callable[..., Membership]) -> None:
    found = formed([members(1, run="one"), members(1, run="other")])
    assert [(each.number, each.world_size) for each in found] == [(0, 1)] * 2


@pytest.mark.parametrize(
    ("address", "settings", "expected"),
    [
        ("somewhere", {}, "host:port"),
        ("127.0.0.1:x", {}, "host:port"),
        ("127.0.0.1:1", {"num_members": 0}, "num_members"),
        ("127.0.0.1:1", {"dead_seconds": 99.0}, "dead_seconds ≤ patience_seconds"),
    ],
)
def test_impossible_settings_are_refused(address: str, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Membership(address, **{"num_members": 2, **settings})
