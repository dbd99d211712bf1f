"""The stager: a private copy in memory that is used again, made beside the training where it may be."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._integrations import dcp_stager
from shade.checkpoint._integrations.dcp_shard import Identity, PackedState, shard_content
from shade.checkpoint.dcp import ShadeReader, ShadeStager, ShadeWriter
from shade.errors import ConfigError, TornSnapshotError

RUN = f"run-{os.getpid()}"
"""A run id is locked on the machine, and pytest-xdist runs tests in several processes."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage:UserWarning")


@pytest.fixture
def stager() -> Iterator[ShadeStager]:
    made = ShadeStager()
    yield made
    made.close()


def staged_by(stager: ShadeStager, state: dict[str, Any]) -> dict[str, Any]:
    staged = stager.stage(state)
    return staged.result() if isinstance(staged, Future) else staged


def test_a_copy_of_everything_that_shares_nothing(stager: ShadeStager) -> None:
    tied = torch.randn(5, requires_grad=True)
    state = {
        "tied": [tied, torch.nn.Parameter(torch.ones(2))],
        "again": tied,
        "turned": torch.randn(3, 4).t(),
        "odd": torch.randn(3, dtype=torch.complex128),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "objects": {"list": [1, {"deep": [2]}], "pair": (1, torch.zeros(2))},
    }
    staged = staged_by(stager, state)
    expected = {key: state[key].detach().clone() for key in ("again", "turned", "odd", "scalar", "empty")}
    with torch.no_grad():
        for tensor in (tied, state["turned"], state["odd"], state["scalar"], state["objects"]["pair"][1]):
            tensor.add_(1)
    state["objects"]["list"][1]["deep"].append(3)
    for key, tensor in expected.items():
        assert torch.equal(staged[key], tensor), key
        assert staged[key].dtype == tensor.dtype
    assert torch.equal(staged["tied"][0], expected["again"])
    assert staged["tied"][0].data_ptr() == staged["again"].data_ptr()
    assert staged["objects"]["list"] == [1, {"deep": [2]}]
    assert torch.equal(staged["objects"]["pair"][1], torch.zeros(2))
    assert isinstance(staged["objects"]["pair"], tuple)
    assert not staged["again"].requires_grad


def test_memory_is_used_again_once_nobody_holds_it_and_not_before(stager: ShadeStager) -> None:
    state = {"a": torch.zeros(1000)}
    first = staged_by(stager, state)
    address = first["a"].data_ptr()
    state["a"] += 1
    second = staged_by(stager, state)
    assert torch.equal(first["a"], torch.zeros(1000)), "a save that is under way"
    assert second["a"].data_ptr() != address
    del first
    gc.collect()
    state["a"] += 1
    third = staged_by(stager, state)
    assert third["a"].data_ptr() == address
    assert torch.equal(second["a"], torch.ones(1000))


def test_a_state_that_has_grown_gets_more(stager: ShadeStager) -> None:
    staged_by(stager, {"a": torch.zeros(10)})
    large = staged_by(stager, {"a": torch.arange(10**6)})
    assert torch.equal(large["a"], torch.arange(10**6))
    assert len(stager._blocks) == 1


def test_the_writer_takes_it_from_where_it_lies(stager: ShadeStager) -> None:
    staged = staged_by(
        stager, {"b": {"x": torch.randn(10**6), "y.z": torch.randn(9 * 10**5)}, "b2": torch.randn(10**6)}
    )

    def none_needed(num_bytes: int) -> torch.Tensor:
        raise AssertionError(f"{num_bytes} bytes were put together")

    tensors = {"b.x[0]": staged["b"]["x"], "b.y.z[0]": staged["b"]["y.z"], "b2[0]": staged["b2"]}
    packed = PackedState(Identity("r", 1, 0, 2), shard_content(tensors, {}), "none", none_needed)
    assert len(packed.manifest.chunks) == 3


@pytest.mark.multiprocess
def test_another_process_reads_the_same_memory(stager: ShadeStager) -> None:
    state = {"a": torch.arange(10**5), "b": [torch.ones(3), {"c": "d"}]}
    staged = staged_by(stager, state)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs,))
    process.start()
    try:
        ours.send(staged)
        assert ours.poll(60)
        assert ours.recv() == (int(state["a"].sum()), 3.0, "d")
        ours.send(None)
    finally:
        process.join(30)
        ours.close()
        theirs.close()
    assert process.exitcode == 0


def _answer(pipe: Connection) -> None:
    staged = pipe.recv()
    pipe.send((int(staged["a"].sum()), float(staged["b"][0].sum()), staged["b"][1]["c"]))
    pipe.recv()


