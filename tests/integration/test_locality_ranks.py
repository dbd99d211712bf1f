"""Ranks on several hosts of a cluster: they get what is near, and every step holds what it would hold without."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from redis.crc import key_slot

from shade.data._sampler import locality
from shade.store import open_store
from shade.store._servers.local_cluster import LocalCluster
from shade.store.cluster import ClusterStore
from shade.store.redis import RedisStore
from tests.support.data_plane import Job, Outcome, global_steps, make_pictures, train_ranks

pytestmark = pytest.mark.multiprocess

N, BATCH, RANKS = 400, 8, 2
HERE = "SHADE_TEST_RANK"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pictures(tmp_path_factory.mktemp("pictures"), N))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    servers = LocalCluster(3)
    servers.start()
    yield servers.url.reveal()
    servers.stop()


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is near one server of the cluster, and the third is near nobody; on one machine all are near all."""
    known: list[str] = []

    def is_here(address: str) -> bool:
        return address == known[dist.get_rank()]

    def refresh(self: locality.Locality) -> None:
        servers, _ = self._servers()
        known[:] = servers
        original(self)

    original = locality.Locality.refresh
    monkeypatch.setattr(locality, "is_here", is_here)
    monkeypatch.setattr(locality.Locality, "refresh", refresh)


def sets(ranks: list[Outcome]) -> list[tuple[int, list[int]]]:
    """The epoch and the sorted samples of each global step."""
    return [(step[0], sorted(step[1:])) for step in global_steps(ranks)]


@pytest.mark.parametrize("keep", [1.0, 0.7])
def test_steps_hold_the_same_and_hits_come_from_near(
    pictures: str, cluster: str, two_hosts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: float
) -> None:
    job = Job(pictures, cluster, epochs=4, batch_size=BATCH, keep=keep, fraction=0.5)
    near = train_ranks(job, RANKS, tmp_path / "near")
    monkeypatch.setattr(locality.Locality, "deal", lambda self, index_G, hit_G, mine: mine)
    by_position = train_ranks(replace(job, url=cluster), RANKS, tmp_path / "by-position")
    assert sets(near) == sets(by_position)
    assert near[0].steps != by_position[0].steps, "who takes what is another matter"

    def local(ranks: list[Outcome]) -> float:
        return sum(rank.totals["near_hits"] for rank in ranks) / sum(rank.totals["hits"] for rank in ranks)

    # Two thirds of the samples have a home here: by position each rank is at home for a third, by home for two.
    assert local(by_position) == pytest.approx(1 / 3, abs=0.06)
    assert local(near) >= 0.6
    assert [ledger["hits"] for ledger in near[0].ledgers] != []


def test_a_run_goes_on_with_other_ranks(pictures: str, cluster: str, two_hosts: None, tmp_path: Path) -> None:
    job = Job(pictures, cluster, epochs=3, batch_size=BATCH, keep=0.7)
    whole = train_ranks(replace(job, url=None, batch_size=RANKS * BATCH), 1, tmp_path / "whole")
    head = train_ranks(replace(job, stop_after=30), RANKS, tmp_path / "head")
    tail = train_ranks(replace(job, batch_size=RANKS * BATCH), 1, tmp_path / "tail", state=head[0].state)
    assert sets(head) + sets(tail) == sets(whole)


def test_one_server_and_servers_near_everybody_change_nothing(pictures: str, cluster: str, tmp_path: Path) -> None:
    job = Job(pictures, cluster, epochs=2, batch_size=BATCH)
    everywhere = train_ranks(job, RANKS, tmp_path / "everywhere")
    with open_store("local://") as store:
        single = train_ranks(replace(job, url=store.url), RANKS, tmp_path / "single")
    assert [rank.steps for rank in everywhere] == [rank.steps for rank in single]
    assert sum(rank.totals["near_hits"] for rank in (*everywhere, *single)) == 0


def test_a_cluster_says_who_has_what(cluster: str) -> None:
    with open_store(cluster) as store:
        assert isinstance(store, ClusterStore)
        homes = store.homes([f"key-{number}" for number in range(3000)])
        assert len(set(homes)) == 3
        keys = [f"key-{number}" for number in range(3000)]
        assert all(home == other for home, other in zip(homes, store.homes(keys), strict=True))
        slots = sorted((key_slot(key.encode()), home) for key, home in zip(keys, homes, strict=True))
        changes = sum(one[1] != two[1] for one, two in itertools.pairwise(slots))
        assert changes == 2, "three equal parts of the slots"
    with open_store("local://") as single:
        assert isinstance(single, RedisStore)
        assert single.homes(["a", "b"]) == ["", ""]


@pytest.mark.parametrize(
    ("address", "here"), [("127.0.0.1:7000", True), ("[::1]:7000", True), ("192.0.2.1:7000", False), ("", False)]
)
def test_an_address_is_here_if_one_could_listen_there(address: str, here: bool) -> None:
    if address.startswith("[") and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 on this machine")
    assert locality.is_here(address) is here
