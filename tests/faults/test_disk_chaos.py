"""Seeded schedules of faults against the disk under a training: the same ids, no wrong byte, and a named warning.

Each schedule trains through memory and a disk while the disk is filled, broken, made read-only, slowed down, torn,
flipped, swapped, deleted and used by other processes: a second training of the same data set, which may be killed in
mid-write, and writers of this format version, an older and a newer one. Then the next job trains on what is left, half
of the time by the newer version.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shade.cache import breaker
from shade.errors import StoreUnavailableError
from shade.store import disk_files, open_store
from tests.support.data_plane import Job, Outcome, make_pictures, train

NUM_SAMPLES, EPOCHS = 160, 3
STEPS = EPOCHS * NUM_SAMPLES // 16
NUM_FAULTS = 6
PATIENCE_SECONDS = 120.0


def broken(number: int) -> Callable[..., int]:
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def slowed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        time.sleep(seconds)
        return call(*arguments)

    return run


def write_as_neighbour(url: str, seed: int, format_version: int) -> None:
    """Another process on the same folder, with entries of its own; runs until it is killed."""
    with mock.patch.object(disk_files, "FORMAT", format_version), open_store(url) as store:
        rng = random.Random(seed)
        while True:
            keys = [f"shade:neighbour:{rng.randrange(50)}" for _ in range(8)]
            with contextlib.suppress(Exception):
                store.set_many({key: rng.randbytes(rng.randrange(1, 20_000)) for key in keys})
                store.delete_many(keys[:4])


def train_beside(job: Job, result: Path) -> None:
    """Another job on the same data set and folder; writes down which samples it had, or why it was refused before its
    first step."""
    steps: list[int] = []
    try:
        outcome = train(job, hook=steps.append)
    except StoreUnavailableError as error:
        assert not steps, "a job that has begun must not end so"
        result.write_bytes(pickle.dumps(str(error)))
    else:
        result.write_bytes(pickle.dumps((outcome.steps, outcome.pixels)))


@dataclass
class Chaos:
    """A schedule's faults, struck by the training's hook."""

    seed: int
    folder: Path
    job: Job
    """The second training."""
    struck: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        steps = rng.sample(range(4, STEPS - 2), NUM_FAULTS)
        self.faults = dict(zip(steps, rng.choices(KINDS, k=NUM_FAULTS), strict=True))
        self._rng = rng
        self._patches = contextlib.ExitStack()
        self._until = 0
        self._neighbours: list[Any] = []
        self.beside: Any = None
        self.result = self.folder.with_name(f"{self.folder.name}.result")

    def __call__(self, step: int) -> None:
        if self._until and step >= self._until:
            self.heal()
        kind = self.faults.get(step)
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
        self._until = min(step + self._rng.randrange(2, 7), STEPS)  # before the training ends its own patches

    def _files(self, suffix: str) -> list[Path]:
        return sorted(self.folder.glob(f"1-*.{suffix}"))

    def do_full(self, step: int) -> None:
        self._patch(step, mock.patch.object(os, "pwrite", broken(errno.ENOSPC)))

    def do_read_only(self, step: int) -> None:
        self._patch(step, mock.patch.object(os, "pwrite", broken(errno.EROFS)))

    def do_read_errors(self, step: int) -> None:
        self._patch(step, mock.patch.object(os, "pread", broken(errno.EIO)))

    def do_slow(self, step: int) -> None:
        """Each read and write takes up to 30 ms; the circuit breaker may give the disk up for it."""
        seconds = self._rng.choice([0.002, 0.03])
        self._patch(
            step,
            mock.patch.object(os, "pread", slowed(os.pread, seconds)),
            mock.patch.object(os, "pwrite", slowed(os.pwrite, seconds)),
            mock.patch.object(breaker, "SLOW_SECONDS", 0.05),
        )

    def do_lost_writes(self, step: int) -> None:
        """The index is committed and parts of the values never reach the disk, as in a power failure."""
        pwrite, rng = os.pwrite, random.Random(self.seed + step)

        def lose(descriptor: int, part: Any, place: int) -> int:
            pwrite(descriptor, bytes(part)[: rng.randrange(len(part) + 1)], place)
            return len(part)

        self._patch(step, mock.patch.object(os, "pwrite", lose))

    def do_torn(self, step: int) -> None:
        """Leaves what a crash may leave: an entries file that is shorter than its index says."""
        del step
        for path in self._files("entries"):
            os.truncate(path, self._rng.randrange(path.stat().st_size + 1))

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
        self._start(write_as_neighbour, f"disk://{self.job.disk}", self.seed + step, 1)

    def do_older_format(self, step: int) -> None:
        self._start(write_as_neighbour, f"disk://{self.job.disk}", self.seed + step, 0)

    def do_newer_format(self, step: int) -> None:
        self._start(write_as_neighbour, f"disk://{self.job.disk}", self.seed + step, 2)

    def do_second_job(self, step: int) -> None:
        del step
        self.result.unlink(missing_ok=True)
        self.beside = self._start(train_beside, self.job, self.result)

    def _start(self, target: Callable[..., None], *arguments: Any) -> Any:
        if self._rng.random() < 0.5:
            self._kill()
        started = multiprocessing.get_context("fork").Process(target=target, args=arguments)
        started.start()
        self._neighbours.append(started)
        return started

    def _kill(self) -> None:
        """SIGKILL for all other processes, in the middle of a write."""
        for neighbour in self._neighbours:
            neighbour.kill()
        self.beside = None

    def saw_beside(self) -> tuple[Any, Any] | None:
        """Waits for the second job; returns which samples it had, or None if it was killed, refused or not there."""
        if self.beside is None:
            return None
        self.beside.join(PATIENCE_SECONDS)
        assert self.beside.exitcode == 0
        found = pickle.loads(self.result.read_bytes())
        if isinstance(found, str):  # the folder was damaged or deleted as it began
            assert str(self.folder) in found
            self.struck["a second job was refused"] += 1
            return None
        self.struck["a second job ended"] += 1
        return found  # type: ignore[no-any-return]


KINDS = [name for name in dir(Chaos) if name.startswith("do_")]
QUICK = (0, 1, 4, 22)
"""Seeds of the schedules that each run of the tests plays; together they have all kinds."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pictures(tmp_path_factory.mktemp("pictures"), NUM_SAMPLES))


