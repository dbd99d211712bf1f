"""Fewer ranks take over the residuals of more, through the checkpoint's own flattening of states."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from shade.checkpoint._capture.app_state import AppState
from shade.checkpoint._capture.flatten import flatten
from shade.gradient._engine.engine import GradientEngine
from shade.gradient.optim import SparseSGD
from shade.types import Parted


def build() -> tuple[nn.Module, GradientEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 5))
    return model, GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), density=0.05, compressor="topk")


def saved(rank: int, world_size: int) -> tuple[Any, dict[str, torch.Tensor], list[np.ndarray]]:
    """As one of so many ranks would save it: skeleton, its own tensors by name, and what it keeps back."""
    model, engine = build()
    with engine:
        for step in range(3):
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * rank + step))
            model(inputs).square().mean().backward()
            engine.step()
        state = {**engine.state_dict(), "rank": rank, "world_size": world_size}
        kept = [torch.as_tensor(each["residual"]).double().numpy() for each in state["residuals"]]
        tree, tensors = flatten({"engine": state}, rank=rank, is_own=lambda path: True)
        return tree, {name: tensor.clone() for name, tensor in tensors.items()}, kept


def test_one_rank_takes_over_what_three_had_kept_back() -> None:
    trees, tensors, kept = [], {}, []
    for rank in range(3):
        tree, own, residuals = saved(rank, 3)
        trees.append(tree)
        tensors |= own
        kept.append(residuals)
    _, engine = build()
    with engine:
        assert isinstance(engine, Parted)
        contents = AppState(replicated=True)
        contents.attach({"engine": engine})
        contents.load(trees[0], tensors, ["engine"], trees)
        taken = [torch.as_tensor(each["residual"]).double().numpy() for each in engine.state_dict()["residuals"]]
        for mine, theirs in zip(taken, zip(*kept, strict=True), strict=True):
            np.testing.assert_allclose(mine, sum(theirs), atol=1e-6)
        assert max(float(np.abs(each).max()) for each in kept[2]) > 1e-3
        assert engine.step_count == 3
