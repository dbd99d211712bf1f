"""A pass over an epoch says how far it has come, goes to a place, and refuses batches that are dealt out twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shade import ShadeSampler
from shade.data._sampler.place import Place, SamplerIterator
from shade.data._sampler.usage import UsageWarnings
from shade.errors import ConfigError
from shade.types import Stateful

N, B = 53, 4


def make(**options: Any) -> ShadeSampler:
    return ShadeSampler(range(N), batch_size=B, **({"mode": "uniform"} | options))


class FixedPlace(Place):
    """Refuses to be sent to another step."""

    def seek(self, step: int) -> None:
        raise AssertionError(step)


class FakeSampler:
    """Begins a pass at one place."""

    batch_size = B

    def __init__(self, taken: int, limit: int) -> None:
        self._taken, self._limit = taken, limit
        self.place: Place = FixedPlace(UsageWarnings(), B)
        self.num_steps = -(-limit // B)

    def __iter__(self) -> SamplerIterator:
        return SamplerIterator(self, self._begin_pass)

    def _begin_pass(self, is_placed: bool) -> tuple[int, Iterator[int]]:
        return self._taken, iter(range(self._taken, self._limit))


def test_an_iterator_counts_what_it_gave() -> None:
    iterator = iter(FakeSampler(8, 11))
    assert isinstance(iterator, Stateful)
    assert iterator.state_dict() == {"num_taken": None, "batch_size": B, "epoch": None}
    assert list(iterator) == [8, 9, 10]
    assert iterator.state_dict() == {"num_taken": 11, "batch_size": B, "epoch": 0}


def test_a_state_of_a_pass_that_has_not_begun_moves_nothing() -> None:
    iter(FakeSampler(0, 1)).load_state_dict({"num_taken": None, "batch_size": B, "epoch": None})


@pytest.mark.parametrize("taken", [0, B, 5 * B, 12 * B, N])
def test_an_iterator_goes_to_its_place(taken: int) -> None:
    one, other = make(), make()
    whole = list(one)
    rest = iter(other)
    rest.load_state_dict({"num_taken": taken, "batch_size": B, "epoch": 0})
    assert len(other) == N, "loaders that keep their place count whole epochs"
    assert list(rest) == whole[taken:]
    assert other.steps_done == -(-taken // B)
    for sampler in (one, other):
        sampler.close()


def test_after_a_pass_that_was_set_to_the_end_comes_the_next_epoch() -> None:
    with_epochs, sampler = make(), make()
    with_epochs.set_epoch(1)
    following = list(with_epochs)
    ended = iter(sampler)
    ended.load_state_dict({"num_taken": N, "batch_size": B, "epoch": 0})
    assert list(ended) == []
    assert list(sampler) == following
    assert sampler.epoch == 1
    for each in (with_epochs, sampler):
        each.close()


def test_an_epoch_that_the_loop_asks_for_is_the_one_it_gets() -> None:
    sampler = make()
    iter(sampler).load_state_dict({"num_taken": N, "batch_size": B, "epoch": 0})
    sampler.set_epoch(4)
    assert len(list(sampler)) == N
    assert sampler.epoch == 4
    sampler.close()


def test_a_place_inside_a_batch_is_refused() -> None:
    sampler = make()
    with pytest.raises(ConfigError, match="give loader and sampler one batch_size"):
        iter(sampler).load_state_dict({"num_taken": 6, "batch_size": B, "epoch": 0})
    sampler.close()


def test_a_place_is_found_on_other_ranks() -> None:
    """Two ranks of 4 had taken three steps; one rank of 8 continues with the fourth."""
    two = [make(num_replicas=2, rank=rank) for rank in range(2)]
    one = ShadeSampler(range(N), batch_size=2 * B, mode="uniform")
    parts = [list(sampler) for sampler in two]
    expected = [index for step in range(3, 6) for part in parts for index in part[step * B : step * B + B]]
    iterator = iter(one)
    iterator.load_state_dict({"num_taken": 3 * B, "batch_size": B, "epoch": 0})
    assert list(iterator)[: 3 * 2 * B] == expected
    for sampler in (*two, one):
        sampler.close()


def test_batches_that_are_dealt_out_twice_are_reported() -> None:
    """What accelerator.prepare(loader) does: of this rank's batches it takes every second."""
    for rank, wrong in ((0, 1), (1, 0)):
        sampler = make(num_replicas=2, rank=rank)
        batches = list(torch.utils.data.BatchSampler(sampler, B, drop_last=False))[rank::2]
        for batch in batches[:wrong]:
            sampler.report(torch.tensor(batch), torch.ones(len(batch)))
        with pytest.raises(ConfigError, match=r"leave the loader out of accelerator\.prepare"):
            sampler.report(torch.tensor(batches[wrong]), torch.ones(B))
        sampler.close()


def test_batches_in_order_are_not() -> None:
    sampler = make(num_replicas=2, rank=1)
    for _ in range(2):
        for batch in torch.utils.data.BatchSampler(sampler, B, drop_last=False):
            sampler.report(torch.tensor(batch), torch.ones(len(batch)))
        sampler.set_epoch(sampler.epoch + 1)
    sampler.close()


def test_a_sampler_is_a_distributed_sampler_to_those_who_ask() -> None:
    sampler = make()
    assert isinstance(sampler, torch.utils.data.distributed.DistributedSampler)
    sampler.close()


def test_a_state_at_every_batch_makes_no_copies_of_the_order() -> None:
    sampler = make()
    next(iter(sampler))
    one, other = sampler.state_dict(), sampler.state_dict()
    assert one["draws"][0][0]["order"] is other["draws"][0][0]["order"]
    sampler.close()
