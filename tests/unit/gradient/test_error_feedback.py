"""Deep Gradient Compression's corrections, as the paper writes them, and states that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shade.errors import ConfigError, NonFiniteGradientError, StateMismatchError
from shade.gradient._compress.compressor import COMPRESSORS, Key, Sparse
from shade.gradient._compress.correction import MomentumCorrection
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._compress.quantiser import QUANTISERS

SIZE = 1000


def feedback(size: int = SIZE, quantiser: str = "none", **settings: Any) -> ErrorFeedback:
    """An exact top-k with a memory."""
    return ErrorFeedback(size, COMPRESSORS.get("topk")(), QUANTISERS.get(quantiser)(), **settings)


def gradients(num_steps: int) -> list[np.ndarray]:
    """Noise."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(SIZE, dtype=np.float32) for _ in range(num_steps)]


def test_momentum_is_corrected_and_masked_as_in_the_paper() -> None:
    memory, momentum = feedback(correction=MomentumCorrection(0.9)), np.float32(0.9)
    velocity_D, sum_D = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for step, gradient_D in enumerate(gradients(20)):
        velocity_D = momentum * velocity_D + gradient_D
        sum_D = sum_D + velocity_D
        picked_K = np.sort(np.argsort(np.abs(sum_D))[-10:])
        sent = memory.compress(gradient_D, 0.01, Key(0, step, 0))
        np.testing.assert_array_equal(sent.indices_K, picked_K)
        np.testing.assert_array_equal(sent.values_K, sum_D[picked_K])
        velocity_D[picked_K] = 0
        sum_D[picked_K] = 0
        np.testing.assert_array_equal(memory.residual_D, sum_D)
        np.testing.assert_array_equal(memory.state_dict()["velocity"].numpy(), velocity_D)


def test_a_residual_that_decays_is_sparse_loco_s_and_can_be_undone() -> None:
    memory, residual_D = feedback(decay=0.95), np.zeros(SIZE, np.float32)
    for step, gradient_D in enumerate(gradients(20)):
        if step % 4 == 2:
            memory.compress(-gradient_D, 0.01, Key(0, step, 1))
            memory.undo()
        residual_D = np.float32(0.95) * residual_D + gradient_D
        picked_K = np.sort(np.argsort(np.abs(residual_D))[-10:])
        sent = memory.compress(gradient_D, 0.01, Key(0, step, 0))
        np.testing.assert_array_equal(sent.indices_K, picked_K)
        np.testing.assert_array_equal(sent.values_K, residual_D[picked_K])
        residual_D[picked_K] = 0
        np.testing.assert_array_equal(memory.residual_D, residual_D)


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1])
def test_a_gradient_of_another_size_changes_nothing(size: int) -> None:
    memory = feedback(correction=MomentumCorrection(0.9))
    first, second = gradients(2)
    memory.compress(first, 0.01, Key(0, 0, 0))
    before = {key: tensor.clone() for key, tensor in memory.state_dict().items()}
    memory.compress(second, 0.01, Key(0, 1, 0))
    with pytest.raises(ConfigError, match="elements"):
        memory.compress(np.ones(size, dtype=np.float32), 0.01, Key(0, 2, 0))
    memory.undo()
    assert all(torch.equal(tensor, before[key]) for key, tensor in memory.state_dict().items())


def test_momentum_beyond_what_a_float_holds_is_refused() -> None:
    memory = feedback(correction=MomentumCorrection(0.9))
    huge_D = np.full(SIZE, 3e38, dtype=np.float32)
    memory.compress(huge_D, 0.01, Key(0, 0, 0))
    with pytest.raises(NonFiniteGradientError):
        memory.compress(huge_D, 0.01, Key(0, 1, 0))


@pytest.mark.parametrize("quantiser", ["bf16", "int8"])
def test_what_rounding_loses_stays(quantiser: str) -> None:
    memory = feedback(quantiser=quantiser)
    (gradient_D,) = gradients(1)
    sent = memory.compress(gradient_D, 0.1, Key(0, 0, 0))
    lost_K = gradient_D[sent.indices_K] - sent.values_K
    assert np.abs(lost_K).max() > 0
    np.testing.assert_array_equal(memory.residual_D[sent.indices_K], lost_K)


