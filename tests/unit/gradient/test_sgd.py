"""SparseSGD ends where torch.optim.SGD ends on dense gradients, lags no further than it says, resumes bit for bit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from shade.errors import ConfigError, GradientError
from shade.gradient._compress.bucket import Bucket
from shade.gradient._compress.compressor import Sparse
from shade.gradient.optim import SparseSGD
from tests.support.optimizing import SIZE, DenseRun, Run, bits, error, gradient, use_arrays

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.02},
    "both": {"momentum": 0.9, "weight_decay": 0.02},
    "nesterov": {"momentum": 0.8, "weight_decay": 0.02, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.02, "maximize": True},
}


@pytest.fixture(params=["numba", "numpy"])
def _loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        use_arrays(monkeypatch)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_thousand_steps_end_where_the_dense_optimizer_ends(name: str) -> None:
    settings = {"lr": 0.02, **SETTINGS[name]}
    ours, theirs = Run(SparseSGD, settings).go(1000), DenseRun(torch.optim.SGD, settings).go(1000)
    if name != "plain":
        assert error(ours.weights_D, theirs.weights_D) > 1e-5, "nothing lagged, so nothing was shown"
    ours.optimizer.flush()
    assert not ours.optimizer.is_behind
    assert error(ours.weights_D, theirs.weights_D) <= 1e-6
    if "momentum" in settings:
        for mine, other in zip(ours.parameters, theirs.parameters, strict=True):
            buffer = theirs.optimizer.state[other]["momentum_buffer"]
            assert error(ours.optimizer.state[mine]["momentum_buffer"], buffer) <= 1e-5


def test_momentum_may_be_scheduled_too() -> None:
    settings = {"lr": 0.02, "momentum": 0.9}
    ours, theirs = Run(SparseSGD, settings), DenseRun(torch.optim.SGD, settings)
    for run in (ours, theirs):
        for step in range(400):
            run.optimizer.param_groups[0]["momentum"] = 0.85 + 0.1 * (step % 50) / 50
            run.go(1)
    ours.optimizer.flush()
    assert error(ours.weights_D, theirs.weights_D) <= 1e-6


@pytest.mark.parametrize("num_lines", [0, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_both_ways_give_the_same_bits(name: str, num_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"lr": 0.02, **SETTINGS[name]}
    compiled = Run(SparseSGD, settings).go(150, num_lines=num_lines)
    use_arrays(monkeypatch)
    plain = Run(SparseSGD, settings).go(150, num_lines=num_lines)
    assert bits(plain.weights_D) == bits(compiled.weights_D)


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("size", [1, 15, 16, 17, 48])
def test_any_size_will_do(size: int) -> None:
    run = Run(SparseSGD, {"lr": 0.1, "momentum": 0.5}, size=size, flush_every=3)
    theirs = torch.nn.Parameter(run.weights_D.clone())
    dense = torch.optim.SGD([theirs], lr=0.1, momentum=0.5)
    for step in range(20):
        sparse = gradient(step, size, count=1)
        run.optimizer.apply(run.bucket, sparse)
        theirs.grad = torch.from_numpy(sparse.dense())
        dense.step()
    run.optimizer.flush()
    assert error(run.weights_D, theirs) <= 1e-6


@pytest.mark.parametrize("flush_every", [1, 4, 16])
def test_no_element_lags_further_than_promised(flush_every: int) -> None:
    run = Run(SparseSGD, {"lr": 0.02, "momentum": 0.9}, flush_every=flush_every)
    longest = 0
    for _ in range(60):
        run.go(1, count=1)
        for lag in run.optimizer.state_dict().get("lags", []):
            longest = max(longest, int(lag["behind"].max()))
    assert longest == flush_every - 1
    assert run.optimizer.is_behind == (flush_every > 1)


def test_swept_at_every_step_it_is_the_dense_optimizer_at_every_step() -> None:
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.02}
    ours, theirs = Run(SparseSGD, settings, flush_every=1), DenseRun(torch.optim.SGD, settings)
    for _ in range(120):
        assert error(ours.go(1).weights_D, theirs.go(1).weights_D) <= 1e-6


def test_without_momentum_and_decay_nothing_is_kept_and_nothing_else_moves() -> None:
    run = Run(SparseSGD, {"lr": 0.5})
    before_D = run.weights_D.clone()
    run.optimizer.apply(run.bucket, Sparse(np.array([3, 200], np.uint32), np.array([1, -2], np.float32), SIZE))
    before_D[3] -= 0.5
    before_D[200] += 1.0
    assert bits(run.weights_D) == bits(before_D)
    assert set(run.optimizer.state[run.parameters[0]]) == {"step"}


def test_replicas_hold_the_same_bits() -> None:
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}
    one, other = Run(SparseSGD, settings).go(1000), Run(SparseSGD, settings).go(1000)
    assert bits(one.weights_D) == bits(other.weights_D)
    one.go(1)
    assert bits(one.weights_D) != bits(other.weights_D)


def test_a_snapshot_changes_nothing_and_goes_on_bit_for_bit() -> None:
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}
    undisturbed = Run(SparseSGD, settings).go(300)
    run = Run(SparseSGD, settings).go(137)
    state = run.state()
    assert state["optimizer"]["lags"], "nothing lagged, so nothing was shown"
    resumed = Run(SparseSGD, settings).resume(state, 137)
    assert bits(resumed.go(163).weights_D) == bits(undisturbed.weights_D)
    assert bits(run.go(163).weights_D) == bits(undisturbed.weights_D)


def test_a_flushed_snapshot_goes_on_bit_for_bit() -> None:
    settings = {"lr": 0.02, "momentum": 0.9}
    run = Run(SparseSGD, settings).go(137)
    run.optimizer.flush()
    state = run.state()
    assert "lags" not in state["optimizer"]
    resumed = Run(SparseSGD, settings).resume(state, 137)
    assert bits(resumed.go(100).weights_D) == bits(run.go(100).weights_D)


def test_what_lags_fits_only_its_own_buckets() -> None:
    settings = {"lr": 0.02, "momentum": 0.9}
    run = Run(SparseSGD, settings).go(30)
    for flushed in (False, True):
        if flushed:
            run.optimizer.flush()
        fresh = Run(SparseSGD, settings)
        fresh.resume(run.state(), 30)
        alone = Bucket(fresh.parameters[:1])
        nothing = Sparse(np.empty(0, np.uint32), np.empty(0, np.float32), alone.size)
        if flushed:
            fresh.optimizer.apply(alone, nothing)
        else:
            with pytest.raises(ConfigError, match=r"call flush\(\) on every rank first"):
                fresh.optimizer.apply(alone, nothing)


def test_new_buckets_take_over_what_is_up_to_date() -> None:
    settings = {"lr": 0.02, "momentum": 0.9}
    run, theirs = Run(SparseSGD, settings).go(30), DenseRun(torch.optim.SGD, settings).go(100)
    run.optimizer.flush()
    run.bucket = Bucket(run.parameters)
    run.go(70)
    assert run.optimizer.is_behind
    with pytest.raises(ConfigError, match="up to date"):
        run.optimizer.apply(Bucket(run.parameters), gradient(0))
    run.optimizer.flush()
    assert error(run.weights_D, theirs.weights_D) <= 1e-6


def test_state_moves_to_pytorch_and_back() -> None:
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}
    expected = DenseRun(torch.optim.SGD, settings).go(300)
    run, dense = Run(SparseSGD, settings).go(100), DenseRun(torch.optim.SGD, settings, torch.float32)
    run.optimizer.flush()
    with torch.no_grad():
        for parameter, part in zip(dense.parameters, run.parameters, strict=True):
            parameter.copy_(part)
    dense.optimizer.load_state_dict(run.optimizer.state_dict())
    dense.schedule.load_state_dict(run.schedule.state_dict())
    dense.step = 100
    dense.go(100)
    back = Run(SparseSGD, settings)
    parts = [parameter.detach() for parameter in dense.parameters]
    state = {"weights": parts, "optimizer": dense.optimizer.state_dict(), "schedule": dense.schedule.state_dict()}
    back.resume(state, 200).go(100)
    back.optimizer.flush()
    assert error(back.weights_D, expected.weights_D) <= 2e-6


@pytest.mark.parametrize("again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copy_goes_on_by_itself(again: Any) -> None:
    run = Run(SparseSGD, {"lr": 0.02, "momentum": 0.9}).go(33)
    twin = again(run.optimizer)
    bucket = Bucket(twin.param_groups[0]["params"])
    for step in range(33, 60):
        for optimizer, each in ((run.optimizer, run.bucket), (twin, bucket)):
            optimizer.apply(each, gradient(step))
    assert bits(bucket.weights_D) == bits(run.weights_D)


def test_step_takes_gradients_of_any_form() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(50, 4, sparse=True)
    layer, unused = torch.nn.Linear(4, 3).to(memory_format=torch.channels_last), torch.nn.Linear(2, 2)
    twins = [torch.nn.Embedding(50, 4), torch.nn.Linear(4, 3)]
    for twin, own in zip(twins, (table, layer), strict=True):
        twin.load_state_dict(own.state_dict())
    ours = SparseSGD([*table.parameters(), *layer.parameters(), *unused.parameters()], lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD([*twins[0].parameters(), *twins[1].parameters()], lr=0.1, momentum=0.9)
    before = bits(unused.weight)

    def closure() -> torch.Tensor:
        ours.zero_grad()
        loss = layer(table(torch.tensor([1, 7, 7]))).square().sum()
        loss.backward()
        return loss

    for _ in range(12):
        loss = ours.step(closure)
        theirs.zero_grad()
        twins[1](twins[0](torch.tensor([1, 7, 7]))).square().sum().backward()
        theirs.step()
    assert loss.item() > 0
    ours.flush()
    assert error(table.weight, twins[0].weight) <= 5e-6
    assert error(layer.weight, twins[1].weight) <= 5e-6
    assert bits(unused.weight) == before


def test_groups_have_rates_of_their_own() -> None:
    parameters = [torch.nn.Parameter(torch.ones(20)) for _ in range(2)]
    optimizer = SparseSGD(parameters[:1], lr=1.0)
    optimizer.add_param_group({"params": parameters[1:], "lr": 0.25})
    for group, parameter in enumerate(parameters):
        optimizer.apply(Bucket([parameter], group=group), Sparse(np.zeros(1, np.uint32), np.ones(1, np.float32), 20))
    assert [parameter[0].item() for parameter in parameters] == [0.0, 0.75]


def test_short_parameters_follow_their_master_weights() -> None:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 40).to(torch.bfloat16))
    optimizer = SparseSGD([parameter], lr=0.01, momentum=0.9)
    bucket = Bucket([parameter])
    for step in range(25):
        optimizer.apply(bucket, gradient(step, 40))
        assert torch.equal(parameter.detach(), bucket.weights_D.to(torch.bfloat16))
    optimizer.flush()
    assert torch.equal(parameter.detach(), bucket.weights_D.to(torch.bfloat16))
    assert optimizer.state[parameter]["momentum_buffer"].dtype == torch.float32


def test_what_cannot_be_is_named() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    for settings, complaint in (
        ({"lr": -1.0}, "lr ≥ 0, got -1.0"),
        ({"lr": float("nan")}, "lr ≥ 0"),
        ({"momentum": -0.1}, "momentum ≥ 0"),
        ({"weight_decay": -0.1}, "weight_decay ≥ 0"),
        ({"nesterov": True}, "momentum > 0"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening 0"),
        ({"flush_every": 0}, "flush_every ≥ 1"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            SparseSGD([parameter], **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="real floating-point"):
        SparseSGD([torch.nn.Parameter(torch.zeros(4, dtype=torch.complex64))])
    run = Run(SparseSGD, {"lr": 0.1})
    with pytest.raises(GradientError, match=f"a gradient of {SIZE} elements, got 5"):
        run.optimizer.apply(run.bucket, gradient(0, 5))
    one = SparseSGD([torch.nn.Parameter(torch.zeros(4))], momentum=0.9)
    one.param_groups[0]["params"][0].grad = torch.ones(4)
    one.step()
    state = one.state_dict()
    with pytest.raises(ConfigError, match=r"momentum_buffer of shape \(5,\), got \(4,\)"):
        SparseSGD([torch.nn.Parameter(torch.zeros(5))], momentum=0.9).load_state_dict(state)


def test_whoever_waits_for_steps_is_called_before_a_flush_changes_weights() -> None:
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = SparseSGD([parameter], lr=0.1, momentum=0.9)
    seen: list[torch.Tensor] = []
    parameter.grad = torch.zeros(64)
    parameter.grad[0] = 1.0
    optimizer.step()
    parameter.grad = torch.zeros(64)
    parameter.grad[40] = 1.0
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.detach().clone()))
    before = parameter.detach().clone()
    assert optimizer.is_behind
    optimizer.flush()
    optimizer.flush()
    assert len(seen) == 1
    assert torch.equal(seen[0], before)
    assert not torch.equal(parameter.detach(), before)
