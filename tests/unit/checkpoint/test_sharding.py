"""How a DTensor lies on ranks: as PyTorch's own placements cut it, and as any other mesh needs it."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shade.checkpoint._capture.sharding import (
    Region,
    Replicas,
    SavedDTensor,
    Sharding,
    _cut_by_torch,
    _is_same,
)
from shade.errors import CorruptCheckpointError, StateMismatchError

MESHES = ((1,), (2,), (3,), (2, 2), (2, 3))
SHAPES = ((7,), (8,), (5, 3), (0, 3), (1, 1))


def placement(dim_and_factor: tuple[int, int] | None) -> Any:
    if dim_and_factor is None:
        return Replicate()
    dim, factor = dim_and_factor
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def cut(whole: torch.Tensor, sharding: Sharding, coordinate: tuple[int, ...]) -> torch.Tensor:
    """What lies at a coordinate, as PyTorch cuts it."""
    for size, place, each in zip(sharding.mesh_shape, coordinate, sharding.placements, strict=True):
        if each is not None:
            whole = placement(each)._split_tensor(whole, size, with_padding=False)[0][place]
    return whole


def taken(whole: torch.Tensor, region: Region) -> torch.Tensor:
    if not region:
        return whole
    return torch.from_numpy(whole.numpy()[np.ix_(*(np.asarray(index, dtype=np.int64) for index in region))])


def shardings(shape: tuple[int, ...], mesh: tuple[int, ...]) -> list[Sharding]:
    placements = [None, *itertools.product(range(len(shape)), (1, 2, 3))]
    ranks = tuple(range(math.prod(mesh)))
    return [Sharding(shape, mesh, ranks, each) for each in itertools.product(placements, repeat=len(mesh))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_holds_what_pytorch_cuts(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for sharding in shardings(shape, mesh):
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
            part = sharding.part_at(coordinate)
            region, expected = sharding.region(part), cut(whole, sharding, coordinate)
            is_equal = torch.equal(taken(whole, region), expected)
            # It cuts uneven sizes otherwise, and what it cuts otherwise is refused.
            spec = SimpleNamespace(
                shape=shape, mesh=torch.zeros(mesh), placements=[*map(placement, sharding.placements)]
            )
            assert is_equal or torch.__version__.startswith("2.8."), sharding
            assert is_equal == _is_same(region, _cut_by_torch(spec, coordinate)), sharding
            holders.setdefault(part, []).append(rank)
        assert set(sharding.parts()) == set(holders)
        for part, ranks in holders.items():
            found = [sharding.rank_of(part, replica) for replica in range(sharding.num_replicas)]
            assert sorted(found) == ranks, sharding
        assert Sharding.of_content(json.loads(json.dumps(sharding.content))) == sharding


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (4, 6, 5, 7), (3, 2, 1, 0), (0, 1, 3, 9)])
def test_the_ranks_of_a_mesh_come_back(ranks: tuple[int, ...]) -> None:
    sharding = Sharding((4, 4), (2, 2), ranks, ((0, 1), None))
    content = json.loads(json.dumps(sharding.content))
    assert Sharding.of_content(content) == sharding
    assert [sharding.rank_of((1, 0), replica) for replica in range(2)] == list(ranks[2:])


def test_a_large_mesh_is_a_short_text() -> None:
    sharding = Sharding((4096, 4096), (256, 8), tuple(range(2048)), (None, (0, 1)))
    assert len(json.dumps(sharding.content)) < 100


@pytest.mark.parametrize(
    "content",
    [
        None,
        [[4], [2], {"first": 0, "strides": [1]}],
        [[4], [2], {"first": 0}, [[0, 1]]],
        [[4], [2], {"first": 0, "strides": [-1]}, [[0, 1]]],
        [[4], [2], {"first": 0, "strides": [1, 1]}, [[0, 1]]],
        [[4], [2], {"ranks": [0]}, [[0, 1]]],
        [[4], [2], {"ranks": [0, True]}, [[0, 1]]],
        [[4], [2], {"ranks": [0, 1]}, [[1, 1]]],
        [[4], [2], {"ranks": [0, 1]}, [[0, 0]]],
        [[4], [2], {"ranks": [0, 1]}, [None, None]],
        [[-4], [2], {"ranks": [0, 1]}, [None]],
        [[4], [0], {"ranks": []}, [None]],
        [[4], [10**6, 10**6], {"first": 0, "strides": [10**6, 1]}, [None, None]],
        [[4], [2], {"ranks": [0, 1]}, [[0, 10**9]]],
    ],
)
def test_what_is_no_sharding_is_refused(content: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="the sharding of a tensor"):
        Sharding.of_content(content)


def test_replicas_share_the_bytes() -> None:
    replicas, loads = Replicas(), [0, 0, 0]
    for size in (300, 100, 100, 200, 100, 100):
        sharding = Sharding((size,), (3,), (0, 1, 2), (None,))
        loads[replicas.take(sharding, 4)] += size
    assert loads == [300, 300, 300]


def saved(sharding: Sharding, whole: torch.Tensor) -> SavedDTensor:
    """A tensor as it lies in a snapshot: its parts by rank."""
    places = {sharding.rank_of(part, 0): part for part in sharding.parts()}

    def tensor_at(rank: int) -> torch.Tensor:
        return taken(whole, sharding.region(places[rank]))

    return SavedDTensor(sharding, whole.stride(), 0, lambda rank: [f"it@rank{rank}"], tensor_at)


@pytest.mark.parametrize("shape", [(7, 3), (5,), ()], ids=str)
def test_any_part_is_made_of_any_parts(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    options = [each for mesh in ((2,), (2, 2)) for each in shardings(shape, mesh)][:: 3 if shape else 1]
    for before, after in itertools.product(options, options):
        it = saved(before, whole)
        for part in after.parts():
            region = after.region(part)
            assert torch.equal(it.part(region), taken(whole, region)), (before, after, part)
        assert torch.equal(it.whole(), whole)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.complex64, torch.complex128])
def test_types_that_cannot_be_indexed_are_put_together(dtype: torch.dtype) -> None:
    numbers = (torch.arange(12) % 2).view(4, 3)
    whole = numbers.to(dtype)
    sharding = Sharding((4, 3), (2,), (0, 1), ((0, 2),))
    halves = {0: numbers[[0, 2]].to(dtype), 1: numbers[[1, 3]].to(dtype)}
    it = SavedDTensor(sharding, whole.stride(), 0, lambda rank: [f"it@rank{rank}"], lambda rank: halves[rank])
    found = it.whole()
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


def test_a_part_that_was_saved_is_not_copied() -> None:
    sharding = Sharding((4, 3), (2,), (0, 1), ((0, 1),))
    halves = {0: torch.ones(2, 3), 1: torch.zeros(2, 3)}
    it = SavedDTensor(sharding, (3, 1), 0, lambda rank: [f"it@rank{rank}"], lambda rank: halves[rank])
    assert it.part(sharding.region((1,))) is halves[1]


def test_only_the_rows_that_are_needed_are_read() -> None:
    sharding = Sharding((8, 3), (2,), (0, 1), ((0, 1),))
    it = saved(sharding, torch.zeros(8, 3))
    assert list(it.needed((range(3, 6), range(3)))) == [("it@rank0", range(3, 4)), ("it@rank1", range(2))]
    assert list(it.needed((range(0), range(3)))) == []


def test_a_part_of_another_shape_is_damage() -> None:
    sharding = Sharding((10**12,), (2,), (0, 1), ((0, 1),))
    it = SavedDTensor(sharding, (1,), 0, lambda rank: [f"it@rank{rank}"], lambda rank: torch.zeros(2))
    with pytest.raises(CorruptCheckpointError, match="expected a part of shape"):
        it.whole()


class Quantized(torch.Tensor):
    """A tensor of another class."""


def test_parts_of_another_class_stay_as_they_were_split() -> None:
    sharding = Sharding((4,), (2,), (0, 1), ((0, 1),))
    halves = {rank: torch.zeros(2).as_subclass(Quantized) for rank in (0, 1)}
    it = SavedDTensor(sharding, (1,), 0, lambda rank: [f"it@rank{rank}"], lambda rank: halves[rank])
    assert it.part((range(2),)) is halves[0]
    with pytest.raises(StateMismatchError, match=r"'model/w' as it was split.*over the same mesh"):
        it.part((range(4),), "model/w")
