"""Scores differ: an average, a rank, a gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shade.importance import ImportanceTable, last_layer_norm


def test_loss_score_is_a_moving_average() -> None:
    table = ImportanceTable(3)
    for loss, expected in ((4.0, 4.0), (2.0, 3.0), (0.0, 1.5)):
        table.update(np.array([1]), np.array([loss], dtype=np.float32))
        assert table.score_N[1] == expected


@pytest.mark.parametrize(("loss", "words"), [(-1.5, "score='rank'"), (math.nan, "NaN"), (math.inf, "infinite")])
def test_a_loss_without_importance_warns_once(loss: float, words: str) -> None:
    table = ImportanceTable(3)
    with pytest.warns(UserWarning, match=words):
        table.update(np.array([0, 1]), np.array([loss, 2.0], dtype=np.float32))
    table.update(np.array([1, 2]), np.array([2.0, loss], dtype=np.float32))
    assert table.score_N.tolist() == [0.0, 2.0, 0.0]


def test_rank_score_learns_from_negative_losses() -> None:
    table = ImportanceTable(3, "rank")
    table.update(np.arange(3), np.array([-1, -3, -2], dtype=np.float32))
    assert table.score_N.argsort().tolist() == [1, 2, 0]


def test_rank_score_is_shades_formula() -> None:
    table = ImportanceTable(5, "rank")
    table.update(np.array([4, 0, 2]), np.array([0.3, 0.1, 0.2], dtype=np.float32))
    np.testing.assert_allclose(table.score_N[[0, 2, 4]], [math.log(10), math.log(11), math.log(12)], rtol=1e-6)


def test_rank_score_ignores_scale_and_past() -> None:
    first, second = ImportanceTable(4, "rank"), ImportanceTable(4, "rank")
    loss_B = np.array([0.3, 0.1, 0.2, 0.9], dtype=np.float32)
    second.update(np.arange(4), loss_B[::-1].copy())
    first.update(np.arange(4), loss_B)
    second.update(np.arange(4), loss_B * 1000)
    np.testing.assert_array_equal(first.score_N, second.score_N)


def test_target_score_is_the_gradient_at_the_targets_logit() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BC = torch.randn(16, 5, generator=generator).requires_grad_()
    targets_B = torch.randint(0, 5, (16,), generator=generator)
    loss_B = torch.nn.functional.cross_entropy(logits_BC, targets_B, reduction="none")
    loss_B.sum().backward()
    assert logits_BC.grad is not None
    gradient_B = logits_BC.grad.gather(1, targets_B[:, None])[:, 0].abs()
    table = ImportanceTable(16, "target-grad")
    table.update(np.arange(16), loss_B.detach().numpy())
    np.testing.assert_allclose(table.score_N, gradient_B.numpy(), rtol=1e-3)
    table.update(np.arange(16), np.zeros(16, dtype=np.float32))
    np.testing.assert_allclose(table.score_N, gradient_B.numpy() / 2, rtol=1e-3)


def test_target_score_warns_once_of_losses_that_it_cannot_tell_apart(recwarn: pytest.WarningsRecorder) -> None:
    table = ImportanceTable(3, "target-grad")
    large_B = np.array([40, 90, 900], dtype=np.float32)
    table.update(np.arange(3), large_B)
    assert not recwarn.list, "an untrained model's cross-entropy may be as large"
    table.update(np.arange(3), np.array([0.1, 1.0, 900], dtype=np.float32))
    assert not recwarn.list, "one outlier"
    for _ in range(2):
        table.update(np.arange(3), large_B)
    (warning,) = recwarn.list
    assert "score='loss'" in str(warning.message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_last_layer_norm_is_the_gradient_of_cross_entropy(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BC = torch.randn(16, 5, generator=generator).to(dtype)
    targets_B = torch.randint(0, 5, (16,), generator=generator)
    leaf = logits_BC.float().requires_grad_()
    torch.nn.functional.cross_entropy(leaf, targets_B, reduction="sum").backward()
    assert leaf.grad is not None
    before = logits_BC.clone()
    norm_B = last_layer_norm(logits_BC, targets_B)
    torch.testing.assert_close(norm_B, leaf.grad.norm(dim=1))
    assert norm_B.dtype == torch.float32
    assert torch.equal(logits_BC, before)


def test_last_layer_norm_needs_no_graph() -> None:
    logits_BC = torch.randn(4, 3, requires_grad=True)
    assert not last_layer_norm(logits_BC, torch.tensor([0, 1, 2, 0])).requires_grad
