"""Generated scripts in company: each is as plain PyTorch, or refused by name; planted faults are found."""

from __future__ import annotations

import pytest

from tests.differential.company import PLANE
from tests.differential.harness import found, search

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.multiprocess, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_drawn_scripts_in_company_are_as_in_plain_pytorch(seed: int) -> None:
    tally = search(PLANE, 300, seed)
    assert not tally.difference, tally
    assert tally.same >= tally.played / 2, tally


@pytest.mark.parametrize("fault", PLANE.faults)
def test_a_planted_fault_is_found(fault: str) -> None:
    assert found(PLANE, fault, 150, 0)
