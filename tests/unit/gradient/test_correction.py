"""Corrections: Adam's direction equals torch.optim's; states of both; settings that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shade.errors import ConfigError, StateMismatchError
from shade.gradient._compress.compressor import COMPRESSORS, Key
from shade.gradient._compress.correction import AdamCorrection, MomentumCorrection
from shade.gradient._compress.device_error_feedback import DeviceErrorFeedback
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._engine.comm_hook import ResidualStore
from shade.gradient._engine.engine import GradientEngine
from shade.gradient.optim import LocalAdam, LocalAdamW, SparseAdamW, SparseSGD
from shade.train.replica import sparse_optimizer

SIZE = 1000
ADAM = AdamCorrection((0.9, 0.99), 1e-6)


def feedback(size: int = SIZE, **settings: Any) -> ErrorFeedback:
    return ErrorFeedback(size, COMPRESSORS.get("topk")(), QUANTISERS.get("none")(), **settings)


def gradients(num_steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(SIZE, dtype=np.float32) * np.float32(1e-3) for _ in range(num_steps)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 5))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(inputs), inputs[:, :5].argmax(1))


def test_what_is_sent_and_kept_is_the_sum_of_adam_s_directions() -> None:
    memory = feedback(correction=ADAM)
    first_D, second_D, total_D, sent_D = (np.zeros(SIZE) for _ in range(4))
    for step, gradient_D in enumerate(gradients(30)):
        first_D = 0.9 * first_D + 0.1 * gradient_D
        second_D = 0.99 * second_D + 0.01 * gradient_D.astype(np.float64) ** 2
        t = step + 1
        total_D += first_D / (1 - 0.9**t) / (np.sqrt(second_D / (1 - 0.99**t)) + 1e-6)
        sent_D += memory.compress(gradient_D, 0.02, Key(0, step, 0)).dense()
    assert np.abs(sent_D).max() > 0
    np.testing.assert_allclose(sent_D + memory.residual_D, total_D, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("correction", [ADAM, AdamCorrection(), MomentumCorrection(0.9)])
def test_a_device_does_what_the_host_does(correction: AdamCorrection | MomentumCorrection) -> None:
    parts = COMPRESSORS.get("random-k")(), QUANTISERS.get("none")()
    host = ErrorFeedback(SIZE, *parts, correction=correction)
    there = DeviceErrorFeedback(SIZE, *parts, torch.device("cpu"), correction=correction)
    steps = gradients(8)
    for step, gradient_D in enumerate(steps[:4]):
        sent = [each.compress(torch.from_numpy(gradient_D), 0.1, Key(0, step, 0)) for each in (host, there)]
        np.testing.assert_array_equal(sent[0].indices_K, sent[1].indices_K)
        np.testing.assert_allclose(sent[0].values_K, sent[1].values_K, rtol=1e-5, atol=1e-7)
    states = [{name: each.clone() for name, each in memory.state_dict().items()} for memory in (host, there)]
    assert states[0].keys() == states[1].keys()
    host.load_state_dict(states[1])
    there.load_state_dict(states[0])
    for step, gradient_D in enumerate(steps[4:], 4):
        sent = [each.compress(torch.from_numpy(gradient_D), 0.1, Key(0, step, 0)) for each in (host, there)]
        np.testing.assert_allclose(sent[0].values_K, sent[1].values_K, rtol=1e-5, atol=1e-6)
    before = {name: each.clone() for name, each in there.state_dict().items()}
    there.compress(torch.from_numpy(steps[0]), 0.1, Key(0, 8, 0))
    there.undo()
    assert all(torch.equal(each, before[name]) for name, each in there.state_dict().items())


def test_a_rank_that_leaves_hands_on_what_it_kept_and_not_its_moments() -> None:
    for kind in (feedback, lambda **settings: device_feedback(**settings)):
        leaving, staying = kind(correction=ADAM), kind(correction=ADAM)
        first, second = gradients(2)
        leaving.compress(torch.from_numpy(first), 0.1, Key(0, 0, 0))
        staying.compress(torch.from_numpy(second), 0.1, Key(0, 0, 0))
        before = {name: each.clone() for name, each in staying.state_dict().items()}
        staying.merge_from(leaving.state_dict())
        after = staying.state_dict()
        assert torch.equal(after["residual"], before["residual"] + leaving.state_dict()["residual"])
        assert all(torch.equal(after[name], before[name]) for name in ("first_moment", "second_moment", "steps"))


def device_feedback(**settings: Any) -> DeviceErrorFeedback:
    return DeviceErrorFeedback(
        SIZE, COMPRESSORS.get("random-k")(), QUANTISERS.get("none")(), torch.device("cpu"), **settings
    )


def test_a_first_moment_is_loaded_only_where_the_correction_has_one() -> None:
    """A state with a moment too many or too few is loaded without it."""
    kinds = {betas: feedback(correction=AdamCorrection(betas)) for betas in ((0.0, 0.99), (0.9, 0.99))}
    for memory in kinds.values():
        memory.compress(gradients(1)[0], 0.1, Key(0, 0, 0))
    without, with_it = ({name: each.clone() for name, each in memory.state_dict().items()} for memory in kinds.values())
    assert with_it.keys() - without.keys() == {"first_moment"}
    assert torch.equal(with_it["second_moment"], without["second_moment"])
    kinds[0.0, 0.99].load_state_dict(with_it)
    kinds[0.9, 0.99].load_state_dict(without)
    assert kinds[0.0, 0.99].state_dict().keys() == without.keys()
    assert not kinds[0.9, 0.99].state_dict()["first_moment"].any()


def test_uncounted_moments_are_ignored() -> None:
    memory = feedback(correction=ADAM)
    memory.compress(gradients(1)[0], 0.1, Key(0, 0, 0))
    memory.load_state_dict({"residual": torch.zeros(SIZE), "first_moment": torch.ones(SIZE)})
    assert not memory.state_dict()["first_moment"].any()
    assert memory.state_dict()["steps"].tolist() == [0]
    broken = {"residual": torch.zeros(SIZE), "second_moment": torch.zeros(3), "steps": torch.ones(1)}
    with pytest.raises(StateMismatchError, match="a second_moment of 1000 elements"):
        memory.load_state_dict(broken)


def test_moments_move_with_their_parameters() -> None:
    """As DDP cuts its buckets anew; a parameter of one element is no count of steps."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    store = ResidualStore(model, lambda size: feedback(size, correction=ADAM))
    everything = list(model.parameters())
    rng = np.random.default_rng(0)
    for step in range(3):
        store.of(everything).compress(rng.standard_normal(161).astype(np.float32), 0.1, Key(0, step, 0))
    before = {name: {kind: each.clone() for kind, each in kept.items()} for name, kept in store.state_dict().items()}
    halves = store.of(everything[:2]), store.of(everything[2:])
    assert [half.state_dict()["steps"].tolist() for half in halves] == [[3], [3]]
    for name, kept in store.state_dict().items():
        assert all(torch.equal(each, before[name][kind]) for kind, each in kept.items())
    again = ResidualStore(model, lambda size: feedback(size, correction=ADAM))
    again.load_state_dict(before)
    assert again.of(everything).state_dict()["steps"].tolist() == [3]


