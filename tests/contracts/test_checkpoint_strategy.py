"""What every checkpoint strategy promises: it restores every bit (or within the bound that it tells), is never torn or
half written, and keeps its config.

(That it commits no torn snapshot under somebody who never stops writing: tests/faults/test_checkpoint_adversary.py.)
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._format.manifest import CHUNK_BYTES
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import ReadSnapshot, read_newest
from shade.checkpoint._save.async_writer import AsyncWriter, CommitResult, SaveHandle, SaveRequest
from shade.checkpoint._session import open_tiers as tiers_module
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint._session.open_tiers import Tiers
from shade.checkpoint._strategies import STRATEGIES, Strategy, StrategyConfig
from shade.checkpoint._tiers.storage import StorageTier
from shade.errors import CheckpointError, ConfigError, ShadeError
from shade.rank_group import RankGroup, SingleProcessGroup
from shade.storage.directory import DirectoryVolume
from shade.store._servers.local_cluster import free_ports
from tests.simulation.torture.disk import OUTCOMES, Disk, DiskView
from tests.simulation.torture.world import NOTHING, Act, CrashedError, Fault, World
from tests.support.strategy_ranks import train_on_two_ranks

every_strategy = pytest.mark.parametrize("strategy", sorted(STRATEGIES))
EXACT = [name for name in sorted(STRATEGIES) if STRATEGIES.get(name).config.is_exact]


def code_of(strategy: type[Strategy]) -> type[Strategy]:
    """The class whose code a strategy runs: itself, or the nearest parent if it differs in its config alone."""
    return next(each for each in strategy.__mro__ if any(callable(value) for value in vars(each).values()))


def different_in(*fields: str, among: Sequence[str] | None = None) -> pytest.MarkDecorator:
    """Runs a test once for each difference that it can see: the strategy's code, and these fields of its config.

    The strategies that differ from one of those in nothing that matters here run it with the slow tests.
    """
    seen, values = set(), []
    for name in among or sorted(STRATEGIES):
        made: type[Strategy] = STRATEGIES.get(name)
        difference = (code_of(made), *(getattr(made.config, field) for field in fields))
        values.append(pytest.param(name, marks=[pytest.mark.slow] if difference in seen else []))
        seen.add(difference)
    return pytest.mark.parametrize("strategy", values)


PATIENCE_SECONDS = 30.0
WIDTH = 1030
"""A layer of so many squared float32 is a little longer than a chunk."""


class Training:
    """A model, an optimizer, and steps; the same each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
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


