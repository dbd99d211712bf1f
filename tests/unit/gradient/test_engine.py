"""The engine of a single rank: gradients, samples, state. Several ranks are in tests/integration."""

from __future__ import annotations

import contextlib
import gc
import io
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shade.checkpoint._session.checkpointer import Checkpointer
from shade.errors import ConfigError, GradientError, NonFiniteGradientError, StateMismatchError
from shade.gradient._compress import correction
from shade.gradient._compress.bucket import Bucket
from shade.gradient._compress.correction import MomentumCorrection
from shade.gradient._compress.device_error_feedback import DeviceErrorFeedback
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._engine import bucket_state, pipeline
from shade.gradient._engine.density import WarmUp
from shade.gradient._engine.engine import GradientEngine
from shade.gradient._engine.gradient_hooks import LossScale
from shade.gradient._engine.meter import COUNTS
from shade.gradient.optim import SparseAdamW, SparseSGD
from shade.telemetry import prometheus_text
from shade.types import Decision, Stateful

EXACT: dict[str, Any] = {"density": 1.0, "quantiser": "none"}
SPARSE: dict[str, Any] = {"density": 0.05, "compressor": "topk", "bucket_bytes": 4 * 4000}


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    gc.collect()
    names = [each.name for each in threading.enumerate() if each.name.startswith("shade-gradient")]
    assert names == []


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 5))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(inputs), inputs[:, :5].argmax(1))


def train(engine: GradientEngine, model: nn.Module, steps: range) -> None:
    for step in steps:
        loss_of(model, step).backward()
        engine.step()


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_accumulated_backward_passes_are_one_step() -> None:
    models = [network(), network()]
    with GradientEngine(models[0], SparseSGD(models[0].parameters(), lr=0.1), **EXACT) as engine:
        with engine.accumulate():
            loss_of(models[0], 0).backward()
        loss_of(models[0], 1).backward()
        engine.step()
    dense = torch.optim.SGD(models[1].parameters(), lr=0.1)
    (loss_of(models[1], 0) + loss_of(models[1], 1)).backward()
    dense.step()
    for mine, theirs in zip(parameters(models[0]), parameters(models[1]), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("staleness", [0, 1])
def test_all_payloads_that_are_ready_set_out_before_the_first_is_waited_for(staleness: int) -> None:
    model, seen = network(), []
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SPARSE, staleness=staleness) as engine:
        exchange = engine._topology.exchange

        def watched(payload: Any, lengths: Any) -> Any:
            arrive = exchange(payload, lengths)
            seen.append("sent")
            return lambda: [seen.append("waited for"), arrive()][1]

        engine._topology.exchange = watched  # type: ignore[method-assign]
        train(engine, model, range(1))
        engine.finish()
        num_buckets = len(engine._bucket_states)
    assert num_buckets > 2
    together = ["sent"] * num_buckets + ["waited for"] * num_buckets
    assert seen == (together if staleness else ["sent", "waited for"] * num_buckets)


@pytest.mark.parametrize("is_accumulated", [False, True])
def test_a_second_backward_pass_in_a_step_is_refused_by_name(is_accumulated: bool) -> None:
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:
        loss_of(model, 0).backward()
        second = loss_of(model, 1)
        place = engine.accumulate() if is_accumulated else contextlib.nullcontext()
        with place, pytest.raises(ConfigError, match=r"a second gradient of '4\.(weight|bias)'.*accumulate"):
            second.backward()
        with pytest.raises(ConfigError, match=r"a second gradient of .*accumulate"):
            engine.step()
        train(engine, model, range(2, 4))


def test_a_weight_of_two_reentrant_checkpoints_is_trained_inside_accumulate() -> None:
    ends = []
    for is_accumulated in (None, False, True):
        model, inputs = Odd(), torch.ones(4, 48, requires_grad=True)
        dense = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        kept = [checkpoint(each, inputs, use_reentrant=True) for each in (model.first, model.tied)]
        if is_accumulated is None:
            sum(kept).square().mean().backward()
            dense.step()
        else:
            with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:
                if is_accumulated:
                    with engine.accumulate():
                        sum(kept).square().mean().backward()
                    engine.step()
                else:
                    with pytest.raises(ConfigError, match="all, where reentrant checkpoints share a weight"):
                        sum(kept).square().mean().backward()
        ends.append(parameters(model))
    for plain, ours in zip(ends[0], ends[2], strict=True):
        assert torch.allclose(plain, ours, atol=1e-6)


