"""The Checkpointer as a training script uses it: what it saves, where it goes, what it says, and what comes back."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._flush.flusher import Flusher
from shade.checkpoint._format.digest import canonical, digest_of
from shade.checkpoint._format.manifest import Manifest
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._interchange.export import import_state
from shade.checkpoint._session import open_tiers as tiers_module
from shade.checkpoint._session.checkpointer import Checkpointer, load_weights
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.data._sampler.sampler import ShadeSampler
from shade.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    RunInUseError,
    StateMismatchError,
    StorageError,
    StorageFullError,
    TornSnapshotError,
    UnknownNameError,
)
from shade.storage import open_volume
from shade.store import open_store
from shade.store._servers.server import LocalServer


class Training:
    """A model, an optimizer, and steps; the same each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self) -> float:
        loss = self.model(torch.randn(6, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @property
    def things(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


@pytest.fixture
def no_flusher(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dirty stays dirty."""
    monkeypatch.setattr(tiers_module, "_ensure_flusher", lambda *words: None)


def crash(checkpointer: Checkpointer) -> None:
    """Leaves as a training does that raises."""
    checkpointer.__exit__(RuntimeError, RuntimeError("out of memory"), None)


def losses(training: Training, num_steps: int) -> list[float]:
    return [training.step() for _ in range(num_steps)]


# ── round trips ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.multiprocess
@pytest.mark.redis
@pytest.mark.parametrize("where", ["storage", "cluster memory", "shared memory"])
@pytest.mark.parametrize("strategy", ["copy", "overlap"])
@pytest.mark.parametrize("buffers", [1, 2])
def test_a_run_goes_on_as_if_it_had_never_ended(
    begin: Callable[..., Checkpointer], server: LocalServer, where: str, strategy: str, buffers: int
) -> None:
    store = str(server.url.reveal()) if where == "cluster memory" else None
    more = {"store": store, "strategy": strategy, "buffers": buffers}
    if where != "storage":
        more["persist_to"] = None
    first = Training()
    with begin(first, **more) as checkpointer:
        for _ in range(4):
            first.step()
            checkpointer.step()
        checkpointer.save({"loss": 1.0})
        assert checkpointer.wait_committed() == where
        undisturbed = losses(first, 5)
        numbers = (random.random(), np.random.random())
    second = Training()
    torch.manual_seed(99)
    with begin(second, **more) as checkpointer:
        restored = checkpointer.restore_latest()
        assert (restored.step, restored.tiers) == (4, (where,))
        assert restored
        assert losses(second, 5) == undisturbed
        assert (random.random(), np.random.random()) == numbers


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Rprop, torch.optim.ASGD])
def test_a_save_before_the_first_step_leaves_the_optimizer_new(begin: Callable[..., Checkpointer], kind: Any) -> None:
    # PyTorch's get_optimizer_state_dict steps it with zero gradients and rate 0; these three then train otherwise.
    def made() -> Training:
        training = Training()
        training.optimizer = kind(training.model.parameters())
        return training

    undisturbed = losses(made(), 3)
    saved = made()
    with begin(saved) as checkpointer:
        assert not checkpointer.restore_latest()
        checkpointer.save()
        checkpointer.wait_durable()
        assert losses(saved, 3) == undisturbed
    restored = made()
    with begin(restored) as checkpointer:
        assert checkpointer.restore_latest()
        assert losses(restored, 3) == undisturbed


def test_steps_are_counted_and_saved_when_due(begin: Callable[..., Checkpointer]) -> None:
    training = Training()
    with begin(training, every=3, keep="all") as checkpointer:
        saved = []
        for _ in range(7):
            training.step()
            saved.append(checkpointer.step({"loss": 0.5}))
        assert saved == [False, False, True, False, False, True, False]
        checkpointer.wait_durable()
        assert [(each.record.step, each.record.metrics) for each in checkpointer.list()] == [
            (6, {"loss": 0.5}),
            (3, {"loss": 0.5}),
        ]
    with begin(Training(), every=3) as checkpointer:
        assert checkpointer.restore(3).step == 3
        assert checkpointer.step_count == 3
        with pytest.raises(CheckpointError, match=r"a snapshot of step 5, got 'steps \[3, 6, 7\]'"):
            checkpointer.restore(5)


@pytest.mark.parametrize(
    ("every", "end", "newest"),
    [(100, None, 5), ("1h", None, 5), (4, None, 5), (5, None, 5), ("never", None, 0), (100, RuntimeError("ended"), 0)],
)
def test_a_clean_end_saves_the_last_steps(
    begin: Callable[..., Checkpointer], every: Any, end: Exception | None, newest: int
) -> None:
    training, checkpointer = Training(), begin(every=every, keep="all")
    checkpointer.attach(**training.things)
    for _ in range(5):
        training.step()
        checkpointer.step()
    checkpointer.__exit__(type(end) if end else None, end, None)
    other = Training()
    again = begin(other, every=every)
    assert again.restore_latest().step == newest
    if newest:
        assert torch.equal(other.model[0].weight, training.model[0].weight)
    again.__exit__(None, None, None)
    assert begin(Training()).restore_latest().step == newest  # a restore without a step is nothing new


class Flips(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that are negated at random."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = torch.full((8,), float(index)) / 24
        return (-row if torch.rand(()) < 0.5 else row), index


@pytest.mark.parametrize("stop", [1, 4, 5, 9])  # one batch into an epoch, at its last batch but one, at its end, later
def test_a_resumed_run_draws_what_the_undisturbed_one_draws(
    begin: Callable[..., Checkpointer], run: str, stop: int
) -> None:
    def train(checkpointer: Checkpointer, until: int) -> list[float]:
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(module.parameters())
        sampler = ShadeSampler(Flips(), batch_size=5, seed=3, mode="uniform")
        loader = torch.utils.data.DataLoader(Flips(), batch_size=5, sampler=sampler)
        checkpointer.attach(model=module, optimizer=optimizer, sampler=sampler)
        losses = []
        for epoch in range(checkpointer.restore_latest().epoch, 3):
            sampler.set_epoch(epoch)
            for rows, indices in loader:
                loss_B = module(rows).square().mean(1)
                loss_B.mean().backward()
                sampler.report(indices, loss_B)
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
                losses.append(loss_B.mean().item())
                if checkpointer.step_count == until:
                    checkpointer.save()
                    checkpointer.wait_durable()
                    crash(checkpointer)
                    return losses
        return losses

    undisturbed = train(begin(run=f"{run}-undisturbed"), 100)
    first = train(begin(), stop)
    torch.manual_seed(99)
    assert first + train(begin(), 100) == undisturbed


def test_what_was_never_saved_is_a_new_run(begin: Callable[..., Checkpointer]) -> None:
    with begin(Training()) as checkpointer:
        restored = checkpointer.restore_latest()
        assert not restored
        assert restored.step == 0
        with pytest.raises(CheckpointError, match=r"call save\(\) first"):
            checkpointer.wait_committed()


def test_the_plan_follows_the_state(begin: Callable[..., Checkpointer]) -> None:
    training = Training()
    with begin(training, keep="all") as checkpointer:
        checkpointer.save()  # the optimizer has no state yet
        checkpointer.wait_committed()
        training.step()
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait_committed()
        undisturbed = losses(training, 2)
        sizes = [each.record.num_bytes for each in checkpointer.list()]
        assert sizes[0] > sizes[1] + 2 * 4 * (8 * 16 + 16)
    for step, right in ((1, undisturbed), (0, None)):
        other = Training()
        other.step()
        with begin(other) as checkpointer:
            checkpointer.restore(step)
            if right is not None:
                assert losses(other, 2) == right
            else:
                assert other.optimizer.state_dict()["state"] == {}


def test_a_part_is_restored_from_its_own_chunks(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bulk:
        def __init__(self) -> None:
            self.tensor = torch.arange(6_000_000, dtype=torch.float32)

        def state_dict(self) -> dict[str, Any]:
            return {"tensor": self.tensor}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.tensor = state["tensor"].clone()

    training = Training()
    training.step()
    with begin(training) as checkpointer:
        checkpointer.attach(bulk=Bulk())
        checkpointer.save()
        checkpointer.wait_committed()
    read: list[int] = []

    def watched(whole: Callable[..., Any]) -> Callable[..., Any]:
        def reading(self: StorageTier, place: str, manifest: Manifest, numbers: Sequence[int], *more: Any) -> Any:
            read.extend(numbers)
            assert len(manifest.chunks) > 5
            return whole(self, place, manifest, numbers, *more)

        return reading

    for name in ("read_chunks", "read_chunks_into"):
        monkeypatch.setattr(StorageTier, name, watched(getattr(StorageTier, name)))
    other, bulk = Training(), Bulk()
    bulk.tensor.zero_()
    with begin(other) as checkpointer:
        checkpointer.attach(bulk=bulk)
        checkpointer.restore_latest(only=["model"])
    assert 0 < len(set(read)) <= 2
    assert not bulk.tensor.any()
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name])
    assert other.optimizer.state_dict()["state"] == {}


def test_a_step_saved_twice_is_there_until_the_second_counts(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    with begin(training, keep="last=1") as checkpointer:
        checkpointer.step_count = 5
        checkpointer.save()
        checkpointer.wait_durable()
        monkeypatch.setattr(StorageTier, "commit", lambda self, place, record: (_ for _ in ()).throw(StorageError("x")))
        checkpointer.save()
        with pytest.raises(CheckpointError):
            checkpointer.wait_committed()
        monkeypatch.undo()
        assert [each.record.sequence for each in checkpointer.list() if "storage" in each.tiers] == [1]
        training.step()
        checkpointer.save()
        checkpointer.wait_durable()
        right = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    other = Training()
    with begin(other) as checkpointer:
        assert len(checkpointer.list()) == 1
        checkpointer.restore(5)
        assert all(torch.equal(tensor, right[name]) for name, tensor in other.model.state_dict().items())


# ── what does not fit ───────────────────────────────────────────────────────────────────────────────────────────────


def test_another_model_is_refused_by_name_and_left_alone(begin: Callable[..., Checkpointer]) -> None:
    with begin(Training()) as checkpointer:
        checkpointer.save()
    wide = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
    before = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    with begin() as checkpointer:
        checkpointer.attach(model=wide)
        with pytest.raises(StateMismatchError, match=r"'model/0\.weight' of shape \(32, 8\)"):
            checkpointer.restore_latest()
        assert checkpointer.step_count == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in wide.state_dict().items())


def test_what_is_read_in_place_is_verified_and_nothing_keeps_hanging_on_it(
    begin: Callable[..., Checkpointer], run: str, tmp_path: Path
) -> None:
    first = Training()
    saving = begin(first)
    losses(first, 2)
    saving.save()
    saving.wait_durable()
    crash(saving)
    expected = losses(first, 2)

    def restored() -> tuple[Checkpointer, Training, tuple[str, ...]]:
        second = Training()
        reading = begin(second)
        return reading, second, reading.restore_latest().tiers

    (buffer,) = own_folder(run).rglob("*.data")
    reading, second, tiers = restored()
    assert tiers == ("shared memory",)
    content = buffer.read_bytes()
    buffer.write_bytes(bytes(len(content)))  # as the next save would overwrite it
    assert losses(second, 2) == expected
    crash(reading)

    for place in (100, 900):  # somewhere in the optimizer's, somewhere in the model's
        buffer.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        reading, second, tiers = restored()
        assert losses(second, 2) == expected
        crash(reading)


class Keeper(torch.nn.Linear):
    """A module that keeps the tensor that it loads, as torchmetrics' do."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self.weight = torch.nn.Parameter(state_dict.pop(f"{prefix}weight"))
        super()._load_from_state_dict({**state_dict, f"{prefix}weight": self.weight}, prefix, *others)


class Box:
    """Any state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_each_tensor_that_comes_back_has_a_storage_of_its_own(begin: Callable[..., Checkpointer]) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = {"rng": generator.get_state(), "ones": torch.ones(3), "ids": np.arange(4), "none": torch.zeros(0, 2)}
    weight = Keeper(128, 64).weight

    def begun(box: Box, keeper: Keeper) -> Checkpointer:
        training = Training()
        training.step()
        made = begin(training)
        made.attach(box=box, keeper=keeper)
        return made

    first, keeper = Box(parts), Keeper(128, 64)
    weight = keeper.weight.detach().clone()
    checkpointer = begun(first, keeper)
    checkpointer.save()
    checkpointer.wait_durable()
    crash(checkpointer)
    second, other = Box({}), Keeper(128, 64)
    with begun(second, other) as again:  # from shared memory, where views would lie in the next save's buffer
        assert again.restore_latest()
        for _ in range(2):
            again.step_count += 1
            again.save()
            again.wait_committed()
    assert torch.equal(other.weight, weight)
    found = second.state
    leaves = [found["rng"], found["ones"], torch.from_numpy(found["ids"]), found["none"], other.weight.detach()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in leaves if tensor.numel()}) == 4
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize for tensor in leaves)
    want = torch.rand(3, generator=generator)
    generator.set_state(found["rng"])
    assert torch.equal(torch.rand(3, generator=generator), want)


@pytest.mark.parametrize("where", ["storage", "shared memory"])
def test_an_object_that_keeps_a_weight_of_the_model_gets_it_back(
    where: str, begin: Callable[..., Checkpointer]
) -> None:
    def begun(model: torch.nn.Module, box: Box) -> Checkpointer:
        checkpointer = begin(buffers=1)
        checkpointer.attach(model=model, box=box)
        return checkpointer

    model, box, other, again = torch.nn.Linear(600, 600), Box({}), torch.nn.Linear(600, 600), Box({})
    box.state = {"shadow": model.weight, "first": model.weight.detach()[:1]}
    checkpointer = begun(model, box)
    checkpointer.save()
    checkpointer.wait_committed()
    crash(checkpointer) if where == "shared memory" else checkpointer.close()
    with begun(other, again) as checkpointer:
        assert checkpointer.restore_latest().tiers == (where,)
        with torch.no_grad():
            other.weight.zero_()
        for _ in range(2):
            checkpointer.save()
            checkpointer.wait_committed()
        assert torch.equal(again.state["shadow"], model.weight)
        assert torch.equal(again.state["first"], model.weight[:1])


def test_names_that_are_not_there(begin: Callable[..., Checkpointer]) -> None:
    training = Training()
    with begin() as checkpointer:
        checkpointer.attach(model=training.model)
        checkpointer.save()
    with begin(training) as checkpointer:
        with pytest.raises(StateMismatchError, match="expected a state for optimizer, got model, random"):
            checkpointer.restore_latest()
        with pytest.raises(ConfigError, match="names of what is attached"):
            checkpointer.restore_latest(only=["modell"])
        assert checkpointer.restore_latest(only=["model"])


def test_silent_storage_and_rotten_records_are_no_new_run(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with begin(Training()) as checkpointer:
        checkpointer.save()
    with begin(Training()) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(StorageTier, "held", lambda self: (_ for _ in ()).throw(StorageError("stale handle")))
            with pytest.raises(CheckpointError, match=r"storage: stale handle'; bring it back"):
                checkpointer.restore_latest()
        (record,) = tmp_path.rglob("commit.json")
        record.write_bytes(record.read_bytes()[:-1])
        with pytest.raises(CorruptCheckpointError, match="its record cannot be read"):
            checkpointer.restore_latest()


@pytest.mark.parametrize("how", ["restored", "begun anew", "imported"])
def test_a_save_after_a_record_that_could_not_be_read_is_the_newest(
    how: str, begin: Callable[..., Checkpointer], run: str, tmp_path: Path
) -> None:
    with begin(Training(), keep="all") as checkpointer:
        for _ in range(3):
            checkpointer.step()
            checkpointer.save()
            checkpointer.wait_durable()
    newest = max(tmp_path.rglob("commit.json"))
    content = newest.read_bytes()
    newest.write_bytes(b"{")
    if how == "imported":
        with open_volume(tmp_path / "durable") as volume:
            import_state({"x": 1}, StorageTier(volume, run), run, 2)
    else:
        with begin(Training(), keep="all") as checkpointer:
            if how == "restored":
                assert checkpointer.restore_latest().step == 2
            checkpointer.save()
            checkpointer.wait_durable()
    newest.write_bytes(content)
    with begin(Training()) as checkpointer:
        steps = [snapshot.record.step for snapshot in checkpointer.list()]
    assert steps == [{"restored": 2, "begun anew": 0, "imported": 2}[how], 3, 2, 1]


# ── bad places ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.multiprocess
@pytest.mark.redis
def test_tiers_that_cannot_be_opened_are_refused_at_once_and_leave_nothing_open(
    begin: Callable[..., Checkpointer], tmp_path: Path, server: LocalServer
) -> None:
    (tmp_path / "file").write_bytes(b"")
    url = str(server.url.reveal())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"persist_to": str(tmp_path / "file")}, "storage that can be written"),
        ({"store": f"unix://{tmp_path}/nobody.sock"}, "a store that answers"),
        ({"store": "memory://"}, "other processes reach"),
        ({"run": "../up"}, "a run id of letters"),
        ({"every": "soon"}, "a number of steps"),
        ({"keep": "first=2"}, "last=N"),
        ({"store": url, "slots": 1}, "2 slots or more"),
        ({"store": url, "replicas": 1}, "fewer replicas than the store has servers"),
        ({"codec": "brotli"}, "brotli"),
        ({"strategy": "guess"}, "guess"),
    ]
    before = threading.active_count()
    for more, complaint in wrong:
        with pytest.raises(ConfigError, match=complaint):
            begin(**more)
    assert threading.active_count() == before
    with begin(Training(), store=url, persist_to=None) as checkpointer:  # the run id is free
        checkpointer.save()


def test_an_unknown_codec_is_an_unknown_name(begin: Callable[..., Checkpointer]) -> None:
    with pytest.raises(UnknownNameError, match=r"known: .*none.*zstd"):
        begin(codec="brotli")


@pytest.mark.multiprocess
@pytest.mark.redis
def test_two_runs_of_one_id_are_refused(
    begin: Callable[..., Checkpointer], server: LocalServer, tmp_path: Path
) -> None:
    for places in ({}, {"store": str(server.url.reveal()), "persist_to": None}):
        with begin(**places):
            with pytest.raises(RunInUseError, match=r"another Checkpointer of that run: close\(\) it first"):
                begin(**places)
            begin(persist_to=tmp_path / "other").close()


@pytest.mark.multiprocess
def test_a_store_that_goes_away_costs_no_step(
    begin: Callable[..., Checkpointer], tmp_path: Path, no_flusher: None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    with LocalServer(directory=folder) as server:
        training = Training()
        with begin(training, store=str(server.url.reveal())) as checkpointer:
            landed = []
            for number in range(6):
                if number == 2:
                    server.stop()
                if number == 4:
                    server.start()
                training.step()
                checkpointer.step()
                checkpointer.save()
                landed.append(checkpointer.wait_committed())
            assert landed == ["cluster memory"] * 2 + ["storage"] * 2 + ["cluster memory"] * 2
    said = [each.getMessage() for each in caplog.records if "cluster memory" in each.getMessage()]
    said = [each for each in said if "fails" in each or "works again" in each]
    assert len(said) == 2
    assert said[0].startswith("cluster memory fails; saves go to storage: ")
    assert said[1] == "cluster memory works again"


@pytest.mark.multiprocess
@pytest.mark.redis
def test_what_memory_has_lost_is_never_called_durable(
    begin: Callable[..., Checkpointer], server: LocalServer, no_flusher: None
) -> None:
    with begin(Training(), store=str(server.url.reveal())) as checkpointer:
        checkpointer.save()
        with pytest.raises(CheckpointError, match=r"durable within 0\.1 s, got 'in cluster memory only'"):
            checkpointer.wait_durable(0.1)
        with open_store(server.url, timeout_seconds=5) as store:
            store.delete_many(list(store.scan("shade:checkpoint:")))
        with pytest.raises(CheckpointError, match="neither there nor in storage"):
            checkpointer.wait_durable()


@pytest.mark.multiprocess
@pytest.mark.redis
def test_a_chunk_that_memory_has_lost_is_put_back_while_a_save_is_waited_for(
    begin: Callable[..., Checkpointer], server: LocalServer, run: str, tmp_path: Path, no_flusher: None
) -> None:
    memory = MemoryTier(open_store(server.url, timeout_seconds=5), run)
    storage = StorageTier(open_volume(str(tmp_path / "durable")), run)
    with memory.store, begin(Training(), store=str(server.url.reveal())) as checkpointer:
        flusher = Flusher(memory, storage, Keep.parse("all"))
        checkpointer.save()
        checkpointer.wait_committed()
        memory.store.delete_many([next(key for key in memory.store.scan("shade:checkpoint:") if "chunk" in key)])
        with pytest.raises(CorruptCheckpointError, match="is lost or damaged in every copy"):
            flusher.flush_one()
        waiting = threading.Thread(target=checkpointer.wait_durable, args=(60,))
        waiting.start()
        while not storage.held():
            with contextlib.suppress(CorruptCheckpointError):
                flusher.flush_one()
            time.sleep(0.05)
        waiting.join()
        assert not memory.dirty()
    memory.close()


@pytest.mark.multiprocess
@pytest.mark.redis
def test_a_save_that_memory_has_lost_in_part_and_nothing_else_has_is_said(
    begin: Callable[..., Checkpointer],
    server: LocalServer,
    run: str,
    no_flusher: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiers_module, "_MEND_SECONDS", 0.01)
    memory = MemoryTier(open_store(server.url, timeout_seconds=5), run)
    with memory.store, begin(Training(), store=str(server.url.reveal())) as checkpointer:
        checkpointer.save()
        checkpointer.wait_committed()
        memory.store.delete_many([next(key for key in memory.store.scan("shade:checkpoint:") if "chunk" in key)])
        shutil.rmtree(own_folder(run))
        memory.note_damage(next(iter(memory.held())))
        with pytest.raises(CheckpointError, match=r"step 0 to stay whole in cluster memory .*; save again"):
            checkpointer.wait_durable()
    memory.close()


def test_a_snapshot_of_a_newer_version_is_no_reason_to_go_back_to_an_older_one(
    begin: Callable[..., Checkpointer], run: str, tmp_path: Path
) -> None:
    with begin(Training(), keep="all") as checkpointer:
        for _ in range(2):
            checkpointer.step()
            checkpointer.save()
            checkpointer.wait_durable()
    path = tmp_path / "durable" / run / "step-0000000002" / "commit.json"
    plain = path.read_bytes()
    body = json.loads(plain) | {"version": 3}
    del body["digest"]
    path.write_bytes(canonical(body | {"digest": digest_of(canonical(body))}))
    training = Training()
    before = training.model[0].weight.detach().clone()
    with begin(training) as checkpointer:
        with pytest.raises(CheckpointError, match="use the shade that wrote it"):
            checkpointer.restore_latest()
        assert torch.equal(training.model[0].weight, before)
    path.write_bytes(plain.replace(b'"version":1', b'"version":3'))  # damaged, and no newer one
    with begin(training) as checkpointer:
        assert checkpointer.restore_latest().step == 1


def test_what_nothing_attached_takes_is_said(
    begin: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 10)
    with begin(training) as checkpointer:
        checkpointer.attach(scheduler=scheduler)
        checkpointer.save()
    with begin(Training()) as checkpointer:
        checkpointer.restore_latest(only=["model"])
        assert "scheduler" not in caplog.text
        checkpointer.restore_latest()
        assert "step 0 also holds scheduler, which nothing attached takes" in caplog.text


def test_what_a_crashed_save_left_half_written_is_removed_by_the_next_training(
    begin: Callable[..., Checkpointer], run: str, tmp_path: Path
) -> None:
    first = Training()
    saving = begin(first)
    for _ in range(5):
        first.step()
        saving.step()
    saving.save()
    saving.wait_durable()
    crash(saving)
    (whole,) = (tmp_path / "durable" / run).glob("step-*")
    older, newer = whole.with_name(whole.name.replace("5", "3")), whole.with_name(whole.name.replace("5", "7"))
    for place in (older, newer):
        shutil.copytree(whole, place, ignore=lambda folder, names: {name for name in names if "commit" in name})
    begin(Training())
    assert whole.exists()
    assert not older.exists()
    assert not newer.exists(), "the lock on the run id says that nobody writes it"


@pytest.mark.multiprocess
@pytest.mark.redis
def test_with_a_store_what_is_newer_than_the_newest_snapshot_is_left_alone(
    begin: Callable[..., Checkpointer], server: LocalServer, run: str, tmp_path: Path
) -> None:
    training = Training()
    with begin(training) as checkpointer:
        training.step()
        checkpointer.save()
        checkpointer.wait_durable()
    (whole,) = (tmp_path / "durable" / run).glob("step-*")
    newer = whole.with_name("step-0000000007")
    shutil.copytree(whole, newer, ignore=lambda folder, names: {name for name in names if "commit" in name})
    begin(Training(), store=str(server.url.reveal()))
    assert whole.exists()
    assert newer.exists(), "a flusher that serves another store may be writing it"


def test_durable_where_there_is_no_storage(begin: Callable[..., Checkpointer]) -> None:
    with begin(Training(), persist_to=None) as checkpointer:
        checkpointer.save()
        with pytest.raises(ConfigError, match="pass persist_to="):
            checkpointer.wait_durable()


def test_a_full_disk_costs_the_save_and_not_the_training(
    begin: Callable[..., Checkpointer], run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    checkpointer = begin(training)
    training.step()
    checkpointer.step()
    with monkeypatch.context() as patch:
        patch.setattr("shade.storage.directory.DirectoryVolume.free_bytes", lambda self: 10)
        checkpointer.save()
        with pytest.raises(CheckpointError, match="expected room for"):
            checkpointer.wait_committed()
        training.step()
        with pytest.raises(CheckpointError, match="expected room for"):
            checkpointer.close()
    assert "step 1 is not saved: storage: expected room for" in caplog.text
    other = Training()
    with begin(other) as again:
        restored = again.restore_latest()
        assert (restored.step, restored.tiers) == (1, ("shared memory",)), "the only copy there is was left"
        again.save()
        again.wait_durable()
    assert not own_folder(run).exists(), "and goes when it is not needed any more"


def test_an_exception_leaves_shared_memory_and_a_good_end_does_not(
    begin: Callable[..., Checkpointer], run: str
) -> None:
    checkpointer = begin(Training(), buffers=2)
    checkpointer.save()
    checkpointer.wait_committed()
    crash(checkpointer)
    with begin(Training(), buffers=2) as checkpointer:
        assert checkpointer.restore_latest().tiers == ("shared memory",)
        checkpointer.save()
    assert not own_folder(run).exists()
    with begin(Training()) as checkpointer:
        assert checkpointer.restore_latest().tiers == ("storage",)


def test_what_another_storages_run_left_in_memory_is_not_restored(
    begin: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    killed = begin(Training())
    killed.step()
    killed.save()
    killed.wait_durable()
    crash(killed)
    with begin(Training(), persist_to=tmp_path / "other") as other:
        assert not other.restore_latest()
        other.save()
    shutil.copytree(tmp_path / "other", tmp_path / "copy")
    with begin(Training(), persist_to=tmp_path / "copy") as copy:
        assert copy.restore_latest().tiers == ("storage",)
    shutil.rmtree(tmp_path / "durable")  # emptied, to begin afresh under the same path
    with begin(Training()) as afresh:
        assert not afresh.restore_latest()
        assert afresh.list() == []


def test_two_with_one_run_id_and_storages_of_their_own_stay_apart(
    begin: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    pair = [(tmp_path / name, torch.nn.Linear(300, 300)) for name in ("teacher", "student")]
    for number, (_, model) in enumerate(pair):
        torch.nn.init.constant_(model.weight, number + 1.0)
    opened = [begin(persist_to=folder, keep="all", strategy="copy") for folder, _ in pair]
    for checkpointer, (_, model) in zip(opened, pair, strict=True):
        checkpointer.attach(model=model)
    for _ in range(4):
        for checkpointer in opened:
            checkpointer.step()
            checkpointer.save()
    for checkpointer, (folder, _), value in zip(opened, pair, (1.0, 2.0), strict=True):
        checkpointer.close()
        for step in range(1, 5):
            restored = torch.nn.Linear(300, 300)
            load_weights(restored, persist_to=folder, run=checkpointer.run, step=step)
            assert restored.weight.unique().tolist() == [value]


def test_nothing_is_done_after_close(begin: Callable[..., Checkpointer]) -> None:
    checkpointer = begin(Training())
    checkpointer.close()
    for action in (checkpointer.step, checkpointer.save, checkpointer.restore_latest, checkpointer.watch):
        with pytest.raises(ConfigError, match=r"an open Checkpointer, got '.*\(\) after close\(\)'"):
            action()


def test_an_epoch_that_nothing_counts_is_named_when_it_is_asked_for(
    begin: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    with begin(Training()) as checkpointer:
        assert checkpointer.restore_latest().epoch == 0
        checkpointer.step()
        checkpointer.save()
    with begin(Training()) as checkpointer:
        restored = checkpointer.restore_latest()
        assert "counts epochs" not in caplog.text, "a loop over steps needs none"
        assert restored.epoch == 0
        assert "step 1 is restored, and nothing attached counts epochs" in caplog.text


def test_ranks_that_torch_does_not_connect_yet_are_refused(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"call init_process_group\(\) before"):
        begin()
    monkeypatch.delenv("RANK")
    begin().close()


BREAKS_OFF = """
import sys, time, torch
from shade.checkpoint import Checkpointer
from shade.checkpoint._save.async_writer import AsyncWriter

dies, run = sys.argv[1] == "dies", sys.argv[2]
checkpointer = Checkpointer(run=run, every="never", buffers=2)
checkpointer.attach(model=torch.nn.Linear(2, 2))
checkpointer.restore_latest()
if dies:
    AsyncWriter._write = lambda *words: time.sleep(60)
for _ in range(1 if dies else 3):
    checkpointer.step()
    checkpointer.save()
    dies or checkpointer.wait_committed()
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.multiprocess
def test_a_save_broken_off_after_a_restart_leaves_the_newest_in_shared_memory(
    begin: Callable[..., Checkpointer], run: str
) -> None:
    for how in ("saves", "dies"):
        command = [sys.executable, "-W", "ignore", "-c", BREAKS_OFF, how, run]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.kill()
    checkpointer = begin(persist_to=None, buffers=2)
    checkpointer.attach(model=torch.nn.Linear(2, 2))
    assert checkpointer.restore_latest().step == 3


# ── what goes wrong while a snapshot is taken ───────────────────────────────────────────────────────────────────────


class Held:
    """Copies that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        finish = Copying.finish

        def finishing(copying: Copying, *words: Any) -> None:
            assert self.release.wait(30)
            finish(copying, *words)

        monkeypatch.setattr(Copying, "finish", finishing)


def test_a_change_that_came_too_early_costs_that_save_and_no_step(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    training.step()
    held = Held(monkeypatch)
    with begin(training) as checkpointer:
        checkpointer.save()
        with torch.no_grad():
            training.model[0].weight.add_(1)
        threading.Timer(0.05, held.release.set).start()
        training.step()  # waits for the copy, and goes on
        with pytest.raises(CheckpointError, match=r"rank 0: expected 'model/0\.weight' to stand still"):
            checkpointer.wait_committed()
        checkpointer.step()
        checkpointer.save()
        assert checkpointer.wait_committed() == "storage"
        assert [each.record.step for each in checkpointer.list()] == [1]
    assert r"step 0 is not saved: rank 0: expected 'model/0.weight' to stand still" in caplog.text


def test_waiting_by_hand_raises_what_an_optimizer_would_not(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    held = Held(monkeypatch)
    checkpointer = begin(training)
    checkpointer.save()
    torch.nn.init.ones_(training.model[2].bias)
    held.release.set()
    with pytest.raises(TornSnapshotError, match=r"'model/2\.bias'"):
        checkpointer.wait_copy_complete()
    checkpointer.wait_copy_complete()


def test_the_optimizer_waits_for_the_copy(begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.step()
    right = {name: tensor.clone() for name, tensor in training.model.named_parameters()}
    held = Held(monkeypatch)
    with begin(training) as checkpointer:
        checkpointer.save()
        threading.Timer(0.1, held.release.set).start()
        training.step()
        assert held.release.is_set()
        checkpointer.wait_committed()
    other = Training()
    with begin(other) as checkpointer:
        checkpointer.restore_latest()
    assert all(torch.equal(tensor, right[name]) for name, tensor in other.model.named_parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_is_not_attached_waits_for_the_copy_of_what_it_changes(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """A fused one does not count its changes, so no check would find them all."""
    training = Training()
    other = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, fused=fused) for each in (training.model, other)]
    for param in (*training.model.parameters(), *other.parameters()):
        param.grad = torch.ones_like(param)
    right = {name: tensor.clone() for name, tensor in training.model.named_parameters()}
    held = Held(monkeypatch)
    with begin() as checkpointer:
        checkpointer.attach(model=training.model)
        checkpointer.save()
        optimizers[1].step()
        assert not held.release.is_set()
        threading.Timer(0.1, held.release.set).start()
        optimizers[0].step()
        assert held.release.is_set()
        checkpointer.wait_committed()
    restored = Training()
    with begin() as checkpointer:
        checkpointer.attach(model=restored.model)
        checkpointer.restore_latest()
    assert all(torch.equal(tensor, right[name]) for name, tensor in restored.model.named_parameters())


@pytest.mark.parametrize("strategy", ["overlap", "gemini"])
def test_what_a_forward_pass_moves_is_saved_from_the_second_save_on(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    net = torch.nn.ModuleDict({"q": torch.nn.Linear(2, 2), "k": torch.nn.Linear(2, 2).requires_grad_(False)})
    optimizer = torch.optim.SGD(net["q"].parameters(), momentum=0.9)
    held = Held(monkeypatch)
    with begin(strategy=strategy) as checkpointer:
        checkpointer.attach(model=net, optimizer=optimizer)
        outcomes = []
        for _ in range(3):
            checkpointer.step()
            checkpointer.save()
            with torch.no_grad():
                for param in net["k"].parameters():  # as a momentum encoder does
                    param.lerp_(torch.ones(()), 0.1)
            held.release.set()
            try:
                outcomes.append(checkpointer.wait_committed())
            except CheckpointError as error:
                outcomes.append("'model/k.bias' to stand still" in str(error))
            held.release.clear()
        held.release.set()
        assert outcomes == [True, "storage", "storage"]


@pytest.mark.parametrize("change", [True, False])
def test_leaving_in_the_middle_of_a_copy_ends(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, change: bool
) -> None:
    training = Training()
    held = Held(monkeypatch)
    checkpointer = begin(training)
    checkpointer.save()
    if change:
        torch.nn.init.ones_(training.model[0].bias)
    threading.Timer(0.05, held.release.set).start()
    crash(checkpointer)
    with begin(Training()) as again:
        assert bool(again.restore_latest()) != change


@pytest.mark.parametrize("error", [StorageFullError("no shared memory"), ValueError("a bug")])
def test_a_save_that_cannot_begin_fails_and_the_next_one_does_not(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with begin(Training(), buffers=2) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(SharedMemoryTier, "begin", lambda self, num_bytes: (_ for _ in ()).throw(error))
            with pytest.raises(type(error)):
                checkpointer.save()
            with pytest.raises(CheckpointError, match=f"rank 0: {error}"):
                checkpointer.wait_committed()
        checkpointer.save()
        assert checkpointer.wait_committed() == "storage"
        assert checkpointer.list()[0].record.sequence == 2, "the other ranks have counted it"


def test_metrics_may_be_whatever_is_a_number(begin: Callable[..., Checkpointer]) -> None:
    with begin(Training()) as checkpointer:
        checkpointer.save({"a": torch.tensor(0.5, requires_grad=True), "b": np.float32(2), "c": 3, "d": float("inf")})  # type: ignore[dict-item]
        checkpointer.wait_committed()
        metrics = checkpointer.list()[0].record.metrics
        assert (metrics["a"], metrics["b"], metrics["c"]) == (0.5, 2.0, 3.0)
        with pytest.raises(ConfigError, match="a number for each metric"):
            checkpointer.save({"accuracy": "good"})  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match="a number for each metric, got 7"):
            checkpointer.save(7)  # type: ignore[arg-type]  # a step, where other libraries take one
        checkpointer.save()
        checkpointer.wait_committed()


def test_closing_right_after_the_first_step_leaves_nothing_behind(begin: Callable[..., Checkpointer], run: str) -> None:
    before = threading.active_count()
    training = Training()
    with begin(training, every=10) as checkpointer:
        training.step()
        checkpointer.step()
    checkpointer.close()
    assert threading.active_count() == before
    assert not own_folder(run).exists()


def test_its_repr_says_what_it_is_doing(run: str, tmp_path: Path) -> None:
    checkpointer = Checkpointer(persist_to=tmp_path, run=run, strategy="copy", every=50)
    with checkpointer:
        checkpointer.attach(model=torch.nn.Linear(2, 2))
        assert (
            repr(checkpointer) == f"<Checkpointer of run '{run}', copy, every 50, file://{tmp_path}, step 0, 0 saves>"
        )
        checkpointer.step_count = 7
        checkpointer.save()
        checkpointer.wait_committed()
        assert repr(checkpointer).endswith("step 7, 1 save, step 7 in storage>")
    assert repr(checkpointer).endswith("step 7 in storage, closed>")


def test_help_shows_what_users_call_and_no_machinery(run: str) -> None:
    assert {name for name in dir(Checkpointer) if not name.startswith("_")} == {
        "attach",
        "close",
        "config",
        "is_due",
        "is_durable",
        "latest",
        "list",
        "recovery_estimate",
        "restore",
        "restore_latest",
        "run",
        "save",
        "should_stop",
        "step",
        "wait_committed",
        "wait_copy_complete",
        "wait_durable",
        "watch",
    }
    with Checkpointer(run=run, every="never") as checkpointer:
        assert [name for name in vars(checkpointer) if not name.startswith("_")] == ["step_count"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["plain", "shade"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_with_a_stateful_loader_goes_on_bit_for_bit(
    kind: str, workers: int, begin: Callable[..., Checkpointer], run: str
) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def train(checkpointer: Checkpointer, until: int) -> list[tuple[list[int], float]]:
        torch.manual_seed(checkpointer.step_count)
        data = torch.utils.data.TensorDataset(torch.arange(24.0), torch.arange(24))
        sampler = ShadeSampler(data, batch_size=5, seed=3, score="loss") if kind == "shade" else None
        order = {"shuffle": True} if sampler is None else {"sampler": sampler}
        loader = loaders.StatefulDataLoader(data, batch_size=5, num_workers=workers, **order)
        module = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(module.parameters())
        checkpointer.attach(model=module, optimizer=optimizer, loader=loader)
        steps = []
        for epoch in range(checkpointer.restore_latest().epoch, 3):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for rows, indices in loader:
                loss_B = module(rows[:, None]).square().mean(1)
                loss_B.mean().backward()
                if sampler is not None:
                    sampler.report(indices, loss_B)
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
                steps.append((indices.tolist(), loss_B.mean().item()))
                if checkpointer.step_count == until:
                    checkpointer.save()
                    checkpointer.wait_durable()
                    crash(checkpointer)
                    return steps
        return steps

    undisturbed = train(begin(run=f"{run}-undisturbed"), 100)
    first = train(begin(), 2)
    rest = train(begin(), 100)
    # A plain set's epochs are not counted in the state: the rest of the first, and then the others.
    assert first + rest == undisturbed


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.multiprocess
def test_a_stateful_loader_with_other_workers_is_refused_by_name(begin: Callable[..., Checkpointer]) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader(workers: int) -> Any:
        return loaders.StatefulDataLoader(list(range(8)), batch_size=2, num_workers=workers)

    saved = loader(0)
    next(iter(saved))
    with begin() as checkpointer:
        checkpointer.attach(loader=saved)
        checkpointer.save()
    with begin() as checkpointer:
        checkpointer.attach(loader=loader(1))
        with pytest.raises(
            StateMismatchError, match="'loader' with num_workers=0, as it was saved, got 'num_workers=1'"
        ):
            checkpointer.restore_latest()
