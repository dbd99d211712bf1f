"""A restore on several ranks: what does not fit on one changes nothing on any, and far bytes are read once for all."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import shade
from shade.checkpoint import Checkpointer, StateDictCheckpointer, load_weights
from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._format.manifest import CHUNK_BYTES
from shade.checkpoint._session.checkpointer import tiers_of
from shade.checkpoint.dcp import ShadeReader, ShadeWriter
from shade.errors import CheckpointError, ConfigError, StateMismatchError
from shade.launch.ranks import free_port
from tests.differential.checkpoint_checks import difference
from tests.differential.checkpoint_processes import Say, in_processes
from tests.support.counted_reads import counted_reads
from tests.support.states import assert_same

pytestmark = pytest.mark.multiprocess


SAVED = 4


class Counter:
    """An object that may refuse the state that was saved."""

    def __init__(self, refuses: bool = False) -> None:
        self.count, self.refuses = 3, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and state["count"] == SAVED:
            raise ValueError("no such count")
        self.count = state["count"]


def build(seed: int, wrong: str = "") -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5 if wrong == "model" else 3), torch.nn.BatchNorm1d(3))
    params: Any = [{"params": [each]} for each in model.parameters()] if wrong == "groups" else model.parameters()
    kind = torch.optim.SGD if wrong == "optimizer" else torch.optim.Adam
    optimizer = kind(params, lr=0.1, **({"momentum": 0.9} if wrong == "optimizer" else {}))
    made = {"counter": Counter(wrong == "object"), "optimizer": optimizer, "model": model}
    return made | ({"other": Counter()} if wrong == "missing" else {})


def opened(folder: Path) -> Checkpointer:
    return Checkpointer(persist_to=folder / "storage", run=f"ranks-{folder.name}", every="never")


def state_of(things: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: each.state_dict() for name, each in things.items()} | {"torch": torch.get_rng_state()})


def step(things: dict[str, Any]) -> None:
    torch.nn.functional.linear(torch.ones(1, 4), things["model"][0].weight).sum().backward()
    things["optimizer"].step()


COMPLAINTS = {
    "optimizer": "'optimizer'",
    "groups": "parameter groups",
    "model": "of shape",
    "missing": "other",
    "object": "no such count",
}
"""By what one rank has otherwise: a part of the refusal."""


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_nothing_is_changed_on_any_rank(bad_rank: int, tmp_path: Path) -> None:
    def restore(rank: int, say: Say) -> None:
        with opened(tmp_path) as checkpointer:
            things = build(0)
            checkpointer.attach(**things)
            things["counter"].count = SAVED
            step(things)
            checkpointer.step()
            checkpointer.save()
            saved = things["model"].state_dict()
        say({wrong: refused(wrong, rank == bad_rank, saved) for wrong in COMPLAINTS})

    def refused(wrong: str, is_bad: bool, saved: dict[str, Any]) -> str:
        with opened(tmp_path) as checkpointer:
            things = build(1, wrong if is_bad else "")
            if wrong != "model":
                step(things)
            checkpointer.attach(**things)
            before = state_of(things)
            with pytest.raises(StateMismatchError) as refusal:
                checkpointer.restore_latest()
            dist.barrier()
            assert_same(state_of(things), before)
            assert checkpointer.step_count == 0
            # The ranks are at the same place, and restore the part that fits.
            part = "counter" if wrong == "model" else "model"
            checkpointer.restore_latest(only=[part])
            assert part != "model" or not difference(things["model"].state_dict(), saved)
            assert part != "counter" or things["counter"].count == SAVED
            return str(refusal.value)

    said = in_processes(2, restore, tmp_path / "meeting")
    for wrong, complaint in COMPLAINTS.items():
        assert complaint in said[bad_rank][wrong]
        assert said[1 - bad_rank][wrong] == f"rank {bad_rank}: {said[bad_rank][wrong]}; so no rank has changed anything"


def test_a_name_that_one_rank_has_not_attached_is_named_on_both(tmp_path: Path) -> None:
    def restore(rank: int, say: Say) -> None:
        with opened(tmp_path) as checkpointer:
            things = build(0)
            checkpointer.attach(**things)
            checkpointer.save()
            before = state_of(things)
            with pytest.raises(StateMismatchError if rank else ConfigError, match="modell") as refused:
                checkpointer.restore_latest(only=["model" if rank else "modell"])
            assert_same(state_of(things), before)
            say(str(refused.value))

    assert all("names of what is attached" in each for each in in_processes(2, restore, tmp_path / "meeting"))


def stores_of(owner: object) -> list[Any]:
    """Returns the stores of torch.distributed that an object keeps alive."""
    found, seen, waiting = [], set(), [owner]
    while waiting:
        each = waiting.pop()
        is_foreign = isinstance(each, (ModuleType, type)) or (isinstance(each, dict) and "__builtins__" in each)
        if id(each) in seen or is_foreign:
            continue
        seen.add(id(each))
        if isinstance(each, dist.Store) and not isinstance(each, dist.HashStore):  # type: ignore[attr-defined]
            found.append(each)
        waiting += gc.get_referents(each)
    return found


def test_a_tensor_that_differs_anywhere_is_each_ranks_own(tmp_path: Path) -> None:
    """Of a state dict that is passed, nobody says what is alike."""

    def act(rank: int, say: Say) -> None:
        counts, alike = torch.zeros(20_000, dtype=torch.int64), torch.arange(20_000.0)
        counts[100 + rank], counts[15_000 + rank] = 7, 70
        options: dict[str, Any] = {"persist_to": tmp_path / "storage", "run": f"ranks-{tmp_path.name}"}
        with StateDictCheckpointer(**options) as checkpointer:
            checkpointer.save_state({"counts": counts, "alike": alike, "strided": counts[::2]}, 1)
            checkpointer.wait_durable()
            num_bytes = checkpointer.list()[0].record.num_bytes
        with StateDictCheckpointer(**options) as checkpointer:
            checkpointer.watch(str(tmp_path / "notice"))
            checkpointer.restore_latest()
            found = checkpointer.state_dict_state.take()
        assert not stores_of(checkpointer), "a server that is kept is the next group's, with old addresses"
        assert found is not None
        assert_same({name: found[name] for name in ("counts", "alike")}, {"counts": counts, "alike": alike})
        assert torch.equal(found["strided"], counts[::2])
        say(num_bytes)

    for num_bytes in in_processes(2, act, tmp_path / "meeting"):
        assert num_bytes < 2 * (160_000 + 80_000) + 80_000 + 40_000  # what is alike is there once


@pytest.mark.slow
def test_zero_1_is_refused_and_the_optimizer_in_it_is_the_cure(tmp_path: Path) -> None:
    """It trains to the same weights, and continues."""
    options: dict[str, Any] = {"persist_to": tmp_path / "storage", "run": f"ranks-{tmp_path.name}", "every": "never"}

    def act(rank: int, say: Say) -> None:
        def made(kind: Any, **given: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 3)
            return model, kind(model.parameters(), **given, lr=0.1)

        def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for step in range(3):
                model(torch.full((2, 3), step + 1.0)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        sharded = made(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam)
        train(*sharded)
        train(*sharded)
        with Checkpointer(**options) as checkpointer:
            with pytest.raises(ConfigError, match="use the optimizer that it wraps"):
                checkpointer.attach(model=sharded[0], optimizer=sharded[1])
            model, optimizer = made(torch.optim.Adam)
            checkpointer.attach(model=model, optimizer=optimizer)
            train(model, optimizer)
            checkpointer.save()
            checkpointer.wait_durable()
        model, optimizer = made(torch.optim.Adam)
        with Checkpointer(**options) as checkpointer:
            checkpointer.attach(model=model, optimizer=optimizer)
            checkpointer.restore_latest()
            train(model, optimizer)
        say(torch.allclose(model.weight, sharded[0].weight))

    assert in_processes(2, act, tmp_path / "meeting") == [True, True]


@pytest.mark.slow
def test_acute_begins_again_while_a_rank_still_ends(tmp_path: Path) -> None:
    """In one process, as a notebook does, and where rank 0 holds the server on which the ranks meet."""
    port = free_port()

    def act(rank: int, say: Say) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        options = {"persist_to": str(tmp_path), "model_name": f"ranks-{tmp_path.name}"}
        _, node, _ = shade.init_acute(**options)
        node.save({"seen": torch.arange(3) + rank, "epoch": 1})
        node.wait_durable(30)
        node.checkpointer.close()
        time.sleep(0.5 * (rank == 0))
        shade.destroy_acute()
        _, node, _ = shade.init_acute(**options, snapshot_path="latest")
        found = node.restore()
        assert found is not None
        say(found["seen"].tolist())
        shade.destroy_acute()

    assert in_processes(2, act) == [[0, 1, 2], [1, 2, 3]]


def test_whole_weights_go_into_a_model_that_is_sharded(tmp_path: Path) -> None:
    def act(rank: int, say: Say) -> None:
        run = f"ranks-{tmp_path.name}"
        torch.manual_seed(0)
        source = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
        with Checkpointer(persist_to=tmp_path / "storage", run=run, every="never") as checkpointer:
            checkpointer.attach(model=source)
            checkpointer.save()
            checkpointer.wait_durable()
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        load_weights(model, persist_to=tmp_path / "storage", run=run)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert not difference(whole, dict(source.state_dict())) or rank

    in_processes(2, act, tmp_path / "meeting")


def test_a_snapshot_that_one_rank_has_begun_to_replace_is_passed_over(tmp_path: Path) -> None:
    run, layer = f"replaced-{tmp_path.name}", torch.nn.Linear(3, 2)

    def opened() -> Checkpointer:
        checkpointer = Checkpointer(persist_to=tmp_path / "storage", run=run, every="never")
        checkpointer.attach(model=layer)
        return checkpointer

    def save(rank: int, say: Say) -> None:
        checkpointer = opened()
        checkpointer.save()
        checkpointer.wait_durable()
        say(str(tiers_of(checkpointer).shared_memory.folder))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def restore(rank: int, say: Say) -> None:
        with opened() as checkpointer:
            say(checkpointer.restore_latest().tiers)

    folder, _ = in_processes(2, save, tmp_path / "first")
    for place in (tmp_path / "storage" / run).glob("step-*"):  # as if it had not come there yet
        shutil.rmtree(place)
    for kind in ("commit", "json"):  # what the first rank's next save gives up at once
        (Path(folder) / f"rank-0.0.{kind}").unlink()
    try:
        assert in_processes(2, restore, tmp_path / "second") == [(), ()]
    finally:
        shutil.rmtree(own_folder(run), ignore_errors=True)


WIDTH = 1030
"""A layer of so many squared float32 is a little longer than a chunk."""


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_in_storage_are_read_once_for_all_ranks(num_ranks: int, tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def restore(rank: int, say: Say) -> None:
        saved = made(0)
        with opened(tmp_path) as checkpointer:
            checkpointer.attach(**saved)
            checkpointer.save()
            checkpointer.wait_durable()
        with opened(tmp_path) as checkpointer, counted_reads() as read:
            other = made(1)
            checkpointer.attach(**other)
            restored = checkpointer.restore_latest()
            assert restored.tiers == ("storage",)
            assert not difference(other["model"].state_dict(), saved["model"].state_dict())
            say((sum(read.values()), restored.num_bytes))

    said = in_processes(num_ranks, restore, tmp_path / "meeting")
    num_bytes = said[0][1]
    assert num_bytes >= 3 * WIDTH**2 * 4
    assert sum(each for each, _ in said) == num_bytes
    assert max(each for each, _ in said) < num_bytes, "the ranks share the reading"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_of_a_sharded_job_reads_its_part_and_little_else(num_ranks: int, tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        layers = (torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)) for _ in range(16))
        model = torch.nn.Sequential(*layers)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (num_ranks,)))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 512)).pow(2).sum().backward()
        optimizer.step()
        held, moments = get_state_dict(model, optimizer)
        return {"model": held, "optimizer": moments}

    def restore(rank: int, say: Say) -> None:
        saved, other = made(0), made(1)
        with ShadeWriter(persist_to=tmp_path / "storage", run="ranks") as writer:
            dcp.save(saved, storage_writer=writer, checkpoint_id="1")
            dist.barrier()
        with counted_reads() as read, ShadeReader(persist_to=tmp_path / "storage", run="ranks") as reader:
            dcp.load(other, storage_reader=reader)
        assert_same(here(other), here(saved))
        say((sum(read.values()), sum(each.nbytes for each in here(saved).values() if torch.is_tensor(each))))

    def here(state: dict[str, Any]) -> dict[str, Any]:
        parts, _ = flatten_state_dict(state)
        return {name: each.to_local() if hasattr(each, "to_local") else each for name, each in parts.items()}

    said = in_processes(num_ranks, restore, tmp_path / "meeting")
    num_bytes = sum(own for _, own in said)
    assert num_bytes > 4 * num_ranks * CHUNK_BYTES, "or else two chunks are much of a shard"
    # Step counts and statistics are small and not sharded, and lie in the shards of several ranks: their chunks, which
    # are the first and the last, are read by all.
    assert num_bytes < sum(read for read, _ in said)
    assert all(read <= own + (num_ranks - 1) * 2 * CHUNK_BYTES for read, own in said)


def test_storage_on_one_rank_alone_is_refused_on_both(tmp_path: Path) -> None:
    def begin(rank: int, say: Say) -> None:
        folder = None if rank else tmp_path / "storage"
        with pytest.raises(ConfigError, match="the same persist_to on every rank") as refused:
            Checkpointer(persist_to=folder, run=f"ranks-{tmp_path.name}")
        say(str(refused.value))

    assert len(set(in_processes(2, begin, tmp_path / "meeting"))) == 1


@pytest.mark.parametrize("saving", [0, 1])
def test_a_save_that_one_rank_leaves_out_fails_on_both_at_once(saving: int, tmp_path: Path) -> None:
    def save(rank: int, say: Say) -> None:
        things = build(0)
        checkpointer = opened(tmp_path)
        checkpointer.attach(**things)
        checkpointer.step()
        checkpointer.save()
        if rank == saving:
            checkpointer.step()
            checkpointer.save()
        dist.barrier()
        if rank != saving:
            checkpointer.step()  # to the step that the other rank has saved
        with pytest.raises(CheckpointError, match=f"no save.. on rank {1 - saving}") as refused:
            checkpointer.wait_committed() if rank == saving else checkpointer.step()
        with pytest.raises(CheckpointError):
            checkpointer.close()
        say(str(refused.value))
        with opened(tmp_path) as again:
            again.attach(**things)
            assert again.restore_latest().step == 1

    said = in_processes(2, save, tmp_path / "meeting")
    assert said[saving] == f"rank {1 - saving}: {said[1 - saving]}"
