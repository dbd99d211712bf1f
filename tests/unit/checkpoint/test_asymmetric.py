"""The asymmetric strategy copies no more than the windows so far have released, and all of it in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.checkpoint._strategies.asymmetric import Asymmetric
from shade.errors import TornSnapshotError

MIB = 2**20


class Training:
    """Four layers of 4 MiB, and a step that can be halted anywhere."""

    def __init__(self, strategy: Asymmetric) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.strategy = strategy
        self.strategy.attach([self.model], [self.optimizer])
        self.strategy._windows.seconds = lambda: ([1.0] * 4, [3.0] * 4)  # type: ignore[method-assign]

    def begin(self) -> tuple[Copying, torch.Tensor]:
        live = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        copying = Copying(live, layout.entries, buffer, frozenset(live))
        self.strategy.begin(copying)
        return copying, buffer

    def backward(self) -> None:
        self.model(torch.ones(2, 1024)).sum().backward()


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training(Asymmetric())
    yield made
    made.strategy.close()


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_so()


def test_no_more_is_copied_than_has_been_released(training: Training) -> None:
    copying, _ = training.begin()
    forward, backward = training.strategy.partitions
    assert sum(forward) + sum(backward) == 16 * MIB
    assert max(forward) < max(backward)
    time.sleep(0.05)
    assert training.strategy._taken == 0  # before the pass begins nothing is released
    training.model(torch.ones(2, 1024))
    released = sum(forward)
    assert eventually(lambda: training.strategy._taken > released - MIB)
    assert training.strategy._taken <= released
    training.strategy.wait()
    assert copying.names == []


def test_a_whole_pass_releases_everything(training: Training) -> None:
    copying, buffer = training.begin()
    training.backward()
    assert eventually(lambda: not copying.names)
    copied = training.strategy._running
    assert copied is not None
    assert eventually(copied.done)  # and checked, before the optimizer asks
    training.strategy.wait()
    expected = torch.cat([tensor.detach().flatten() for tensor in training.model.state_dict().values()])
    assert torch.equal(buffer.view(torch.float32), expected)


def test_without_a_pass_the_copy_ends_by_itself(training: Training) -> None:
    training.strategy._windows.seconds = lambda: ([0.001] * 4, [0.003] * 4)  # type: ignore[method-assign]
    copying, _ = training.begin()
    assert eventually(lambda: not copying.names)
    training.strategy.wait()


def test_a_step_of_another_form_releases_what_it_can(training: Training) -> None:
    training.strategy._windows.seconds = lambda: ([1.0], [3.0])  # type: ignore[method-assign]
    copying, _ = training.begin()
    training.backward()  # has more marks than the plan
    training.strategy.wait()
    assert copying.names == []


def test_without_idle_cores_the_training_waits(training: Training) -> None:
    training.strategy._windows.cores_left = lambda: 0  # type: ignore[method-assign]
    copying, buffer = training.begin()
    assert all(part.done() for part in training.strategy._copied)  # before `begin` returned
    assert copying.names == []
    assert training.strategy.partitions == ([], [])
    expected = torch.cat([tensor.detach().flatten() for tensor in training.model.state_dict().values()])
    assert torch.equal(buffer.view(torch.float32), expected)
    training.backward()  # the marks are not watched
    training.strategy.wait()


def test_a_change_is_found_while_the_training_waits(training: Training) -> None:
    training.strategy._windows.cores_left = lambda: 0  # type: ignore[method-assign]
    check = Copying.finish

    def late(copying: Copying) -> None:
        with torch.no_grad():
            next(training.model[2].parameters()).add_(1)
        check(copying)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copying, "finish", late)
        training.begin()
        with pytest.raises(TornSnapshotError, match=r"2\.weight"):
            training.strategy.wait()