class Odd(nn.Module):
    """A shared weight, a frozen one, and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.sometimes = nn.Linear(48, 48), nn.Linear(48, 48)
        self.tied = nn.Linear(48, 48)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(48, 48).requires_grad_(False)

    def forward(self, inputs: torch.Tensor, with_sometimes: bool) -> torch.Tensor:
        hidden = self.frozen(self.tied(torch.tanh(self.first(inputs))))
        return self.sometimes(hidden) if with_sometimes else hidden


@pytest.mark.parametrize("staleness", [0, 1])
def test_shared_frozen_and_unused_parameters(staleness: int) -> None:
    model, reference = Odd(), Odd()
    dense = torch.optim.SGD([each for each in reference.parameters() if each.requires_grad], lr=0.1, momentum=0.5)
    optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.5, flush_every=1)
    pending: list[torch.Tensor | None] | None = None
    with GradientEngine(model, optimizer, **EXACT, staleness=staleness) as engine:
        for step in range(8):
            inputs = torch.randn(4, 48, generator=torch.Generator().manual_seed(step))
            model(inputs, step % 3 == 0).square().mean().backward()
            engine.step()
            reference(inputs, step % 3 == 0).square().mean().backward()
            trained = [each for each in reference.parameters() if each.requires_grad]
            fresh = [each.grad for each in trained]
            due, pending = (fresh, None) if staleness == 0 else (pending, fresh)
            if due is not None:
                for parameter, gradient in zip(trained, due, strict=True):
                    parameter.grad = gradient
                dense.step()
            dense.zero_grad()
    for mine, theirs in zip(parameters(model), parameters(reference), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert model.tied.weight is model.first.weight


def test_a_parameter_that_thaws_is_not_trained_by_one_rank_alone() -> None:
    model = Odd()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:
        model.frozen.requires_grad_(True)
        model(torch.ones(1, 48), True).sum().backward()
        with pytest.raises(ConfigError, match="make a new engine"):
            engine.step()


@pytest.mark.parametrize("kind", [SparseSGD, SparseAdamW])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_parameter_that_freezes_for_a_time_stays_as_with_plain_pytorch(staleness: int, kind: Any) -> None:
    model, reference = network(), network()
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1} if kind is SparseSGD else {"lr": 0.01, "eps": 1e-4}
    dense = (torch.optim.SGD if kind is SparseSGD else torch.optim.AdamW)(reference.parameters(), **settings)
    optimizer, steps = kind(model.parameters(), **settings), range(12)
    with GradientEngine(model, optimizer, **EXACT, staleness=staleness) as engine:
        for step in steps:
            engine.finish()
            before = parameters(model)
            model[0].requires_grad_(not 3 <= step < 7)
            train(engine, model, range(step, step + 1))
            engine.finish()
            assert (torch.equal(parameters(model)[0], before[0])) == (3 <= step < 7)
        layout = optimizer.layout_of(engine._buckets[0])
    for step in steps:
        reference[0].requires_grad_(not 3 <= step < 7)
        loss_of(reference, step).backward()
        dense.step()
        dense.zero_grad()
    for mine, theirs in zip(parameters(model), parameters(reference), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert len(layout) == 2, "the parts have taken different numbers of steps"


def taken_back(model: nn.Module, optimizer: Any) -> list[Any]:
    """What scripts do to gradients after the backward pass: a name, the act, and what plain PyTorch steps then."""

    def drops_a_layer() -> None:
        for parameter in model[4].parameters():  # type: ignore[index, union-attr]
            parameter.grad = None

    def puts_ones() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    return [drops_a_layer, optimizer.zero_grad, model.zero_grad, puts_ones]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("number", range(4))
def test_a_gradient_that_is_taken_back_is_refused_or_taken_back(number: int, staleness: int) -> None:
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    model, reference = network(), network()
    dense = torch.optim.SGD(reference.parameters(), **settings)
    optimizer = SparseSGD(model.parameters(), **settings)
    with GradientEngine(model, optimizer, **EXACT, staleness=staleness) as engine:
        for step in range(5):
            loss_of(reference, step).backward()
            if step == 2:
                loss_of(model, step).backward()
                before = parameters(model)
                taken_back(model, optimizer)[number]()
                with pytest.raises(ConfigError, match=r"p\.grad of '.*' (set to None|replaced).*engine\.accumulate"):
                    engine.step()
                assert_same(parameters(model), before)
                with engine.accumulate():  # the cure
                    loss_of(model, step).backward()
                for each in (model, reference):
                    taken_back(each, optimizer if each is model else dense)[number]()
                engine.step()
            else:
                train(engine, model, range(step, step + 1))
            engine.finish()
            dense.step()
            dense.zero_grad()
    for mine, theirs in zip(parameters(model), parameters(reference), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_a_rank_s_own_gradient_is_changed_in_a_hook() -> None:
    """The cure that the refusal of `p.grad.mul_` names."""
    model, reference = network(), network()
    dense = torch.optim.SGD(reference.parameters(), lr=0.1)
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:
        loss_of(model, 0).backward()
        with pytest.raises(ConfigError, match=r"change a rank's own gradient in p\.register_hook"):
            model[0].weight.grad.data.mul_(0.5)
        engine.step()
        model[0].weight.register_hook(lambda gradient: 0.5 * gradient)
        train(engine, model, range(1, 2))
    for step in range(2):
        loss_of(reference, step).backward()
        if step:
            reference[0].weight.grad.mul_(0.5)
        dense.step()
        dense.zero_grad()
    for mine, theirs in zip(parameters(model), parameters(reference), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_step_hooks_see_the_weights_of_before_and_after() -> None:
    model = network()
    optimizer, seen = SparseSGD(model.parameters(), lr=1.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameters(model)[0]))
    optimizer.register_step_post_hook(lambda *_: model[0].weight.data.clamp_(-0.01, 0.01))
    with GradientEngine(model, optimizer, **EXACT) as engine:
        before = parameters(model)[0]
        train(engine, model, range(1))
    assert torch.equal(seen[0], before)
    assert float(parameters(model)[0].abs().max()) <= 0.01


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_parameter_group_that_is_added_later_is_not_trained_by_one_rank_alone(staleness: int) -> None:
    model, head = network(), nn.Linear(5, 5)
    optimizer = SparseSGD(model.parameters(), lr=0.1)
    with GradientEngine(model, optimizer, **EXACT, staleness=staleness) as engine:
        train(engine, model, range(1))
        optimizer.add_param_group({"params": list(head.parameters())})
        before = parameters(head)
        head(model(torch.ones(1, 32))).sum().backward()
        with pytest.raises(ConfigError, match="added to the optimizer"):
            engine.step()
        with pytest.raises(ConfigError, match="added to the optimizer"):
            engine.finish()
        assert_same(parameters(head), before)
    head.zero_grad()
    with GradientEngine(nn.Sequential(model, head), optimizer, **EXACT) as engine:  # the cure
        head(model(torch.ones(1, 32))).sum().backward()
        engine.step()
    assert not torch.equal(parameters(head)[1], before[1])


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("is_last_outside", [True, False])
def test_gradients_are_unscaled_wherever_the_passes_stand(staleness: int, is_last_outside: bool) -> None:
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = network()
        optimizer = SparseSGD(model.parameters(), lr=0.1)
        with GradientEngine(model, optimizer, **EXACT, scaler=scaler, staleness=staleness) as engine:
            for step in range(3):
                for place in range(2):
                    outside = place == 1 and is_last_outside
                    with contextlib.nullcontext() if outside else engine.accumulate():
                        loss = loss_of(model, 2 * step + place)
                        (scaler.scale(loss) if scaler else loss).backward()
                engine.step()
            engine.finish()
        ends.append(parameters(model))
    for plain, scaled in zip(*ends, strict=True):
        assert torch.allclose(plain, scaled, atol=1e-5)


def test_the_scale_follows_all_ranks_before_this_rank_has_scaled_a_loss() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT, scaler=scaler) as engine:
        engine.num_samples = 0
        engine.step()
        assert scaler.get_scale() == 16.0
        engine.num_samples = 1
        scaler.scale(loss_of(model, 0) * float("inf")).backward()
        engine.step()
        assert scaler.get_scale() == 8.0
    joined = torch.amp.GradScaler("cpu", init_scale=8.0)
    LossScale(joined).load_status({"num_good_steps": 3, "scale": 4.0})
    assert joined.get_scale() == 4.0
    assert float(joined.scale(torch.ones(()))) == 4.0


class InMemoryOfItsOwn:
    """An edit that puts gradients into the same memory at every step, which `after` writes to."""

    def __init__(self) -> None:
        self.own: dict[nn.Parameter, torch.Tensor] = {}

    def __call__(self, model: nn.Module) -> None:
        for each in model.parameters():
            own = self.own.setdefault(each, torch.empty_like(each))
            own.copy_(each.grad)  # type: ignore[arg-type]
            each.grad = own

    def after(self) -> None:
        for own in self.own.values():
            own.fill_(1e6)


def new_ones(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad = 0.5 * each.grad  # type: ignore[operator]


def in_place(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad.mul_(0.5).data.add_(0.01)  # type: ignore[union-attr]


EDITS: list[Any] = [
    new_ones,
    in_place,
    lambda model: setattr(model[0].weight, "grad", None),
    lambda model: model[2].zero_grad(set_to_none=False),
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
]


@pytest.mark.parametrize("staleness", [0, 1])
def test_accumulated_gradients_are_in_p_grad_for_the_script_to_change(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = Bucket.gather
    # A late step is still on its way when the script goes on.
    monkeypatch.setattr(Bucket, "gather", lambda *given: [time.sleep(0.004), gather(*given)][1])
    model, reference, own = network(), network(), InMemoryOfItsOwn()
    dense, late = torch.optim.SGD(reference.parameters(), lr=0.5), []
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.5), **EXACT, staleness=staleness) as engine:
        for step, edit in enumerate([*EDITS, own, own, None]):
            for number in range(2):
                with contextlib.nullcontext() if edit is None and number else engine.accumulate():
                    loss_of(model, 2 * step + number).backward()
                loss_of(reference, 2 * step + number).backward()
                for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
                    if edit is not None:
                        torch.testing.assert_close(mine.grad, plain.grad)
            for each in (model, reference) if edit else ():
                (edit if edit is not own or each is model else lambda _: None)(each)
            engine.step()
            own.after()
            late.append([each.grad for each in reference.parameters()])
            if step >= staleness:
                step_with(dense, late.pop(0))
            dense.zero_grad()
        engine.finish()
        for each in late:
            step_with(dense, each)
    for mine, plain in zip(parameters(model), parameters(reference), strict=True):
        assert torch.allclose(mine, plain, atol=1e-5)


def step_with(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def test_accumulated_gradients_are_neither_applied_nor_unscaled_by_one_rank_alone() -> None:
    model = network()
    optimizer, scaler = SparseSGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = parameters(model)
    with GradientEngine(model, optimizer, **EXACT, scaler=scaler) as engine:
        for unscales in (False, True):
            with engine.accumulate():
                scaler.scale(loss_of(model, 0)).backward()
            scaler.unscale_(optimizer) if unscales else None
            with pytest.raises(ConfigError, match=r"optimizer\.step.*engine\.step"):
                optimizer.step()
            assert_same(parameters(model), before)
            if unscales:
                with pytest.raises(ConfigError, match=r"scaler\.unscale_.*engine\.step\(\) unscales"):
                    engine.step()
                assert_same(parameters(model), before)
            else:
                engine.step()
                before = parameters(model)
    loss_of(model, 0).backward()
    optimizer.step()
    assert not torch.equal(parameters(model)[0], before[0])


@pytest.mark.parametrize("staleness", [0, 1])
def test_gradients_that_are_on_their_way_cannot_be_clipped_or_applied_in_silence(staleness: int) -> None:
    model = network()
    optimizer = SparseSGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with GradientEngine(model, optimizer, **EXACT, staleness=staleness) as engine:
        train(engine, model, range(2))
        scaler.scale(loss_of(model, 2)).backward()
        for use in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            lambda: scaler.unscale_(optimizer),
            optimizer.step,
            lambda: [each.grad.norm() for each in model.parameters() if each.grad is not None],
        ):
            with pytest.raises(ConfigError, match=r"gradients to be left to the engine.*engine\.step"):
                use()
        engine.step()
        assert [each.grad for each in model.parameters()] == [None] * 6
        optimizer.zero_grad()
        train(engine, model, range(3, 5))
        with engine.accumulate():
            loss_of(model, 5).backward()
        optimizer.zero_grad(set_to_none=True)
        engine.finish()
        before = parameters(model)
        engine.step()
        engine.finish()
        assert_same(parameters(model), before)
        loss_of(model, 5).backward()
        optimizer.zero_grad(set_to_none=True)
    assert [each.grad for each in model.parameters()] == [None] * 6


def rebind_data(model: nn.Module) -> None:
    for each in model.parameters():
        each.data = each.data * 0.5


def rebind_by_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())


def rebind_one(model: nn.Module) -> None:
    bias = model[-1].bias  # type: ignore[index]
    bias.data = torch.ones_like(bias.data)


def change_in_place(model: nn.Module) -> None:
    for each in model.parameters():
        each.data.mul_(0.5)


@pytest.mark.parametrize("rebind", [rebind_data, rebind_by_vector, rebind_one, change_in_place])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_weights_that_a_script_changes_are_trained_from_there(rebind: Any, dtype: torch.dtype, momentum: float) -> None:
    model, reference = network().to(dtype), network().to(dtype)
    dense = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=momentum)
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1, momentum=momentum), **EXACT) as engine:
        for step in range(4):
            if step == 2:
                rebind(model)
                rebind(reference)
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(inputs).square().mean().backward()
            engine.step()
            reference(inputs).square().mean().backward()
            dense.step()
            dense.zero_grad()
    for mine, theirs in zip(parameters(model), parameters(reference), strict=True):
        assert torch.allclose(mine, theirs, atol=0.02 if dtype == torch.bfloat16 else 1e-6)


def test_a_transposed_weight_is_trained_as_it_is_seen() -> None:
    torch.manual_seed(0)
    model, reference = (nn.Linear(8, 8, bias=False) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    dense, inputs = torch.optim.SGD(reference.parameters(), lr=0.1), torch.randn(4, 8)
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:
        for each in (model, reference):
            each.weight.data = each.weight.data.t()
        model(inputs).square().sum().backward()
        engine.step()
        reference(inputs).square().sum().backward()
        dense.step()
    assert torch.allclose(model.weight, reference.weight, atol=1e-6)


def test_channels_last_after_the_start_is_trained() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 3)
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        before = parameters(model)
        model(torch.ones(1, 8, 5, 5)).sum().backward()
        engine.step()
    assert not torch.equal(parameters(model)[0], before[0])


def test_an_optimizer_of_its_own_trains_weights_that_are_bound_to_other_memory() -> None:
    model = network()
    optimizer = SparseSGD(model.parameters(), lr=0.1)
    for _ in range(2):
        rebind_data(model)
        before = parameters(model)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(torch.equal(a, b) for a, b in zip(parameters(model), before, strict=True))


def test_other_parameters_in_the_place_of_the_engine_s_are_refused_by_name() -> None:
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
        loss_of(model, 0).backward()
        with pytest.raises(ConfigError, match=r"'0\.weight'.*assign=True"):
            engine.step()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:  # the cure
        model.zero_grad()
        before = parameters(model)
        train(engine, model, range(1))
        assert not torch.equal(parameters(model)[0], before[0])


def test_weights_of_another_type_after_the_start_are_refused_by_name() -> None:
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:
        model.double()
        model(torch.ones(1, 32, dtype=torch.float64)).sum().backward()
        with pytest.raises(ConfigError, match=r"'0\.weight' as at the start.*float64.*convert the model first"):
            engine.step()
    model.zero_grad()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:  # the cure
        before = parameters(model)
        model(torch.ones(1, 32, dtype=torch.float64)).sum().backward()
        engine.step()
        assert not torch.equal(parameters(model)[0], before[0])


def test_a_model_under_ddp_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(network())
        with pytest.raises(ConfigError, match=r"give the engine ddp\.module"):
            GradientEngine(ddp, SparseSGD(ddp.parameters(), lr=0.1))
        with GradientEngine(ddp.module, SparseSGD(ddp.parameters(), lr=0.1), **EXACT) as engine:  # the cure
            train(engine, ddp.module, range(1))
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_of_an_open_engine_are_refused_until_it_is_closed() -> None:
    model = network()
    optimizer = SparseSGD(model.parameters(), lr=0.1)
    first = GradientEngine(model, optimizer, **EXACT)
    part = SparseSGD(model[2].parameters(), lr=0.1)
    for each in (optimizer, part):
        with pytest.raises(ConfigError, match=r"got 'parameters of another engine'; close\(\) that one first"):
            GradientEngine(model, each, **EXACT)
    train(first, model, range(2))
    first.close()
    before = parameters(model)
    with GradientEngine(model, optimizer, **EXACT) as engine:  # the cure
        train(engine, model, range(2, 3))
    assert not torch.equal(parameters(model)[0], before[0])


@pytest.mark.parametrize("kind", [SparseSGD, SparseAdamW])
def test_a_new_engine_after_a_layer_was_unfrozen_trains_as_plain_pytorch(kind: Any) -> None:
    model, reference = network(), network()
    for each in (model, reference):
        each[0].requires_grad_(False)
    settings = {"lr": 0.1, "momentum": 0.9} if kind is SparseSGD else {"lr": 0.01, "eps": 1e-4}
    optimizer = kind(model.parameters(), **settings)
    dense = (torch.optim.SGD if kind is SparseSGD else torch.optim.AdamW)(reference.parameters(), **settings)
    for first in (0, 3):
        with GradientEngine(model, optimizer, **EXACT) as engine:
            train(engine, model, range(first, first + 3))
            engine.finish()
        for step in range(first, first + 3):
            dense.zero_grad()
            loss_of(reference, step).backward()
            dense.step()
        for each in (model, reference):
            each[0].requires_grad_(True)
    for mine, theirs in zip(parameters(model), parameters(reference), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_two_engines_train_two_models_in_turn_as_in_a_gan() -> None:
    ends = []
    for is_ours in (False, True):
        models = [network(), network()]
        kind = SparseSGD if is_ours else torch.optim.SGD
        optimizers = [kind(each.parameters(), lr=0.1) for each in models]
        engines = [GradientEngine(*pair, **EXACT) for pair in zip(models, optimizers, strict=True)] if is_ours else []
        for step in range(4):
            made = nn.functional.pad(models[0](torch.ones(2, 32)), (0, 27))
            models[1](made.detach()).square().mean().backward()
            (engines or optimizers)[1].step()
            optimizers[1].zero_grad()
            models[1].requires_grad_(False)
            (models[1](made) - step).square().mean().backward()
            models[1].requires_grad_(True)
            (engines or optimizers)[0].step()
            optimizers[0].zero_grad()
        for engine in engines:
            engine.close()
        ends.append([*parameters(models[0]), *parameters(models[1])])
    for plain, ours in zip(*ends, strict=True):
        assert torch.allclose(plain, ours, atol=1e-6)


def test_a_layer_is_saved_without_the_rest_of_its_bucket() -> None:
    def size(module: nn.Module) -> int:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        return file.tell()

    for dtype in (torch.float32, torch.bfloat16):
        model = network().to(dtype)
        before = [size(model[-1]), size(model)]
        with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1)):
            assert [size(model[-1]), size(model)] == before


def test_a_state_is_read_by_torch_load_as_it_is() -> None:
    model, file = network(), io.BytesIO()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SPARSE, staleness=1) as engine:
        train(engine, model, range(2))
        torch.save(engine.state_dict(), file)
        file.seek(0)
        engine.load_state_dict(torch.load(file))
        train(engine, model, range(2, 3))


def test_weights_of_half_precision_follow_float32_ones() -> None:
    model = network().bfloat16()
    optimizer = SparseSGD(model.parameters(), lr=1e-4)
    with GradientEngine(model, optimizer, **EXACT) as engine:
        before = parameters(model)
        for step in range(3):
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(inputs).square().mean().backward()
            engine.step()
        masters = torch.cat([each.weights_D for each in (each.bucket for each in engine._bucket_states)])
        assert masters.dtype == torch.float32
        assert not torch.equal(masters, masters.bfloat16().float())  # steps too small for bfloat16 are not lost
        model.load_state_dict(
            {name: each.clone() for (name, _), each in zip(model.named_parameters(), before, strict=True)}
        )
        for bucket_state in engine._bucket_states:
            for parameter, view in zip(
                bucket_state.bucket.parameters, bucket_state.bucket.views(bucket_state.bucket.weights_D), strict=True
            ):
                assert torch.equal(parameter.float(), view)


def test_samples_belong_to_the_batch_that_is_drawn() -> None:
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SPARSE) as engine:
        engine.num_samples = 16
        loss_of(model, 0).backward()
        with pytest.raises(ConfigError, match="before the backward pass"):
            engine.num_samples = 8
        engine.step()
        report = engine.report()
        assert report is not None
        assert (report.step, report.num_samples) == (0, 16)
        assert 0.05 <= report.density < 0.2
        engine.num_samples = 0
        before = parameters(model)
        engine.step()  # no rank has samples: a step without a gradient
        assert_same(parameters(model), before)
        with pytest.raises(ConfigError, match="num_samples ≥ 0"):
            engine.num_samples = -1


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_decision_rides_at_once_and_again_if_its_step_fails(staleness: int) -> None:
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SPARSE, staleness=staleness) as engine:
        train(engine, model, range(2))
        engine.propose(Decision(0.5, (), 0, "rides in step 2"))
        seen = []
        for step in range(2, 12):
            if step == 6:
                engine.propose(Decision(0.25, (), 0, "rides in step 6, which fails"))
            seen.append(engine.density)
            (loss_of(model, step) * (float("nan") if step == 6 else 1.0)).backward()
            with contextlib.suppress(NonFiniteGradientError):
                engine.step()
        assert engine.counts["gradient_failed_steps"] == 1
        told_again = 6 + 1 + staleness
        first, second = 2 + 1 + staleness, told_again + 1 + staleness
        assert seen == [SPARSE["density"]] * (first - 2) + [0.5] * (second - first) + [0.25] * (12 - second)


@pytest.mark.parametrize("staleness", [0, 1])
def test_nan_leaves_everything_as_it_was(staleness: int) -> None:
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SPARSE, staleness=staleness) as engine:
        train(engine, model, range(3))
        engine.finish()
        before = parameters(model)
        kept = [each["residual"].numpy().copy() for each in engine.state_dict()["residuals"]]
        (loss_of(model, 3) * float("nan")).backward()
        if staleness:
            engine.step()
        with pytest.raises(NonFiniteGradientError, match="step 3"):
            (engine.finish if staleness else engine.step)()
        assert_same(parameters(model), before)
        engine.load_state_dict(state := engine.state_dict())
        assert state["step"] == 4
        assert all(np.array_equal(a, b["residual"].numpy()) for a, b in zip(kept, state["residuals"], strict=True))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_saved_run_resumes_bit_for_bit(staleness: int, run: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, SparseAdamW, GradientEngine]:
        model = network()
        optimizer = SparseAdamW(model.parameters(), lr=1e-3)
        settings = {**SPARSE, "density": WarmUp(0.02, 8), "quantiser": "int8", "staleness": staleness}
        return model, optimizer, GradientEngine(model, optimizer, **settings)

    def checkpointer() -> Checkpointer:
        return Checkpointer(persist_to=str(tmp_path), run=run, every=1000)

    model, optimizer, engine = build()
    with checkpointer() as keeping, engine:
        assert isinstance(engine, Stateful)
        keeping.attach(model=model, optimizer=optimizer, engine=engine)
        train(engine, model, range(5))
        engine.propose(Decision(0.1, (16,), 8, "a test"))
        train(engine, model, range(5, 6))
        keeping.save()
        keeping.wait_durable(60)
        train(engine, model, range(6, 12))
        engine.finish()
        expected = parameters(model)

    model, optimizer, engine = build()
    with checkpointer() as keeping, engine:
        keeping.attach(model=model, optimizer=optimizer, engine=engine)
        train(engine, model, range(2))  # a run that is somewhere else
        keeping.restore_latest()
        assert engine.step_count == 6
        train(engine, model, range(6, 12))
        assert (engine.density, engine.batch_size) == (0.1, 16)
        engine.finish()
        assert_same(parameters(model), expected)


def test_a_snapshot_still_being_copied_is_waited_for_before_weights_change() -> None:
    model = network()
    optimizer = SparseSGD(model.parameters(), lr=0.1)
    seen, moved = [], network()
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameters(model)))
    with GradientEngine(model, optimizer, **SPARSE) as engine:
        train(engine, model, range(1))
    assert len(seen) == 1
    assert_same(seen[0], parameters(moved))


def test_a_state_of_another_model_changes_nothing() -> None:
    model, other = network(), nn.Linear(64, 64)
    with GradientEngine(other, SparseSGD(other.parameters(), lr=0.1), **SPARSE) as engine:
        foreign = engine.state_dict()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SPARSE) as engine:
        train(engine, model, range(2))
        before = [each["residual"].numpy().copy() for each in engine.state_dict()["residuals"]]
        with pytest.raises(StateMismatchError, match="residuals of the parameters"):
            engine.load_state_dict(foreign)
        after = engine.state_dict()
        assert after["step"] == 2
        assert all(np.array_equal(a, b["residual"].numpy()) for a, b in zip(before, after["residuals"], strict=True))
        loss_of(model, 2).backward()
        with pytest.raises(ConfigError, match="between two steps"):
            engine.state_dict()


def test_clipping_bounds_what_is_applied() -> None:
    model = network()
    before = parameters(model)
    with GradientEngine(model, SparseSGD(model.parameters(), lr=1.0), **EXACT, clip_norm=1e-3) as engine:
        train(engine, model, range(1))
        report = engine.report()
    assert report is not None
    assert report.gradient_norm > 1e-3
    moved = [after - at for after, at in zip(parameters(model), before, strict=True)]
    assert float(torch.cat([each.flatten() for each in moved]).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_counters_reach_a_page_of_prometheus() -> None:
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SPARSE, staleness=1) as engine:
        train(engine, model, range(3))
        assert engine.counts["gradient_steps"] == 2  # the third is still to be applied
        engine.finish()
        assert engine.counts["gradient_steps"] == 3
        page = prometheus_text(engine.counts, COUNTS)
    assert "shade_gradient_steps_total 3" in page
    assert engine.counts["gradient_chosen"] < 0.2 * engine.counts["gradient_elements"]


def test_impossible_settings_are_refused_at_construction() -> None:
    model = network()
    optimizer = SparseSGD(model.parameters(), lr=0.1)
    for settings, expected in (
        ({"staleness": 2}, "staleness 0 or 1"),
        ({"clip_norm": 0.0}, "clip_norm > 0"),
        ({"density": 0.0}, "density"),
        ({"local_size": 2}, "divide 1"),
        ({"timeout_seconds": 0}, "timeout_seconds > 0"),
        ({"compressor": "topp"}, "did you mean 'topk'"),
    ):
        with pytest.raises(ConfigError, match=expected):
            GradientEngine(model, optimizer, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sparse_hook"):
        GradientEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    engine = GradientEngine(model, optimizer)
    with pytest.raises(ConfigError, match="1 batch sizes"):
        engine.propose(Decision(0.1, (1, 2), 0, "a test"))
    engine.close()
    engine.close()
    with pytest.raises(ConfigError, match="open engine"):
        engine.step()


class PlayedCuda(str):
    """The name of a device that torch takes for the host, and the pipeline for a GPU."""

    type = "cuda"


def test_a_gradient_on_a_gpu_is_freed_after_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's stream may write to what was freed while the pipeline's own stream still reads it."""
    read: list[weakref.ref[torch.Tensor]] = []
    alive, entered = [], []
    gather = Bucket.gather

    def noting(bucket: Bucket, gradients: Any, *others: Any) -> None:
        read.extend(weakref.ref(each) for each in gradients if each is not None)
        gather(bucket, gradients, *others)

    class Stream:
        def synchronize(self) -> None:
            if read:
                alive.append(all(each() is not None for each in read))
                read.clear()

    @contextlib.contextmanager
    def entering(what: Any) -> Iterator[None]:
        entered.append(type(what))
        yield

    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SPARSE) as engine:
        for each in engine._bucket_states:
            each.bucket.device = PlayedCuda("cpu")  # type: ignore[assignment]
        stream = Stream()
        monkeypatch.setattr(Bucket, "gather", noting)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "device", entering)
        monkeypatch.setattr(torch.cuda, "stream", entering)
        train(engine, model, range(3))
    assert alive == [True] * 3 * len(engine._bucket_states)
    assert entered[:2] == [PlayedCuda, Stream], "the stream alone would leave a context on GPU 0"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_model_on_a_gpu_trains_as_on_the_cpu(staleness: int) -> None:
    models = [network(), network().cuda()]
    for model in models:
        with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT, staleness=staleness) as engine:
            for step in range(10):
                inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
                device = next(model.parameters()).device
                nn.functional.cross_entropy(model(inputs.to(device)), inputs[:, :5].argmax(1).to(device)).backward()
                engine.step()
            engine.finish()
    for mine, theirs in zip(parameters(models[0]), parameters(models[1]), strict=True):
        assert torch.allclose(mine, theirs.cpu(), atol=1e-4)


