"""What an exchange takes: what its bytes take, what it takes without them, and what a link that changes may bring."""

from __future__ import annotations

import json

import pytest

from shade.control.link_cost import DELAY, DOUBT, HISTORY, LinkCost


def measured(*slow: float, fixed: float = 0.0, num_bytes: int = 1000) -> LinkCost:
    """After exchanges at these seconds per byte."""
    cost = LinkCost()
    for each in slow:
        cost.add(fixed + each * num_bytes, num_bytes, fixed)
    return cost


def test_what_bytes_do_not_cause_is_no_rate() -> None:
    few, many = (measured(*[1e-5] * 9, fixed=0.2, num_bytes=size) for size in (1_000, 100_000))
    assert few.seconds_per_byte == pytest.approx(1e-5)
    assert many.seconds_per_byte == pytest.approx(1e-5)
    assert (few.fixed_seconds, many.fixed_seconds) == (0.2, 0.2)


def test_a_delay_of_the_whole_exchange_leaves_its_bytes_a_little() -> None:
    cost = LinkCost()
    for _ in range(9):
        cost.add(0.1, 1000, 0.4)
    assert cost.fixed_seconds == 0.1
    assert cost.seconds_per_byte == pytest.approx(0.01 * 0.1 / 1000)


def test_a_steady_link_has_one_rate() -> None:
    assert measured(*[2e-6, 2.2e-6] * 50).rates() == [(pytest.approx(2.1e-6, rel=0.1), 1.0)]
    assert LinkCost().rates() == [(0.0, 1.0)]


def test_a_link_that_changes_may_bring_what_it_brought() -> None:
    cost = measured(*([1e-6] * 20 + [9e-6] * 20) * 5)
    (present, share), *others = cost.rates()
    assert present == pytest.approx(9e-6, rel=0.02)
    # A change is met by the steps that were planned before it, or before the median of three believes it.
    assert 9 * DELAY < (1 - share) * (200 - DELAY + DOUBT) < 9 * (DELAY + 2)
    assert sum(each for _, each in others) == pytest.approx(1 - share)
    assert {round(rate * 1e6) for rate, _ in others} >= {1, 9}


def test_what_was_long_ago_is_forgotten() -> None:
    assert len(measured(*[1e-6] * 20, *[9e-6] * 20, *[1e-6] * (HISTORY + 2 * DELAY)).rates()) == 1


def test_a_loaded_state_goes_on_as_the_whole_did() -> None:
    slow = [1e-6, 5e-6, 5e-6, 2e-6] * 10
    whole, half = measured(*slow), measured(*slow[:20])
    resumed = LinkCost()
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    for each in slow[20:]:
        resumed.add(each * 1000, 1000, 0.0)
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.rates() == whole.rates()
