"""What an end would cost follows from what has landed, and errs on the side of losing more."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from shade.checkpoint._preemption.recovery_estimate import CLUSTER, SHARED, STORAGE, Loss, LossTracker, RecoveryEstimate
from shade.checkpoint._save.async_writer import CommitResult, SaveHandle
from shade.errors import CheckpointError, StoreUnavailableError
from shade.testing import ManualClock

MB = 10**6


class TierLike:
    """A tier, as far as its name goes."""

    def __init__(self, name: str) -> None:
        self.name = name


class Run:
    """A run whose saves the test moves along."""

    def __init__(self, *, rank: int = 1, num_buffers: int = 1, has_storage: bool = True) -> None:
        self.clock = ManualClock()
        self.step_count = 0
        self.durable: set[str] = set()
        self.is_away = False
        self.losses = LossTracker(
            rank, 2, num_buffers, lambda: self.step_count, self.is_durable if has_storage else None, self.clock
        )

    def is_durable(self, result: CommitResult) -> bool:
        if self.is_away:
            raise StoreUnavailableError("no answer")
        return result.location in self.durable

    def begin(self, step: int) -> SaveHandle:
        self.step_count = step
        handle = SaveHandle(step, begun=self.clock())
        self.losses.begun(handle, 100 * MB)
        return handle

    def land(self, handle: SaveHandle, tier: str, seconds: float = 2.0) -> None:
        self.clock.advance(seconds / 4)
        handle.copied.set_result(None)
        handle.is_in_shared_memory = True
        self.clock.advance(seconds * 3 / 4)
        handle.commit_seconds = seconds
        handle.committed.set_result(CommitResult(TierLike(tier), str(handle.step)))  # type: ignore[arg-type]

    def read(self) -> RecoveryEstimate:
        return self.losses.read()


@pytest.fixture
def run() -> Run:
    return Run()


def test_before_the_first_save_everything_would_be_lost(run: Run) -> None:
    run.step_count = 7
    run.clock.advance(3.5)
    assert run.read().process == run.read().machine == run.read().cluster == Loss(7, 3.5, None, None)
    assert str(run.read()) == "if killed now: lose 7 steps / 3.5 s, nothing to recover from"


def test_each_end_goes_back_to_what_survives_it(run: Run) -> None:
    run.land(run.begin(10), CLUSTER)
    run.durable.add("10")
    run.read()
    run.clock.advance(8)
    run.land(run.begin(20), CLUSTER)
    run.step_count = 23
    run.clock.advance(1)
    gauge = run.read()
    assert (gauge.process.tier, gauge.process.steps, gauge.process.seconds) == (SHARED, 3, 3.0)
    assert (gauge.machine.tier, gauge.machine.steps, gauge.machine.seconds) == (CLUSTER, 3, 3.0)
    assert (gauge.cluster.tier, gauge.cluster.steps, gauge.cluster.seconds) == (STORAGE, 13, 13.0)
    said = str(gauge)
    assert said.startswith(
        "if killed now: lose 3 steps / 3.0 s, recover in 1.00 s from shared memory; with this machine:"
    )
    assert said.endswith("with all machines: lose 13 steps / 13.0 s, recover from storage")


def test_one_buffer_holds_nothing_while_it_is_copied_into(run: Run) -> None:
    run.land(run.begin(10), CLUSTER)
    assert run.read().process.tier == SHARED
    handle = run.begin(20)
    assert run.read().process.tier == CLUSTER
    assert run.read().process.steps == 10
    handle.is_in_shared_memory = True
    assert run.read().process.tier == SHARED
    assert run.read().process.steps == 0


def test_a_second_buffer_holds_the_one_before() -> None:
    run = Run(num_buffers=2)
    run.land(run.begin(10), CLUSTER)
    run.begin(20)
    assert (run.read().process.tier, run.read().process.steps) == (SHARED, 10)


def test_a_save_that_fails_is_nothing_to_go_back_to(run: Run) -> None:
    run.land(run.begin(10), CLUSTER)
    handle = run.begin(20)
    handle.committed.set_exception(CheckpointError("torn"))
    assert (run.read().process.tier, run.read().process.steps) == (CLUSTER, 10)


def test_storage_alone_survives_everything(run: Run) -> None:
    run.land(run.begin(10), STORAGE, 4.0)
    assert (run.read().cluster.tier, run.read().cluster.recover_seconds) == (STORAGE, 4.0)
    assert run.losses.forecast().durable_seconds == 4.0
    assert run.losses.is_durable(CommitResult(TierLike(STORAGE), "")) is True  # type: ignore[arg-type]


def test_memory_alone_is_never_durable() -> None:
    run = Run(has_storage=False)
    run.land(run.begin(10), CLUSTER)
    assert run.read().cluster.tier is None
    assert run.losses.is_durable(CommitResult(TierLike(CLUSTER), "")) is None  # type: ignore[arg-type]


def test_of_several_dirty_ones_the_newest_durable_counts(run: Run) -> None:
    for step in (10, 20, 30):
        run.land(run.begin(step), CLUSTER)
    run.durable = {"10", "20"}
    assert run.read().cluster.steps == 10
    run.durable = {"30"}
    assert run.read().cluster.steps == 0


def test_a_store_that_does_not_say_leaves_what_is_known(run: Run) -> None:
    run.land(run.begin(10), CLUSTER)
    run.is_away = True
    assert run.read().cluster.tier is None
    run.is_away, run.durable = False, {"10"}
    assert run.read().cluster.tier == STORAGE


def test_what_was_restored_is_where_an_end_goes_back_to(run: Run) -> None:
    run.step_count = 50
    run.losses.restored(50, [CLUSTER, STORAGE], [CLUSTER], 0.5, 400 * MB)
    run.clock.advance(2)
    run.step_count = 53
    gauge = run.read()
    assert (gauge.process.tier, gauge.process.steps, gauge.process.seconds) == (CLUSTER, 3, 2.0)
    assert gauge.cluster.tier == STORAGE
    run.land(run.begin(60), CLUSTER)
    assert run.read().machine.recover_seconds == pytest.approx(0.25)  # 200 MB at the rate of the restore


def test_forecasts_take_the_worst_of_the_last_few(run: Run) -> None:
    assert run.losses.forecast().committed_seconds is None
    for number, seconds in enumerate((9.0, 1.0, 3.0, 2.0)):
        run.land(run.begin(10 * number), CLUSTER, seconds)
    forecast = run.losses.forecast()
    assert (forecast.copied_seconds, forecast.committed_seconds, forecast.durable_seconds) == (0.75, 3.0, None)
    assert forecast.waiting_seconds == 0.0
    run.begin(50)
    run.clock.advance(1.0)
    assert run.losses.forecast().waiting_seconds == 2.0


def test_before_a_copy_was_measured_one_is_estimated(run: Run) -> None:
    run.begin(10)
    assert run.losses.forecast().copied_seconds == pytest.approx(0.1)


def test_a_row_has_every_end_and_prometheus_gets_gauges(run: Run) -> None:
    run.land(run.begin(10), STORAGE)
    run.step_count = 12
    row = run.read().row()
    assert row["checkpoint_process_lost_steps"] == 2
    assert row["checkpoint_cluster_tier"] == STORAGE
    assert len(row) == 12
    page = run.read().prometheus({"rank": 1})
    assert 'shade_checkpoint_lost_steps{rank="1",end="cluster",tier="storage"} 2\n' in page
    assert page.count("# TYPE shade_checkpoint_") == page.count("# HELP shade_checkpoint_") == 3


def test_prometheus_leaves_out_what_is_unknown(run: Run) -> None:
    page = run.read().prometheus()
    assert 'shade_checkpoint_lost_seconds{end="machine",tier="none"} 0' in page
    assert "shade_checkpoint_recover_seconds{" not in page


@pytest.fixture
def first() -> Iterator[Run]:
    run = Run(rank=0)
    yield run
    run.losses.close()
    run.losses.close()


def test_rank_0_finds_out_by_itself_and_says_each_save(first: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shade.checkpoint"):
        first.land(first.begin(10), CLUSTER)
    assert "step 10 is in cluster memory: 100.0 MB a rank" in caplog.text
    assert "if killed now: lose 0 steps" in caplog.text
    first.durable.add("10")
    deadline = time.monotonic() + 30
    while first.read().cluster.tier is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert first.losses.forecast().durable_seconds is not None


def test_no_thread_is_left(first: Run) -> None:
    first.land(first.begin(10), CLUSTER)
    assert "shade-recovery-estimate" in {thread.name for thread in threading.enumerate()}
    first.losses.close()
    assert "shade-recovery-estimate" not in {thread.name for thread in threading.enumerate()}
