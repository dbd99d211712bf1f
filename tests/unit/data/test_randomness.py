"""Transforms draw the same for the same batch of the same epoch, in any process, and change no other random numbers."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from shade.data._transforms.randomness import BatchGenerators, set_generators


def draw() -> tuple[float, float, float]:
    """One number of each global generator."""
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def of(generators: BatchGenerators, *indices: int) -> tuple[float, float, float]:
    """What a transform draws for a batch."""
    with generators.of(indices):
        return draw()


def test_nothing_is_set_before_the_epoch_is_known() -> None:
    set_generators(1)
    expected = [draw(), draw()]
    set_generators(1)
    generators = BatchGenerators()
    assert [of(generators, 1, 2), of(generators, 1, 2)] == expected


def test_a_batch_draws_the_same_every_time_and_another_batch_and_epoch_and_seed_another() -> None:
    generators = BatchGenerators()
    drawn = set()
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        generators.follow(seed, epoch)
        assert of(generators, 1, 2) == of(generators, 1, 2)
        drawn |= {of(generators, 1, 2), of(generators, 2, 1), of(generators, 1)}
    assert len(drawn) == 9
    assert len({torch_drew for torch_drew, _, _ in drawn}) == 9


def test_the_samples_of_a_batch_draw_differently() -> None:
    generators = BatchGenerators()
    generators.follow(0, 0)
    with generators.of([5, 5]):
        assert draw() != draw()


def test_a_devices_generator_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played: CUDA's calls move a generator of the CPU."""
    device = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", device.manual_seed)
    monkeypatch.setattr(torch.cuda, "get_rng_state", device.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", device.set_state)
    generators, before = BatchGenerators(), device.get_state()
    generators.follow(0, 0)
    drawn = []
    for _ in range(2):
        with generators.of([1, 2]):
            drawn.append(torch.rand((), generator=device).item())
        assert torch.equal(device.get_state(), before)
    assert drawn[0] == drawn[1]


def test_the_process_continues_as_if_nothing_had_been_drawn() -> None:
    generators = BatchGenerators()
    generators.follow(0, 0)
    set_generators(3)
    expected = draw()
    set_generators(3)
    of(generators, 1, 2, 3)
    assert draw() == expected


def test_a_copy_in_a_worker_follows() -> None:
    generators = BatchGenerators()
    copy: BatchGenerators = pickle.loads(pickle.dumps(generators))
    generators.follow(0, 4)
    copy.follow(0, 4)
    assert of(copy, 1, 2) == of(generators, 1, 2)


def test_a_key_is_a_stream() -> None:
    def stream(*key: int) -> tuple[float, float, float]:
        set_generators(*key)
        return draw()

    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (-1, 0, 0)]
    assert len({stream(*key) for key in keys}) == len(keys)
    assert stream(0, 7, 1) == stream(0, 7, 1)
