"""Who is left alone, for how long, and who never is."""

from __future__ import annotations

from shade.store.patience import Patience
from shade.testing import ManualClock

A, B, C = (("10.0.0.1", 7000), ("10.0.0.2", 7000), ("10.0.0.3", 7000))


def test_a_failed_node_rests_twice_as_long_each_time_up_to_a_limit() -> None:
    clock = ManualClock()
    patience = Patience(clock)
    for pause in (2, 4, 8, 8):
        patience.failed(A)
        clock.advance(pause - 0.01)
        assert patience.resting() == {A}
        clock.advance(0.02)
        assert patience.resting() == set()


def test_an_answer_is_all_it_takes_to_be_forgiven() -> None:
    clock = ManualClock()
    patience = Patience(clock)
    for _ in range(3):
        patience.failed(A)
    patience.answered({A: 0.01, B: 0.01})
    assert patience.resting() == set()
    patience.failed(A)
    clock.advance(2.01)
    assert patience.resting() == set(), "the first pause is short again"


def test_one_slow_round_is_an_accident_two_are_not() -> None:
    patience = Patience(ManualClock())
    patience.answered({A: 0.3, B: 0.01, C: 0.01})
    assert patience.resting() == set()
    patience.answered({A: 0.3, B: 0.01, C: 0.01})
    assert patience.resting() == {A}


def test_a_quick_round_between_two_slow_ones_forgives() -> None:
    patience = Patience(ManualClock())
    for took in (0.3, 0.01, 0.3, 0.01):
        patience.answered({A: took, B: 0.01, C: 0.01})
    assert patience.resting() == set()


def test_one_that_is_slow_again_after_its_pause_rests_at_once() -> None:
    clock = ManualClock()
    patience = Patience(clock)
    for _ in range(2):
        patience.answered({A: 0.3, B: 0.01, C: 0.01})
    clock.advance(2.01)
    patience.answered({A: 0.3, B: 0.01, C: 0.01})
    assert patience.resting() == {A}
    clock.advance(2.01)
    assert patience.resting() == {A}, "and for longer"


def test_where_all_are_slow_nobody_is() -> None:
    patience = Patience(ManualClock())
    for _ in range(5):
        patience.answered({A: 0.5, B: 0.4, C: 0.45})
        patience.answered({A: 0.5})
        patience.answered({A: 0.09, B: 0.001, C: 0.001})
        patience.answered({})
    assert patience.resting() == set()
