"""Whatever becomes of the cache in mid-run, training sees the samples it would have seen, and loses little time.

Each story has a fault, the proof that it struck, and what the ledger must say of it afterwards. All are told twice: in
short here, with 0 and 2 workers, and at length in `test_throughput…`, against a run without any cache.
"""

from __future__ import annotations

import logging
import signal
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shade.process import is_running
from tests.support.data_plane import Job, Outcome, make_pictures, train
from tests.support.fault_plane import Patient, patient

pytestmark = pytest.mark.multiprocess

N, BATCH, EPOCHS = 320, 16, 5
STRIKE = 50
"""In the third epoch: the cache is warm."""


def kill(patient: Patient) -> None:
    pid = patient.server.process_id
    patient.server.signal(signal.SIGKILL)
    while is_running(pid):
        threading.Event().wait(0.001)


def pause(patient: Patient) -> None:
    patient.server.signal(signal.SIGSTOP)


def fill(patient: Patient) -> None:
    used = int(patient.admin.info("memory")["used_memory"])
    patient.admin.config_set("maxmemory", used // 2)
    with pytest.raises(Exception, match="maxmemory"):
        patient.admin.set("no-room", b"x" * 100)


def slow(patient: Patient) -> None:
    patient.proxy.delay_seconds = 0.2


def change_password(patient: Patient) -> None:
    patient.admin.config_set("requirepass", "another")
    patient.drop_connections()


def take_rights(patient: Patient) -> None:
    patient.admin.acl_setuser("default", enabled=True, nopass=True, categories=["-@all", "+@connection", "+@admin"])


def corrupt(patient: Patient) -> None:
    keys = patient.samples()
    assert len(keys) >= 40
    values = patient.admin.mget(keys)
    patient.admin.mset({keys[0]: values[1], keys[1]: values[0]})
    patient.admin.mset({key: b"SH" + bytes(300) for key in keys[2:10]})
    patient.admin.mset({key: value[:-1] for key, value in zip(keys[10:20], values[10:20], strict=True)})
    patient.admin.mset(dict.fromkeys(keys[20:25], b""))
    flipped = {key: value[:-1] + bytes([value[-1] ^ 1]) for key, value in zip(keys[25:40], values[25:40], strict=True)}
    patient.admin.mset(flipped)


def flush(patient: Patient) -> None:
    assert patient.samples()
    patient.admin.flushall()


def restart(patient: Patient) -> None:
    patient.server.stop()
    patient.server.start()


def delete_some(patient: Patient) -> None:
    patient.admin.delete(*patient.samples()[::3])


def retype(patient: Patient) -> None:
    """Somebody else's program writes something else under our names."""
    keys = patient.samples()[::2]
    change = patient.admin.pipeline(transaction=True).delete(*keys)
    for key in keys:
        change.lpush(key, "not", "ours")
    change.execute()


@dataclass(frozen=True)
class Story:
    """One fault."""

    strike: Callable[[Patient], None]
    counted: tuple[str, ...]
    """The ledger says it in at least one of these."""
    is_told: bool = False
    """The log says that the cache is out of use."""


STORIES = {
    "dead": Story(kill, ("store_errors",), True),
    "paused": Story(pause, ("store_errors",), True),
    "full": Story(fill, ("declined",)),
    "slow": Story(slow, ("skipped", "declined", "store_errors"), True),
    "password-changed": Story(change_password, ("store_errors",), True),
    "rights-taken": Story(take_rights, ("store_errors",), True),
    "corrupted": Story(corrupt, ("corrupt",)),
    "flushed": Story(flush, ("surprises",)),
    "restarted-empty": Story(restart, ("surprises", "store_errors")),
    "some-deleted": Story(delete_some, ("surprises",)),
    "other-types": Story(retype, ("store_errors",), True),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pictures(tmp_path_factory.mktemp("pictures"), N))


@pytest.fixture(scope="module")
def undisturbed(pictures: str) -> Outcome:
    return train(Job(pictures, None, epochs=EPOCHS, batch_size=BATCH))


def live_through(story: Story, job: Job, patient: Patient, strike_at: int = STRIKE) -> tuple[Outcome, bool]:
    """Trains, with the fault at its step."""
    struck = []

    def hook(step: int) -> None:
        if step == strike_at:
            story.strike(patient)
            struck.append(step)

    outcome = train(replace(job, url=patient.url), hook=hook)
    return outcome, bool(struck)


@pytest.fixture
def warnings_of(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """What all processes of a run have logged: forked workers inherit the handler and append to its file."""
    path = tmp_path / "warnings.log"
    handler = logging.FileHandler(path)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("shade.cache")
    logger.addHandler(handler)
    yield lambda: path.read_text().splitlines()
    logger.removeHandler(handler)
    handler.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", STORIES)
def test_the_stream_is_the_same_and_the_ledger_says_why(
    name: str,
    workers: int,
    pictures: str,
    undisturbed: Outcome,
    tmp_path: Path,
    warnings_of: Callable[[], list[str]],
) -> None:
    story = STORIES[name]
    log = tmp_path / "reads"
    job = Job(pictures, None, epochs=EPOCHS, batch_size=BATCH, workers=workers, log=str(log), seconds=0.001)
    job = replace(job, persistent=workers > 0, is_patient=name != "slow")
    with patient(tmp_path) as hurt:
        outcome, struck = live_through(story, job, hurt)
        assert struck, "the fault fired"
        if name == "slow":
            assert hurt.proxy.num_delayed > 0
    assert outcome.steps == undisturbed.steps
    assert outcome.pixels == undisturbed.pixels
    assert sum(outcome.totals[name] for name in story.counted) > 0
    assert outcome.totals["origin_reads"] == len(log.read_text().splitlines())
    assert outcome.totals["hits"] + outcome.totals["misses"] == outcome.totals["samples"]
    told = [line for line in warnings_of() if "the cache is out of use" in line]
    assert len(told) == story.is_told or (name == "restarted-empty" and len(told) == 1), told


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """These epochs take tenths of a second; so the breaker's pause must take less."""
    monkeypatch.setattr("shade.cache.breaker.FIRST_PAUSE_SECONDS", 0.02)


def hits_by_epoch(outcome: Outcome) -> list[int]:
    return [ledger["hits"] for ledger in outcome.ledgers]


@pytest.mark.parametrize("name", ["flushed", "restarted-empty", "some-deleted", "corrupted"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_hit_ratio_is_back_within_one_epoch(
    name: str, workers: int, pictures: str, tmp_path: Path, short_pauses: None
) -> None:
    job = Job(pictures, None, epochs=6, batch_size=BATCH, mode="uniform", workers=workers, persistent=workers > 0)
    with patient(tmp_path) as hurt:
        outcome, struck = live_through(STORIES[name], job, hurt)
    assert struck
    full = N // 5
    hits = hits_by_epoch(outcome)
    assert hits[1] == full
    assert hits[2] < full, "epoch 2 was hit"
    assert hits[4:] == [full, full], "after epoch 3 all is as before"


def test_a_paused_cache_is_used_again_when_it_goes_on(
    pictures: str, undisturbed: Outcome, tmp_path: Path, warnings_of: Callable[[], list[str]], short_pauses: None
) -> None:
    with patient(tmp_path) as hurt:

        def hook(step: int) -> None:
            if step == STRIKE:
                hurt.server.signal(signal.SIGSTOP)
            elif step == STRIKE + 10:
                hurt.server.signal(signal.SIGCONT)

        job = Job(pictures, hurt.url, epochs=9, batch_size=BATCH, log=str(tmp_path / "log"), seconds=0.003)
        outcome = train(job, hook=hook)
    assert outcome.steps[: len(undisturbed.steps)] == undisturbed.steps
    assert outcome.totals["store_errors"] >= 1
    assert outcome.totals["skipped"] > 0
    assert hits_by_epoch(outcome)[-1] == N // 5
    assert [line.partition(" (")[0] for line in warnings_of()] == [
        "the cache is out of use",
        "the cache answers again and is back in use",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STORIES)
def test_throughput_is_at_least_nine_tenths_of_a_run_without_a_cache(name: str, pictures: str, tmp_path: Path) -> None:
    """Interleaved rounds, two workers, a batch of 16 read in parallel in 50 ms: 3 ms a sample; struck after a fifth."""
    rounds: list[float] = []
    job = Job(pictures, None, epochs=8, batch_size=BATCH, workers=2, persistent=True, is_patient=False)
    job = replace(job, log=str(tmp_path / "log"), seconds=0.05)
    for attempt in range(3):
        bare = train(job)
        with patient(tmp_path / str(attempt)) as hurt:
            outcome, struck = live_through(STORIES[name], job, hurt, strike_at=30)
        assert struck
        assert outcome.steps == bare.steps
        rounds.append(sum(bare.seconds) / sum(outcome.seconds))
    logging.getLogger(__name__).info("%s: throughput over no cache %s", name, [f"{ratio:.3f}" for ratio in rounds])
    assert statistics.median(rounds) >= 0.9, rounds
