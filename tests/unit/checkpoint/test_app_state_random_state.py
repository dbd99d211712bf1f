"""The global generators go on from where they were saved."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shade.checkpoint._capture.app_state import RandomState
from shade.checkpoint._capture.flatten import flatten, unflatten
from shade.errors import StateMismatchError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = RandomState().state_dict()
    yield
    RandomState().load_state_dict(before)


def draw() -> list[Any]:
    """Some of each, an odd number of normals, so that one is left over in each generator that makes two."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        torch.randperm(5).tolist(),
    ]


@pytest.mark.parametrize("num_drawn", [0, 1, 300])
def test_what_follows_is_what_would_have_followed(num_drawn: int) -> None:
    for _ in range(num_drawn):
        draw()
    skeleton, tensors = flatten(RandomState().state_dict())
    stored = {name: tensor.clone() for name, tensor in tensors.items()}
    text = json.dumps(skeleton)
    expected = [draw() for _ in range(3)]
    RandomState().load_state_dict(unflatten(json.loads(text), stored))
    assert [draw() for _ in range(3)] == expected


def test_it_is_small_and_drawing_does_not_change_it() -> None:
    state = RandomState().state_dict()
    skeleton, tensors = flatten(state)
    assert len(json.dumps(skeleton)) < 1000
    assert sum(tensor.nbytes for tensor in tensors.values()) < 20_000
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    draw()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "change",
    [
        {"python": None},
        {"python": {"version": 3, "words": np.zeros(3, np.uint32), "gauss": None}},
        {"numpy": {"bit_generator": "MT19937"}},
        {"torch": torch.zeros(3, dtype=torch.uint8)},
        {"torch": "no"},
        {"cuda": None},
    ],
)
def test_a_state_that_is_none_changes_nothing(change: dict[str, Any]) -> None:
    state = RandomState().state_dict()
    draw()
    here = RandomState().state_dict()
    with pytest.raises(StateMismatchError, match="random"):
        RandomState().load_state_dict({**state, **change})
    expected = draw()
    RandomState().load_state_dict(here)
    assert draw() == expected
    with pytest.raises(StateMismatchError):
        RandomState().load_state_dict({})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_devices_go_on_too() -> None:
    torch.rand(1, device="cuda")
    state = RandomState().state_dict()
    assert len(state["cuda"]) == torch.cuda.device_count()
    expected = torch.rand(3, device="cuda").tolist()
    RandomState().load_state_dict(state)
    assert torch.rand(3, device="cuda").tolist() == expected
