"""ACUTE's interface in one process: nothing lost, nothing torn, everything back; and its flags."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shade
from shade.checkpoint._capture.app_state import CapturedState
from shade.checkpoint._integrations.acute import TrainNode
from shade.checkpoint._session.state_dict_checkpointer import SMALL_BYTES, StateDictState
from shade.errors import CheckpointError, ConfigError, CorruptCheckpointError

LARGE = 3 * SMALL_BYTES // 4


@pytest.fixture
def name(tmp_path: Path) -> str:
    """A model's name that no other test has: shared memory is the machine's."""
    return f"acute-{tmp_path.parent.name}-{tmp_path.name}"[-90:]


@pytest.fixture
def begin(tmp_path: Path, name: str) -> Iterator[Callable[..., TrainNode]]:
    """Begins, after an end where there was a beginning."""

    def make(args: argparse.Namespace | None = None, **overrides: Any) -> TrainNode:
        shade.destroy_acute()
        given = {"persist_to": str(tmp_path / "store"), "model_name": name, **overrides}
        return shade.init_acute(args, **given)[1]

    yield make
    shade.destroy_acute()
    assert not dist.is_initialized()


def state(epoch: int) -> dict[str, Any]:
    return {"weights": torch.full((LARGE,), float(epoch)), "few": torch.full((3,), epoch), "epoch": epoch, "name": "x"}


def check(found: dict[str, Any] | None, epoch: int) -> None:
    assert found is not None
    wanted = state(epoch)
    assert found.keys() == wanted.keys()
    assert torch.equal(found["weights"], wanted["weights"])
    assert torch.equal(found["few"], wanted["few"])
    assert (found["epoch"], found["name"]) == (epoch, "x")


def test_what_was_saved_last_comes_back_with_the_epoch_to_train_next(begin: Callable[..., TrainNode]) -> None:
    node = begin()
    assert node.restore() is None
    assert node.starting_epoch == 1
    for epoch in (1, 2, 3):
        node.save(state(epoch))
    node = begin(snapshot_path="latest")
    assert node.starting_epoch == 4
    check(node.restore(), 3)
    assert node.restore() is None


def test_the_arguments_of_the_original_are_taken_and_given_the_epoch(begin: Callable[..., TrainNode]) -> None:
    begin().save(state(5))
    args = argparse.Namespace(
        total_epochs=10, save_period=1, training_master_addr="127.0.0.1", training_master_port="1", batch_size=32,
        remote_buffer_size=2, shard_size=8, file_name_include_datetime=False, file_save_in_dictionary=False,
        snapshot_path="latest", starting_epoch=1,
    )  # fmt: skip
    check(begin(args).restore(), 5)
    assert args.starting_epoch == 6


def test_every_save_is_kept_however_fast_they_come(begin: Callable[..., TrainNode], tmp_path: Path, name: str) -> None:
    node = begin(file_name_include_datetime=True)
    for epoch in range(1, 9):
        node.save(state(epoch))
    shade.destroy_acute()
    (run,) = (tmp_path / "store").glob(f"{name}_*")
    steps = sorted(path.parent.name for path in run.glob("*/commit.json"))
    assert steps == [f"step-{epoch:010}" for epoch in range(1, 9)]


def test_with_a_date_the_latest_run_goes_on(begin: Callable[..., TrainNode], tmp_path: Path) -> None:
    begin(file_name_include_datetime=True).save(state(1))
    node = begin(file_name_include_datetime=True, snapshot_path="latest")
    check(node.restore(), 1)
    node.save(state(2))
    shade.destroy_acute()
    assert len(list((tmp_path / "store").iterdir())) == 1


def test_in_a_folder_of_the_models_name(begin: Callable[..., TrainNode], tmp_path: Path, name: str) -> None:
    begin(file_save_in_dictionary=True).save(state(1))
    shade.destroy_acute()
    assert (tmp_path / "store" / name / name / "step-0000000001" / "commit.json").exists()
    check(begin(file_save_in_dictionary=True, snapshot_path="latest").restore(), 1)


@pytest.mark.parametrize("tail", ["", "/", "/rank-0.safetensors", "/commit.json"])
def test_an_older_snapshot_by_its_path(begin: Callable[..., TrainNode], tmp_path: Path, name: str, tail: str) -> None:
    node = begin()
    node.save(state(1))
    node.save(state(2))
    node = begin(snapshot_path=f"{tmp_path}/store/{name}/step-0000000001{tail}")
    assert node.starting_epoch == 2
    check(node.restore(), 1)


def test_files_of_others(begin: Callable[..., TrainNode], tmp_path: Path) -> None:
    torch.save(state(4), tmp_path / "old_2024.pt.tar")
    node = begin(snapshot_path=str(tmp_path / "old_2024.pt.tar"))
    assert node.starting_epoch == 5
    check(node.restore(), 4)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("executed",))


def test_a_file_that_wants_to_be_executed_is_refused(begin: Callable[..., TrainNode], tmp_path: Path) -> None:
    torch.save({"epoch": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CorruptCheckpointError):
        begin(snapshot_path=str(tmp_path / "evil.pt"))
    assert not dist.is_initialized()


def test_a_snapshot_that_is_not_there(begin: Callable[..., TrainNode], tmp_path: Path, name: str) -> None:
    begin().save(state(1))
    with pytest.raises(CheckpointError, match="none at"):
        begin(snapshot_path=f"{tmp_path}/store/{name}/step-0000000009")
    with pytest.raises(ConfigError, match="nothing at"):
        begin(snapshot_path=f"{tmp_path}/nowhere.pt")
    check(begin(snapshot_path="latest").restore(), 1)


def test_steps_are_epochs_or_counted_and_always_go_up(begin: Callable[..., TrainNode]) -> None:
    node = begin()
    steps = []
    for given in ({"epoch": 4}, {"epoch": 4}, {"step": 9, "epoch": 5}, {"x": 1}, {"epoch": "last"}):
        node.save(given)
        steps.append(node.checkpointer.step_count)
    assert steps == [4, 5, 9, 10, 11]


def test_a_large_tensor_changed_too_early_costs_that_save_and_no_other(
    begin: Callable[..., TrainNode], caplog: pytest.LogCaptureFixture
) -> None:
    node = begin()
    strategy = node.checkpointer._strategy
    begun = strategy.begin
    release = threading.Event()

    def late(copying: Any) -> Any:
        whole = copying.finish

        def finishing(*words: Any) -> None:
            release.wait(30)
            whole(*words)

        copying.finish = finishing
        return begun(copying)

    strategy.begin = late  # type: ignore[method-assign]
    torn = state(1)
    node.save(torn)
    torn["weights"].fill_(7)
    release.set()
    node.wait_copy_complete()
    strategy.begin = begun  # type: ignore[method-assign]
    assert "expected 'state/weights' to stand still" in caplog.text
    given = state(2)
    node.save(given)
    given["weights"].fill_(7)
    node.wait_copy_complete()
    node = begin(snapshot_path="latest")
    check(node.restore(), 2)


def test_small_tensors_may_change_at_once(begin: Callable[..., TrainNode], caplog: pytest.LogCaptureFixture) -> None:
    node = begin()
    given = state(1)
    node.save(given)
    given["few"].fill_(7)
    node.waiting_for_copying()
    assert "stand still" not in caplog.text
    check(begin(snapshot_path="latest").restore(), 1)


def test_generators_go_on_where_they_were(begin: Callable[..., TrainNode]) -> None:
    torch.manual_seed(5)
    begin().save(state(1))
    drawn = torch.rand(3)
    torch.manual_seed(6)
    node = begin(snapshot_path="latest")
    node.restore()
    assert torch.equal(torch.rand(3), drawn)


def test_one_slot_is_taken_as_two_and_said(begin: Callable[..., TrainNode], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shade.checkpoint"):
        begin(remote_buffer_size=1)
    assert "remote_buffer_size 1 is taken as 2" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"remote_buffer_size": 0}, "of 1 or more"),
        ({"shard_size": 0}, "of 1 or more"),
        ({"shards": 2}, r"got \['shards'\]"),
        ({"model_name": "a/b"}, "a run id of letters"),
        ({"store": "redis://127.0.0.1:1"}, "a store that answers"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    begin: Callable[..., TrainNode], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        begin(**given)
    assert not dist.is_initialized()
    begin()


def test_a_second_beginning_needs_an_end(begin: Callable[..., TrainNode]) -> None:
    begin()
    with pytest.raises(ConfigError, match="destroy_acute"):
        shade.init_acute()
    shade.destroy_acute()
    shade.destroy_acute()


def test_what_cannot_be_saved_is_named(begin: Callable[..., TrainNode]) -> None:
    node = begin()
    with pytest.raises(ConfigError, match="state/model"):
        node.save({"model": object()})
    node.save(state(1))


def test_dash_is_the_same_under_its_name(tmp_path: Path, name: str) -> None:
    communicator, node, remote = shade.init_dash(persist_to=str(tmp_path), model_name=name)
    assert (communicator.rank, communicator.world_size) == (0, 1)
    assert (remote.run, remote.store, remote.command, remote.is_serving()) == (name, None, "", False)
    communicator.barrier()
    node.save(state(1))
    node.wait_durable(30)
    assert node.wait_committed() == "storage"
    shade.destroy_dash()


@pytest.mark.parametrize("spelling", ["ACUTE", "DASH", "dash"])
def test_the_original_spellings_are_the_same_calls(spelling: str) -> None:
    for verb in ("init", "destroy"):
        assert getattr(shade, f"{verb}_{spelling}") is getattr(shade, f"{verb}_acute")


def test_mpiruns_variables_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "")  # to be taken away again at the end, whatever was set
        monkeypatch.delenv(variable)
    for variable, value in (("RANK", "0"), ("SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{variable}", value)
    communicator, _, _ = shade.init_acute(persist_to=str(tmp_path), model_name=name, training_master_port="0")
    assert communicator.world_size == 1
    shade.destroy_acute()


class Pair:
    """Two ranks in one process: what each tells is known to both."""

    world_size = 2

    def __init__(self, rank: int, told: list[Any]) -> None:
        self.rank, self._told = rank, told

    def gather(self, message: Any) -> list[Any]:
        self._told[self.rank] = message
        return [message if each is None else each for each in self._told]


def captured(states: list[dict[str, Any]]) -> list[CapturedState]:
    """What each of two ranks saves; asked twice, so that the second time both have told."""
    told: list[Any] = [None, None]
    ranks = [StateDictState(Pair(rank, told)) for rank in range(2)]  # type: ignore[arg-type]
    for rank, each in enumerate(ranks):
        each.state = states[rank]
        each.capture(rank, 2)
    return [each.capture(rank, 2) for rank, each in enumerate(ranks)]


def test_what_is_alike_on_all_ranks_is_shared_and_the_rest_is_each_ranks_own() -> None:
    tied = torch.rand(LARGE)
    states = []
    for rank in range(2):
        middle = torch.zeros(LARGE)
        middle[LARGE // 2] = rank
        states.append({"w": tied, "mean": torch.tensor([1.0, rank]), "middle": middle, 1: tied[:5], "1": tied[:4]})
    states[1]["extra"] = torch.ones(2)
    first, second = captured(states)
    assert {"state/w", "state/1", "state/1%"} <= first.tensors.keys() & second.tensors.keys()
    assert {"state/mean@rank0", "state/middle@rank0"} <= first.tensors.keys()
    assert {"state/mean@rank1", "state/middle@rank1", "state/extra@rank1"} <= second.tensors.keys()
    assert first.steady == {"state/w", "state/middle@rank0"}


def test_what_one_rank_cannot_save_none_does() -> None:
    told: list[Any] = [None, None]
    failing, other = (StateDictState(Pair(rank, told)) for rank in range(2))  # type: ignore[arg-type]
    failing.state, other.state = {"model": object()}, state(1)
    told[1] = {}
    with pytest.raises(ConfigError, match="state/model"):
        failing.capture(0, 2)
    assert told[0] is None
    other._group.gather = lambda message: [None, message]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="rank 0 cannot save its state"):
        other.capture(1, 2)
