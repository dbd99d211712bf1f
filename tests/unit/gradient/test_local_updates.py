"""Outer steps on a single rank. Several ranks are in tests/integration/test_local_updates_ranks.py."""

from __future__ import annotations

import gc
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shade.checkpoint._session.checkpointer import Checkpointer
from shade.errors import ShadeError, StateMismatchError
from shade.gradient._local.local_updates import DiLoCo, LocalSGD, LocalUpdates
from tests.support.gradient_ranks import loss_of, network


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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every": 0}, "every ≥ 1 step"),
        ({"lr": 0.0}, "an outer lr > 0"),
        ({"momentum": 1.0}, "an outer momentum"),
        ({"density": 2.0}, "a density in"),
        ({"decay": 1.5}, "a decay in"),
        ({"fragments": 5}, "1 ≤ fragments ≤ every"),
        ({"fragments": 3}, "at least 3 buckets"),
        ({"every": 3, "delay": 3}, "0 ≤ delay < every"),
        ({"compressor": "chunk-topk"}, "did you mean 'chunk-top-k'"),
        ({"quantiser": "int3"}, "did you mean"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ShadeError, match=re.escape(expected)):
        LocalUpdates(nn.Linear(4, 4), **{"every": 4, **settings})


def test_states_of_others_are_refused_and_change_nothing() -> None:
    with DiLoCo(nn.Linear(64, 64), every=4) as large:
        before = [each.clone() for each in large.state_dict()["anchors"]]
        for other, expected in (
            (lambda: DiLoCo(nn.Linear(4, 4), every=4), "anchors"),
            (lambda: LocalSGD(nn.Linear(64, 64), every=4), "velocities"),
            (lambda: DiLoCo(nn.Linear(64, 64), every=4, fragments=2), "1 fragments"),
        ):
            with other() as small, pytest.raises(StateMismatchError, match=expected):
                large.load_state_dict(small.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(before, large.state_dict()["anchors"], strict=True))


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 2, "momentum": 0.5}], ids=["at once", "beside"])
def test_a_saved_run_resumes_bit_for_bit(settings: dict[str, Any], run: str, tmp_path: Path) -> None:
    """Saved while outer steps are under way: they are applied when they are due."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, LocalUpdates]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, LocalUpdates(model, every=4, density=0.02, **settings)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, outer: LocalUpdates, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
            outer.step()

    def checkpointer() -> Checkpointer:
        return Checkpointer(persist_to=str(tmp_path), run=run, every=1000, replicated=False)

    model, optimizer, outer = build()
    with checkpointer() as keeping, outer:
        keeping.attach(model=model, optimizer=optimizer, outer=outer)
        train(model, optimizer, outer, range(9))
        keeping.save()
        keeping.wait_durable(60)
        train(model, optimizer, outer, range(9, 16))
        expected = weights(model)

    model, optimizer, outer = build()
    with checkpointer() as keeping, outer:
        keeping.attach(model=model, optimizer=optimizer, outer=outer)
        train(model, optimizer, outer, range(3))  # a run that is somewhere else
        keeping.restore_latest()
        assert outer.step_count == 9
        train(model, optimizer, outer, range(9, 16))
        assert torch.equal(weights(model), expected)


def test_a_whole_distance_that_is_sent_twice_moves_once() -> None:
    """`synchronise` right after an exchange exchanges nothing again: the residual does not decay twice."""
    model = network()
    with LocalUpdates(model, every=1, density=0.02) as outer:
        with torch.no_grad():
            model[0].weight += 1.0
        outer.step()
        before, count = weights(model), outer.outer_count
        outer.synchronise()
        assert (outer.outer_count, count) == (1, 1)
        assert torch.equal(weights(model), before)


def test_its_thread_ends_with_it() -> None:
    def make() -> LocalUpdates:
        outer = LocalUpdates(nn.Linear(64, 64), every=2, delay=1)
        for _ in range(3):
            outer.step()
        return outer

    for close in (True, False):
        outer = make()
        (thread,) = [each for each in threading.enumerate() if each.name == "shade-local-updates"]
        if close:
            outer.close()
            outer.close()
        del outer
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()