def test_a_gradient_is_never_written_to() -> None:
    memory = feedback(correction=MomentumCorrection(0.9))
    gradient_D = torch.from_numpy(gradients(1)[0]).requires_grad_()
    before = gradient_D.detach().clone()
    memory.compress(gradient_D, 0.1, Key(0, 0, 0))
    assert torch.equal(gradient_D.detach(), before)


def test_what_is_handed_on_is_not_changed_by_the_next_step() -> None:
    memory = feedback()
    first, second = gradients(2)
    sent = memory.compress(first, 0.01, Key(0, 0, 0))
    kept = Sparse(sent.indices_K.copy(), sent.values_K.copy(), SIZE)
    memory.compress(second, 0.01, Key(0, 1, 0))
    np.testing.assert_array_equal(sent.indices_K, kept.indices_K)
    np.testing.assert_array_equal(sent.values_K, kept.values_K)


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"residual": torch.zeros(SIZE - 1)}, "a residual of 1000 elements"),
        ({"residual": torch.zeros(2, SIZE // 2)}, "a residual of 1000 elements"),
        ({"residual": torch.zeros(SIZE), "velocity": torch.zeros(3)}, "a velocity of 1000 elements"),
        ({"residual": torch.full((SIZE,), torch.nan)}, "a finite residual"),
        ({"velocity": torch.zeros(SIZE)}, "a residual"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state: dict[str, torch.Tensor], complaint: str) -> None:
    memory = feedback(correction=MomentumCorrection(0.5))
    memory.compress(gradients(1)[0], 0.01, Key(0, 0, 0))
    before = memory.residual_D.copy()
    for take in (memory.load_state_dict, memory.merge_from):
        with pytest.raises(StateMismatchError, match=complaint):
            take(state)
    np.testing.assert_array_equal(memory.residual_D, before)


def test_a_state_may_lack_a_velocity_or_have_one_too_many() -> None:
    with_momentum, without = feedback(correction=MomentumCorrection(0.5)), feedback()
    for memory in (with_momentum, without):
        memory.compress(gradients(1)[0], 0.01, Key(0, 0, 0))
    states = [{k: v.clone() for k, v in memory.state_dict().items()} for memory in (with_momentum, without)]
    with_momentum.load_state_dict(states[1])
    assert not with_momentum.state_dict()["velocity"].any()
    without.load_state_dict(states[0])
    assert torch.equal(without.state_dict()["residual"], states[0]["residual"])


def test_what_is_given_back_must_come_from_here() -> None:
    memory = feedback()
    elsewhere = Sparse(np.zeros(0, np.uint32), np.zeros(0, np.float32), SIZE + 1)
    with pytest.raises(ConfigError, match="a bucket of 1000 elements, got 1001"):
        memory.absorb(elsewhere)


@pytest.mark.parametrize("quantiser", ["none", "bf16", "int8"])
def test_held_parts_stay_whole_and_what_is_sent_arrives_as_it_was_rounded(quantiser: str) -> None:
    memory, held = feedback(quantiser=quantiser), [slice(0, 300), slice(500, 501)]
    first, second = gradients(2)
    memory.compress(first, 0.1, Key(0, 0, 0))
    before_D = memory.residual_D.copy()
    expected_D = before_D + second
    sent = memory.compress(second, 0.9, Key(0, 1, 0), held)
    arrived_D = sent.dense()
    assert not any(arrived_D[part].any() for part in held)
    assert all(np.array_equal(memory.residual_D[part], expected_D[part]) for part in held)
    np.testing.assert_allclose(memory.residual_D + arrived_D, expected_D, rtol=0, atol=1e-6)
    again_K = memory.quantiser.decode(memory.quantiser.encode(sent.values_K), sent.count)
    np.testing.assert_allclose(again_K, sent.values_K, rtol=0, atol=1e-6)
    memory.undo()
    np.testing.assert_array_equal(memory.residual_D, before_D)
