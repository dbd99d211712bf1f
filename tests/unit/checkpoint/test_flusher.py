"""Which snapshot a flusher takes, what it leaves behind whatever fails, and how it overlaps reading with writing."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shade.checkpoint._flush.flusher import AHEAD_FETCHES, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, Flusher
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._tiers.tier import Shard
from shade.errors import CorruptCheckpointError, StorageError, StorageFullError, StoreUnavailableError
from tests.support.tiers import CHUNK, Shelf

AfterChunk = Callable[[Callable[[int], None]], None]


@pytest.fixture
def after_chunk(monkeypatch: pytest.MonkeyPatch) -> AfterChunk:
    """Has something called with the length of each chunk, when it is written."""

    def call(action: Callable[[int], None]) -> None:
        bar = contextlib.nullcontext(SimpleNamespace(update=action))
        monkeypatch.setattr("shade.checkpoint._flush.flusher.bytes_bar", lambda *_: bar)

    return call


@pytest.fixture
def memory() -> Shelf:
    return Shelf()


@pytest.fixture
def storage() -> Shelf:
    return Shelf()


def flusher(memory: Shelf, storage: Shelf, keep: str = "all", **options: Any) -> Flusher:
    return Flusher(memory, storage, Keep.parse(keep), **options)  # type: ignore[arg-type]


def drain(each: Flusher) -> list[int]:
    """Steps in the order in which they became durable."""
    steps = []
    while (done := each.flush_one()) is not None:
        steps.append(done.record.step)
    return steps


def test_a_snapshot_arrives_whole_and_its_slot_is_clean(memory: Shelf, storage: Shelf) -> None:
    memory.take(7)
    done = flusher(memory, storage).flush_one()
    assert done is not None
    assert done.num_bytes == 2 * 3 * 3 * CHUNK
    assert done.num_dirty == 0
    assert storage.records == memory.records
    assert storage.manifests == memory.manifests
    assert storage.chunks == memory.chunks
    assert memory.marks == {}


def test_the_slot_is_clean_only_after_the_commit(memory: Shelf, storage: Shelf) -> None:
    memory.take(7)
    told: list[str] = []
    memory.done = storage.done = told
    flusher(memory, storage).flush_one()
    order = [each for each in told if each.split()[0] in ("prepare", "commit", "clean")]
    assert order == ["prepare 7", "commit 7", "clean 7"]


def test_the_newest_is_durable_first(memory: Shelf, storage: Shelf) -> None:
    for step in (10, 20, 30):
        memory.take(step)
    assert drain(flusher(memory, storage)) == [30, 20, 10]


def test_what_the_rules_would_not_keep_is_let_go_but_not_before_something_newer_is_durable(
    memory: Shelf, storage: Shelf
) -> None:
    for step in (10, 20, 30, 40):
        memory.take(step, loss=abs(step - 20))
    each = flusher(memory, storage, "last=2,best=loss")
    storage.failing["commit"] = StorageError("no")
    with pytest.raises(StorageError):
        each.flush_one()
    assert set(memory.marks) == {"10", "20", "30", "40"}
    storage.failing.clear()
    assert drain(each) == [40, 30, 20]
    assert memory.marks == {}
    assert {record.step for record in storage.records.values()} == {20, 30, 40}
    assert "prepare 10" not in storage.done


def test_a_slot_taken_again_meanwhile_stays_dirty(memory: Shelf, storage: Shelf, after_chunk: AfterChunk) -> None:
    memory.take(7)

    def slot_is_reused(num_bytes: int) -> None:
        memory.marks["7"] = 8

    after_chunk(slot_is_reused)
    flusher(memory, storage).flush_one()
    assert memory.marks == {"7": 8}


def test_what_is_durable_already_is_not_written_again(memory: Shelf, storage: Shelf) -> None:
    """A flusher that died between the commit and the cleaning left it so."""
    memory.take(7)
    flusher(memory, storage).flush_one()
    memory.marks["7"] = 7
    storage.done.clear()
    assert drain(flusher(memory, storage)) == []
    assert memory.marks == {}
    assert not any(each.startswith(("prepare", "write", "commit")) for each in storage.done)


def test_the_same_step_saved_again_after_going_back_is_written_again(memory: Shelf, storage: Shelf) -> None:
    memory.take(7, sequence=1)
    drain(flusher(memory, storage))
    memory.take(7, sequence=5, chunks=2)
    assert drain(flusher(memory, storage)) == [7]
    assert storage.records["7"].sequence == 5


def test_old_ones_go_from_storage_after_the_new_one_is_there(memory: Shelf, storage: Shelf) -> None:
    each = flusher(memory, storage, "last=2")
    for step in (10, 20, 30):
        memory.take(step)
        drain(each)
    assert set(storage.records) == {"20", "30"}
    assert storage.done.index("commit 30") < storage.done.index("discard 10")


def test_old_ones_that_cannot_be_removed_cost_nothing_else(
    memory: Shelf, storage: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    each = flusher(memory, storage, "last=1")
    storage.failing["discard"] = StorageError("stuck")
    for step in (10, 20):
        memory.take(step)
        drain(each)
    assert set(storage.records) == {"10", "20"}
    assert "stuck" in caplog.text
    storage.failing.clear()
    memory.take(30)
    drain(each)
    assert set(storage.records) == {"30"}


# ── what fails ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("where", ["prepare", "write", "commit", "held"])
@pytest.mark.parametrize("error", [StorageError("broken"), StorageFullError("full")])
def test_a_storage_that_fails_leaves_the_slot_dirty_and_nothing_behind(
    where: str, error: Exception, memory: Shelf, storage: Shelf
) -> None:
    memory.take(7)
    each = flusher(memory, storage)
    storage.failing[where] = error
    with pytest.raises(type(error)):
        each.flush_one()
    assert memory.marks == {"7": 7}
    assert storage.records == {}
    if where in ("write", "commit"):
        assert storage.done[-1] == "discard 7"
    storage.failing.clear()
    assert drain(each) == [7]


def test_a_store_that_fails_leaves_the_slot_dirty(memory: Shelf, storage: Shelf) -> None:
    memory.take(7)
    each = flusher(memory, storage)
    for where in ("dirty", "clean"):
        memory.failing = {where: StoreUnavailableError("gone")}
        with pytest.raises(StoreUnavailableError):
            each.flush_one()
        assert memory.marks == {"7": 7}
    memory.failing.clear()
    assert drain(each) == []
    assert memory.marks == {}


def test_a_damaged_snapshot_is_never_durable_and_holds_nobody_up(
    memory: Shelf, storage: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    memory.take(10)
    memory.take(20)
    memory.chunks["20", 1, 2] = b"rot"
    each = flusher(memory, storage)
    done = each.flush_one()
    assert done is not None
    assert done.record.step == 10
    with pytest.raises(CorruptCheckpointError, match="chunk 2 of rank 1"):
        each.flush_one()
    assert memory.marks == {"20": 20}
    assert "20" not in storage.records
    memory.take(30)
    assert drain(each) == [30]
    assert memory.marks == {}
    assert set(storage.records) == {"10", "30"}
    assert caplog.text.count("cannot flush") == 1
    assert "step 20 is given up" in caplog.text


def test_what_could_not_be_read_once_is_not_given_up(memory: Shelf, storage: Shelf) -> None:
    """A read that failed while a newer snapshot became durable says nothing of the next read."""
    memory.take(20)
    lost = memory.chunks.pop(("20", 0, 1))
    each = flusher(memory, storage, "all")
    with pytest.raises(CorruptCheckpointError):
        each.flush_one()
    memory.take(30)
    assert each.flush_one() is not None
    memory.chunks["20", 0, 1] = lost
    assert drain(each) == [20]


def test_a_node_that_comes_back_mends_it(memory: Shelf, storage: Shelf) -> None:
    memory.take(20)
    lost = memory.chunks.pop(("20", 0, 1))
    each = flusher(memory, storage)
    with pytest.raises(CorruptCheckpointError):
        each.flush_one()
    memory.chunks["20", 0, 1] = lost
    assert drain(each) == [20]


@pytest.mark.parametrize("at", range(7))
def test_told_to_stop_it_leaves_the_slot_dirty_and_nothing_visible(
    at: int, memory: Shelf, storage: Shelf, after_chunk: AfterChunk
) -> None:
    memory.take(7)
    stop, written = threading.Event(), 0

    def advance(num_bytes: int) -> None:
        nonlocal written
        written += 1
        if written == at:
            stop.set()

    if at == 0:
        stop.set()
    after_chunk(advance)
    assert flusher(memory, storage, stop=stop).flush_one() is None
    assert memory.marks == {"7": 7}
    assert storage.records == {}
    assert drain(flusher(memory, storage)) == [7]


def test_who_was_replaced_neither_commits_nor_tidies_up(memory: Shelf, storage: Shelf, after_chunk: AfterChunk) -> None:
    """Somebody else may be writing to that very place by now."""
    memory.take(7)
    ours = [True]
    after_chunk(lambda num_bytes: ours.__setitem__(0, False))
    assert flusher(memory, storage, may_write=lambda: ours[0]).flush_one() is None
    assert not any(each.startswith(("commit", "discard")) for each in storage.done)
    assert memory.marks == {"7": 7}


def test_an_error_is_said_once_and_tried_again_ever_more_rarely(
    memory: Shelf, storage: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now, waits = [0.0], []
    each = flusher(memory, storage, clock=lambda: now[0])
    memory.take(7)
    storage.failing["prepare"] = StorageFullError("no space left")
    tries = 0
    last = 0.0
    while len(waits) < 10:
        storage.done.clear()
        assert each.poll() is None
        if storage.done:
            tries += 1
            waits.append(now[0] - last)
            last = now[0]
        now[0] += 0.25
    assert waits[1] == FIRST_WAIT_SECONDS
    assert waits[2] == 2 * FIRST_WAIT_SECONDS
    assert waits[-1] == LONGEST_WAIT_SECONDS
    assert caplog.text.count("no space left") == 1
    assert isinstance(each.last_error, StorageFullError)
    storage.failing.clear()
    now[0] += LONGEST_WAIT_SECONDS
    assert each.poll() is not None
    assert each.last_error is None
    assert "flushing continues" in caplog.text
    assert "run step 7 is durable" in caplog.text


# ── reading ahead ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("slow", ["memory", "storage", "neither"])
def test_no_buffer_is_filled_again_while_it_is_still_needed(
    slow: str, memory: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is looked at as late as may be: just before the next is asked for."""
    monkeypatch.setattr("shade.checkpoint._flush.flusher.MOST_BYTES", 3 * 4096)
    waits = random.Random(1)

    class Late(Shelf):
        def put(self, place: str, shard: Shard) -> None:
            for number, content in enumerate(shard.chunks):
                time.sleep(waits.random() * 0.01 if slow == "storage" else 0)
                self.chunks[place, shard.manifest.rank, number] = bytes(content)
            self.manifests[place, shard.manifest.rank] = shard.manifest.to_bytes()

    if slow == "memory":
        read = memory.read_chunks
        memory.read_chunks = lambda *of: time.sleep(0.005) or read(*of)  # type: ignore[func-returns-value, method-assign]
    storage = Late()
    memory.take(7, chunks=40 * AHEAD_FETCHES + 3)
    assert drain(flusher(memory, storage)) == [7]
    assert storage.chunks == memory.chunks
