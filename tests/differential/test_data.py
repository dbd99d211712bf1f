"""Generated scripts of the data plane: none differs from plain PyTorch, and planted faults are found."""

from __future__ import annotations

import pytest

from tests.differential.data import ALONE, PLANE, PREFIXED
from tests.differential.data_comparing import REFUSALS
from tests.differential.data_faults import NEW, OLD
from tests.differential.harness import Tally, found, search

# What a library that a script uses says once, in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def check(tally: Tally) -> None:
    assert not tally.difference, tally
    assert tally.same >= tally.played / 2, tally
    assert set(tally.refused) <= set(REFUSALS)


def test_a_drawn_script_in_one_process_is_as_in_plain_pytorch() -> None:
    check(search(ALONE, 30, 1))


def test_a_drawn_script_with_a_cached_first_step_is_as_in_plain_pytorch() -> None:
    check(search(PREFIXED, 30, 1))


@pytest.mark.redis
@pytest.mark.multiprocess
def test_a_drawn_script_is_as_in_plain_pytorch() -> None:
    check(search(PLANE, 20, 2))


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.multiprocess
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_many_drawn_scripts_are_as_in_plain_pytorch(seed: int) -> None:
    check(search(PLANE, 700, seed))


@pytest.mark.parametrize("fault", ["epochs have one order", "wrapping draws random numbers"])
def test_a_planted_fault_is_found(fault: str) -> None:
    assert found(ALONE, fault, 100, 0)


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.multiprocess
@pytest.mark.timeout(7200)
def test_nine_of_ten_planted_faults_are_found() -> None:
    def is_found(fault: str) -> bool:
        return found(ALONE, fault, 300, 0) or found(PLANE, fault, 300, 0)

    missed = [fault for fault in (*OLD, *NEW) if not is_found(fault)]
    assert len(missed) <= len(OLD | NEW) / 10, missed
