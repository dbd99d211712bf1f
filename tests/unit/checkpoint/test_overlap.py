"""`overlap` copies beside the training where a core is idle or a device computes, and at once elsewhere."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from shade.checkpoint import Checkpointer
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.checkpoint._strategies import STRATEGIES, overlap
from shade.checkpoint._strategies.base import Strategy
from shade.checkpoint._strategies.overlap import Overlap
from shade.config import RunConfig
from shade.errors import TornSnapshotError

PATIENCE_SECONDS = 30.0
DEFAULT: str = signature(Checkpointer).parameters["strategy"].default


class Clock:
    """A manual clock, and the idle seconds of the cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.idle = self.now = 0.0
        monkeypatch.setattr(overlap, "_idle_seconds", lambda: (self.idle, self.now))
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def passes(self, seconds: float, num_idle: float) -> None:
        self.now, self.idle = self.now + seconds, self.idle + num_idle * seconds


class Training:
    """A model, an optimizer, and a strategy that is attached to both."""

    def __init__(self, strategy: Strategy, clock: Clock) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.strategy, self.clock = strategy, clock
        strategy.attach([self.model], [self.optimizer])

    def step(self, num_idle: float) -> None:
        self.model(torch.ones(2, 64)).sum().backward()
        self.clock.passes(4, num_idle)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin(self) -> dict[str, torch.Tensor]:
        """Begins a snapshot; what becomes of it, by name."""
        live = self.model.state_dict()
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        self.strategy.begin(Copying(live, layout.entries, buffer, frozenset(live)))
        return {
            name: buffer[entry.start : entry.stop].view(torch.float32).view(entry.shape)
            for name, entry in layout.entries.items()
        }


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    made = Training(Overlap(), Clock(monkeypatch))
    yield made
    made.strategy.close()


@pytest.fixture
def copied_by(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that have copied all of a snapshot, in order."""
    found, finish = list[threading.Thread](), Copying.finish

    def finishing(copying: Copying, *helper: Any) -> None:
        found.append(threading.current_thread())
        finish(copying, *helper)

    monkeypatch.setattr(Copying, "finish", finishing)
    return found


def saved(training: Training) -> None:
    """Saves, and checks what was copied."""
    found = training.begin()
    training.strategy.wait()
    assert all(torch.equal(found[name], tensor) for name, tensor in training.model.state_dict().items())


def test_it_copies_at_once_where_no_core_is_idle_and_beside_the_training_elsewhere(
    training: Training, copied_by: list[threading.Thread]
) -> None:
    saved(training)  # nothing is counted yet
    for num_idle in (0.0, 0.0, 2.0, 2.0):
        for _ in range(overlap.PROFILED_STEPS + 1):
            training.step(num_idle)
        saved(training)
    here = threading.current_thread()
    assert [each is here for each in copied_by] == [False, True, True, False, False]


def test_a_device_copies_beside_the_training(
    training: Training, copied_by: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copying, "is_of_devices", True)
    for _ in range(3):
        training.step(0.0)
    saved(training)
    assert copied_by != [threading.current_thread()]


def test_cores_that_rest_while_a_save_is_waited_for_do_not_count(
    training: Training, copied_by: list[threading.Thread]
) -> None:
    for _ in range(3):
        training.step(0.0)
    for _ in range(5):
        training.clock.passes(60, 2.0)
        saved(training)
        training.step(0.0)
        training.step(0.0)
    assert set(copied_by) == {threading.current_thread()}


def test_a_change_during_the_copy_at_once_is_found(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        training.step(0.0)
    check = Copying._first_torn

    def late(copying: Copying, *words: Any) -> str | None:
        with torch.no_grad():
            training.model.weight.data.view(-1).numpy()[:] += 1  # nothing counts it
        return check(copying, *words)

    monkeypatch.setattr(Copying, "_first_torn", late)
    training.begin()
    with pytest.raises(TornSnapshotError, match="weight"):
        training.strategy.wait()


def test_closing_removes_the_hooks(training: Training) -> None:
    training.strategy.close()
    training.strategy.close()
    assert not training.optimizer._optimizer_step_pre_hooks
    assert not training.optimizer._optimizer_step_post_hooks


# ── what a script may do ─────────────────────────────────────────────────────────────────────────────────────────────


class Attention(torch.nn.Module):
    """A module whose evaluation PyTorch fuses, unless something hangs on it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(images)
        return found


def pickled(model: torch.nn.Module) -> torch.nn.Module:
    found: torch.nn.Module = pickle.loads(pickle.dumps(model))
    return found


def stored(model: torch.nn.Module) -> torch.nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    found: torch.nn.Module = torch.load(stream, weights_only=False)
    return found


COPIES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "pickle": pickled,
    "torch.save": stored,
    "deepcopy": copy.deepcopy,
}


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_module_can_be_copied_and_its_copy_is_no_part_of_the_training(
    strategy: str, way: str, run: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(persist_to=tmp_path, run=run, strategy=strategy, every="never") as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        trained(model, optimizer)
        trained(model, optimizer)
        other = COPIES[way](model)
        hooks = [hook for each in other.modules() for hook in each._forward_hooks.values()]
        assert all(hook(None, (), torch.ones(1)) is None for hook in hooks)
        assert all("shade" not in repr(hook) for hook in hooks)
        trained(other, torch.optim.SGD(other.parameters(), 0.1))
        checkpointer.save()
        trained(model, optimizer)
        checkpointer.wait_durable()
        trained(COPIES[way](other), torch.optim.SGD(other.parameters(), 0.1))


def test_the_default_is_the_same_from_python_and_from_the_command_line() -> None:
    assert RunConfig.checkpoint_strategy == DEFAULT


def test_with_the_default_a_module_is_left_as_it_was(run: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.Adam(model.parameters())
    apart = copy.deepcopy(model)
    with Checkpointer(persist_to=tmp_path, run=run, every="never") as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        for each in model.modules():
            assert {name: value for name, value in vars(each).items() if name.endswith("_hooks") and value} == {}
        for parameter in model.parameters():
            assert not parameter._backward_hooks
            assert not parameter._post_accumulate_grad_hooks
        model.eval()
        apart.eval()
        with torch.no_grad():
            images = torch.randn(2, 3, 16)
            assert torch.equal(model(images), apart(images))
            assert "_transformer_encoder_layer_fwd" in operations(model, images)
        torch.compile(model.train(), backend="eager", fullgraph=True)(images).sum().backward()
        optimizer.step()
        checkpointer.save()
        checkpointer.wait_durable()


def operations(model: torch.nn.Module, images: torch.Tensor) -> str:
    """The names of what PyTorch runs."""
    # PyTorch 2.10 warns of events that it forgets, if they are not to be kept.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        model(images)
    return " ".join(event.key for event in profile.key_averages())