def test_everything_sent_it_is_torch_s_adamw() -> None:
    ours, theirs = network(), network()
    settings: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.05}
    optimizer, reference = LocalAdamW(ours.parameters(), **settings), torch.optim.AdamW(theirs.parameters(), **settings)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 200) for each in (optimizer, reference)]
    with GradientEngine(ours, optimizer, density=1.0, quantiser="none") as engine:
        for step in range(200):
            loss_of(ours, step).backward()
            engine.step()
            loss_of(theirs, step).backward()
            reference.step()
            reference.zero_grad()
            for schedule in schedules:
                schedule.step()
        engine.finish()
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=2e-6)


def test_it_learns_faster_than_an_adam_behind_the_exchange() -> None:
    """One element in fifty, 60 steps: the loss of both, beside AdamW's with whole gradients."""
    losses = {}
    for kind, density in ((LocalAdamW, 0.02), (SparseAdamW, 0.02), (LocalAdamW, 1.0)):
        model = network()
        optimizer = kind(model.parameters(), lr=3e-3)
        with GradientEngine(model, optimizer, density=density, bucket_bytes=4 * 4000) as engine:
            for step in range(60):
                loss_of(model, step).backward()
                engine.step()
            engine.finish()
        with torch.no_grad():
            losses[kind, density] = sum(float(loss_of(model, 1000 + each)) for each in range(20)) / 20
    begun, whole = 1.6, losses[LocalAdamW, 1.0]
    gained = {key: (begun - loss) / (begun - whole) for key, loss in losses.items()}
    assert gained[LocalAdamW, 0.02] > 0.9, gained
    assert gained[LocalAdamW, 0.02] > gained[SparseAdamW, 0.02] + 0.1, gained


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_saved_run_resumes_bit_for_bit(staleness: int) -> None:
    def build() -> tuple[nn.Module, LocalAdamW, GradientEngine]:
        model = network()
        optimizer = LocalAdamW(model.parameters(), lr=1e-2)
        return model, optimizer, GradientEngine(model, optimizer, density=0.05, staleness=staleness)

    def train(model: nn.Module, engine: GradientEngine, steps: range) -> None:
        for step in steps:
            loss_of(model, step).backward()
            engine.step()

    model, optimizer, engine = build()
    with engine:
        train(model, engine, range(5))
        saved = [each.state_dict() for each in (model, optimizer, engine)]
        saved = torch.load(_saved(saved), weights_only=False)
        train(model, engine, range(5, 10))
        engine.finish()
    again, optimizer, engine = build()
    with engine:
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        engine.load_state_dict(saved[2])
        train(again, engine, range(5, 10))
        engine.finish()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def _saved(state: Any) -> Any:
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_the_launcher_s_adams_are_local() -> None:
    kinds = {torch.optim.SGD: SparseSGD, torch.optim.Adam: LocalAdam, torch.optim.AdamW: LocalAdamW}
    assert {kind: sparse_optimizer(kind) for kind in kinds} == kinds


