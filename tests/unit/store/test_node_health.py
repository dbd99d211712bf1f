"""Who is left alone, for how long, and who never is."""

from __future__ import annotations

from shade.store.node import NodeHealth
from shade.testing import ManualClock

A, B, C = (("10.0.0.1", 7000), ("10.0.0.2", 7000), ("10.0.0.3", 7000))


def test_a_failed_node_rests_twice_as_long_each_time_up_to_a_limit() -> None:
    clock = ManualClock()
    health = NodeHealth(clock)
    for pause in (2, 4, 8, 8):
        health.failed(A)
        clock.advance(pause - 0.01)
        assert health.resting() == {A}
        clock.advance(0.02)
        assert health.resting() == set()


def test_an_answer_is_all_it_takes_to_be_forgiven() -> None:
    clock = ManualClock()
    health = NodeHealth(clock)
    for _ in range(3):
        health.failed(A)
    health.answered({A: 0.01, B: 0.01})
    assert health.resting() == set()
    health.failed(A)
    clock.advance(2.01)
    assert health.resting() == set(), "the first pause is short again"


def test_one_slow_round_is_an_accident_two_are_not() -> None:
    health = NodeHealth(ManualClock())
    health.answered({A: 0.3, B: 0.01, C: 0.01})
    assert health.resting() == set()
    health.answered({A: 0.3, B: 0.01, C: 0.01})
    assert health.resting() == {A}


def test_a_quick_round_between_two_slow_ones_forgives() -> None:
    health = NodeHealth(ManualClock())
    for took in (0.3, 0.01, 0.3, 0.01):
        health.answered({A: took, B: 0.01, C: 0.01})
    assert health.resting() == set()


def test_one_that_is_slow_again_after_its_pause_rests_at_once() -> None:
    clock = ManualClock()
    health = NodeHealth(clock)
    for _ in range(2):
        health.answered({A: 0.3, B: 0.01, C: 0.01})
    clock.advance(2.01)
    health.answered({A: 0.3, B: 0.01, C: 0.01})
    assert health.resting() == {A}
    clock.advance(2.01)
    assert health.resting() == {A}, "and for longer"


def test_a_slow_node_is_not_silent_until_it_fails() -> None:
    clock = ManualClock()
    health = NodeHealth(clock)
    for _ in range(2):
        health.answered({A: 0.3, B: 0.01, C: 0.01})
    health.failed(B)
    assert health.resting() == {A, B}
    assert health.silent() == {B}
    health.failed(A)
    assert health.silent() == {A, B}
    clock.advance(4.01)
    assert health.silent() == set()


def test_where_all_are_slow_nobody_is() -> None:
    health = NodeHealth(ManualClock())
    for _ in range(5):
        health.answered({A: 0.5, B: 0.4, C: 0.45})
        health.answered({A: 0.5})
        health.answered({A: 0.09, B: 0.001, C: 0.001})
        health.answered({})
    assert health.resting() == set()
