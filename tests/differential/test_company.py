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


def test_nine_of_ten_planted_faults_are_found() -> None:
    missed = [fault for fault in PLANE.faults if not found(PLANE, fault, 40, 0)]
    assert len(missed) <= len(PLANE.faults) / 10, missed
