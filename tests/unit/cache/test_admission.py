"""An arrival without space waits in memory, near an epoch's end for a moment, until another's departures paid."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import pytest

from shade.cache.admission import COUNTER, Admission
from shade.cache.job_registry import EntryNames
from shade.cache.residency_map import ResidencyMap
from shade.store import open_store
from shade.store.base import Store
from shade.store.keys import SampleKeys

PAYLOAD = b"x" * 1000


class Setting(NamedTuple):
    """A store with space for one entry, and two processes that want it."""

    store: Store
    residency: ResidencyMap
    mine: Admission
    neighbour: Admission


@pytest.fixture
def setting() -> Setting:
    store, residency = open_store("memory://"), ResidencyMap(4)
    slots = EntryNames("room", residency)
    residency.capacity_bytes = largest = store.stored_bytes(slots.key_length, 1100)
    mine, neighbour = (
        Admission(store, slots, residency, residency.ledger(worker), cached_format=0, largest_bytes=largest)
        for worker in (0, 1)
    )
    return Setting(store, residency, mine, neighbour)


def post(residency: ResidencyMap, *, ending: bool) -> None:
    residency.post(np.arange(4), np.zeros(4, dtype=bool), np.ones(4, dtype=bool), ending=ending)


def test_in_mid_epoch_no_process_waits(setting: Setting) -> None:
    post(setting.residency, ending=False)
    assert setting.neighbour.settle({0: PAYLOAD}) == 1
    assert setting.mine.settle({1: PAYLOAD}) == 0
    assert setting.mine.is_unfinished
    setting.neighbour.owe([0])
    setting.neighbour.settle({})
    assert setting.mine.settle({}) == 1, "with the next batch"


def test_near_the_end_an_arrival_waits_for_a_neighbours_departure(setting: Setting) -> None:
    post(setting.residency, ending=True)
    setting.residency.origin_seconds = 0.5
    assert setting.neighbour.settle({0: PAYLOAD}) == 1
    setting.neighbour.owe([0])
    late = threading.Timer(0.05, setting.neighbour.settle, args=({},))
    late.start()
    try:
        assert setting.mine.settle({1: PAYLOAD}) == 1
    finally:
        late.join()
    assert not setting.mine.is_unfinished
    used = setting.store.increment(SampleKeys("room").counter_key(COUNTER), 0)
    assert used == setting.mine.size_bytes(len(PAYLOAD)), "waiting has cost no space"


def test_space_that_never_comes_is_waited_for_once(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shade.cache.admission.LEAST_PATIENCE_SECONDS", 0.02)
    pauses: list[float] = []
    monkeypatch.setattr("shade.cache.admission.time.sleep", pauses.append)
    post(setting.residency, ending=True)
    assert setting.neighbour.settle({0: PAYLOAD}) == 1
    assert setting.mine.settle({1: PAYLOAD}) == 0
    waited = len(pauses)
    assert waited > 0
    assert setting.mine.settle({2: PAYLOAD}) == 0
    assert len(pauses) == waited


@pytest.mark.parametrize(("origin_seconds", "expected"), [(1e-5, 0.05), (0.1, 0.2), (60.0, 0.5)])
def test_no_wait_for_space_is_longer_than_reading_again(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, origin_seconds: float, expected: float
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("shade.cache.admission.time.sleep", sleep)
    monkeypatch.setattr("shade.cache.admission.time.monotonic", lambda: now)
    post(setting.residency, ending=True)
    setting.residency.origin_seconds = origin_seconds
    assert setting.neighbour.settle({0: PAYLOAD}) == 1
    assert setting.mine.settle({1: PAYLOAD, 2: PAYLOAD}) == 0
    assert setting.mine.waited_seconds == pytest.approx(expected, abs=0.006)
