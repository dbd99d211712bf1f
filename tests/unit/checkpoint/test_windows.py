"""The hooks measure the windows of a training, and leave everything else alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shade.checkpoint._strategies import overlap
from shade.checkpoint._strategies.overlap import PROFILED_STEPS
from shade.checkpoint._strategies.windows import Windows


class Sleep(torch.autograd.Function):
    """The identity, in its own time, three times as long backward."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(3 * context.seconds)
        return gradient, None


class Slow(torch.nn.Module):
    """A layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(images * self.weight, self.seconds)  # type: ignore[no-untyped-call]


class Training:
    def __init__(self, *layers: torch.nn.Module) -> None:
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.marks: list[int] = []
        self.windows = Windows(self.marks.append)
        self.windows.attach([self.model], [self.optimizer])

    def step(self, num_passes: int = 1) -> None:
        for _ in range(num_passes):
            self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 1))
    yield made
    made.windows.close()


def test_every_layer_is_a_window_forward_and_backward(training: Training) -> None:
    training.step()  # the first has no beginning that anyone has seen
    assert training.windows.seconds() == ([], [])
    training.step()
    forward, backward = training.windows.seconds()
    assert (len(forward), len(backward)) == (3, 3)
    assert min(*forward, *backward) >= 0


def test_long_windows_are_measured_as_long() -> None:
    training = Training(Slow(0.004), torch.nn.Identity(), Slow(0.02))
    for _ in range(4):
        training.step()
    forward, backward = training.windows.seconds()
    assert forward[2] > 2 * forward[0] > 4 * forward[1]
    assert sum(backward) > sum(forward)
    training.windows.close()


def test_watched_steps_call_back_and_are_not_measured(training: Training) -> None:
    training.step()
    training.step()
    before = training.windows.seconds()
    assert training.marks == []
    training.windows.is_watched = True
    training.model(torch.ones(2, 4)).sum().backward()
    assert training.marks == [0, 1, 2, 3, 4, 5]
    training.windows.is_watched = False
    training.optimizer.step()
    assert training.windows.seconds() == before


def test_evaluation_and_further_passes_of_one_step_are_no_windows(training: Training) -> None:
    training.step()
    for _ in range(2):
        training.model.eval()
        with torch.no_grad():
            training.model(torch.ones(2, 4))
        training.model.train()
        training.step(num_passes=2)
    forward, backward = training.windows.seconds()
    assert len(forward) == 3
    assert len(backward) == 6


def test_the_plan_follows_a_training_that_changes(training: Training) -> None:
    training.step()
    for _ in range(PROFILED_STEPS):
        training.step()
    training.model.append(torch.nn.Linear(1, 1))
    training.windows.attach([training.model], [])
    training.step()
    forward, backward = training.windows.seconds()
    assert (len(forward), len(backward)) == (4, 4)


def test_a_copy_of_the_model_is_no_part_of_the_training(training: Training) -> None:
    training.step()
    average = copy.deepcopy(training.model)
    with torch.no_grad():
        average(torch.ones(2, 4))
    training.step()
    assert [len(windows) for windows in training.windows.seconds()] == [3, 3]


def test_closing_removes_every_hook(training: Training) -> None:
    training.windows.close()
    training.windows.close()
    for module in training.model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    training.windows.is_watched = True
    training.step()
    assert training.marks == []


def test_idle_time_before_the_pass_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, now = 0.0, 0.0
    monkeypatch.setattr(overlap, "_idle_seconds", lambda: (idle, now))

    class Busy(Slow):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += 1
            return images * self.weight

    training = Training(Busy(0), Busy(0))
    for _ in range(3):
        training.step()
        idle, now = idle + 8, now + 4  # for data, or a save that is waited for
    assert training.windows.cores_left() == 0
    training.windows.close()
