"""Which threads count as saving threads, and which of their CPU time counts as work beside the training."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from shade import Checkpointer
from shade.checkpoint._pacing import schedule
from shade.checkpoint._pacing.schedule import cpu_seconds, processor_ns
from shade.checkpoint._save import async_writer, save
from shade.checkpoint._save.async_writer import AsyncWriter, CommitResult, SaveHandle, SaveRequest
from shade.checkpoint._save.save import WaitPolicy
from shade.rank_group import RankGroup

WORK_SECONDS = 0.05
WRITE_CPU_SECONDS = 2.0
"""What the faked clock charges for one write."""


@pytest.mark.parametrize(
    ("name", "counts"),
    [("shade-copy_0", True), ("shade-save", True), ("shade-memory-tier_1", True), ("shade-x", False)],
)
def test_only_saving_threads_count(name: str, counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def fake_ns(thread: int) -> int:
        measured.append(thread)
        return 3_000_000_000 if thread == worker.native_id else 0

    monkeypatch.setattr(schedule, "processor_ns", fake_ns)
    may_end = threading.Event()
    worker = threading.Thread(target=may_end.wait, name=name)
    worker.start()
    try:
        assert cpu_seconds() == (3.0 if counts else 0.0)
        assert (worker.native_id in measured) == counts
    finally:
        may_end.set()
        worker.join()
    assert cpu_seconds() == 0.0, "a thread that has ended counts no more"


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no clock for each thread")
def test_the_clock_of_a_thread_counts_what_it_works_and_ends_with_it() -> None:
    has_worked, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < WORK_SECONDS:
            pass
        has_worked.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert has_worked.wait(60)
        assert processor_ns(thread.native_id or 0) >= WORK_SECONDS * 1e9
    finally:
        may_end.set()
        thread.join()
    deadline = time.monotonic() + 60
    while processor_ns(thread.native_id or 0):  # the system takes a moment longer to end it
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("strategy", "expected"), [("overlap", WRITE_CPU_SECONDS), ("copy", WRITE_CPU_SECONDS), ("sync", 0)]
)
def test_work_that_the_training_waits_for_is_not_work_beside_it(
    strategy: str, expected: float, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    may_write = threading.Event()
    write, until_committed = AsyncWriter._write, WaitPolicy._until_committed

    def slow_write(self: AsyncWriter, request: SaveRequest, group: RankGroup) -> CommitResult:
        assert may_write.wait(60)
        clock[0] += WRITE_CPU_SECONDS
        return write(self, request, group)

    def wait_for_the_write(self: WaitPolicy, handle: SaveHandle) -> None:
        may_write.set()
        until_committed(self, handle)

    monkeypatch.setattr(AsyncWriter, "_write", slow_write)
    monkeypatch.setattr(WaitPolicy, "_until_committed", wait_for_the_write)
    for module in (async_writer, save):
        monkeypatch.setattr(module, "cpu_seconds", lambda: clock[0])
    with Checkpointer(strategy=strategy, run=run, every="never") as checkpointer:
        checkpointer.attach(model=torch.nn.Linear(64, 64))
        for _ in range(3):
            may_write.clear()
            handle = checkpointer.save()
            checkpointer.wait_copy_complete()
            assert may_write.is_set() == (strategy == "sync"), "only sync waits in save()"
            may_write.set()
            handle.committed.result()
            assert handle.background_cpu_seconds == expected
