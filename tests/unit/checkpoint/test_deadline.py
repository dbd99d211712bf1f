"""All ranks save the same step, whoever hears of the end and whenever; nothing is begun that cannot be ended."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from torch.distributed import HashStore

from shade.checkpoint._preemption.deadline import Deadline, DeadlineStore
from shade.checkpoint._preemption.notice import NoticeSource, PreemptionNotice
from shade.checkpoint._preemption.recovery_estimate import CLUSTER, STORAGE, RecoveryForecast
from shade.checkpoint._save.async_writer import CommitResult, SaveHandle
from shade.errors import CheckpointError
from shade.process import start_of, this_machine

PATIENCE_SECONDS = 30.0


class Word(NoticeSource):
    """A notice that comes when the test says so."""

    def __init__(self) -> None:
        self.notice: PreemptionNotice | None = None
        self.closed = False

    def say(self, seconds: float = PATIENCE_SECONDS) -> None:
        self.notice = PreemptionNotice("the test", time.monotonic() + seconds)

    def look(self) -> PreemptionNotice | None:
        return self.notice

    def close(self) -> None:
        self.closed = True


class TierLike:
    """A tier, as far as its name goes."""

    def __init__(self, name: str) -> None:
        self.name = name


class Known:
    """A loss tracker whose forecast the test sets."""

    def __init__(self, forecast: RecoveryForecast | None = None) -> None:
        self.forecast_given = forecast or RecoveryForecast(0.0, 0.01, 0.02, 0.03)
        self.durable: bool | None = True

    def forecast(self) -> RecoveryForecast:
        return self.forecast_given

    def is_durable(self, result: CommitResult) -> bool | None:
        return self.durable


class Saver:
    """A rank's checkpointer that lands at once, or never."""

    def __init__(self) -> None:
        self.step_count = 0
        self.saved: list[int] = []
        self.latest: SaveHandle | None = None
        self.lands = True
        self.error: Exception | None = None

    def save(self) -> SaveHandle:
        if self.error is not None:
            raise self.error
        self.saved.append(self.step_count)
        self.latest = SaveHandle(self.step_count)
        self.latest.copied.set_result(None)
        if self.lands:
            self.latest.committed.set_result(CommitResult(TierLike(CLUSTER), "0"))  # type: ignore[arg-type]
        return self.latest

    def wait_copy_complete(self) -> None:
        pass


class Rank:
    """One rank: a saver and its deadline."""

    def __init__(self, store: HashStore, rank: int, world_size: int, exit_code: int | None = 143) -> None:
        self.saver, self.known, self.word = Saver(), Known(), Word()
        self.store = DeadlineStore(store, rank, world_size)
        self.deadline = Deadline(self.saver, self.known, self.store, [self.word], exit_code=exit_code)  # type: ignore[arg-type]
        self.code: int | str | None = None

    def step(self) -> bool:
        self.saver.step_count += 1
        return self.deadline.at_step()

    def until_stopped(self, num_steps: int = 10_000) -> None:
        """Trains; notes with what it was stopped."""
        try:
            for _ in range(num_steps):
                self.step()
                time.sleep(0.001)
        except SystemExit as stopped:
            self.code = stopped.code


@pytest.fixture
def alone() -> Iterator[Rank]:
    rank = Rank(HashStore(), 0, 1)
    yield rank
    rank.deadline.close()
    assert rank.word.closed


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "shade.checkpoint"):
        yield caplog


def test_without_a_notice_nothing_happens(alone: Rank) -> None:
    assert not any(alone.step() for _ in range(50))
    assert not alone.deadline.should_stop
    assert alone.saver.saved == []


def test_a_notice_between_two_steps_saves_the_step_that_ends_next(alone: Rank, said: pytest.LogCaptureFixture) -> None:
    alone.step()
    alone.word.say()
    with pytest.raises(SystemExit) as stopped:
        alone.step()
    assert stopped.value.code == 143
    assert alone.saver.saved == [2]
    assert "step 2 should reach storage" in said.text
    assert "step 2 committed in cluster memory" in said.text
    assert "durable in" in said.text


