"""The ledger adds up, and splits a wait without inventing time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shade.cache.ledger import CAUSES, FIELDS, Ledger


def test_rows_add_up_and_subtract() -> None:
    row = np.zeros(len(FIELDS), dtype=np.int64)
    Ledger(row).add(samples=3, hits=2)
    Ledger(row).add(samples=4)
    now = Ledger(row.copy())
    Ledger(row).add(samples=5)
    assert now["samples"] == 7
    assert (Ledger(row) - now)["samples"] == 5
    assert Ledger(row).as_dict()["hits"] == 2


def test_an_unknown_counter_is_an_error() -> None:
    with pytest.raises(KeyError):
        Ledger().add(hitz=1)


@given(st.lists(st.integers(0, 10**12), min_size=4, max_size=4), st.floats(0, 1e5))
def test_the_stall_sums_to_the_wait(busy: list[int], wait_seconds: float) -> None:
    ledger = Ledger()
    ledger.add(**{f"{cause}_nanoseconds": n for cause, n in zip(CAUSES, busy, strict=True)})
    stall = ledger.stall_seconds(wait_seconds)
    assert set(stall) == {*CAUSES, "wait"}
    assert all(seconds >= 0 for seconds in stall.values())
    assert sum(stall.values()) == pytest.approx(wait_seconds, abs=1e-9)
    assert all(stall[cause] <= ledger.as_dict()["busy_seconds"][cause] + 1e-9 for cause in CAUSES)


def test_the_busiest_gets_the_blame() -> None:
    ledger = Ledger()
    ledger.add(origin_nanoseconds=8 * 10**9, decode_nanoseconds=2 * 10**9)
    stall = ledger.stall_seconds(5.0)
    assert stall["origin"] == pytest.approx(4.0)
    assert stall["decode"] == pytest.approx(1.0)
    assert stall["wait"] == 0.0
    assert Ledger().stall_seconds(2.0)["wait"] == 2.0