def test_a_gradient_far_from_the_host_is_chosen_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU's gradient through buckets and pipeline, with the host in the place of the GPU."""

    def build() -> tuple[nn.Module, GradientEngine]:
        model = network()
        settings = {**SPARSE, "quantiser": "int8", "staleness": 1}
        return model, GradientEngine(model, SparseSGD(model.parameters(), lr=0.1, momentum=0.9), **settings)

    model, engine = build()
    with engine:
        train(engine, model, range(8))
        engine.finish()
        expected, kept = parameters(model), engine.state_dict()["residuals"]
    monkeypatch.setattr(bucket_state, "is_accelerator", lambda device: True)
    far, far_engine = build()
    with far_engine:
        kinds = [(each.bucket.is_dense, type(each.feedback)) for each in far_engine._bucket_states]
        assert {DeviceErrorFeedback, ErrorFeedback} == {kind for _, kind in kinds}
        assert all(
            is_dense == (kind is ErrorFeedback) for is_dense, kind in kinds
        )  # what is sent whole may as well travel
        train(far_engine, far, range(8))
        far_engine.finish()
        for mine, theirs in zip(parameters(far), expected, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)
        before = parameters(far)
        (loss_of(far, 8) * float("nan")).backward()
        far_engine.step()
        with pytest.raises(NonFiniteGradientError):
            far_engine.finish()
        assert_same(parameters(far), before)
        for mine, theirs in zip(far_engine.state_dict()["residuals"], kept, strict=True):
            assert torch.allclose(mine["residual"], torch.as_tensor(theirs["residual"]), atol=1e-6)
        state = far_engine.state_dict()
    monkeypatch.undo()
    near, near_engine = build()
    with near_engine:
        near.load_state_dict(far.state_dict())
        near_engine.load_state_dict(state)  # a run on GPUs resumes on the host
        train(near_engine, near, range(9, 11))