def test_without_an_exit_code_the_loop_is_told_and_nothing_is_saved_twice() -> None:
    rank = Rank(HashStore(), 0, 1, exit_code=None)
    rank.word.say()
    assert rank.step()
    assert rank.deadline.should_stop
    assert not rank.step()
    assert rank.saver.saved == [1]
    rank.deadline.close()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_ranks_in_step_save_the_same_step(world_size: int, seed: int) -> None:
    """A barrier in each step is the collective that no rank can leave while another waits for the target."""
    store, generator = HashStore(), random.Random(seed)
    ranks = [Rank(store, rank, world_size) for rank in range(world_size)]
    together = threading.Barrier(world_size)
    pauses = [[generator.uniform(0, 0.01) for _ in range(100)] for _ in ranks]

    def train(number: int) -> None:
        try:
            for step in range(10_000):
                together.wait(PATIENCE_SECONDS)
                time.sleep(pauses[number][step % 100])
                ranks[number].step()
        except SystemExit as stopped:
            ranks[number].code = stopped.code

    threads = [threading.Thread(target=train, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    time.sleep(generator.uniform(0.02, 0.1))
    for number in generator.sample(range(world_size), generator.randint(1, world_size)):
        ranks[number].word.say()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert [rank.code for rank in ranks] == [143] * world_size
    assert len({tuple(rank.saver.saved) for rank in ranks}) == 1
    assert ranks[0].saver.saved == [ranks[0].saver.step_count]
    for rank in ranks:
        rank.deadline.close()


@pytest.mark.parametrize(
    ("forecast", "goal"),
    [
        (RecoveryForecast(0.0, 1.0, 2.0, 3.0), "storage"),
        (RecoveryForecast(0.0, 1.0, 2.0, 300.0), "cluster memory"),
        (RecoveryForecast(0.0, 1.0, 200.0, 300.0), "shared memory"),
        (RecoveryForecast(25.0, 1.0, 2.0, 10.0), "cluster memory"),
        (RecoveryForecast(0.0, 0.1, None, None), "whatever it can"),
    ],
)
def test_what_can_be_reached_is_foreseen(
    alone: Rank, said: pytest.LogCaptureFixture, forecast: RecoveryForecast, goal: str
) -> None:
    alone.known.forecast_given = forecast
    alone.word.say(30)
    alone.until_stopped()
    assert alone.saver.saved == [alone.saver.step_count]
    assert f"should reach {goal}" in said.text


def test_no_copy_is_begun_that_cannot_be_ended(alone: Rank, said: pytest.LogCaptureFixture) -> None:
    alone.saver.step_count = 4
    before = alone.saver.save()
    alone.known.forecast_given = RecoveryForecast(0.0, 100.0, 200.0, 300.0)
    alone.word.say(20)
    alone.until_stopped()
    assert alone.code == 143
    assert alone.saver.saved == [4]
    assert alone.saver.latest is before
    assert "too little time for a copy" in said.text
    assert "step 4 (1 step behind) committed in cluster memory" in said.text


def test_a_save_that_does_not_land_is_not_waited_for_beyond_the_time(
    alone: Rank, said: pytest.LogCaptureFixture
) -> None:
    alone.saver.lands = False
    alone.word.say(0.5)
    alone.until_stopped()
    assert alone.code == 143
    assert "is in no tier in time" in said.text


def test_one_that_is_under_way_is_not_disturbed(alone: Rank, said: pytest.LogCaptureFixture) -> None:
    alone.saver.lands = False
    alone.saver.step_count = 4
    alone.saver.save().is_in_shared_memory = True
    alone.word.say(0.5)
    alone.until_stopped()
    assert alone.saver.saved == [4]
    assert "step 4 is still on its way" in said.text
    assert "step 4 (1 step behind) is in shared memory only" in said.text


def test_what_goes_wrong_in_the_last_save_is_said(alone: Rank, said: pytest.LogCaptureFixture) -> None:
    alone.saver.error = CheckpointError("a tensor moved")
    alone.word.say()
    alone.until_stopped()
    assert alone.code == 143
    assert "a tensor moved" in said.text


def test_what_is_not_durable_in_time_is_left_to_the_flusher(alone: Rank, said: pytest.LogCaptureFixture) -> None:
    alone.known.durable = False
    alone.word.say(0.4)
    alone.until_stopped()
    assert "not durable in time: its flusher continues" in said.text


def test_a_rank_that_never_answers_costs_the_time_and_no_more(said: pytest.LogCaptureFixture) -> None:
    rank = Rank(HashStore(), 0, 2)
    rank.word.say(0.3)
    rank.until_stopped()
    assert rank.code == 143
    assert rank.saver.saved == []
    assert "not all ranks have answered" in said.text
    rank.deadline.close()


def dead_process(store: HashStore, rank: int) -> None:
    """Writes into the store what a rank has written that was killed since."""
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    store.set(f"process-{rank}", json.dumps([this_machine(), ended.pid, start_of(ended.pid)]))
    ended.communicate()


@pytest.mark.multiprocess
@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_whose_process_is_gone_is_not_waited_for(fails: bool, said: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    rank = Rank(store, 0, 2)
    dead_process(store, 1)
    rank.word.say(10_000.0)
    if fails:
        rank.deadline.at_failure(is_between_steps=True)
    else:
        rank.until_stopped()
        assert rank.code == 143
    assert rank.saver.saved == []
    assert "nothing new is saved" in said.text
    rank.deadline.close()


def test_every_one_of_a_process_saves_before_the_first_ends_it() -> None:
    first, second = (Rank(HashStore(), 0, 1) for _ in range(2))
    for rank in (first, second):
        rank.word.say()
    assert first.step()
    with pytest.raises(SystemExit):
        second.step()
    with pytest.raises(SystemExit):
        first.step()
    assert [rank.saver.saved for rank in (first, second)] == [[1], [1]]
    for rank in (first, second):
        rank.deadline.close()


def test_one_that_is_not_stepped_any_more_is_not_waited_for_long(alone: Rank) -> None:
    other = Rank(HashStore(), 0, 1)
    alone.word.say()
    alone.until_stopped(4)
    assert alone.code == 143
    assert other.saver.saved == []
    other.deadline.close()


@pytest.mark.parametrize(("is_between_steps", "saved"), [(True, [3]), (False, [])])
def test_a_training_that_fails_after_a_notice_saves_its_last_whole_step(
    alone: Rank, said: pytest.LogCaptureFixture, is_between_steps: bool, saved: list[int]
) -> None:
    alone.saver.step_count = 3
    alone.deadline.at_failure(is_between_steps=is_between_steps)
    assert alone.saver.saved == []  # without a notice it is a failure like any other
    alone.word.say()
    alone.deadline.at_failure(is_between_steps=is_between_steps)
    alone.deadline.at_failure(is_between_steps=is_between_steps)
    assert alone.saver.saved == saved
    assert ("step 3 committed in cluster memory" if saved else "nothing new is saved") in said.text


@pytest.mark.parametrize(("steps", "saved"), [((3, 3), [3]), ((3, 4), [])])
def test_ranks_that_fail_save_only_one_and_the_same_step(steps: tuple[int, int], saved: list[int]) -> None:
    store = HashStore()
    ranks = [Rank(store, rank, 2) for rank in range(2)]
    for rank, step in zip(ranks, steps, strict=True):
        rank.saver.step_count = step
        rank.word.say(2.0)
    threads = [threading.Thread(target=rank.deadline.at_failure, kwargs={"is_between_steps": True}) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [rank.saver.saved for rank in ranks] == [saved, saved]
    for rank in ranks:
        rank.deadline.close()


class Gone(DeadlineStore):
    """A store whose process has died."""

    def read(self, name: str) -> object:
        raise RuntimeError(name)

    def write(self, name: str, content: object) -> None:
        raise RuntimeError(name)


def test_a_store_that_is_gone_stops_no_training_without_a_notice() -> None:
    word = Word()
    saver = Saver()
    deadline = Deadline(saver, Known(), Gone(HashStore(), 0, 2), [word])  # type: ignore[arg-type]
    for _ in range(20):
        assert not deadline.at_step()
    word.say()
    with pytest.raises(SystemExit):
        deadline.at_step()
    assert saver.saved == []
    deadline.close()


def test_time_that_passes_within_a_step_is_logged(alone: Rank, said: pytest.LogCaptureFixture) -> None:
    alone.word.say(0.2)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "no step has ended in time" not in said.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert alone.saver.saved == []


def test_a_committed_save_is_logged_with_its_tier(alone: Rank, said: pytest.LogCaptureFixture) -> None:
    alone.saver.lands = False
    committed: Future[CommitResult] = Future()
    committed.set_result(CommitResult(TierLike(STORAGE), "0"))  # type: ignore[arg-type]
    begun = alone.saver.save

    def save() -> SaveHandle:
        handle = begun()
        handle.committed = committed
        return handle

    alone.saver.save = save  # type: ignore[method-assign]
    alone.word.say()
    alone.until_stopped()
    assert "committed in storage" in said.text
