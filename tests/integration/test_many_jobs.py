"""Several training runs, each a process of its own, on one real Redis: what they read, and a killed one's share."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from shade.cache.job_registry import JobRegistry, slot_keys
from shade.data._sampler import cache_planner
from shade.store import open_store
from shade.store.base import Store
from tests.support.data_plane import Job, Outcome, global_steps, make_pictures, train, train_ranks

pytestmark = pytest.mark.multiprocess

N, BATCH = 600, 10
STEP_SECONDS = 0.02


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pictures(tmp_path_factory.mktemp("pictures"), N))


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("local://") as made:
        yield made


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs take a second here, so a look every quarter of one would be seldom."""
    monkeypatch.setattr(cache_planner, "BEAT_SECONDS", 0.04)


def _train(job: Job, result: str) -> None:
    outcome = train(job, hook=lambda step: time.sleep(STEP_SECONDS))
    Path(result).write_bytes(pickle.dumps(outcome))


def start(job: Job, result: Path) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_train, args=(job, str(result)))
    process.start()
    return process


def train_together(jobs: list[Job], folder: Path) -> list[Outcome]:
    """All at the same time."""
    processes = [start(job, folder / str(number)) for number, job in enumerate(jobs)]
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * len(jobs)
    return [pickle.loads((folder / str(number)).read_bytes()) for number in range(len(jobs))]


def later_reads(outcome: Outcome) -> float:
    """Origin reads of an epoch over N, once all is warm; while the others run, too."""
    return float(np.mean([ledger["origin_reads"] for ledger in outcome.ledgers[2:-1]])) / N


@pytest.mark.parametrize(
    ("mode", "keep", "epochs", "bar"),
    [pytest.param("uniform", None, 12, 0.6, marks=pytest.mark.slow), ("unbiased", 0.7, 6, 0.45)],
)
def test_three_jobs_read_less_than_each_alone(
    pictures: str, store: Store, tmp_path: Path, mode: str, keep: float | None, epochs: int, bar: float
) -> None:
    """Uniform orders come within 0.02 of the bar, and three epochs of a job vary by as much: so there are more."""
    job = Job(pictures, store.url, epochs=epochs, batch_size=BATCH, mode=mode, keep=keep)
    outcomes = train_together([replace(job, seed=seed) for seed in range(3)], tmp_path)
    reads = [later_reads(outcome) for outcome in outcomes]
    assert max(reads) <= bar, reads
    assert min(outcome.totals["borrowed"] for outcome in outcomes) > 0
    alone = train(replace(job, url=None, seed=1))
    assert outcomes[1].steps == alone.steps, "the order is a job's own, whoever else is there"
    assert outcomes[1].pixels == alone.pixels


def test_three_jobs_that_follow_one_stream_read_it_once(pictures: str, store: Store, tmp_path: Path) -> None:
    job = Job(pictures, store.url, epochs=5, batch_size=BATCH, mode="uniform", follow="search")
    outcomes = train_together([replace(job, seed=seed) for seed in range(3)], tmp_path)
    assert outcomes[0].steps == outcomes[1].steps == outcomes[2].steps
    assert outcomes[0].pixels == outcomes[1].pixels
    reads = [later_reads(outcome) for outcome in outcomes]
    assert sum(reads) / 3 <= 0.3, reads


def test_those_who_follow_an_unbiased_stream_have_its_weights(pictures: str, store: Store, tmp_path: Path) -> None:
    job = Job(pictures, store.url, epochs=4, batch_size=BATCH, keep=0.7, follow="search", workers=1)
    one, two = train_together([job, replace(job, seed=1)], tmp_path)
    assert one.steps == two.steps
    draws = (*one.state["draws"], *two.state["draws"])
    assert draws[0].keys() == draws[1].keys()
    assert all(bool((draws[0][epoch]["weight"] == draws[1][epoch]["weight"]).all()) for epoch in draws[0])


@pytest.mark.slow
def test_a_killed_jobs_share_is_free_and_its_entries_serve_on(pictures: str, store: Store, tmp_path: Path) -> None:
    job = Job(pictures, store.url, epochs=12, batch_size=BATCH, mode="uniform")
    survivor, victim = start(job, tmp_path / "survivor"), start(replace(job, seed=1, epochs=100), tmp_path / "victim")
    jobs = JobRegistry(store, _namespace(store))
    while len(jobs.look().living) < 2 or not _entries(store, 1) or not _entries(store, 0):
        time.sleep(0.02)
    time.sleep(1.0)
    half = max(note.quota_bytes for note in jobs.look().living.values())
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    left = _entries(store, 0), _entries(store, 1)
    deadline = time.monotonic() + 30
    while len({note.owner for note in jobs.look().living.values()}) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    owners = {note.owner: note for note in jobs.look().living.values()}
    assert len(owners) == 1, "the other has taken its slot over"
    (note,) = owners.values()
    deadline = time.monotonic() + 30
    while note.quota_bytes <= half and time.monotonic() < deadline:
        time.sleep(0.02)
        (note,) = {each.owner: each for each in jobs.look().living.values()}.values()
    survivor.join(120)
    assert survivor.exitcode == 0
    outcome: Outcome = pickle.loads((tmp_path / "survivor").read_bytes())
    assert note.quota_bytes == outcome.capacity_bytes, "all of the cache is its own"
    assert min(left) > 0, "both had brought something in"
    assert [ledger["hits"] for ledger in outcome.ledgers[-3:]] == [N // 5] * 3, "and the exact plan is in force again"
    assert _entries(store, 0) + _entries(store, 1) <= N // 5


def _namespace(store: Store) -> str:
    while True:
        for key in store.scan("shade:"):
            if ":counter:job-" in key:
                return key.split(":")[1]
        time.sleep(0.02)


def _entries(store: Store, slot: int) -> int:
    keys = slot_keys(_namespace(store).partition(".")[0], slot)
    return sum(keys.index_of(key) is not None for key in store.scan(keys.prefix))


def _train_two_ranks(job: Job, folder: str) -> None:
    ranks = train_ranks(replace(job, batch_size=BATCH // 2), 2, Path(folder))
    Path(folder, "outcome").write_bytes(pickle.dumps(ranks))


@pytest.mark.slow
def test_a_job_of_two_ranks_shares_with_one_of_one(pictures: str, store: Store, tmp_path: Path) -> None:
    """Each rank decides for itself while there is company; what a step holds stays the job's own."""
    job = Job(pictures, store.url, epochs=5, batch_size=BATCH, mode="uniform")
    context = multiprocessing.get_context("fork")
    (tmp_path / "two").mkdir()
    two = context.Process(target=_train_two_ranks, args=(job, str(tmp_path / "two")))
    two.start()
    one = start(replace(job, seed=1), tmp_path / "one")
    for process in (one, two):
        process.join(200)
    assert (one.exitcode, two.exitcode) == (0, 0)
    ranks: list[Outcome] = pickle.loads((tmp_path / "two" / "outcome").read_bytes())
    alone = train(replace(job, url=None))
    assert global_steps(ranks) == alone.steps
    outcome: Outcome = pickle.loads((tmp_path / "one").read_bytes())
    assert outcome.totals["borrowed"] + sum(rank.totals["borrowed"] for rank in ranks) > 0
