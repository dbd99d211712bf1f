"""LoaderPipeline: threads that make batches ahead of training. Fetchers wait for bytes, workers turn them into pixels.

::

    training thread ──submit──▶ fetchers ──parts──▶ workers ──▶ finished batch ──wait──▶ training thread
        (the order)            (waiting)          (computing)

A batch is one job. A fetcher begins it and cuts it into parts; the worker of the last part finishes it. An exception
ends only its own job, and is raised where that batch is waited for. There are never more jobs than the caller has
submitted and not waited for.

Invariant: batches come out in the order in which they were submitted, and after `close` no thread is left.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shade.errors import DataError

_FIRST = -1
"""Sorts before every batch: the signal to end."""


class BatchParts(Protocol):
    """A batch whose bytes are fetched."""

    num_parts: int

    def run(self, part: int, worker: int) -> None:
        """Does one part; several threads do different ones at the same time."""
        ...

    def finish(self) -> Any:
        """Returns the batch, after the last part."""
        ...


class Job:
    """One batch under way, numbered from 0."""

    def __init__(self, sequence: int, indices: Sequence[int]) -> None:
        self.sequence, self.indices = sequence, indices
        self.parts: BatchParts | None = None
        self.left = 0
        self.done = threading.Event()
        self.batch: Any = None
        self.error: BaseException | None = None


class LoaderPipeline:
    """Runs fetchers, which wait, and workers, which compute. ``begin`` maps a fetcher's number and a batch's samples to
    its parts."""

    def __init__(self, begin: Callable[[int, Sequence[int]], BatchParts], num_fetchers: int, num_workers: int) -> None:
        self._begin = begin
        self._submitted: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Parts of the batch that training wants next come first, whichever batch was ready first: so all workers finish
        # one batch instead of many at the same time.
        self._parts: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        self._counting = threading.Lock()
        self._closed = False
        self._num_jobs = 0
        self._threads = [
            threading.Thread(target=self._fetch, args=(number,), name=f"shade-fetch-{number}", daemon=True)
            for number in range(num_fetchers)
        ]
        self._threads += [
            threading.Thread(target=self._work, args=(number,), name=f"shade-work-{number}", daemon=True)
            for number in range(num_workers)
        ]
        self._num_fetchers, self._num_workers = num_fetchers, num_workers
        for thread in self._threads:
            thread.start()

    def submit(self, indices: Sequence[int]) -> Job:
        """Starts a batch of these samples; returns the job to `wait` for."""
        job = Job(self._num_jobs, indices)
        self._num_jobs += 1
        self._submitted.put(job)
        return job

    def wait(self, job: Job, timeout_seconds: float | None) -> Any:
        """Waits for a batch from `submit`, without limit if ``timeout_seconds`` is None. Raises DataError if it did not
        come in time, and any exception that was raised while it was made."""
        if not job.done.wait(timeout_seconds):
            first = ", ".join(map(str, list(job.indices)[:4]))
            raise DataError.of(
                f"a batch within timeout={timeout_seconds} s",
                f"none (samples {first} …)",
                "see whether the storage answers, or raise timeout",
            )
        if job.error is not None:
            raise job.error
        return job.batch

    def close(self) -> None:
        """Ends the threads and waits for them; unfinished jobs stay unfinished. Safe to call twice."""
        self._closed = True
        for _ in range(self._num_fetchers):
            self._submitted.put(None)
        for number in range(self._num_workers):
            self._parts.put((_FIRST, number, None))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # ── the threads ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _fetch(self, number: int) -> None:
        while (job := self._submitted.get()) is not None and not self._closed:
            try:
                job.parts = parts = self._begin(number, job.indices)
                job.left = parts.num_parts
            except BaseException as error:  # noqa: BLE001 - it is the training loop's, whatever it is
                self._fail(job, error)
                # Its error's traceback holds the waiting caller.
                del job
                continue
            for part in range(parts.num_parts):
                self._parts.put((job.sequence, part, job))
            # A waiting thread keeps no batch alive.
            del job, parts

    def _work(self, number: int) -> None:
        while True:
            _, part, job = self._parts.get()
            if job is None or self._closed:
                return
            try:
                assert job.parts is not None
                if job.error is None:
                    job.parts.run(part, number)
                with self._counting:
                    job.left -= 1
                    last = job.left == 0
                if last and job.error is None:
                    job.batch = job.parts.finish()
                    job.parts = None
                    job.done.set()
            except BaseException as error:  # noqa: BLE001 - as above
                self._fail(job, error)
            del job

    @staticmethod
    def _fail(job: Job, error: BaseException) -> None:
        if job.error is None:
            job.error = error
        job.done.set()
