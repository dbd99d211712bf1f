"""Runs reads of one process in threads, as many at once as the storage serves without a queue.

A link or disk serves so many bytes a second and answers after some time. Up to the product of the two, one more read
under way is one more served, and none takes longer (Little's law). Beyond it reads queue, which holds memory. Neither
number is known beforehand. So the limit doubles while reads take their best latency, and halves when they take much
longer, but only if halving shortens the queue.

Invariants: results come in the order of the reads; a read runs exactly once, or its caller gets `StoreClosedError`; no
lock is held while it runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from shade.errors import StoreClosedError

MOST_BYTES = 64 << 20
"""Upper bound of the bytes being read; a file larger than that is read alone."""
LEAST, MOST = 8, 64
"""Limits of concurrency: a disk's own queue is longer than the one; beyond the other, memory matters."""
WINDOW_READS = 16
"""Reads whose mean latency is judged together."""
FREE, QUEUE = 1.25, 2.5
"""Multiples of the best latency: below the one no read waits, above the other there is a queue. A doubled limit at most
doubles the latency, so a step up never asks for a step down."""
EASED = 0.65
"""A halved limit brings the latency below this part of what it was, if this process made the queue."""
PATIENCE_WINDOWS = 8
"""Windows until a step down that did not help is tried again."""
Result = bytes | OSError


class ConcurrencyLimit:
    """Limits the reads under way; arithmetic alone.

    A read counts only if another was waiting when it ended: the speed of an idle origin says nothing about its limit.

    Args:
        most: Upper bound of the limit, ≥ 1.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.limit = min(LEAST, most)
        """Reads that may be under way now."""
        self._best = float("inf")
        """Mean seconds of a read in the best window."""
        self._trial: tuple[int, float] | None = None
        """Limit and seconds a read before the step down that is being tried."""
        self._rest = self._stale = 0
        self.idle()

    def idle(self) -> None:
        """Forgets the current window, because no read is waiting."""
        self._num_reads, self._seconds, self._stale = 0, 0.0, 0

    def finished(self, seconds: float) -> None:
        """Counts a read that took so many seconds and ended while others waited."""
        # The read was begun under another limit.
        if self._stale:
            self._stale -= 1
            return
        self._num_reads += 1
        self._seconds += seconds
        if self._num_reads == WINDOW_READS:
            latency = self._seconds / WINDOW_READS
            self.idle()
            self._judge(latency)

    def _judge(self, latency: float) -> None:
        self._best = min(self._best, latency)
        if self._trial is not None:
            limit, before = self._trial
            self._trial = None
            # Another process made the queue, or the link got slower: a process that backs off would wait as long, for
            # less.
            if latency > EASED * before:
                self._rest = PATIENCE_WINDOWS
                self._set(min(2 * limit, self._most))
                return
        self._rest = max(0, self._rest - 1)
        if latency < FREE * self._best:
            self._set(min(2 * self.limit, self._most))
        elif latency > QUEUE * self._best and not self._rest and self.limit > LEAST:
            self._trial = (self.limit, latency)
            self._set(max(self.limit // 2, LEAST))

    def _set(self, limit: int) -> None:
        # Reads begun under the old limit say nothing about the new one.
        self._stale = self.limit if limit != self.limit else 0
        self.limit = limit


class _ReadBatch:
    """The reads of one caller."""

    def __init__(self, count: int) -> None:
        self.results: list[Result | None] = [None] * count
        self.left = count
        self.done = threading.Event()


class ReadPool:
    """Runs reads in up to ``most`` threads, with up to ``most_bytes`` under way."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self.pace = ConcurrencyLimit(most)
        self._most_bytes = most_bytes
        self._wake = threading.Condition()
        self._waiting: deque[tuple[_ReadBatch, int, Callable[[], Result], int]] = deque()
        self._threads: list[threading.Thread] = []
        self._running = self._bytes = 0
        self._closed, self._pid = False, os.getpid()

    def run(self, reads: Sequence[Callable[[], Result]], sizes: Sequence[int]) -> list[Result]:
        """Runs reads of some expected sizes, each of which returns what it read or the error that it met, and returns
        their results in order. Raises StoreClosedError if the pool is closed meanwhile."""
        mine = _ReadBatch(len(reads))
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
        # A file larger than the bound must still be read, alone.
        return self._running == 0 or self._bytes + self._waiting[0][3] <= self._most_bytes

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._closed and not self._may_start():
                    self._wake.wait()
                if self._closed:
                    return
                # Batches ask in the order in which training wants them, so the first in the queue is wanted first.
                mine, number, read, size = self._waiting.popleft()
                self._running += 1
                self._bytes += size
            begun = time.monotonic()
            try:
                result = read()
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller must not wait forever
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
            # A waiting thread must not keep its last batch alive.
            del mine, read, result

    def _grow(self) -> None:
        """Starts one more thread if the limit has risen."""
        if len(self._threads) < self.pace.limit and self._running + 1 >= len(self._threads):
            thread = threading.Thread(target=self._work, name=f"shade-origin-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ends the threads; waiting callers get `StoreClosedError`. Safe to call twice, and in a child."""
        # A child's copy of the lock may be held by a thread that it does not have.
        if self._pid != os.getpid():
            return
        with self._wake:
            self._closed = True
            for mine, *_ in self._waiting:
                mine.done.set()
            self._waiting.clear()
            self._wake.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
