"""Threads that read an origin: as many at once as pays, and never more bytes under way than there is room for.

One pool serves all batches of a process, first come, first served: batches are asked for in the order in which training
wants them, so the read with the nearest deadline is the first in the queue. How many run at once is `Pace`'s word.

Invariant: an action runs exactly once, or its caller learns that the pool was closed; no lock is held while it runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from shade.errors import StoreClosedError
from shade.store.origin_pace import Pace

T = TypeVar("T")
Result = bytes | OSError
MOST_BYTES = 64 << 20
"""Under way at most; a file larger than that is read alone."""


class _Round:
    """The reads of one caller."""

    def __init__(self, count: int) -> None:
        self.results: list[Result | None] = [None] * count
        self.left = count
        self.done = threading.Event()


class ReadPool:
    """Runs reads.

    Args:
        most: Threads, at most.
        most_bytes: Bytes under way, at most.
    """

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self.pace = Pace(most)
        self._most_bytes = most_bytes
        self._wake = threading.Condition()
        self._waiting: deque[tuple[_Round, int, Callable[[], Result], int]] = deque()
        self._threads: list[threading.Thread] = []
        self._running = self._bytes = 0
        self._closed = False

    def run(self, reads: Sequence[Callable[[], Result]], sizes: Sequence[int]) -> list[Result]:
        """Runs reads and waits for them.

        Args:
            reads: Each returns what it read, or the error that it met.
            sizes: Expected bytes of each.

        Returns:
            The results in order.

        Raises:
            StoreClosedError: The pool was closed meanwhile.
        """
        mine = _Round(len(reads))
        with self._wake:
            if self._closed:
                raise StoreClosedError("expected an open origin, got one that is closed; open the data set again")
            for number, (read, size) in enumerate(zip(reads, sizes, strict=True)):
                self._waiting.append((mine, number, read, size))
            while len(self._threads) < min(self.pace.limit, self._running + len(self._waiting)):
                thread = threading.Thread(target=self._work, name=f"shade-origin-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._wake.notify(len(reads))
        mine.done.wait()
        results = [result for result in mine.results if result is not None]
        if len(results) < len(reads):
            raise StoreClosedError("expected an open origin, got one that was closed; open the data set again")
        return results

    def _may_start(self) -> bool:
        if not self._waiting or self._running >= self.pace.limit:
            return False
        return self._running == 0 or self._bytes + self._waiting[0][3] <= self._most_bytes

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._closed and not self._may_start():
                    self._wake.wait()
                if self._closed:
                    return
                mine, number, read, size = self._waiting.popleft()
                self._running += 1
                self._bytes += size
            begun = time.monotonic()
            try:
                result = read()
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
                result = OSError(f"{type(error).__name__}: {error}")
            now = time.monotonic()
            with self._wake:
                self._running -= 1
                self._bytes -= size
                if self._waiting:
                    self.pace.finished(now - begun)
                    self._grow()
                    self._wake.notify(2)
                else:
                    self.pace.idle()
                mine.results[number] = result
                mine.left -= 1
                if mine.left == 0:
                    mine.done.set()
            del mine, read, result  # a thread that waits keeps nobody alive

    def _grow(self) -> None:
        """One thread more where the limit has risen."""
        if len(self._threads) < self.pace.limit and self._running + 1 >= len(self._threads):
            thread = threading.Thread(target=self._work, name=f"shade-origin-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ends the threads; who waits for a read is told. Safe to call twice."""
        with self._wake:
            self._closed = True
            for mine, *_ in self._waiting:
                mine.done.set()
            self._waiting.clear()
            self._wake.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
