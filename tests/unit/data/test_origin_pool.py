"""ReadPool: order, bounds on threads and bytes, nobody forgotten at the end."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from shade.data._origin.read_pool import ReadPool, Result
from shade.errors import StoreClosedError


class Watched:
    """Reads that know how many of them, and how many bytes, are under way."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds, self.lock = seconds, threading.Lock()
        self.running = self.most = self.bytes = self.most_bytes = 0

    def read(self, number: int, size: int) -> Result:
        with self.lock:
            self.running += 1
            self.bytes += size
            self.most, self.most_bytes = max(self.most, self.running), max(self.most_bytes, self.bytes)
        time.sleep(self.seconds)
        with self.lock:
            self.running -= 1
            self.bytes -= size
        return OSError(f"no {number}") if number % 7 == 3 else b"%d" % number


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shade-origin")]


def test_results_come_in_order_and_errors_in_their_place() -> None:
    watched, pool = Watched(0.0), ReadPool(16)
    for _ in range(5):
        results = pool.run([partial(watched.read, number, 1) for number in range(100)], [1] * 100)
        assert [r for r in results if isinstance(r, bytes)] == [b"%d" % n for n in range(100) if n % 7 != 3]
        assert [str(r) for r in results if isinstance(r, OSError)] == [f"no {n}" for n in range(100) if n % 7 == 3]
    pool.close()
    assert not ours()


def test_it_opens_up_on_a_slow_origin_and_not_further_than_allowed() -> None:
    watched, pool = Watched(0.005), ReadPool(24)
    for _ in range(20):
        pool.run([partial(watched.read, 1, 1)] * 64, [1] * 64)
    assert 8 < watched.most <= 24
    pool.close()


def test_no_more_bytes_are_under_way_than_there_is_room_for() -> None:
    watched, pool = Watched(), ReadPool(16, most_bytes=1000)
    sizes = [300, 300, 5000, 10, 300, 300, 300, 999] * 6
    pool.run([partial(watched.read, 1, size) for size in sizes], sizes)
    assert watched.most_bytes <= 5000 + 0, "what is larger than the room is read alone"
    assert watched.most >= 2
    pool.close()


def test_several_callers_share_it() -> None:
    watched, pool = Watched(), ReadPool(16)
    wrong = []

    def call(first: int) -> None:
        for _ in range(10):
            results = pool.run([partial(watched.read, 7 * number + first, 1) for number in range(30)], [1] * 30)
            if results != [b"%d" % (7 * number + first) for number in range(30)]:
                wrong.append(first)

    callers = [threading.Thread(target=call, args=(first,)) for first in (0, 1, 2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    pool.close()
    assert not wrong


def test_a_read_that_raises_is_an_error_in_its_place() -> None:
    pool = ReadPool(4)

    def bad() -> Result:
        raise ZeroDivisionError("by design")

    results = pool.run([bad, lambda: b"good"], [1, 1])
    assert "ZeroDivisionError" in str(results[0])
    assert results[1] == b"good"
    pool.close()


def test_who_waits_when_it_is_closed_is_told() -> None:
    pool, began = ReadPool(2), threading.Event()
    told: list[Exception] = []

    def slow() -> Result:
        began.set()
        time.sleep(0.05)
        return b""

    def call() -> None:
        try:
            pool.run([slow] * 50, [1] * 50)
        except StoreClosedError as error:
            told.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    began.wait(5)
    pool.close()
    caller.join(5)
    assert len(told) == 1
    assert not ours()
    with pytest.raises(StoreClosedError, match="closed"):
        pool.run([slow], [1])
