"""Strategy `auto` in a real training tries several strategies, settles on one, and restores its saves bit for bit."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from shade import Checkpointer
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._strategies import STRATEGIES
from shade.checkpoint._strategies.auto import FIRST, Auto
from shade.checkpoint._strategies.base import StrategyConfig
from shade.errors import ConfigError

CHOSEN_AND_MEASURED = re.compile(r"> \S+ +measured \d+ times: waits .* works .* costs")


class Training:
    """A small model under the autopilot."""

    def __init__(self, folder: Path, every: str | int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.checkpointer = Checkpointer(
            persist_to=str(folder), run=f"auto-{os.getpid()}", strategy="auto", every=every
        )
        self.checkpointer.attach(model=self.model, optimizer=self.optimizer)
        strategy = self.checkpointer._strategy
        assert isinstance(strategy, Auto)
        self.auto = strategy
        self.strategies: list[str] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.model(torch.randn(8, 256)).pow(2).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.checkpointer.step():
                self.strategies.append(self.auto.chosen)

    @property
    def has_settled(self) -> bool:
        """Whether it has tried more than one, and knows what the chosen one costs."""
        return len(set(self.strategies)) > 1 and CHOSEN_AND_MEASURED.search(self.auto.report) is not None


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path, "90% mtbf 2s")
    yield made
    made.checkpointer.close()


def test_tries_several_strategies_settles_and_logs_why(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shade.checkpoint"):
        while training.checkpointer.step_count < 6000 and not training.has_settled:
            training.run(50)  # how many it takes is for the pace of this machine's disk to say: it makes the interval
        training.checkpointer.close()
    assert training.strategies[:2] == [FIRST, FIRST]
    assert len(set(training.strategies)) > 1, "nothing but the first was ever tried"
    messages = [record.getMessage() for record in caplog.records]
    assert any(re.match(r"autopilot: \S+ instead of overlap", message) for message in messages)
    report = next(message for message in messages if message.startswith("autopilot, at the end"))
    assert CHOSEN_AND_MEASURED.search(report)


def test_restores_its_saves(training: Training, tmp_path: Path) -> None:
    training.run(150)
    training.checkpointer.save()
    saved = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    training.checkpointer.close()
    other = Training(tmp_path, "never")
    assert other.checkpointer.restore_latest()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.model.state_dict().items())
    other.checkpointer.close()


def test_inactive_strategies_are_closed(training: Training) -> None:
    training.run(300)
    training.checkpointer.wait_durable()
    assert set(training.auto._active) == {training.strategies[-1]}


def test_follows_the_agreed_strategy() -> None:
    auto = Auto()
    auto.open(Auto.config)
    published = auto.steer(Pace(), Pace(strategy="copy"))
    assert auto.chosen == "copy"
    assert published.strategy == FIRST  # what it would like itself, with nothing measured
    auto.steer(Pace(), Pace())
    assert auto.chosen == "copy"
    auto.close()


def test_waits_for_the_strategy_that_began_the_copy() -> None:
    auto, begun = Auto(), []
    auto.open(Auto.config)

    class Copied(Copying):
        def __init__(self) -> None:
            super().__init__({}, {}, torch.empty(0, dtype=torch.uint8))

    class Slow(STRATEGIES.get("overlap")):  # type: ignore[misc]
        def begin(self, copying: Copying) -> Future[None]:
            begun.append(self)
            return Future[None]()

        def wait(self) -> None:
            begun.append("waited")

    auto._active[FIRST] = Slow()
    auto.begin(Copied())
    auto.steer(Pace(), Pace(strategy="copy"))
    auto.wait()
    assert begun[-1] == "waited"
    auto.close()


def test_strategies_that_do_not_fit_the_open_tiers_are_no_candidates() -> None:
    auto = Auto()
    auto.open(Auto.config)
    assert auto._selector is not None
    able = set(auto._selector.candidates)
    assert {"overlap", "copy", "asymmetric", "datastates"} <= able
    assert not able & {"auto", "sync", "mlc-base", "fastpersist", "pccheck", "acute", "dash"}
    auto.close()
    roomy = Auto()
    roomy.open(StrategyConfig(every="2% mtbf 1h", in_flight=2, buffers=2, slots=4, batches=True))
    assert roomy._selector is not None
    assert "pccheck" in roomy._selector.candidates
    roomy.close()


def test_budget_and_failures_are_optional() -> None:
    for every in ("5%", "60s", 50, "never", "2% mtbf 6h"):
        auto = Auto()
        auto.open(StrategyConfig(every=every))
        auto.close()


def test_refuses_an_invalid_budget(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2% mtbf 6h"):
        Checkpointer(persist_to=str(tmp_path), strategy="auto", every="2% mtbf soon")