def test_impossible_settings_are_refused_at_construction() -> None:
    model = network()
    for make, complaint in (
        (lambda: AdamCorrection((0.9, 1.0)), r"two betas in \[0, 1\)"),
        (lambda: AdamCorrection(eps=0.0), "eps > 0"),
        (lambda: AdamCorrection(eps=1e-60), "eps > 0"),
        (lambda: MomentumCorrection(1.0), "a momentum in"),
        (lambda: MomentumCorrection(-0.1), "a momentum in"),
        (lambda: LocalAdam(model.parameters(), weight_decay=0.1), "use AdamW"),
        (lambda: LocalAdamW(model.parameters(), betas=(0.9, 2.0)), "two betas"),
        (lambda: GradientEngine(model, LocalAdamW(model.parameters()), correction=ADAM), "leave one of them out"),
        (lambda: GradientEngine(model, SparseAdamW(model.parameters()), correction=ADAM), "leave one of them out"),
        (
            lambda: GradientEngine(model, SparseSGD(model.parameters(), momentum=0.9), correction=ADAM),
            "SparseSGD without momentum",
        ),
        (lambda: GradientEngine(model, LocalAdamW(model.parameters()), clip_norm=1.0), "clip_norm None with Adam"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            make()
    optimizer = LocalAdamW(model.parameters())
    optimizer.step()
    loss_of(model, 0).backward()
    with pytest.raises(ConfigError, match=r"call engine\.step\(\)"):
        optimizer.step()