def test_what_its_memory_does_not_say_is_staged_as_it_is(stager: ShadeStager) -> None:
    number, phase = torch.tensor([1 + 2j, 3 - 1j]), torch.ones(3)
    state = {"number": number, "kernel": number.conj(), "phase": torch._neg_view(phase), "plain": phase}
    staged = staged_by(stager, state)
    assert staged["kernel"].tolist() == [1 - 2j, 3 + 1j]
    assert staged["number"].tolist() == [1 + 2j, 3 - 1j]
    assert (staged["phase"].tolist(), staged["plain"].tolist()) == ([-1.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3).to_sparse(), torch.zeros(3).as_subclass(type("Own", (torch.Tensor,), {}))]
)
def test_kinds_that_only_dcp_knows_are_refused_by_name(stager: ShadeStager, tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"'a\.0'"):
        stager.stage({"a": [tensor]})


def test_what_does_not_stand_still_is_not_saved(
    stager: ShadeStager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"still": torch.zeros(9), "moving": torch.zeros(9)}
    before = Copying.finish

    def meanwhile(self: Copying, *rest: Any) -> None:
        state["moving"].add_(1)
        before(self, *rest)

    monkeypatch.setattr(Copying, "finish", meanwhile)
    with ShadeWriter(persist_to=str(tmp_path), run=RUN) as writer:
        response = dcp.async_save(state, storage_writer=writer, checkpoint_id="1", async_stager=stager)
        assert isinstance(response, Future)
        with pytest.raises(CheckpointException) as failure:
            response.result(60)
    ((error, _),) = failure.value.failures.values()
    assert isinstance(error, TornSnapshotError)
    assert "moving" in str(error)
    assert "moving" in caplog.text
    with ShadeReader(persist_to=str(tmp_path), run=RUN) as reader:
        assert reader.steps() == []


class Held:
    """Holds the copy of what only a step changes, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.copied = threading.Event(), threading.Event()
        before = Copying.finish

        def later(copying: Copying, *rest: Any) -> None:
            assert self.go.wait(60)
            before(copying, *rest)
            self.copied.set()

        monkeypatch.setattr(Copying, "finish", later)


def train(model: torch.nn.Module) -> None:
    model(torch.randn(8, 4)).sum().backward()


def test_with_an_optimizer_the_copy_runs_beside_and_the_step_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    train(model)
    optimizer.step()
    stager, held = ShadeStager(optimizer), Held(monkeypatch)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    with ShadeWriter(persist_to=str(tmp_path), run=RUN) as writer:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        response: Any = dcp.async_save(state, storage_writer=writer, checkpoint_id="1", async_stager=stager)
        assert not response.staging_completion.done()
        train(model)  # moves the running statistics, which have been copied at once
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(held.copied.is_set()))
        threading.Timer(0.05, held.go.set).start()
        optimizer.step()
        assert seen == [True], "the step came before the copy"
        response.upload_completion.result(60)
    loaded = {"model": {key: torch.zeros_like(value) for key, value in expected.items()}}
    with ShadeReader(persist_to=str(tmp_path), run=RUN) as reader:
        dcp.load(loaded, storage_reader=reader)
    assert all(torch.equal(loaded["model"][key], value) for key, value in expected.items())
    assert not torch.equal(model[1].running_mean, expected["1.running_mean"])
    stager.close()
    stager.close()
    train(model)
    optimizer.step()


def test_writing_to_a_parameter_too_early_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stager, held = ShadeStager(optimizer), Held(monkeypatch)
    with ShadeWriter(persist_to=str(tmp_path), run=RUN) as writer:
        state = {"model": model.state_dict()}
        response: Any = dcp.async_save(state, storage_writer=writer, checkpoint_id="1", async_stager=stager)
        with torch.no_grad():
            model.weight.add_(1)
        held.go.set()
        with pytest.raises(CheckpointException, match=r"model\.weight"):
            response.upload_completion.result(60)
    stager.close()


def test_an_older_pytorch_is_told_that_it_cannot_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.checkpoint.state_dict_saver.AsyncSaveResponse")
    ShadeStager().close()
    with pytest.raises(ConfigError, match=r"2\.9"):
        ShadeStager(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))


def test_everything_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    before: Callable[[Any, int], None] = dcp_stager._Block.__init__
    monkeypatch.setattr(
        dcp_stager._Block, "__init__", lambda self, length: (made.append(self), before(self, length))[1]
    )
    stager = ShadeStager()
    stager.stage({"a": torch.zeros(3)})
    stager.close()
    assert [len(block.memory) for block in made] == [0]
