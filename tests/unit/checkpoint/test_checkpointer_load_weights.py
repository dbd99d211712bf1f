"""Weights are read beside a training that runs, from what cannot be written, into a module that fits in part."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shade.checkpoint import Checkpointer, load_weights
from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint.dcp import ShadeWriter
from shade.errors import CheckpointError, ConfigError, RunInUseError, StateMismatchError
from tests.support.launching import same_state

TRAINS = """
import sys, torch
from shade.checkpoint import Checkpointer

model = torch.nn.Linear(300, 300)
with Checkpointer(persist_to=sys.argv[2], run=sys.argv[1], every=1, keep="last=1") as checkpointer:
    checkpointer.attach(model=model)
    while True:
        checkpointer.wait_copy_complete()
        with torch.no_grad():
            model.weight.fill_(checkpointer.step_count + 1), model.bias.fill_(checkpointer.step_count + 1)
        checkpointer.step()
        checkpointer.wait_durable()
        if checkpointer.step_count == 1:
            print("up", flush=True)
"""


@pytest.mark.multiprocess
def test_beside_a_training_that_saves_and_removes_all_the_time(run: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", TRAINS, run, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            steps: list[int] = []
            deadline = time.monotonic() + 60
            while len(steps) < 12 or (steps[0] == steps[-1] and time.monotonic() < deadline):
                module = torch.nn.Linear(300, 300)
                steps.append(load_weights(module, persist_to=tmp_path, run=run).step)
                for parameter in module.parameters():
                    assert (parameter == steps[-1]).all(), "not of one step, or not of that which it says"
            assert steps == sorted(steps)
            assert steps[0] < steps[-1], "the training stands still"
            with pytest.raises(RunInUseError, match="load_weights reads beside it"):
                Checkpointer(persist_to=tmp_path, run=run)
            assert process.poll() is None
        finally:
            process.kill()


class Classifier(torch.nn.Module):
    """A body, and a head of some width."""

    def __init__(self, width: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
        self.head = torch.nn.Linear(6, width)


@pytest.fixture
def model(begin: Callable[..., Checkpointer]) -> Classifier:
    """Saved as it is."""
    made = Classifier(10)
    with begin() as checkpointer:
        checkpointer.attach(model=made, optimizer=torch.optim.SGD(made.parameters()))
        for _ in range(2):
            checkpointer.step()
            checkpointer.save()
            checkpointer.wait_durable()
    return made


def test_nothing_is_written_and_the_step_is_said(model: Classifier, run: str, tmp_path: Path) -> None:
    def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
        return {each: (each.stat().st_mtime_ns, each.stat().st_size) for each in [folder, *folder.rglob("*")]}

    before, target = state_of(tmp_path), Classifier(10, seed=1)
    restored = load_weights(target, persist_to=tmp_path / "durable", run=run)
    assert (restored.step, restored.tiers, restored.missing_keys) == (2, ("storage",), ())
    assert load_weights(target, persist_to=tmp_path / "durable", run=run, step=1).step == 1
    assert state_of(tmp_path) == before
    assert not own_folder(run).exists()
    assert same_state(target.state_dict(), model.state_dict())


def test_into_a_model_with_another_head(model: Classifier, run: str, tmp_path: Path) -> None:
    target = Classifier(3, seed=1)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(StateMismatchError, match=r"load_weights\(…, strict=False\) takes what fits"):
        load_weights(target, persist_to=tmp_path / "durable", run=run)
    assert same_state(target.state_dict(), before)
    restored = load_weights(target, persist_to=tmp_path / "durable", run=run, strict=False)
    assert restored.missing_keys == restored.unexpected_keys == ("head.bias", "head.weight")
    assert same_state(target.body.state_dict(), model.body.state_dict())
    assert torch.equal(target.head.weight, before["head.weight"])
    target.body[0].weight.data.zero_()
    load_weights(target.body, persist_to=tmp_path / "durable", run=run, prefix="body.")
    assert same_state(target.body.state_dict(), model.body.state_dict())


def test_as_module_load_state_dict_does(model: Classifier, run: str, tmp_path: Path) -> None:
    """In another type, in a wrapper, and into a module that has more."""
    for target in (Classifier(10, seed=1).bfloat16(), torch.nn.DataParallel(Classifier(10, seed=1))):
        other = Classifier(10, seed=2).to(next(target.parameters()).dtype)
        load_weights(target, persist_to=tmp_path / "durable", run=run)
        other.load_state_dict(model.state_dict())
        assert target.state_dict()[next(iter(target.state_dict()))].dtype is other.body[0].weight.dtype
        assert all(map(torch.equal, target.state_dict().values(), other.state_dict().values()))
    larger = Classifier(10, seed=1)
    larger.extra = torch.nn.Linear(2, 2)
    restored = load_weights(larger, persist_to=tmp_path / "durable", run=run, strict=False)
    assert restored.missing_keys == ("extra.bias", "extra.weight")
    assert torch.equal(larger.head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"name": "net"}, ConfigError, "attached as 'net', got 'model, optimizer, random'"),
        ({"name": "optimizer"}, StateMismatchError, "has no body.0.bias"),
        ({"step": 7}, CheckpointError, r"a snapshot of step 7 of run .*\[1, 2\]"),
        ({"prefix": "neck"}, StateMismatchError, "names that begin with 'neck.', got 'those of body, head'"),
        ({"prefix": "body", "strict": False}, StateMismatchError, "has no body.0.bias"),
        ({"run": "another"}, CheckpointError, "a snapshot of run 'another'"),
        ({"persist_to": None}, ConfigError, "a location where snapshots are"),
    ],
)
def test_what_is_not_there_is_named_and_nothing_changes(
    options: dict[str, object], error: type[Exception], words: str, model: Classifier, run: str, tmp_path: Path
) -> None:
    target = Classifier(10, seed=1)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(error, match=words):
        load_weights(target, **{"persist_to": tmp_path / "durable", "run": run} | options)  # type: ignore[arg-type]
    assert same_state(target.state_dict(), before)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_what_another_library_saved_is_said(run: str, tmp_path: Path) -> None:
    with ShadeWriter(persist_to=os.fspath(tmp_path), run=run, step=1) as writer:
        torch.distributed.checkpoint.save({"model": Classifier(10).state_dict()}, storage_writer=writer, no_dist=True)
    with pytest.raises(ConfigError, match="ShadeReader reads"):
        load_weights(Classifier(10), persist_to=tmp_path, run=run)
