"""What users see of data set, sampler and loader: a repr that says what they are doing, and no machinery in help()."""

from __future__ import annotations

import contextlib
import pydoc
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from torch.utils.data import TensorDataset

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from tests.conftest import PASSWORD, Place

N, B = 24, 4


@pytest.fixture
def dataset() -> Iterator[ShadeDataset]:
    with contextlib.closing(ShadeDataset(TensorDataset(torch.zeros(N)), cache="memory://?capacity=1MiB")) as dataset:
        yield dataset


@pytest.fixture
def sampler(dataset: ShadeDataset) -> Iterator[ShadeSampler]:
    with contextlib.closing(ShadeSampler(dataset, batch_size=B, mode="uniform", seed=7)) as sampler:
        yield sampler


def test_a_data_set_says_what_is_cached_where(dataset: ShadeDataset, sampler: ShadeSampler) -> None:
    begun = repr(dataset)
    assert begun.startswith(f"ShadeDataset(TensorDataset, num_samples={N}, store='memory://")
    for part in ("capacity=1.0 MiB", "form='encoded'", "policy=PlanPolicy", "hits=0, misses=0"):
        assert part in begun
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in torch.utils.data.BatchSampler(sampler, B, drop_last=False):
            dataset.__getitems__(batch)
    assert f"hits={N}, misses={N})" in repr(dataset)


def test_a_data_set_without_a_cache_says_so() -> None:
    with contextlib.closing(ShadeDataset(TensorDataset(torch.zeros(N)), cache=None, policy="lru")) as dataset:
        assert repr(dataset) == f"ShadeDataset(TensorDataset, num_samples={N}, cache=None)"


@pytest.mark.multiprocess
def test_no_repr_shows_a_password(get_place: Callable[[str], Place]) -> None:
    place = get_place("redis")
    with contextlib.closing(ShadeDataset(TensorDataset(torch.zeros(N)), cache=place.url)) as dataset:
        assert "store='" in repr(dataset)
        assert PASSWORD not in repr(dataset)
        assert quote(PASSWORD, safe="") not in repr(dataset)


def test_a_sampler_says_what_it_draws_and_where_it_is(dataset: ShadeDataset, sampler: ShadeSampler) -> None:
    begun = repr(sampler)
    assert begun == repr(sampler), "asking draws nothing"
    for part in (f"num_samples={N}, batch_size={B}, rank=0 of 1, mode='uniform', seed=7", "policy='plan'"):
        assert part in begun
    assert begun.endswith("epoch=0, step=0)")
    sampler.set_epoch(3)
    indices = iter(sampler)
    first = torch.tensor([next(indices) for _ in range(B)])
    sampler.report(first, torch.ones(B))
    assert repr(sampler).endswith(f"epoch=3, step=1 of {N // B})")
    with contextlib.closing(ShadeSampler(range(N), batch_size=B, mode="uniform")) as alone:
        assert "policy=None" in repr(alone)


def test_a_loader_says_how_batches_are_made(dataset: ShadeDataset, sampler: ShadeSampler) -> None:
    loader = ShadeLoader(dataset, batch_size=B, sampler=sampler, num_workers=0)
    assert repr(loader) == (
        f"ShadeLoader(batch_size={B}, num_workers=0 (the training thread), sampler=ShadeSampler, device=None, "
        f"batches=0 of {N // B})"
    )
    batches = iter(loader)
    next(batches)
    assert f"batches=1 of {N // B})" in repr(loader)
    assert "2 (processes)" in repr(ShadeLoader(dataset, batch_size=B, num_workers=2))
    assert "batches=0)" in repr(ShadeLoader(dataset, batch_size=None, num_workers=0))


@pytest.mark.parametrize(
    ("users_class", "methods"),
    [
        (
            ShadeDataset,
            {"check_forecast", "close", "generators", "is_fused", "source", "stats", "targets", "transform"},
        ),
        (
            ShadeSampler,
            {"at_resume", "close", "count_step", "epoch", "load_state_dict", "num_steps", "order_of", "receipt"}
            | {"report_validation", "scores", "set_epoch", "state_dict", "steps_done", "take_losses", "total_steps"}
            | {"report", "weights"},
        ),
        (ShadeLoader, {"close", "count_step", "epoch", "in_threads", "load_state_dict", "state_dict", "stats"}),
    ],
)
def test_help_shows_what_users_call(users_class: type, methods: set[str]) -> None:
    assert {name for name in vars(users_class) if not name.startswith("_")} == methods
    text = pydoc.render_doc(users_class, renderer=pydoc.plaintext)
    assert all(name in text for name in methods)


def test_stats_are_the_reads_of_this_epoch_and_in_all(dataset: ShadeDataset, sampler: ShadeSampler) -> None:
    loader = ShadeLoader(dataset, batch_size=B, sampler=sampler, num_workers=0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for _ in loader:
            pass
        stats = loader.stats()
        assert stats["epoch_samples"] == N
        assert stats["epoch_hit_ratio"] == (0.0 if epoch == 0 else 1.0)
        assert stats["epoch_misses"] == stats["epoch_origin_reads"] == (N if epoch == 0 else 0)
        assert 0 < stats["epoch_wait_seconds"] <= stats["wait_seconds"]
    assert {name: stats[name] for name in dataset.stats()} == dataset.stats()
    assert (stats["samples"], stats["hits"], stats["misses"]) == (3 * N, 2 * N, N)
    assert stats["hit_ratio"] == 2 / 3
    assert stats["origin_bytes"] > 0
    assert all(isinstance(value, int | float) for value in stats.values()), "as loggers of metrics take them"


def test_without_a_cache_nothing_is_counted() -> None:
    with contextlib.closing(ShadeDataset(TensorDataset(torch.zeros(N)), cache=None)) as dataset:
        assert dataset.stats() == {}
        assert set(ShadeLoader(dataset, num_workers=0).stats()) == {"wait_seconds", "epoch_wait_seconds"}


@pytest.mark.redis
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_log_has_one_line_an_access(tmp_path: Path, num_workers: int) -> None:
    log = tmp_path / "train.log"
    items = TensorDataset(torch.arange(N))
    with contextlib.closing(ShadeDataset(items, cache="local://?capacity=1MiB", log=log)) as dataset:
        loader = torch.utils.data.DataLoader(dataset, batch_size=B, num_workers=num_workers)
        for _ in range(2):
            assert sum(len(batch[0]) for batch in loader) == N
        stats = dataset.stats()
    lines = log.read_text().splitlines()
    assert len(lines) == stats["samples"] == 2 * N
    assert sum("hitting" in line for line in lines) == stats["hits"]
    assert sum("miss" in line for line in lines) == stats["misses"]
    assert sorted(int(line.split()[1]) for line in lines) == sorted([*range(N)] * 2)
