"""Ranks that were given different arguments are told at the start, all of them; a private server serves all ranks of
one machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from shade import ShadeDataset, ShadeSampler
from shade.data import MixtureSampler, PackedDataset
from shade.data._dataset import format_choice
from shade.data._dataset.format_choice import FormatChoice, FormatWishes
from shade.data._dataset.prefix import PrefixSplit
from shade.data._sampler import cache_planner
from shade.data._source.source_choice import source_of
from shade.errors import ConfigError
from shade.store._servers.server import LocalServer
from tests.support.gradient_ranks import play

pytestmark = [pytest.mark.multiprocess, pytest.mark.redis]

RANKS, BATCH = 2, 4
STORE = "TEST_RANKS_AGREE_STORE"
DIFFERENT: dict[str, tuple[str, tuple[Any, Any]]] = {
    "seed": ("seed", (0, 1)),
    "batch_size": ("batch_size", (4, 5)),
    "mode": ("mode", ("unbiased", "uniform")),
    "keep": ("keep", (0.7, 0.6)),
    "epochs": ("epochs", (3, None)),
    "score": ("score", ("loss_log", None)),
    "shuffle": ("shuffle", (True, False)),
    "drop_last": ("drop_last", (False, True)),
    "policy": ("policy", ("lru", "shade")),
    "working_set_fraction": ("capacity of the cache in bytes", (0.2, 0.3)),
    "cache": ("cache", ("memory://", None)),
}
"""Argument → how the message names it, and what each rank was given."""


def numbers(num: int = 80) -> TensorDataset:
    return TensorDataset(torch.arange(float(num * 50)).view(num, 50))


def outcome(make: Any) -> str:
    try:
        with contextlib.closing(make()):
            return "made"
    except ConfigError as error:
        return str(error)


def different_arguments(rank: int, world_size: int) -> dict[str, str]:
    said = {}
    for name, (_, values) in DIFFERENT.items():
        given: dict[str, Any] = {"batch_size": BATCH, "cache": "memory://", name: values[rank]}
        settings = {each: given.pop(each) for each in ("cache", "policy", "working_set_fraction") if each in given}
        with contextlib.closing(ShadeDataset(numbers(), version="1", **settings)) as dataset:
            said[name] = outcome(lambda dataset=dataset, given=given: ShadeSampler(dataset, **given))
    packed = PackedDataset({"a": [torch.arange(8)] * 12}, length=8)
    said["mixture"] = outcome(
        lambda: MixtureSampler(packed, weights={"a": 1.0}, batch_size=2, round_sequences=16, seed=rank)
    )
    return said


def hits_of_four_epochs(cache: str) -> list[float]:
    hits = []
    with contextlib.closing(ShadeDataset(numbers(480), cache, version="1", working_set_fraction=0.5)) as dataset:
        sampler = ShadeSampler(dataset, batch_size=8, mode="uniform")
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for _ in DataLoader(dataset, batch_size=8, sampler=sampler):
                pass
            hits.append(dataset.stats()["epoch_hit_ratio"])
        dist.barrier()
        sampler.close()
    dist.barrier()
    return hits


def formats_that_were_measured_otherwise(rank: int, world_size: int) -> list[str]:
    """Rank 1 makes two data sets, one alone; clocks say something else on each rank."""
    prefixes = {"prefix": PrefixSplit((torch.abs,))}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        best = SimpleNamespace(cached_format="prefix" if rank else "encoded")
        patch.setattr(format_choice, "forecast", lambda *given, **options: best)
        for alone in (True, False):
            if rank or not alone:
                source = source_of(list(torch.arange(float(40)).split(1)), None, None)
                wishes = FormatWishes("auto", prefixes=prefixes, dataset=list(torch.arange(40.0).split(1)))
                found.append(FormatChoice(source, wishes, 10**4, 10**3 + alone).used)
            if not alone:
                dist.barrier()
    return found


def private_servers(rank: int, world_size: int) -> list[list[float]]:
    return [hits_of_four_epochs("local://"), hits_of_four_epochs(os.environ[STORE])]


def servers_on_two_machines(rank: int, world_size: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_planner, "this_machine", lambda: f"machine {rank}")
        with contextlib.closing(ShadeDataset(numbers(), "local://", version="1")) as dataset:
            return outcome(lambda: ShadeSampler(dataset, batch_size=BATCH))


def one_private_server(rank: int, world_size: int) -> str:
    cache = "local://" if rank else os.environ[STORE]
    with contextlib.closing(ShadeDataset(numbers(), cache, version="1")) as dataset:
        return outcome(lambda: ShadeSampler(dataset, batch_size=BATCH))


class SamplesOf:
    """The samples that a rank has of a data set that the parent made, which `mp.spawn` pickles with this story."""

    __name__ = "samples_of"

    def __init__(self, dataset: ShadeDataset) -> None:
        self._dataset = dataset

    def __call__(self, rank: int, world_size: int) -> list[int]:
        sampler = ShadeSampler(self._dataset, batch_size=5, mode="uniform")
        seen = [int(i) for _, indices in DataLoader(self._dataset, batch_size=5, sampler=sampler) for i in indices]
        sampler.close()
        return seen


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    stories = [
        different_arguments,
        formats_that_were_measured_otherwise,
        private_servers,
        servers_on_two_machines,
        one_private_server,
    ]
    with LocalServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv(STORE, f"unix://{server.socket_path}")
        with contextlib.closing(ShadeDataset(numbers(), "local://", version="1")) as dataset:
            yield play([*stories, SamplesOf(dataset)], RANKS, tmp_path_factory.mktemp("agree"))


@pytest.mark.parametrize("name", DIFFERENT)
def test_arguments_that_differ_are_refused_by_name_on_all_ranks(played: list[dict[str, Any]], name: str) -> None:
    shown, (first, second) = DIFFERENT[name]
    for rank in played:
        said = rank["different_arguments"][name]
        assert said.startswith(f"expected the same {shown} on every rank, got {{'rank 0': "), said
        if shown == name != "cache":
            assert f"got {{'rank 0': {first!r}, 'rank 1': {second!r}}}; start all ranks with the same arguments" in said


def test_ranks_take_the_format_that_one_chose_first_and_wait_for_nobody(played: list[dict[str, Any]]) -> None:
    (common,), (alone, same) = (rank["formats_that_were_measured_otherwise"] for rank in played)
    assert alone == "prefix"
    assert common == same


def test_a_data_set_is_an_argument_of_spawned_ranks(played: list[dict[str, Any]]) -> None:
    assert sorted(index for rank in played for index in rank["samples_of"]) == list(range(80))


def test_mixtures_that_differ_are_refused_too(played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert rank["different_arguments"]["mixture"].startswith("expected the same seed on every rank")


def test_ranks_of_one_machine_share_rank_0s_private_server(played: list[dict[str, Any]]) -> None:
    for rank in played:
        private, common = rank["private_servers"]
        assert private == common
        assert private[-1] >= 0.4


@pytest.mark.parametrize("story", ["servers_on_two_machines", "one_private_server"])
def test_private_servers_that_ranks_cannot_share_are_refused_on_all_ranks(
    played: list[dict[str, Any]], story: str
) -> None:
    for rank in played:
        assert rank[story].startswith("expected one cache that all ranks reach, got ["), rank[story]
        assert "shade cache up" in rank[story]