def test_kernels_that_cannot_be_prepared_are_an_error_of_the_step_and_not_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise OSError("no such kernel")

    for module in (pipeline, correction):
        monkeypatch.setattr(module, "prepare", broken)
    model = network()
    before = parameters(model)
    settings = EXACT | {"correction": MomentumCorrection(0.9)}
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **settings) as engine:
        with pytest.raises(GradientError, match="failed on rank 0") as caught:
            train(engine, model, range(1))
        assert "no such kernel" in str(caught.value.__cause__)
        assert_same(before, parameters(model))
        monkeypatch.undo()
        train(engine, model, range(1, 3))
        assert not all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))


def test_its_repr_says_what_it_is_doing() -> None:
    model = network()
    engine = GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SPARSE, staleness=1)
    train(engine, model, range(3))
    assert repr(engine) == (
        f"<GradientEngine of {sum(each.numel() for each in model.parameters()):,} parameters in {len(engine._buckets)} "
        "buckets, topk at density 0.05, quantiser bf16, staleness 1, rank 0 of 1, step 3, 0.0 MB sent>"
    )
    engine.close()
    assert repr(engine).endswith("0.0 MB sent, closed>")


def test_its_public_attributes_are_those_that_users_need() -> None:
    model = network()
    expected = {"accumulate", "batch_size", "close", "counts", "density", "finish", "load_state_dict"}
    expected |= {"load_state_dicts", "num_samples", "propose", "report", "state_dict", "step", "step_count"}
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1)) as engine:
        assert {name for name in (*dir(GradientEngine), *vars(engine)) if not name.startswith("_")} == expected
