"""SparseAdam and SparseAdamW end where torch.optim's end on the dense gradient, also where epsilon rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shade.errors import ConfigError
from shade.gradient.optim import SparseAdam, SparseAdamW
from tests.support.optimizing import DenseRun, Run, bits, error, use_arrays

PAIRS = {"adam": (SparseAdam, torch.optim.Adam), "adamw": (SparseAdamW, torch.optim.AdamW)}
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "adam": ("adam", {}, 1.0),
    "decay within": ("adam", {"weight_decay": 0.01}, 1.0),
    "maximize": ("adam", {"maximize": True}, 1.0),
    "adamw": ("adamw", {}, 1.0),
    "decay without": ("adamw", {"weight_decay": 0.3, "betas": (0.9, 0.95)}, 1.0),
    "short memory": ("adamw", {"betas": (0.5, 0.6)}, 1.0),
    "no first moment": ("adam", {"betas": (0.0, 0.99)}, 1.0),
    "epsilon": ("adam", {}, 1e-8),
    "epsilon, short memory": ("adam", {"betas": (0.9, 0.95)}, 1e-8),
    "large epsilon": ("adamw", {"eps": 0.1}, 1.0),
    "tiny": ("adam", {}, 1e-12),
}


@pytest.mark.parametrize("name", CASES)
def test_it_ends_where_the_dense_optimizer_ends(name: str) -> None:
    pair, settings, scale = CASES[name]
    settings = {"lr": 0.001, **settings}
    num_steps = 1000 if name in ("adam", "decay within", "decay without", "epsilon") else 250
    ours = Run(PAIRS[pair][0], settings).go(num_steps, scale=scale)
    theirs = DenseRun(PAIRS[pair][1], settings).go(num_steps, scale=scale)
    ours.optimizer.flush()
    assert error(ours.weights_D, theirs.weights_D) <= 1e-6
    for mine, other in zip(ours.parameters, theirs.parameters, strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = theirs.optimizer.state[other][moment]
            assert error(ours.optimizer.state[mine][moment], expected) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("num_lines", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same_bits(name: str, num_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, settings, scale = CASES[name]
    compiled = Run(PAIRS[pair][0], {"lr": 0.001, **settings}).go(150, scale=scale, num_lines=num_lines)
    use_arrays(monkeypatch)
    plain = Run(PAIRS[pair][0], {"lr": 0.001, **settings}).go(150, scale=scale, num_lines=num_lines)
    assert bits(plain.weights_D) == bits(compiled.weights_D)


def test_betas_may_be_scheduled_too() -> None:
    ours, theirs = Run(SparseAdamW, {"lr": 0.001}), DenseRun(torch.optim.AdamW, {"lr": 0.001})
    for run in (ours, theirs):
        for step in range(300):
            run.optimizer.param_groups[0]["betas"] = (0.85 + 0.1 * (step % 50) / 50, 0.999)
            run.go(1)
    ours.optimizer.flush()
    assert error(ours.weights_D, theirs.weights_D) <= 1e-6


@pytest.mark.parametrize(("decay", "num_steps"), [(0.0, 1000), (0.01, 150)])
def test_replicas_hold_the_same_bits_and_a_snapshot_goes_on_bit_for_bit(decay: float, num_steps: int) -> None:
    settings = {"lr": 0.001, "weight_decay": decay}
    undisturbed, run = Run(SparseAdam, settings).go(num_steps), Run(SparseAdam, settings).go(num_steps - 70)
    state = run.state()
    assert state["optimizer"]["lags"], "nothing lagged, so nothing was shown"
    resumed = Run(SparseAdam, settings).resume(state, num_steps - 70)
    assert bits(resumed.go(70).weights_D) == bits(undisturbed.weights_D)
    assert bits(run.go(70).weights_D) == bits(undisturbed.weights_D)


@pytest.mark.parametrize("pair", PAIRS)
def test_state_moves_to_pytorch_and_back(pair: str) -> None:
    ours, theirs = PAIRS[pair]
    settings = {"lr": 0.001, "weight_decay": 0.01}
    expected = DenseRun(theirs, settings).go(300)
    run, dense = Run(ours, settings).go(100), DenseRun(theirs, settings, torch.float32)
    run.optimizer.flush()
    with torch.no_grad():
        for parameter, part in zip(dense.parameters, run.parameters, strict=True):
            parameter.copy_(part)
    dense.optimizer.load_state_dict(run.optimizer.state_dict())
    dense.schedule.load_state_dict(run.schedule.state_dict())
    dense.step = 100
    dense.go(100)
    back = Run(ours, settings)
    parts = [parameter.detach() for parameter in dense.parameters]
    state = {"weights": parts, "optimizer": dense.optimizer.state_dict(), "schedule": dense.schedule.state_dict()}
    back.resume(state, 200).go(100)
    back.optimizer.flush()
    assert error(back.weights_D, expected.weights_D) <= 2e-6


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lr": -1.0}, "lr ≥ 0"),
        ({"betas": (0.9, 1.0)}, "betas in"),
        ({"eps": 0.0}, "eps > 0"),
        ({"weight_decay": -1.0}, "weight_decay ≥ 0"),
        ({"amsgrad": True}, "amsgrad=False"),
    ],
)
def test_what_cannot_be_is_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SparseAdam([torch.nn.Parameter(torch.zeros(4))], **settings)
