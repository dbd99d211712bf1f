"""Idle cores are counted from the system's idle times; there are none while all are busy."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from shade.checkpoint._strategies import overlap
from shade.checkpoint._strategies.overlap import CoresLeft

HERTZ = os.sysconf("SC_CLK_TCK")


class System:
    """Four cores, of which this process may use 1 and 2, and a manual clock."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.now, self.idle = path, 100.0, [0.0] * 4
        monkeypatch.setattr(overlap, "_STAT", path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.passes(0, [0.0] * 4)

    def passes(self, seconds: float, idle: list[float]) -> None:
        """So long, and each core rests for a part of it; half of that it waits for a disk."""
        self.now += seconds
        self.idle = [before + seconds * part for before, part in zip(self.idle, idle, strict=True)]
        ticks = [round(each * HERTZ / 2) for each in self.idle]
        lines = [f"cpu{number} 7 0 7 {each} {each} 0 0 0 0 0" for number, each in enumerate(ticks)]
        self.path.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 12345", "ctxt 6789"]))


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path / "stat", monkeypatch)


def test_idle_cores_are_counted(system: System) -> None:
    left = CoresLeft(10)
    assert left.number() is None
    for idle, expected in [([1.0, 0.0, 0.1, 1.0], 0), ([0.0, 0.9, 0.9, 0.0], 1), ([0.0, 1.0, 1.0, 0.0], 1)]:
        left.begin()
        system.passes(2, idle)
        left.end()
        assert left.number() == expected, "the mean of all, of those cores that are ours"
        system.passes(2, [1.0] * 4)  # between passes: an optimizer's step


def test_old_measurements_are_forgotten(system: System) -> None:
    left = CoresLeft(2)
    for idle in (1.0, 0.0, 0.0):
        left.begin()
        system.passes(2, [idle] * 4)
        left.end()
        system.passes(2, [1.0] * 4)
    assert left.number() == 0


def test_short_passes_are_not_all_measured(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    left, asked = CoresLeft(10), list[float]()
    read = overlap._idle_seconds

    def now() -> tuple[float, float] | None:
        asked.append(system.now)
        return read()

    monkeypatch.setattr(overlap, "_idle_seconds", now)
    for _ in range(300):
        left.begin()
        system.passes(0.01, [0.0, 1.0, 0.0, 0.0])
        left.end()
    assert 4 <= len(asked) <= 8
    assert left.number() == 1


def test_an_end_without_a_begin_measures_nothing(system: System) -> None:
    left = CoresLeft(10)
    left.end()
    assert left.number() is None


def test_a_dropped_measurement_does_not_count(system: System) -> None:
    left = CoresLeft(10)
    left.begin()
    system.passes(2, [1.0] * 4)
    left.drop()
    left.end()
    assert left.number() is None


def test_without_proc_stat_nothing_is_known(system: System) -> None:
    system.path.unlink()
    left = CoresLeft(10)
    left.begin()
    left.end()
    assert left.number() is None


def _work(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@pytest.mark.skipif(not overlap._STAT.exists(), reason="the system has no such clock")
@pytest.mark.multiprocess
def test_busy_cores_are_not_idle() -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_work, args=(1.0,)) for _ in os.sched_getaffinity(0)]
    left = CoresLeft(1)
    for worker in workers:
        worker.start()
    time.sleep(0.2)
    left.begin()
    time.sleep(0.5)
    left.end()
    for worker in workers:
        worker.join()
    assert left.number() == 0
