"""Gemini sends in gaps that are long enough, and after a limited wait in any case."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from shade.checkpoint._strategies import gemini as gaps_module
from shade.checkpoint._strategies.gemini import Gaps


class Clock:
    """Stands still until it is moved; waiting moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Training:
    """Gaps of 0.4 s in steps of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(gaps_module, "time", self.clock)
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.gaps = Gaps()
        self.gaps.attach([self.model], [self.optimizer])
        self.waited = 0.0
        monkeypatch.setattr(self.gaps._turn, "wait", self._wait)

    def _wait(self, seconds: float) -> bool:
        self.waited += seconds
        self.clock.now += seconds
        return False

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(1, 2)).sum()
        self.clock.now += 0.4
        return loss

    def step(self) -> None:
        self.forward().backward()
        self.clock.now += 0.6
        self.optimizer.step()

    def rate(self, bytes_per_second: float) -> None:
        """Sends so many bytes a second for a while, in what is a gap."""
        for _ in range(32):
            self.gaps.wait(1000)
            self.clock.now += 1000 / bytes_per_second
        assert max(self.gaps._rates) == pytest.approx(bytes_per_second)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    made = Training(monkeypatch)
    yield made
    made.gaps.close()


def test_without_measurements_everything_passes(training: Training) -> None:
    training.gaps.wait(10**9)
    assert training.waited == 0


def test_a_chunk_passes_if_it_fits_into_the_gap(training: Training) -> None:
    for _ in range(4):
        training.step()
    assert list(training.gaps._gap_seconds)[-2:] == pytest.approx([0.4, 0.4])
    training.rate(1e6)
    training.step()  # a gap has just begun: 0.4 s, 400,000 bytes
    training.gaps.wait(390_000)
    assert training.waited == 0
    training.clock.now += 0.3
    training.gaps.wait(90_000)
    assert training.waited == 0
    training.gaps.wait(110_000)
    assert training.waited == pytest.approx(0.1, abs=0.01), "until the gap is longer than usual, since no training runs"


def test_a_backward_pass_blocks_until_patience_ends(training: Training) -> None:
    for _ in range(4):
        training.step()
    loss = training.forward()
    seen: list[float] = []

    def in_backward(_: torch.Tensor) -> None:
        training.gaps.wait(1)
        seen.append(training.waited)

    training.model.weight.register_hook(in_backward)
    loss.backward()
    assert seen == pytest.approx([2.0]), "twice a step"


def test_closing_lets_everything_pass() -> None:
    model, gaps = torch.nn.Linear(2, 2), Gaps()
    gaps.attach([model], [])
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        time.sleep(0.01)
    gaps._step_seconds.extend([60.0] * 10)
    waiting = threading.Thread(target=gaps.wait, args=(1,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    gaps.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert not model._forward_hooks
    gaps.close()
