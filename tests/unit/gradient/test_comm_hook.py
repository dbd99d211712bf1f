"""Residuals follow parameters through DDP's buckets. Several ranks are in tests/integration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from shade.errors import ConfigError, StateMismatchError
from shade.gradient._compress.compressor import COMPRESSORS, Key
from shade.gradient._compress.correction import MomentumCorrection
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._engine.comm_hook import ResidualStore


def make(size: int) -> ErrorFeedback:
    return ErrorFeedback(size, COMPRESSORS.get("topk")(), QUANTISERS.get("none")(), correction=MomentumCorrection(0.5))


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def test_what_is_kept_moves_with_its_parameters(model: nn.Sequential) -> None:
    store, first = ResidualStore(model, make), list(model[0].parameters())
    generator = np.random.default_rng(0)
    store.of(first).compress(generator.standard_normal(144).astype(np.float32), 0.1, Key(0, 0, 0))
    before = {name: {kind: each.clone() for kind, each in kept.items()} for name, kept in store.state_dict().items()}
    assert set(before) == {"0.weight", "0.bias"}
    assert set(before["0.bias"]) == {"residual", "velocity"}
    moved = store.of([model[1].bias, model[0].bias])
    assert moved.residual_D[:4].tolist() == [0.0] * 4
    assert torch.equal(torch.from_numpy(moved.residual_D[4:].copy()), before["0.bias"]["residual"])
    assert store.of([model[1].bias, model[0].bias]) is moved
    after = store.state_dict()
    for name, kept in before.items():
        assert all(torch.equal(each, after[name][kind]) for kind, each in kept.items())


def test_a_state_fits_its_model_or_is_refused(model: nn.Sequential) -> None:
    store = ResidualStore(model, make)
    store.load_state_dict({"1.bias": {"residual": torch.arange(4.0)}})
    with pytest.raises(StateMismatchError, match=r"'0\.bias' with 16 elements"):
        store.load_state_dict({"0.bias": {"residual": torch.zeros(3)}})
    with pytest.raises(StateMismatchError, match="no such parameter"):
        store.load_state_dict({"2.bias": {"residual": torch.zeros(3)}})
    assert store.of([model[1].bias]).residual_D.tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="the model that DDP wraps"):
        store.of([torch.zeros(3)])
