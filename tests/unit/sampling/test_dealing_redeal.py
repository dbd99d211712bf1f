"""Dealing by home: the same samples in shares of the same sizes, as many as can be at home, hits first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shade.sampling.dealing import NOWHERE, redeal


def shares(places: np.ndarray, size_W: np.ndarray) -> list[np.ndarray]:
    return np.split(places, np.cumsum(size_W)[:-1])


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    num_hosts = draw(st.integers(1, 4))
    host_W = np.array(draw(st.lists(st.integers(0, num_hosts - 1), min_size=1, max_size=6)))
    host_W = np.unique(host_W, return_inverse=True)[1]
    size_W = np.array(draw(st.lists(st.integers(0, 9), min_size=len(host_W), max_size=len(host_W))))
    total = int(size_W.sum())
    home_G = np.array(draw(st.lists(st.integers(NOWHERE, num_hosts), min_size=total, max_size=total)), dtype=np.int64)
    hit_G = np.array(draw(st.lists(st.booleans(), min_size=total, max_size=total)), dtype=bool)
    return home_G, hit_G, size_W, host_W


@given(batches())
def test_nobody_is_lost_and_as_many_as_can_be_are_at_home(case: tuple[np.ndarray, ...]) -> None:
    home_G, hit_G, size_W, host_W = case
    places = redeal(home_G, hit_G, size_W, host_W)
    assert sorted(places.tolist()) == list(range(len(home_G)))
    at_home = dict.fromkeys(range(int(host_W.max()) + 1), 0)
    hits_at_home = dict.fromkeys(at_home, 0)
    for rank, share in enumerate(shares(places, size_W)):
        assert share.tolist() == sorted(share.tolist()), "in the order of the batch"
        mine = home_G[share] == host_W[rank]
        at_home[int(host_W[rank])] += int(mine.sum())
        hits_at_home[int(host_W[rank])] += int((mine & hit_G[share]).sum())
    for host in at_home:
        room = int(size_W[host_W == host].sum())
        assert at_home[host] == min(room, int((home_G == host).sum()))
        assert hits_at_home[host] == min(room, int(((home_G == host) & hit_G).sum())), "hits have the first choice"


@pytest.mark.parametrize(
    ("fraction", "by_place", "by_home"), [(0.2, 0.05, 0.199), (0.4, 0.10, 0.40), (1.0, 0.25, 0.957)]
)
def test_the_local_share_grows_by_the_number_of_hosts(fraction: float, by_place: float, by_home: float) -> None:
    """Four ranks on four hosts, a global batch of 256."""
    rng = np.random.default_rng(0)
    size_W, host_W = np.full(4, 64), np.arange(4)
    found, before = [], []
    for _ in range(400):
        home_G, hit_G = rng.integers(0, 4, 256), rng.random(256) < fraction
        rank_G = np.repeat(host_W, 64)
        places = redeal(home_G, hit_G, size_W, host_W)
        found.append(np.mean((home_G[places] == rank_G) & hit_G[places]))
        before.append(np.mean((home_G == rank_G) & hit_G))
    assert np.mean(before) == pytest.approx(by_place, abs=0.005)
    assert np.mean(found) == pytest.approx(by_home, abs=0.005)
