"""Somebody writes to parameters while they are copied: no torn snapshot is ever committed, and the error says which.

First with the writer at chosen moments, then with one that never rests. It fills whole tensors, in order, each time
with the next number: so a snapshot that was copied while it wrote has two numbers in a tensor, or numbers out of order.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch

from shade.checkpoint._buffer import copy_and_compare
from shade.checkpoint._buffer.copy_and_compare import SharedCopy
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.checkpoint._restore.restore import read_newest
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint._strategies import STRATEGIES
from shade.errors import CheckpointError, TornSnapshotError
from shade.rank_group import SingleProcessGroup

pytestmark = pytest.mark.multiprocess

SIZES = (2_000_000, 500, 300_000, 7)
PATIENCE = 20
"""Times as many saves as are asked for, until the adversary must have met one: short saves and its rests miss."""
KINDS = ("operation", "data", "numpy")
EXACT = [name for name in sorted(STRATEGIES) if STRATEGIES.get(name).config.is_exact]
"""What is near to a number looks torn; whoever stores that copies as one of these does."""


def write(tensor: torch.Tensor, number: int, kind: str) -> None:
    """One change of a whole tensor."""
    if kind == "operation":
        with torch.no_grad():
            tensor.fill_(number)
    elif kind == "data":
        tensor.data.fill_(number)
    else:
        tensor.detach().numpy()[:] = number


def tensors() -> dict[str, torch.Tensor]:
    return {f"model/{number}": torch.zeros(size) for number, size in enumerate(SIZES)}


def copying_of(live: dict[str, torch.Tensor]) -> Copying:
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
    return Copying(live, layout.entries, torch.zeros(layout.num_bytes, dtype=torch.uint8))


# ── at chosen moments ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", range(len(SIZES)))
@pytest.mark.parametrize("num_copied", range(len(SIZES) + 1))
def test_a_change_between_two_tensors_is_found_and_named(kind: str, victim: int, num_copied: int) -> None:
    live = tensors()
    copying = copying_of(live)
    for name in copying.names[:num_copied]:
        copying.copy(name)
    write(live[f"model/{victim}"], 1, kind)
    with pytest.raises(TornSnapshotError, match=f"expected 'model/{victim}' to stand still"):
        copying.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_in_the_middle_of_a_tensor_is_found(kind: str) -> None:
    live = {"model/x": torch.arange(1_000_000.0)}
    copying = copying_of(live)
    share = copying._share

    def slowly(names: Iterable[str]) -> SharedCopy:
        share(names).run()
        half = live["model/x"].detach()[500_000:]
        copying._view("model/x")[500_000:] = half + 1  # as if the copy had come by after the change
        write(live["model/x"], 5, kind)
        return SharedCopy([])

    copying._share = slowly  # type: ignore[method-assign]
    with pytest.raises(TornSnapshotError, match="'model/x'"):
        copying.finish()


def test_a_tensor_that_gets_other_memory_is_found() -> None:
    live = tensors()
    copying = copying_of(live)
    live["model/1"].data = torch.ones(SIZES[1])
    with pytest.raises(TornSnapshotError, match="'model/1'"):
        copying.finish()


def test_what_was_settled_may_change() -> None:
    live = tensors()
    copying = copying_of(live)
    copying.settle(["model/1", "model/3"])
    write(live["model/1"], 1, "operation")
    copying.finish()


def test_where_nothing_changes_nothing_is_raised() -> None:
    dice = random.Random(0)
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64]
    for _ in range(200):
        live = {
            f"model/{number}": torch.zeros(dice.choice([0, 1, 3, 64, 65, 1000])).to(dice.choice(kinds))
            for number in range(dice.randrange(1, 6))
        }
        live["model/turned"] = torch.randn(30, 20).t()
        live["model/nothing"] = torch.full((100,), float("nan"))
        copying_of(live).finish()


@pytest.mark.parametrize("before", [lambda copying: None, lambda copying: copying.advance(2**30)])
def test_a_thread_that_may_be_in_the_middle_of_writing_costs_the_snapshot(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[Copying], object]
) -> None:
    copying = copying_of(tensors())
    before(copying)  # whoever has copied it, and when
    monkeypatch.setattr(copy_and_compare, "LONGEST_SECONDS", 0.01)
    monkeypatch.setattr(copy_and_compare, "_may_be_writing", lambda thread: True)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with pytest.raises(TornSnapshotError, match="without a processor"):
            copying.finish()
    finally:
        ended.set()
        thread.join()


# ── one that never rests ────────────────────────────────────────────────────────────────────────────────────────────


class Model(torch.nn.Module):
    """Parameters of all sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for size in SIZES])


class Adversary(threading.Thread):
    """Writes to all parameters, in order, again and again, with rests of all lengths."""

    def __init__(self, model: Model, kind: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._model, self._kind, self._dice = model, kind, random.Random(seed)
        self.ended = threading.Event()
        self.num_rounds = 0

    def run(self) -> None:
        while not self.ended.is_set():
            self.num_rounds += 1
            for weight in self._model.weights:
                write(weight, self.num_rounds % 2**20, self._kind)
            if self._dice.random() < 0.5:
                time.sleep(self._dice.random() * 0.02)


@pytest.fixture
def resting() -> Iterator[Callable[[Adversary], Adversary]]:
    """Ends adversaries."""
    with contextlib.ExitStack() as ends:

        def start(adversary: Adversary) -> Adversary:
            adversary.start()
            ends.callback(adversary.join)
            ends.callback(adversary.ended.set)
            return adversary

        yield start


@pytest.mark.parametrize("num_saves", [25, pytest.param(700, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("kind", KINDS)
def test_no_torn_snapshot_is_ever_committed(
    kind: str, strategy: str, num_saves: int, resting: Callable[[Adversary], Adversary]
) -> None:
    model = Model()
    refused = committed = 0
    with (
        contextlib.suppress(CheckpointError),
        Checkpointer(run=f"adversary-{secrets.token_hex(4)}", strategy=strategy, every="never") as checkpointer,
    ):
        checkpointer.attach(model=model)
        checkpointer.save()
        checkpointer.wait_committed()
        adversary = resting(Adversary(model, kind, num_saves))
        while refused + committed < num_saves or (not refused and committed < PATIENCE * num_saves):
            checkpointer.step_count += 1
            try:
                checkpointer.save()
                checkpointer.wait_committed()
            except CheckpointError as error:
                refused += 1
                told = str(error)
                assert "expected 'model/weights." in told, told
                continue
            committed += 1
            found = read_newest(checkpointer._tiers.reader, SingleProcessGroup())
            assert found is not None
            assert found.record.step == checkpointer.step_count
            weights = [found.tensors[f"model/weights.{place}"].numpy() for place in range(len(SIZES))]
            for weight in weights:
                edges = np.flatnonzero(np.diff(weight))
                assert len(edges) == 0, f"of {len(weight)} items {weight[edges]} end at {edges}, {weight[-1]} follows"
            values = [int(weight[0]) for weight in weights]
            assert values == sorted(values, reverse=True), f"tensors out of order: {values}"
            assert values[0] - values[-1] <= 1, f"tensors of more than two moments: {values}"
        adversary.ended.set()
        adversary.join()
        checkpointer.save()
        checkpointer.wait_committed()
        checkpointer._tiers.shared_memory.remove()
    assert adversary.num_rounds > 1
    assert refused > 0, "the adversary has never met a copy"
