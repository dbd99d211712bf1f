"""Pipeline: order, deadlines, exceptions in their place, and no thread left."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

import pytest

from shade.data._loader.pipeline import LoaderPipeline
from shade.errors import DataError


class Numbers:
    """A batch of sums, in parts; remembers what ran when."""

    log: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, indices: Sequence[int], num_parts: int = 3, seconds: float = 0.0) -> None:
        self.indices, self.num_parts, self.seconds = list(indices), num_parts, seconds
        self.done = [0] * num_parts

    def run(self, part: int, worker: int) -> None:
        time.sleep(self.seconds)
        Numbers.log.append((self.indices[0], part))
        if self.indices[0] < 0:
            raise KeyError(self.indices[0])
        self.done[part] += 1

    def finish(self) -> list[int]:
        assert self.done == [1] * self.num_parts
        return self.indices


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("shade-fetch", "shade-work"))]


@pytest.fixture(autouse=True)
def _no_thread_left() -> object:
    Numbers.log = []
    yield
    gc.collect()
    assert not ours()


def test_batches_come_in_the_order_of_their_submission() -> None:
    def begin(number: int, indices: Sequence[int]) -> Numbers:
        time.sleep(0.01 if indices[0] % 3 == 0 else 0.0)  # earlier ones may be ready later
        return Numbers(indices)

    pipeline = LoaderPipeline(begin, num_fetchers=3, num_workers=4)
    jobs = [pipeline.submit([number]) for number in range(30)]
    assert [pipeline.wait(job, 10.0) for job in jobs] == [[number] for number in range(30)]
    pipeline.close()


def test_the_nearest_deadline_goes_first() -> None:
    """A late batch's parts overtake those of later batches that were ready before it."""
    ready = threading.Event()

    def begin(number: int, indices: Sequence[int]) -> Numbers:
        if indices[0] == 0:
            ready.wait(5)
        return Numbers(indices, num_parts=4, seconds=0.005)

    pipeline = LoaderPipeline(begin, num_fetchers=2, num_workers=1)
    jobs = [pipeline.submit([number]) for number in range(6)]
    while len(Numbers.log) < 2:
        time.sleep(0.001)
    ready.set()
    pipeline.wait(jobs[0], 10.0)
    behind = [number for number, _ in Numbers.log]
    assert behind.index(0) < 12, "it did not have to wait for all that was ready before it"
    for job in jobs:
        pipeline.wait(job, 10.0)
    pipeline.close()


@pytest.mark.parametrize("where", ["begin", "run", "finish"])
def test_an_exception_ends_its_own_batch_alone(where: str) -> None:
    class Broken(Numbers):
        def finish(self) -> list[int]:
            if self.indices[0] == 2 and where == "finish":
                raise KeyError("finish")
            return super().finish()

    def begin(number: int, indices: Sequence[int]) -> Numbers:
        if indices[0] == 2 and where == "begin":
            raise KeyError("begin")
        return Broken([-1] if indices[0] == 2 and where == "run" else indices)

    pipeline = LoaderPipeline(begin, 2, 2)
    jobs = [pipeline.submit([number]) for number in range(5)]
    for number, job in enumerate(jobs):
        if number == 2:
            with pytest.raises(KeyError):
                pipeline.wait(job, 10.0)
        else:
            assert pipeline.wait(job, 10.0) == [number]
    pipeline.close()


def test_closing_does_not_wait_for_what_was_not_begun() -> None:
    pipeline = LoaderPipeline(lambda number, indices: Numbers(indices, 10, 0.02), 2, 1)
    jobs = [pipeline.submit([number]) for number in range(50)]
    pipeline.wait(jobs[0], 10.0)
    begun = time.monotonic()
    pipeline.close()
    pipeline.close()
    assert time.monotonic() - begun < 5.0
    assert not jobs[-1].done.is_set()


def test_a_late_batch_raises_and_may_be_waited_for_again() -> None:
    held = threading.Event()

    def begin(number: int, indices: Sequence[int]) -> Numbers:
        held.wait(10)
        return Numbers(indices)

    pipeline = LoaderPipeline(begin, 1, 1)
    job = pipeline.submit([7, 8])
    with pytest.raises(DataError, match=r"timeout=0\.05 s.*samples 7, 8"):
        pipeline.wait(job, 0.05)
    held.set()
    assert pipeline.wait(job, 10.0) == [7, 8]
    pipeline.close()
