"""A run cut anywhere goes on with the same samples: other ranks, other workers, the cache warm, cold or dead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shade.store import open_store
from shade.store._servers.server import LocalServer
from tests.support.data_plane import Job, Outcome, global_steps, make_pictures, train, train_ranks

N, G, EPOCHS = 150, 16, 5
pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


def equal(one: Any, other: Any) -> bool:
    """The same values all the way down."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other or (one != one and other != other))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pictures(tmp_path_factory.mktemp("pictures"), N))


@pytest.fixture(scope="module")
def whole(pictures: str) -> Outcome:
    """The run that nobody disturbs: one rank, no cache, no workers."""
    return train(Job(pictures, None, epochs=EPOCHS, batch_size=G, keep=0.6))


def run(job: Job, world_size: int, folder: Path, state: Any = None) -> tuple[list[tuple[int, ...]], list[Outcome]]:
    ranks = train_ranks(replace(job, batch_size=G // world_size), world_size, folder, state=state)
    return global_steps(ranks), ranks


def test_ranks_do_not_change_the_order(pictures: str, whole: Outcome, tmp_path: Path) -> None:
    found, _ = run(Job(pictures, None, epochs=EPOCHS, keep=0.6), 2, tmp_path / "a")
    assert found == whole.steps


@pytest.mark.parametrize("stop", [1, 23, *(pytest.param(each, marks=pytest.mark.slow) for each in (7, 10, 30))])
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 0), (2, 2)), ((2, 0), (1, 4)), ((2, 1), (2, 0))],
    ids=lambda pair: f"{pair[0]}r{pair[1]}w",
)
def test_resumed_with_other_ranks_and_workers(
    pictures: str, whole: Outcome, tmp_path: Path, stop: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    with open_store("local://") as store:
        job = Job(pictures, store.url, epochs=EPOCHS, keep=0.6)
        head, ranks = run(replace(job, workers=before[1], stop_after=stop), before[0], tmp_path / "head")
        assert head == whole.steps[:stop]
        tail, _ = run(replace(job, workers=after[1]), after[0], tmp_path / "tail", ranks[0].state)
    assert head + tail == whole.steps
    assert all(equal(rank.state, ranks[0].state) for rank in ranks), "any rank may save"


def kill(server: LocalServer) -> None:
    server.stop()


def flush(server: LocalServer) -> None:
    server.ask("FLUSHALL")


def nothing(server: LocalServer) -> None:
    assert server.ask("DBSIZE")


@pytest.mark.parametrize("meanwhile", [nothing, flush], ids=["warm", "cold"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_cache_does_not_change_the_order(
    pictures: str, whole: Outcome, meanwhile: Callable[[LocalServer], None], workers: int
) -> None:
    with open_store("local://") as store:
        job = Job(pictures, store.url, epochs=EPOCHS, batch_size=G, keep=0.6, workers=workers)
        head = train(replace(job, stop_after=15))
        meanwhile(store.server)  # type: ignore[attr-defined]
        tail = train(job, state=head.state)
    assert head.steps + tail.steps == whole.steps
    assert head.pixels + tail.pixels == whole.pixels
    assert (tail.ledgers[0]["hits"] > 0) == (meanwhile is nothing), "a warm cache is used at once"
    assert tail.ledgers[-1]["hits"] == N // 5


def test_a_cache_that_died_in_mid_epoch_does_not_change_the_order(pictures: str, whole: Outcome) -> None:
    with open_store("local://") as store:
        job = Job(pictures, store.url, epochs=EPOCHS, batch_size=G, keep=0.6)
        outcome = train(job, hook=lambda step: kill(store.server) if step == 15 else None)  # type: ignore[attr-defined]
    assert outcome.steps == whole.steps
    assert outcome.pixels == whole.pixels
    assert outcome.totals["store_errors"] > 0
