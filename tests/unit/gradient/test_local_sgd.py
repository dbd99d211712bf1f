"""DiLoCo's outer step on a single rank. Several ranks are in tests/integration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shade.errors import ConfigError, StateMismatchError
from shade.gradient._engine.local_sgd import DiLoCo, LocalSGD


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten().clone() for each in model.parameters()])


def test_the_outer_step_is_sgd_with_nesterovs_momentum_on_how_far_one_came() -> None:
    torch.manual_seed(0)
    model = nn.Linear(48, 64)
    anchor = nn.Parameter(weights(model))
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(model, every=2) as diloco:
        for step in range(6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += torch.randn(parameter.shape)
            ahead = weights(model)
            synchronised = diloco.step()
            assert synchronised == (step % 2 == 1)
            if synchronised:
                anchor.grad = anchor.detach() - ahead
                outer.step()
                ahead = anchor.detach()
            assert torch.allclose(weights(model), ahead, atol=1e-5)


def test_local_sgd_of_one_rank_changes_nothing() -> None:
    model = nn.Linear(48, 64)
    with LocalSGD(model, every=1) as local:
        with torch.no_grad():
            model.weight += 1.0
        before = weights(model)
        local.step()
        assert torch.allclose(weights(model), before, atol=1e-6)


def test_impossible_settings_are_refused() -> None:
    for settings in (
        {"every": 0},
        {"every": 1, "lr": 0.0},
        {"every": 1, "momentum": 1.0},
        {"every": 1, "density": 2.0},
    ):
        with pytest.raises(ConfigError, match="every=100"):
            DiLoCo(nn.Linear(4, 4), **settings)  # type: ignore[arg-type]
    with DiLoCo(nn.Linear(4, 4), every=1) as small, DiLoCo(nn.Linear(64, 64), every=1) as large:
        before = [each.clone() for each in large.state_dict()["anchors"]]
        with pytest.raises(StateMismatchError, match="anchors"):
            large.load_state_dict(small.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(before, large.state_dict()["anchors"], strict=True))
