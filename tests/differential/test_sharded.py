"""Generated jobs of DTensors, restored over another mesh: the bits of one process with whole tensors."""

from __future__ import annotations

import pytest

from tests.differential.harness import found, search
from tests.differential.sharded import PLANE

pytestmark = [pytest.mark.multiprocess, pytest.mark.redis]


def check(count: int, seed: int) -> None:
    tally = search(PLANE, count, seed)
    assert not tally.difference, tally.difference
    assert 10 * tally.same >= 9 * tally.played >= 4 * count, str(tally)


def test_no_script_differs() -> None:
    check(6, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", PLANE.faults)
def test_a_fault_is_found(fault: str) -> None:
    assert found(PLANE, fault, 60, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_script_of_many_differs(seed: int) -> None:
    check(100, seed)
