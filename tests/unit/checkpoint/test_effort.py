"""Who works for saves is known by name, and what it has worked by the system's clock."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from shade import Checkpointer
from shade.checkpoint._pacing.schedule import cpu_seconds, processor_ns

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system has no clock for each thread")

WORK_SECONDS = 0.05


def worker(name: str) -> tuple[threading.Thread, threading.Event, threading.Event]:
    """A thread that works for a while, and then rests until it is told to end."""
    has_worked, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < WORK_SECONDS:
            pass
        has_worked.set()
        may_end.wait()

    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread, has_worked, may_end


@pytest.mark.parametrize(
    ("name", "counts"), [("shade-copy_0", True), ("shade-writer", True), ("shade-origin-1", False)]
)
def test_only_who_works_for_saves_counts(name: str, counts: bool) -> None:
    before = cpu_seconds()
    thread, has_worked, may_end = worker(name)
    try:
        assert has_worked.wait(10)
        told = cpu_seconds() - before
        assert (WORK_SECONDS <= told < 2 * WORK_SECONDS) if counts else told == 0
        assert processor_ns(thread.native_id or 0) >= WORK_SECONDS * 1e9
    finally:
        may_end.set()
        thread.join()
    assert cpu_seconds() == before
    deadline = time.monotonic() + 10
    while processor_ns(thread.native_id or 0):  # the system takes a moment longer to end it
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_work_that_the_training_waits_for_is_not_work_beside_it() -> None:
    worked = {}
    for strategy in ("overlap", "copy", "sync"):
        with Checkpointer(strategy=strategy, every="never") as checkpointer:
            checkpointer.attach(model=torch.nn.Linear(2048, 2048))
            for _ in range(3):
                handle = checkpointer.save()
                checkpointer.wait_copy_complete()
                handle.committed.result()
            worked[strategy] = handle.worked_seconds
    assert worked["overlap"] > 0
    assert worked["copy"] > 0, "it is hashed behind the training"
    assert worked["sync"] < worked["copy"] / 4