class Wide(Training):
    """A state of a few chunks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH // 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> float:
        loss = self.model(torch.randn(2, WIDTH)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def tensors(self) -> dict[str, bytes]:
        """What a snapshot of it should hold."""
        return {f"model/{name}": tensor.numpy().tobytes() for name, tensor in self.model.state_dict().items()}


def assert_holds(found: ReadSnapshot | None, saved: dict[str, bytes], strategy: str, said: str = "") -> None:
    """Every bit is there; of a strategy that is not exact, each number within the bound that comes with it."""
    assert found is not None, said
    assert strategy not in EXACT or not found.bounds, said
    assert {name for name in found.tensors if "model/" in name} == saved.keys(), said
    for name, expected in saved.items():
        numbers = found.tensors[name].numpy()
        if name in found.bounds:
            difference = numbers.astype(np.float64) - np.frombuffer(expected, numbers.dtype).reshape(numbers.shape)
            assert np.abs(difference).max() <= found.bounds[name].max_abs, f"{name}, {said}"
        else:
            assert numbers.tobytes() == expected, f"{name}, {said}"


def crash(checkpointer: Checkpointer) -> None:
    """Leaves as a training does that raises."""
    checkpointer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


# ── every bit comes back ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.redis
@different_in("codec", "streams", "in_flight", among=EXACT)
@pytest.mark.parametrize("where", ["storage", "cluster memory", "shared memory"])
def test_a_run_goes_on_as_if_it_had_never_ended(
    begin: Callable[..., Checkpointer], request: pytest.FixtureRequest, where: str, strategy: str
) -> None:
    more: dict[str, Any] = {"strategy": strategy}
    if where == "cluster memory":
        more["store"] = str(request.getfixturevalue("server").url.reveal())
    if where != "storage":
        more["persist_to"] = None
    first = Training()
    with begin(first, **more) as checkpointer:
        for _ in range(3):
            first.step()
            checkpointer.step()
            checkpointer.save({"loss": 1.0})
        assert checkpointer.wait_committed() == where
        undisturbed = [first.step() for _ in range(4)]
        numbers = (random.random(), np.random.random())
    second = Training()
    torch.manual_seed(99)
    with begin(second, **more) as checkpointer:
        restored = checkpointer.restore_latest()
        assert (restored.step, restored.tiers) == (3, (where,))
        assert [second.step() for _ in range(4)] == undisturbed
        assert (random.random(), np.random.random()) == numbers


@different_in("codec", "streams", "in_flight")
def test_a_state_of_many_chunks_is_saved_while_training_goes_on(
    begin: Callable[..., Checkpointer], strategy: str
) -> None:
    training = Wide()
    right: dict[int, dict[str, bytes]] = {}
    with begin(training, strategy=strategy, keep="all") as checkpointer:
        for _ in range(5):
            training.step()
            checkpointer.step()
            right[checkpointer.step_count] = training.tensors()
            checkpointer.save()
        checkpointer.wait_durable()
        snapshots = checkpointer.list()
        assert [each.record.step for each in snapshots] == [5, 4, 3, 2, 1]
        for snapshot in snapshots:
            found = read_newest(checkpointer._tiers.reader, SingleProcessGroup(), step=snapshot.record.step)
            assert_holds(found, right[snapshot.record.step], strategy)


@pytest.mark.multiprocess
@pytest.mark.parametrize("names", [["deepfreeze", "pccheck"], pytest.param(EXACT, marks=pytest.mark.slow, id="all")])
def test_what_is_exact_restores_on_two_ranks(tmp_path: Path, names: list[str]) -> None:
    """All in one pair of processes: each rank's own state comes back to it, the shared state to both."""
    context = multiprocessing.get_context("forkserver")
    (port,) = free_ports(1)
    told = context.SimpleQueue()
    words = (names, str(tmp_path), f"ranks-{secrets.token_hex(4)}", port, told)
    processes = [context.Process(target=train_on_two_ranks, args=(rank, *words), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    found = []
    while not told.empty():
        found.append(told.get())
    assert sorted(found) == sorted((name, rank, "same") for name in names for rank in range(2))


# ── killed at every write ───────────────────────────────────────────────────────────────────────────────────────────


class Place(World):
    """A disk and a process that uses it in several threads; it dies at a chosen operation."""

    def __init__(self) -> None:
        super().__init__(0)
        self.disk = Disk()
        self.tidied = threading.Semaphore(0)
        """Counts the saves after which what became old was removed."""
        self._lock = threading.RLock()

    def perform(self, actor: str, act: Act) -> Any:
        with self._lock:
            return super().perform(actor, act)

    def volume(self, actor: str) -> DirectoryVolume:
        return DirectoryVolume("/disk", DiskView(self, self.disk, actor))


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Place]:
    """Makes places that checkpointers save to. What a dead process would not say, a live one that plays dead fails."""
    places: list[Place] = []
    write, after_commit = AsyncWriter._write, Tiers.after_commit

    def writing(self: AsyncWriter, request: SaveRequest, group: RankGroup) -> CommitResult:
        try:
            return write(self, request, group)
        except CrashedError as error:
            raise CheckpointError("dead") from error

    def tidying(self: Tiers, result: CommitResult) -> None:
        try:
            after_commit(self, result)
        except CrashedError as error:
            raise CheckpointError("dead") from error
        finally:
            places[-1].tidied.release()

    monkeypatch.setattr(AsyncWriter, "_write", writing)
    monkeypatch.setattr(Tiers, "after_commit", tidying)
    monkeypatch.setattr(tiers_module, "_volume", lambda url: places[-1].volume("rank 0"))
    monkeypatch.setattr(tiers_module, "_lock_run", lambda *words: None)

    def make() -> Place:
        places.append(Place())
        return places[-1]

    return make


def two_saves(place: Place, run: str, strategy: str, fault: Fault) -> tuple[list[dict[str, bytes]], int]:
    """A durable save, and one with a fault in it: what each saved, and the last that was said to have landed."""
    training, saved, landed = Wide(), [], 0
    checkpointer = Checkpointer(persist_to="/disk", run=run, every="never", strategy=strategy, keep="last=1")
    checkpointer.attach(model=training.model)
    hook = training.optimizer.register_step_pre_hook(lambda *_: checkpointer.wait_copy_complete())
    try:
        for number in (1, 2):
            checkpointer.step_count = number
            saved.append(training.tensors())
            if number == 2:
                assert place.tidied.acquire(timeout=PATIENCE_SECONDS)  # or its operations would be among the second's
                place.operations.clear()
                place.fault = fault
            handle = checkpointer.save()
            training.step()
            with contextlib.suppress(CheckpointError):
                handle.committed.result(PATIENCE_SECONDS)
                landed = number
    finally:
        hook.remove()
        crash(checkpointer)
        checkpointer._tiers.shared_memory.remove()
    return saved, landed


@different_in("codec", "streams", "in_flight")
@pytest.mark.parametrize("one_in", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_write_the_snapshot_before_loads(
    strategy: str, one_in: int, run: str, mortal: Callable[[], Place]
) -> None:
    place = mortal()
    two_saves(place, run, strategy, NOTHING)
    operations = [operation for operation in place.operations if operation.writes]
    assert len(operations) > 10
    dice, outcomes = random.Random(strategy), itertools.cycle(OUTCOMES)
    for operation in operations[dice.randrange(one_in) :: one_in]:
        for moment in ("before", "within") if "part" in operation.ways else ("before",):
            place = mortal()
            saved, landed = two_saves(place, run, strategy, Fault(operation.number, "crash", moment))
            assert place.struck is not None
            outcome = next(outcomes)  # all four of each operation: scripts/torture
            left = place.disk.after_power_failure(outcome, dice)
            with contextlib.closing(
                StorageTier(DirectoryVolume("/disk", DiskView(World(0), left, "look")), run)
            ) as tier:
                found = read_newest(Reader([tier]), SingleProcessGroup())
            said = f"{operation}, {moment}, {outcome}"
            assert found is not None, said
            assert landed <= found.record.step <= 2, said
            assert_holds(found, saved[found.record.step - 1], strategy, said)


# ── budgets and config ───────────────────────────────────────────────────────────────────────────────────────────────


class Gate:
    """Holds every commit in storage until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.num_waiting = 0
        commit = StorageTier.commit

        def committing(tier: StorageTier, place: str, record: Any) -> None:
            self.num_waiting += 1
            assert self._open.wait(PATIENCE_SECONDS)
            self.num_waiting -= 1
            commit(tier, place, record)

        monkeypatch.setattr(StorageTier, "commit", committing)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.002)
    return is_so()


REST_SECONDS = 0.15
"""Enough for what does not wait to have ended, on a machine that does nothing else; a slow one only tests less."""


@different_in("save_waits_for", "step_waits_for", "streams")
def test_the_training_waits_for_what_the_config_says_and_for_no_more(
    begin: Callable[..., Checkpointer], gate: Gate, strategy: str
) -> None:
    training = Training()
    checkpointer = begin(training, strategy=strategy)
    config = checkpointer.config
    training.step()
    saving = in_thread(checkpointer.save)
    waits_in_save = config.save_waits_for in ("committed", "durable")
    if not waits_in_save:
        saving.join(PATIENCE_SECONDS)
    assert eventually(lambda: gate.num_waiting == 1)
    saving.join(REST_SECONDS)
    assert saving.is_alive() == waits_in_save
    stepping = in_thread(lambda: (saving.join(), training.step()))
    waits_in_step = waits_in_save or config.step_waits_for in ("committed", "durable")
    stepping.join(REST_SECONDS if waits_in_step else PATIENCE_SECONDS)
    assert stepping.is_alive() == waits_in_step
    gate.open()
    saving.join()
    stepping.join()
    assert checkpointer.wait_committed() == "storage"


@different_in("buffers", "in_flight", "save_waits_for", "step_waits_for")
def test_no_more_memory_is_taken_and_no_more_saves_are_begun_than_the_config_says(
    begin: Callable[..., Checkpointer], run: str, gate: Gate, strategy: str
) -> None:
    training = Wide()
    checkpointer = begin(training, strategy=strategy)
    config = checkpointer.config
    begun: list[SaveHandle] = []

    def save() -> None:
        for number in range(config.in_flight + 2):
            checkpointer.step_count = number
            begun.append(checkpointer.save())
            training.optimizer.step()

    saving = in_thread(save)
    goes_on = config.save_waits_for in ("begun", "copied") and config.step_waits_for == "copied"
    possible = config.in_flight if goes_on else 0
    if possible:
        assert eventually(lambda: len(begun) == possible)
    saving.join(REST_SECONDS)
    assert len(begun) <= max(possible, 1)
    gate.open()
    saving.join(PATIENCE_SECONDS)
    assert len(begun) == config.in_flight + 2
    checkpointer.wait_durable()
    buffers = list(own_folder(run).rglob("*.data"))
    state_bytes = sum(len(each) for each in training.tensors().values())
    assert 1 <= len(buffers) <= config.buffers
    assert sum(path.stat().st_blocks * 512 for path in buffers) <= config.buffers * (state_bytes + 4 * 2**20)


@different_in("buffers", "in_flight", "codec")
def test_a_tighter_budget_is_kept(begin: Callable[..., Checkpointer], run: str, strategy: str) -> None:
    training = Wide()
    with begin(training, strategy=strategy, buffers=1) as checkpointer:
        assert checkpointer.config.in_flight == 1
        for number in range(3):
            checkpointer.step_count = number
            checkpointer.save()
            training.step()
        checkpointer.wait_durable()
        assert len(list(own_folder(run).rglob("*.data"))) == 1


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if STRATEGIES.get(name).config.streams])
def test_what_streams_is_on_its_way_before_the_last_byte_is_copied(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    training = Wide()
    held, written = threading.Event(), threading.Event()
    move, fill = Copying._move, DirectoryVolume._fill

    def moving(self: Copying, name: str, start: int, stop: int) -> None:
        if self._entries[name].start + start >= CHUNK_BYTES and name in self.steady:
            assert held.wait(PATIENCE_SECONDS), "nothing has left, and most is here"
        move(self, name, start, stop)

    def filling(self: DirectoryVolume, file: Any, parts: Any, name: str) -> int:
        def passed() -> Iterator[Any]:
            for part in parts:
                yield part
                if len(part) >= CHUNK_BYTES:
                    written.set()

        return fill(self, file, passed() if name.endswith(".safetensors") else parts, name)

    monkeypatch.setattr(Copying, "_move", moving)
    monkeypatch.setattr(DirectoryVolume, "_fill", filling)
    with begin(training, strategy=strategy) as checkpointer:
        checkpointer.save()
        assert written.wait(PATIENCE_SECONDS)
        held.set()
        checkpointer.wait_durable()
        found = read_newest(checkpointer._tiers.reader, SingleProcessGroup())
        assert found is not None
        assert {name: each.numpy().tobytes() for name, each in found.tensors.items() if "model/" in name} == (
            training.tensors()
        )


@every_strategy
def test_its_config_can_be_had(strategy: str) -> None:
    made: type[Strategy] = STRATEGIES.get(strategy)
    config = made.config
    assert config.agreed() == config, "it proposes what it gets"
    assert config.in_flight <= config.buffers
    assert config.in_flight < config.slots


# ── whose word counts ───────────────────────────────────────────────────────────────────────────────────────────────


def test_what_the_user_says_has_the_last_word() -> None:
    proposed = StrategyConfig(every="profiled", replicas=1, buffers=2, in_flight=2, streams=True)
    assert proposed.agreed(every=5, replicas=0, buffers=3, slots=9) == StrategyConfig(
        every=5, replicas=0, buffers=3, slots=9, in_flight=2, streams=True
    )
    assert proposed.agreed(buffers=1).in_flight == 1
    assert proposed.agreed(slots=2).in_flight == 1
    more = StrategyConfig().agreed(in_flight=4)
    assert (more.in_flight, more.buffers, more.slots) == (4, 4, 5)
    assert proposed.agreed(codec="zstd").streams
    assert not proposed.agreed(codec="xor-zstd").streams, "differences go as a whole: to where their base is"
    with pytest.raises(ConfigError, match="4 buffers and 5 slots for 4 saves in flight"):
        StrategyConfig().agreed(in_flight=4, buffers=2)
    for wrong in ({"in_flight": 0}, {"buffers": 0}):
        with pytest.raises(ConfigError, match="one buffer and one save in flight"):
            StrategyConfig().agreed(**wrong)


def test_the_newest_of_several_in_flight_is_what_comes_back_whichever_lands_last(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, held = Wide(), threading.Event()
    commit = StorageTier.commit

    def committing(tier: StorageTier, place: str, record: Any) -> None:
        if record.step == 1:
            assert held.wait(PATIENCE_SECONDS)
        commit(tier, place, record)

    monkeypatch.setattr(StorageTier, "commit", committing)
    with begin(training, strategy="pccheck", keep="last=1") as checkpointer:
        handles = []
        for number in (1, 2):
            checkpointer.step_count = number
            handles.append(checkpointer.save())
            training.step()
        assert handles[1].committed.result(PATIENCE_SECONDS)
        assert not handles[0].committed.done()
        assert checkpointer.list()[0].record.step == 2
        held.set()
        assert handles[0].committed.result(PATIENCE_SECONDS)
        checkpointer.step_count = 3
        checkpointer.save()
        checkpointer.wait_durable()
        checkpointer.step_count = 0
        assert checkpointer.restore_latest().step == 3


def test_two_saves_of_one_step_do_not_share_a_folder(begin: Callable[..., Checkpointer], gate: Gate) -> None:
    training = Wide()
    with begin(training, strategy="pccheck", keep="all") as checkpointer:
        checkpointer.save()
        second = in_thread(checkpointer.save)
        assert eventually(lambda: gate.num_waiting == 1)
        second.join(REST_SECONDS)
        assert second.is_alive()
        gate.open()
        second.join(PATIENCE_SECONDS)
        checkpointer.wait_durable()
        assert [each.record.sequence for each in checkpointer.list()] == [2, 1]


def test_a_save_that_fails_in_one_lane_leaves_the_others_alone(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, commit = Wide(), StorageTier.commit

    def committing(tier: StorageTier, place: str, record: Any) -> None:
        if record.step == 2:
            raise ShadeError("no")
        commit(tier, place, record)

    monkeypatch.setattr(StorageTier, "commit", committing)
    with begin(training, strategy="pccheck", keep="all") as checkpointer:
        handles = []
        for number in (1, 2, 3):
            checkpointer.step_count = number
            handles.append(checkpointer.save())
            training.step()
        assert handles[0].committed.result(PATIENCE_SECONDS)
        assert handles[2].committed.result(PATIENCE_SECONDS)
        with pytest.raises(CheckpointError, match="storage: no"):
            handles[1].committed.result(PATIENCE_SECONDS)
        assert checkpointer._tiers.storage is not None
        assert {record.step for record in checkpointer._tiers.storage.held().values()} == {1, 3}


def test_a_strategy_that_saves_as_often_as_saves_fit_follows_what_they_take(
    begin: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    with begin(training, strategy="checkfreq", every=None) as checkpointer:
        assert checkpointer.config.every == "profiled 5%"
        monkeypatch.setattr(checkpointer._meter, "pace", lambda *took: Pace(0.1, 0.01, 2.0, 0.1))
        saved = []
        for _ in range(90):
            training.step()
            if checkpointer.step():
                saved.append(checkpointer.step_count)
                assert checkpointer.latest is not None
                checkpointer.latest.committed.result(PATIENCE_SECONDS)
    fits = -(-19 // 1.05)  # 1.9 s that nobody waits for, in steps of 0.1 s that may take 5% longer
    assert saved == [10, 20, 20 + fits, 20 + 2 * fits, 20 + 3 * fits]
