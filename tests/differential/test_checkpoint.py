"""Generated training scripts, ended and restored: as if never ended, or refused by name with nothing changed."""

from __future__ import annotations

import pytest

from tests.differential.checkpoint import PLANE
from tests.differential.harness import found, search

pytestmark = [pytest.mark.multiprocess, pytest.mark.redis]

REFUSED = frozenset(
    {
        "a damaged snapshot",
        "a value that no snapshot can hold",
        "an attached object without a state",
        "another batch",
        "another dtype",
        "another groups",
        "another missing",
        "another model",
        "another optimizer",
        "another shape",
    }
)
QUICK = ("restored tensors are views of one buffer", "buffers are not restored", "verify accepts damage")
"""Faults that a few scripts show."""


def check(count: int, seed: int) -> None:
    tally = search(PLANE, count, seed)
    assert not tally.difference, tally.difference
    assert 2 * tally.same >= tally.played >= count // 2, str(tally)
    assert set(tally.refused) <= REFUSED


def test_no_script_differs() -> None:
    check(30, 0)


@pytest.mark.parametrize("fault", QUICK)
def test_a_known_fault_is_found(fault: str) -> None:
    assert found(PLANE, fault, 60, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nine_of_ten_known_faults_are_found() -> None:
    missed = [fault for fault in PLANE.faults if not found(PLANE, fault, 300, 0)]
    assert 10 * len(missed) <= len(PLANE.faults), missed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_no_script_of_many_differs(seed: int) -> None:
    check(500, seed)
