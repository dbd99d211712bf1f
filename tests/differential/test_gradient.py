"""Generated training scripts come to plain PyTorch's weights or to a refusal by name, and known faults are found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.differential.gradient import PLANE, RANKS
from tests.differential.gradient_script import DDP_REFUSES, PYTORCH_REFUSES, REFUSALS
from tests.differential.harness import found, search

pytestmark = pytest.mark.multiprocess

QUICK_FAULTS = {"the mean counts one rank more": 5, "rebound weights are left behind": 40}
NAMES = {PYTORCH_REFUSES, DDP_REFUSES, *(each.name for each in REFUSALS)}


@pytest.fixture(scope="module", autouse=True)
def _ranks_end() -> Iterator[None]:
    yield
    RANKS.close()


def play_all(count: int, seed: int) -> None:
    tally = search(PLANE, count, seed)
    assert not tally.difference, tally.difference
    assert tally.same >= tally.played / 2, tally
    assert set(tally.refused) <= NAMES, tally


def test_scripts_train_as_on_plain_pytorch_or_are_refused_by_name() -> None:
    play_all(40, 20)


@pytest.mark.parametrize("fault", QUICK_FAULTS)
def test_a_known_fault_is_found(fault: str) -> None:
    assert found(PLANE, fault, QUICK_FAULTS[fault], 0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(4))
def test_many_scripts_train_as_on_plain_pytorch_or_are_refused_by_name(seed: int) -> None:
    play_all(2000, seed)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nearly_every_known_fault_is_found() -> None:
    missed = [fault for fault in PLANE.faults if not found(PLANE, fault, 300, 0)]
    assert len(missed) <= len(PLANE.faults) / 10, missed
