"""Seeded schedules of faults against the disk under a training: the same samples, no wrong byte, and a named warning.

Each schedule trains through memory and a disk while the disk is filled, broken, made read-only, flipped, swapped,
deleted and used by other processes, among them one of another format version and one that is killed in mid-write.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shade.store import disk as disk_module
from shade.store import open_store
from tests.support.data_plane import Job, make_pictures, train

NUM_SAMPLES, EPOCHS = 160, 3
STEPS = EPOCHS * NUM_SAMPLES // 16


def broken(number: int) -> Callable[..., int]:
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def write_as_neighbour(url: str, seed: int, format_version: int) -> None:
    """Another process on the same folder, with entries of its own; runs until it is killed."""
    with mock.patch.object(disk_module, "FORMAT", format_version), open_store(url) as store:
        rng = random.Random(seed)
        while True:
            keys = [f"shade:neighbour:{rng.randrange(50)}" for _ in range(8)]
            with contextlib.suppress(Exception):
                store.set_many({key: rng.randbytes(rng.randrange(1, 20_000)) for key in keys})
                store.delete_many(keys[:4])


@dataclass
class Chaos:
    """A schedule's faults, struck by the training's hook."""

    seed: int
    folder: Path
    url: str
    struck: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        kinds = [*(name for name in dir(self) if name.startswith("do_"))]
        self.acts = {rng.randrange(4, STEPS - 2): rng.choice(kinds) for _ in range(6)}
        self._rng = rng
        self._patches = contextlib.ExitStack()
        self._until = 0
        self._neighbours: list[Any] = []

    def __call__(self, step: int) -> None:
        if self._until and step >= self._until:
            self.heal()
        kind = self.acts.get(step)
        if kind is not None:
            getattr(self, kind)(step)
            self.struck[kind] += 1

    def heal(self) -> None:
        self._patches.close()
        self._until = 0

    def end(self) -> None:
        self.heal()
        for neighbour in self._neighbours:
            neighbour.kill()
            neighbour.join()

    def _patch(self, step: int, *patches: Any) -> None:
        for patch in patches:
            self._patches.enter_context(patch)
        self._until = step + self._rng.randrange(2, 7)

    def _files(self, suffix: str) -> list[Path]:
        return sorted(self.folder.glob(f"1-*.{suffix}"))

    def do_full(self, step: int) -> None:
        self._patch(step, mock.patch.object(os, "pwrite", broken(errno.ENOSPC)))

    def do_read_only(self, step: int) -> None:
        self._patch(step, mock.patch.object(os, "pwrite", broken(errno.EROFS)))

    def do_read_errors(self, step: int) -> None:
        self._patch(step, mock.patch.object(os, "pread", broken(errno.EIO)))

    def do_flip(self, step: int) -> None:
        del step
        for path in self._files("entries"):
            content = bytearray(path.read_bytes())
            with path.open("r+b") as file:
                for _ in range(30 if content else 0):
                    place = self._rng.randrange(len(content))
                    file.seek(place)
                    file.write(bytes([content[place] ^ 1 << self._rng.randrange(8)]))

    def do_swap(self, step: int) -> None:
        del step
        for path in self._files("index"):
            with contextlib.closing(sqlite3.connect(path, timeout=10)) as base, base:
                rows = list(base.execute("select key, places from entry where value is null"))
                places = [place for _, place in rows]
                self._rng.shuffle(places)
                changes = [(place, key) for (key, _), place in zip(rows, places, strict=True)]
                base.executemany("update entry set places = ? where key = ?", changes)

    def do_damage_index(self, step: int) -> None:
        del step
        for path in self._files("index"):
            with path.open("r+b") as file:
                file.truncate(max(0, path.stat().st_size - 4096))
                file.seek(4096 * self._rng.randrange(3))
                file.write(self._rng.randbytes(2000))

    def do_delete_folder(self, step: int) -> None:
        del step
        shutil.rmtree(self.folder, ignore_errors=True)

    def do_neighbour(self, step: int) -> None:
        self._start(step, 1)

    def do_other_format(self, step: int) -> None:
        self._start(step, 2)

    def _start(self, step: int, format_version: int) -> None:
        for neighbour in self._neighbours:
            neighbour.kill()  # SIGKILL, in the middle of a write
        context = multiprocessing.get_context("fork")
        started = context.Process(target=write_as_neighbour, args=(self.url, self.seed + step, format_version))
        started.start()
        self._neighbours.append(started)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pictures(tmp_path_factory.mktemp("pictures"), NUM_SAMPLES))


@pytest.fixture(scope="module")
def undisturbed(root: str) -> list[int]:
    return train(Job(root, None, mode="uniform", epochs=EPOCHS)).pixels


def play(seed: int, root: str, tmp_path: Path, undisturbed: list[int]) -> Counter[str]:
    """Trains through one schedule, asserts what must hold, and returns what struck."""
    folder = tmp_path / f"tier{seed}"
    capacity = random.Random(-seed - 1).choice([60_000, 100_000, 2_000_000])
    url = f"disk://{folder}?capacity={capacity}"
    chaos = Chaos(seed, folder, url)
    memory = random.Random(seed + 10_000).choice(["memory://", None])
    job = Job(root, memory, mode="uniform", epochs=EPOCHS, disk=url.removeprefix("disk://"))
    try:
        outcome = train(job, hook=chaos)
        chaos.heal()
        assert outcome.pixels == undisturbed, f"seed {seed}: {chaos.acts}"
        assert outcome.totals["samples"] == outcome.totals["hits"] + outcome.totals["misses"] == EPOCHS * NUM_SAMPLES
        assert train(replace(job, epochs=1)).pixels == undisturbed[: len(undisturbed) // EPOCHS]  # the next job
    finally:
        chaos.end()
        shutil.rmtree(folder, ignore_errors=True)
    return chaos.struck


@pytest.mark.multiprocess
@pytest.mark.parametrize("seed", range(4))
def test_training_does_not_notice(seed: int, root: str, tmp_path: Path, undisturbed: list[int]) -> None:
    assert play(seed, root, tmp_path, undisturbed).total() > 0


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(7200)
def test_two_hundred_schedules(root: str, tmp_path: Path, undisturbed: list[int]) -> None:
    struck = sum((play(seed, root, tmp_path, undisturbed) for seed in range(1000, 1200)), Counter[str]())
    assert set(struck) == {name for name in dir(Chaos) if name.startswith("do_")}, "each kind struck"


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, logger="shade.cache"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("memory", ["memory://", None])
@pytest.mark.parametrize(
    ("call", "number"), [("pread", errno.EIO), ("pwrite", errno.EROFS)], ids=["unreadable", "read-only"]
)
def test_a_broken_disk_is_named_and_left_alone(
    root: str,
    tmp_path: Path,
    undisturbed: list[int],
    memory: str | None,
    call: str,
    number: int,
    warnings_of: Callable[[], list[str]],
) -> None:
    job = Job(root, memory, mode="uniform", epochs=EPOCHS, disk=f"{tmp_path}/tier?capacity=2MB")
    with contextlib.ExitStack() as stack:
        step = 12 if call == "pread" else 2

        def hook(done: int) -> None:
            if done == step:
                stack.enter_context(mock.patch.object(os, call, broken(number)))

        outcome = train(job, hook=hook)
    assert outcome.pixels == undisturbed
    told = [line for line in warnings_of() if "is out of use" in line]
    assert len(told) == 1
    assert told[0].startswith(f"the disk tier disk://{tmp_path}/tier")
    assert os.strerror(number) in told[0]
    errors = "disk_errors" if memory else "store_errors"
    assert outcome.totals[errors] > 0
    assert outcome.totals["misses"] > NUM_SAMPLES
