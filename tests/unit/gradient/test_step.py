"""A step only advances along the arrows of `StepState`, and wakes the threads that wait for a state."""

from __future__ import annotations

import threading

import pytest

from shade.errors import GradientError
from shade.gradient._comm.step import GradientStep, StepState

LIFE = [StepState.PACKED, StepState.AGREED, StepState.MERGED]


def step_in(state: StepState) -> GradientStep:
    """A step that has come to a state the regular way."""
    step = GradientStep(7, [1], 0.5, 1)
    for each in LIFE[: LIFE.index(state) + 1] if state in LIFE else []:
        step.advance(each)
    if state is StepState.FAILED:
        step.end(ValueError("planted"))
    return step


@pytest.mark.parametrize("state", [StepState.FILLING, *LIFE, StepState.FAILED])
@pytest.mark.parametrize("following", list(StepState))
def test_only_the_arrows_are_allowed(state: StepState, following: StepState) -> None:
    step = step_in(state)
    ends = {StepState.FAILED, StepState.ABANDONED} if state < StepState.MERGED else set()
    if following in ends | ({LIFE[state]} if state < StepState.MERGED else set()):
        step.advance(following)
        assert step.state is following
    else:
        with pytest.raises(GradientError, match=f"step 7 cannot go from {state.name} to {following.name}"):
            step.advance(following)
        assert step.state is state


def test_a_waiting_thread_is_woken_by_the_state_or_by_the_end() -> None:
    for end in (lambda step: step.advance(StepState.PACKED), lambda step: step.end(ValueError())):
        step = GradientStep(0, [1], 0.5, 1)
        waiting = threading.Thread(target=step.wait, args=(StepState.PACKED,))
        waiting.start()
        assert waiting.is_alive()
        end(step)
        waiting.join(30)
        assert not waiting.is_alive()


def test_an_abandoned_step_stays_abandoned_and_an_ended_one_ended() -> None:
    step = GradientStep(0, [1], 0.5, 1)
    step.abandon()
    step.end(None)
    assert step.state is StepState.ABANDONED
    assert all(event.is_set() for event in (*step.ready, *step.packed)), "no thread waits for its gradients"
    merged = step_in(StepState.MERGED)
    merged.abandon()
    assert merged.state is StepState.MERGED


def test_a_failed_step_has_no_result() -> None:
    step = step_in(StepState.AGREED)
    step.merged = ["what was merged before the vote"]  # type: ignore[list-item]
    step.end(ValueError("planted"))
    assert (step.merged, str(step.error)) == ([], "planted")