@pytest.fixture(scope="module")
def undisturbed(root: str) -> list[Outcome]:
    """The job and the second one without a cache."""
    return [train(Job(root, None, mode="uniform", epochs=EPOCHS, seed=seed)) for seed in range(2)]


def play(seed: int, root: str, tmp_path: Path, undisturbed: list[Outcome]) -> Counter[str]:
    """Trains through one schedule, asserts what must hold, and returns what struck."""
    folder, rng = tmp_path / f"tier{seed}", random.Random(-seed - 1)
    capacity = rng.choice([60_000, 100_000, 2_000_000])
    memory = random.Random(seed + 10_000).choice(["memory://", None])
    job = Job(root, memory, mode="uniform", epochs=EPOCHS, disk=f"{folder}?capacity={capacity}")
    chaos = Chaos(seed, folder, replace(job, seed=1))
    mine, other = undisturbed
    try:
        outcome = train(job, hook=chaos)
        chaos.heal()
        assert (outcome.steps, outcome.pixels) == (mine.steps, mine.pixels), f"seed {seed}: {chaos.faults}"
        assert outcome.totals["samples"] == outcome.totals["hits"] + outcome.totals["misses"] == EPOCHS * NUM_SAMPLES
        with mock.patch.object(disk_files, "FORMAT", rng.choice([1, 2])):
            following = train(replace(job, epochs=1))
        num_steps = len(following.steps)
        assert (following.steps, following.pixels) == (mine.steps[:num_steps], mine.pixels[:num_steps])
        assert chaos.saw_beside() in (None, (other.steps, other.pixels)), f"seed {seed}: {chaos.faults}"
    finally:
        chaos.end()
        shutil.rmtree(folder, ignore_errors=True)
    return chaos.struck


def test_the_quick_schedules_have_all_kinds(tmp_path: Path) -> None:
    job = Job("", None)
    assert {kind for seed in QUICK for kind in Chaos(seed, tmp_path, job).faults.values()} == set(KINDS)


@pytest.mark.multiprocess
@pytest.mark.parametrize("seed", QUICK)
def test_training_does_not_notice(seed: int, root: str, tmp_path: Path, undisturbed: list[Outcome]) -> None:
    struck = play(seed, root, tmp_path, undisturbed)
    assert sum(struck[kind] for kind in KINDS) == NUM_FAULTS


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(7200)
def test_two_hundred_schedules(root: str, tmp_path: Path, undisturbed: list[Outcome]) -> None:
    struck = sum((play(seed, root, tmp_path, undisturbed) for seed in range(1000, 1200)), Counter[str]())
    assert set(struck) >= {*KINDS, "a second job ended"}, "each kind struck"
    assert struck["a second job was refused"] < struck["a second job ended"]


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
    undisturbed: list[Outcome],
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
    assert outcome.pixels == undisturbed[0].pixels
    told = [line for line in warnings_of() if "is out of use" in line]
    assert len(told) == 1
    assert told[0].startswith(f"the disk tier disk://{tmp_path}/tier")
    assert os.strerror(number) in told[0]
    errors = "disk_errors" if memory else "store_errors"
    assert outcome.totals[errors] > 0
    assert outcome.totals["misses"] > NUM_SAMPLES


@pytest.mark.parametrize("memory", ["memory://", None])
def test_a_slow_disk_is_named_and_left_alone(
    root: str, tmp_path: Path, undisturbed: list[Outcome], memory: str | None, warnings_of: Callable[[], list[str]]
) -> None:
    job = Job(root, memory, mode="uniform", epochs=EPOCHS, disk=f"{tmp_path}/tier?capacity=2MB")
    with contextlib.ExitStack() as stack:

        def hook(done: int) -> None:
            if done == 12:
                stack.enter_context(mock.patch.object(os, "pread", slowed(os.pread, 0.05)))
                stack.enter_context(mock.patch.object(breaker, "SLOW_SECONDS", 0.1))
            elif done == STEPS:
                stack.close()

        outcome = train(job, hook=hook)
    assert (outcome.steps, outcome.pixels) == (undisturbed[0].steps, undisturbed[0].pixels)
    told = [line for line in warnings_of() if "is out of use" in line]
    assert len(told) == 1
    assert told[0].startswith(f"the disk tier disk://{tmp_path}/tier")
    assert "slower than the origin" in told[0]
    assert outcome.totals["misses"] > NUM_SAMPLES
