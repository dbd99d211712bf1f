"""The CPU time of a thread is read by its number, and ends with it."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from shade.checkpoint._buffer.copy_and_compare import processor_ns

WORK_SECONDS = 0.05


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
