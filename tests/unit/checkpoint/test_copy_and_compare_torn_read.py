"""Whoever may be in the middle of a write is waited for, and nobody else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import numba
import numpy as np
import pytest

from shade.checkpoint._buffer import copy_and_compare
from shade.checkpoint._buffer.copy_and_compare import REST_SECONDS, wait_for_others

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what its threads do")


@numba.njit(nogil=True)
def write_until_stopped(memory_N: np.ndarray) -> None:
    """Fills memory with 1, 2, 3, … without a rest, and without the interpreter, until its last element is set."""
    number = 0
    while memory_N[-1] == 0:
        number += 1
        for index in range(len(memory_N) - 1):
            memory_N[index] = number


@pytest.fixture
def writer() -> Iterator[np.ndarray]:
    """Memory that a thread writes to."""
    memory_N = np.zeros(2**20)
    thread = threading.Thread(target=write_until_stopped, args=(memory_N,))
    thread.start()
    while memory_N[0] == 0:
        time.sleep(0.01)  # it is compiled first
    yield memory_N
    memory_N[-1] = 1
    thread.join()


def test_who_sleeps_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_and_compare, "LONGEST_SECONDS", 0.25)
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        assert wait_for_others()
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_who_writes_has_written_on(writer: np.ndarray) -> None:
    for _ in range(200):
        before = writer.copy()
        assert wait_for_others()
        assert (writer[:: 2**12] != before[:: 2**12]).any()


def test_a_processor_that_answers_late_has_not_been_running(
    writer: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_and_compare, "LONGEST_SECONDS", 0.2)
    monkeypatch.setattr(copy_and_compare, "_touch_processors", lambda: time.sleep(2 * copy_and_compare._CLOSE_SECONDS))
    assert not wait_for_others()


def test_who_was_called_to_work_meanwhile_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asleep at the first look, it is working when all others have run: an operation's second thread."""
    ended = threading.Event()
    helper = threading.Thread(target=ended.wait)
    helper.start()
    number, num_looks = helper.native_id, 0
    look = copy_and_compare._may_be_writing

    def asleep_then_stuck(thread: int) -> bool:
        nonlocal num_looks
        if thread != number:
            return look(thread)
        num_looks += 1
        return 1 < num_looks < 5

    monkeypatch.setattr(copy_and_compare, "_may_be_writing", asleep_then_stuck)
    try:
        assert wait_for_others()
    finally:
        ended.set()
        helper.join()
    assert num_looks == 5


def test_a_thread_that_has_ended_is_not_waited_for() -> None:
    for _ in range(50):
        thread = threading.Thread(target=time.sleep, args=(REST_SECONDS,))
        thread.start()
        assert wait_for_others()
        thread.join()
