"""How a DTensor lies on the ranks of its mesh, and how the parts that were saved make the part that a rank has now.

A tree keeps a DTensor's shape, mesh and placements. From these any rank computes what every rank held and which of the
replicas saved it, so no plan is exchanged, and none is stored. Indices are counted as DTensor counts them: mesh
dimension by mesh dimension from the left, each by ``torch.chunk``; a ``_StridedShard`` first into its split factor.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from shade.errors import ConfigError, CorruptCheckpointError, StateMismatchError

Index = range | npt.NDArray[np.int64]
"""Indices of one dimension of the whole tensor, in the order in which a part has them."""
Region = tuple[Index, ...]
"""Indices of a part, by dimension of the whole tensor."""
_ALIGNED_BYTES: Final = 64
_MOST: Final = 2**20
"""Most ranks of a mesh, and runs of a dimension, that a file may name."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Returns whether a value is a DTensor, without importing their module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


@dataclass(frozen=True)
class Sharding:
    """Where the parts of one tensor lie."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Ranks of the mesh, row-major."""
    placements: tuple[tuple[int, int] | None, ...]
    """By mesh dimension: the tensor's dimension that is split and the split factor; None: every rank has all of it."""

    @property
    def sizes(self) -> list[int]:
        """How many different parts there are, by mesh dimension."""
        pairs = zip(self.mesh_shape, self.placements, strict=True)
        return [1 if placement is None else size for size, placement in pairs]

    @cached_property
    def num_replicas(self) -> int:
        """How many ranks hold each part."""
        return len(self.ranks) // math.prod(self.sizes)

    @cached_property
    def holders(self) -> str:
        """Names the mesh and the dimensions along which ranks hold the same."""
        return f"{self.content[1:3]} {[each is None for each in self.placements]}"

    def parts(self, region: Region | None = None) -> Iterator[tuple[int, ...]]:
        """Yields the coordinates of each part, once; given a region, may leave out those that have nothing of it."""
        places = [range(size) for size in self.sizes]
        split = [each[0] for each in self.placements if each is not None]
        for dim, (size, placement) in enumerate(zip(self.mesh_shape, self.placements, strict=True)):
            # A dimension that is split once, into runs: the others need not be looked at.
            if region is not None and placement is not None and placement[1] == 1 and split.count(placement[0]) == 1:
                index, run = region[placement[0]], -(-self.shape[placement[0]] // size)
                places[dim] = range(int(index[0]) // run, int(index[-1]) // run + 1) if len(index) else range(0)
        return itertools.product(*places)

    def rank_of(self, part: Sequence[int], replica: int) -> int:
        """Returns the rank that holds a part as its ``replica``-th."""
        number, weight = 0, 1
        dims = zip(self.mesh_shape, self.placements, part, strict=True)
        for size, placement, place in reversed([*dims]):
            if placement is None:
                replica, place = divmod(replica, size)
            number += place * weight
            weight *= size
        return self.ranks[number]

    def part_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Returns the part that lies at a coordinate of the mesh."""
        pairs = zip(coordinate, self.placements, strict=True)
        return tuple(0 if placement is None else place for place, placement in pairs)

    def region(self, part: Sequence[int]) -> Region:
        """Returns the indices of a part."""
        found: list[Index] = [range(size) for size in self.shape]
        for size, place, placement in zip(self.mesh_shape, part, self.placements, strict=True):
            if placement is not None:
                dim, factor = placement
                found[dim] = _joined([_chunk(each, size, place) for each in _chunks(found[dim], factor)])
        return tuple(found)

    @cached_property
    def content(self) -> list[Any]:
        """What JSON takes."""
        strides = _strides_of(self.mesh_shape, self.ranks)
        ranks = {"ranks": list(self.ranks)} if strides is None else {"first": self.ranks[0], "strides": strides}
        placed = [None if each is None else list(each) for each in self.placements]
        return [list(self.shape), list(self.mesh_shape), ranks, placed]

    @classmethod
    def of_content(cls, content: Any) -> Sharding:
        """Returns the sharding that has this content; raises CorruptCheckpointError if none can have it."""
        try:
            shape, mesh_shape, where, placed = content
            sizes = tuple(_count(size) for size in mesh_shape)
            if not 1 <= math.prod(sizes) <= _MOST:
                raise ValueError(sizes)
            placements = tuple(None if each is None else (_count(each[0]), _count(each[1])) for each in placed)
            made = cls(tuple(_count(size) for size in shape), sizes, _ranks_of(sizes, where), placements)
            dims = [each for each in placements if each is not None]
            if (
                len(placements) != len(sizes)
                or math.prod(sizes) != len(made.ranks)
                or any(dim >= len(made.shape) or not 1 <= factor <= _MOST for dim, factor in dims)
            ):
                raise ValueError(content)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise CorruptCheckpointError(f"expected the sharding of a tensor, got {content!r}") from error
        return made


class Replicas:
    """Shares out what several ranks hold: each part is saved by one of them. All ranks choose alike, from sizes of
    whole tensors."""

    def __init__(self) -> None:
        self._loads: dict[str, list[int]] = {}

    def take(self, sharding: Sharding, item_bytes: int) -> int:
        """Returns which of the replicas saves the parts of a tensor."""
        if sharding.num_replicas == 1:
            return 0
        loads = self._loads.setdefault(sharding.holders, [0] * sharding.num_replicas)
        least = loads.index(min(loads))
        loads[least] += math.prod(sharding.shape) * item_bytes
        return least


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _ranks_of(mesh_shape: Sequence[int], where: Mapping[str, Any]) -> tuple[int, ...]:
    if "ranks" in where:
        return tuple(map(_count, where["ranks"]))
    steps = [_count(step) for step in where["strides"]]
    places = itertools.product(*map(range, mesh_shape))
    return tuple(
        _count(where["first"]) + sum(place * step for place, step in zip(each, steps, strict=True)) for each in places
    )


@lru_cache(maxsize=64)
def _strides_of(mesh_shape: tuple[int, ...], ranks: tuple[int, ...]) -> list[int] | None:
    """Returns the steps from rank to rank of a mesh, by dimension; None if they are not regular."""
    weights = [math.prod(mesh_shape[dim + 1 :]) for dim in range(len(mesh_shape))]
    steps = [ranks[weight] - ranks[0] if size > 1 else 0 for size, weight in zip(mesh_shape, weights, strict=True)]
    is_regular = min(steps, default=0) >= 0 and _ranks_of(mesh_shape, {"first": ranks[0], "strides": steps}) == ranks
    return steps if is_regular else None


def _chunk(index: Index, count: int, number: int) -> Index:
    size = -(-len(index) // count)
    return index[number * size : (number + 1) * size]


def _chunks(index: Index, count: int) -> list[Index]:
    return [index] if count == 1 else [_chunk(index, count, number) for number in range(count)]


def _array(index: Index) -> npt.NDArray[np.int64]:
    return np.asarray(index, dtype=np.int64)


def _joined(parts: Sequence[Index]) -> Index:
    parts = [part for part in parts if len(part)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    together = np.concatenate([_array(part) for part in parts])
    return range(int(together[0]), int(together[-1]) + 1) if np.all(np.diff(together) == 1) else together


def _is_same(one: Region, other: Region) -> bool:
    return all(
        len(a) == len(b) and (a == b if isinstance(a, range) and isinstance(b, range) else np.array_equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def _common(held: Index, wanted: Index) -> tuple[Index, Index] | None:
    """Returns the positions, in both, of what both have; None if that is nothing."""
    if isinstance(held, range) and isinstance(wanted, range):
        first, last = max(held.start, wanted.start), min(held.stop, wanted.stop)
        if first >= last:
            return None
        return range(first - held.start, last - held.start), range(first - wanted.start, last - wanted.start)
    found, here, there = np.intersect1d(_array(held), _array(wanted), assume_unique=True, return_indices=True)
    return (here, there) if len(found) else None


def _overlap(held: Region, wanted: Region) -> tuple[Region, Region] | None:
    pairs = []
    for each in itertools.starmap(_common, zip(held, wanted, strict=True)):
        if each is None:
            return None
        pairs.append(each)
    return tuple(here for here, _ in pairs), tuple(there for _, there in pairs)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as whole numbers of its width: not every type can be indexed."""
    return tensor.view(_WORDS[tensor.itemsize]) if tensor.itemsize in _WORDS else tensor


def _at(tensor: torch.Tensor, index: Region) -> Any:
    """Returns what selects a region of a tensor."""
    spans = [slice(each.start, each.stop) for each in index if isinstance(each, range)]
    if len(spans) == len(index):
        return tuple(spans)
    return tuple(torch.from_numpy(each) for each in np.ix_(*map(_array, index)))


def sharding_of(tensor: Any, path: str) -> tuple[Sharding, tuple[int, ...]]:
    """Returns how a DTensor is sharded, and which part of it this rank has. Raises `ConfigError` if it waits for a
    reduction, its shards are applied in an order of their own, or this rank's part is not the one that its placements
    say, as where uneven dimensions are split twice."""
    spec = tensor._spec
    for each in spec.placements:
        if each.is_partial():
            cure = "redistribute() it to Replicate() or Shard() before it is saved"
            raise ConfigError.of(f"{path!r} to be sharded or replicated", each, cure)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        cure = "attach it on the ranks of its mesh alone"
        raise ConfigError.of(f"this rank to be in the mesh of {path!r}", f"{spec.mesh}", cure)
    made, part, shape, order, is_torchs = _split_at(spec, tuple(coordinate))
    if not is_torchs:
        got = f"{spec.placements} of {tuple(spec.shape)}, which this PyTorch cuts otherwise than FSDP2 does"
        raise ConfigError.of(f"{path!r} to be split evenly", got, "choose sizes which the ranks divide")
    if order is not None:
        raise ConfigError.of(f"{path!r} to be split from the first mesh dimension on", order, "redistribute() it")
    if shape != tensor._local_tensor.shape:  # `to_local` would make a view for autograd
        expected, got = f"a part of {path!r} of shape {shape}, which {spec.placements} give", tensor._local_tensor.shape
        raise ConfigError.of(expected, tuple(got), "choose sizes which the ranks divide")
    return made, part


@lru_cache(maxsize=4096)
def _split_at(spec: Any, coordinate: tuple[int, ...]) -> tuple[Sharding, tuple[int, ...], tuple[int, ...], Any, bool]:
    """Returns the sharding of a DTensorSpec, the part at a coordinate, its shape, the order of its shards if that is
    one of their own, and whether PyTorch cuts there, too; every save asks for each tensor's, and a mesh makes the list
    of its ranks anew each time."""
    mesh = spec.mesh
    placements = tuple(
        None if each.is_replicate() else (int(each.dim), int(getattr(each, "split_factor", 1)))
        for each in spec.placements
    )
    made = Sharding(tuple(spec.shape), tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), placements)
    part = made.part_at(coordinate)
    order, default = getattr(spec, "shard_order", None), getattr(spec, "compute_default_shard_order", None)
    is_usual = order is None or default is None or order == default(spec.placements)
    region = made.region(part)
    is_strided = any(each is not None and each[1] > 1 for each in placements)
    is_torchs = not is_strided or _is_same(region, _cut_by_torch(spec, coordinate))
    return made, part, tuple(map(len, region)), None if is_usual else order, is_torchs


def _cut_by_torch(spec: Any, coordinate: tuple[int, ...]) -> Region:
    """Returns the indices that PyTorch itself puts at a coordinate: 2.8 cuts strided shards of uneven sizes otherwise
    than FSDP2 makes them."""
    found: list[Index] = []
    for dim, num_items in enumerate(spec.shape):
        items = torch.arange(num_items).view([-1 if each == dim else 1 for each in range(len(spec.shape))])
        for size, place, placement in zip(spec.mesh.shape, coordinate, spec.placements, strict=True):
            if not placement.is_replicate() and placement.dim == dim:
                items = placement._split_tensor(items, size, with_padding=False)[0][place]
        found.append(items.flatten().numpy())
    return tuple(found)


@dataclass(frozen=True, eq=False)
class SavedDTensor:
    """A DTensor in a tree that was read; its parts may not have been read yet."""

    sharding: Sharding
    stride: tuple[int, ...]
    """Steps in memory of the whole tensor."""
    replica: int
    """Which of the ranks that held a part saved it."""
    names_at: Callable[[int], Collection[str]]
    """Returns the names of the tensors that a rank saved of it."""
    tensor_at: Callable[[int], torch.Tensor]
    """Returns the part that a rank saved."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self.sharding.shape)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of an item."""
        return self.tensor_at(self._rank_of([0] * len(self.sharding.mesh_shape))).dtype

    def needed(self, region: Region) -> Iterator[tuple[str, range | None]]:
        """Yields the names of the tensors that a region is made of, and the rows (None: all) that it takes of them."""
        for part, here, _ in self._overlaps(region):
            names = self.names_at(self._rank_of(part))
            rows = here[0] if here and len(names) == 1 else None
            span = range(int(rows.min()), int(rows.max()) + 1) if isinstance(rows, np.ndarray) else rows
            yield from ((name, span) for name in names)

    def part(self, region: Region, path: str = "") -> torch.Tensor:
        """Returns a region: a view of what was read where one rank saved exactly that; raises StateMismatchError if
        it has to be made of parts that are no plain tensors."""
        found = list(self._overlaps(region))
        parts = [self._checked(part) for part, _, _ in found]
        if len(found) == 1 and _is_same(self.sharding.region(found[0][0]), region):
            return parts[0]
        for part in parts:
            if type(part) is not torch.Tensor:
                cure = "restore on as many ranks as saved, over the same mesh"
                raise StateMismatchError.of(f"{path!r} as it was split", f"{type(part).__name__} split anew", cure)
        order = sorted(range(len(region)), key=lambda dim: -self.stride[dim])
        made = torch.empty_permuted([len(index) for index in region], order, dtype=self.dtype)
        for (_, here, there), part in zip(found, parts, strict=True):
            _words(made)[_at(made, there)] = _words(part)[_at(part, here)]
        return made

    def copy_to(self, target: torch.Tensor, region: Region) -> None:
        """Copies a region into a tensor, of its shape and perhaps another type."""
        found = list(self._overlaps(region))
        if all(isinstance(index, range) for _, here, there in found for index in (*here, *there)):
            for part, here, there in found:
                target[_at(target, there)].copy_(self._checked(part)[_at(target, here)])
        else:
            target.copy_(self.part(region))

    def whole(self) -> torch.Tensor:
        """Returns all of it."""
        return self.part(tuple(map(range, self.shape)))

    def _checked(self, part: Sequence[int]) -> torch.Tensor:
        rank, shape = self._rank_of(part), tuple(map(len, self.sharding.region(part)))
        tensor = self.tensor_at(rank)
        if tensor.shape != shape:
            raise CorruptCheckpointError(
                f"expected a part of shape {shape} from rank {rank}, got {tuple(tensor.shape)}"
            )
        return tensor

    def _rank_of(self, part: Sequence[int]) -> int:
        return self.sharding.rank_of(part, self.replica)

    def _overlaps(self, region: Region) -> Iterator[tuple[tuple[int, ...], Region, Region]]:
        """Yields the parts that have something of a region, and its positions in the part and in the region."""
        for part in self.sharding.parts(region):
            found = _overlap(self.sharding.region(part), region)
            if found is not None:
                yield part, *found


# ── a rank's own part ───────────────────────────────────────────────────────────────────────────────────────────────

Take = Callable[[SavedDTensor, Any, str], Any]
"""Takes what was saved, what this rank has in its place (None: nothing), and the path."""


def fitted(saved: Any, own: Any, path: str, take: Take) -> Any:
    """Replaces the DTensors in a state that was read, within its containers.

    Args:
        saved: The state.
        own: What this rank has in its place: containers alike, or one tensor for all that is in it.
        path: Its path, for messages.
        take: Returns what replaces a saved DTensor.

    Returns:
        The state, where plain tensors have become DTensors if this rank has DTensors of their shape.
    """
    if isinstance(saved, SavedDTensor):
        return take(saved, own, path)
    if type(saved) is torch.Tensor:
        is_split_now = is_dtensor(own) and saved.dim() and saved.shape == own.shape
        return _split(saved, own, path) if is_split_now else saved
    if isinstance(saved, dict | list):
        for key in saved if isinstance(saved, dict) else range(len(saved)):
            saved[key] = fitted(saved[key], _own_at(own, key), f"{path}/{key}", take)
    elif isinstance(saved, tuple):
        parts = [fitted(each, _own_at(own, number), f"{path}/{number}", take) for number, each in enumerate(saved)]
        return type(saved)(parts) if type(saved) is tuple else saved
    return saved


def _own_at(own: Any, key: Any) -> Any:
    if isinstance(own, torch.Tensor):
        return own
    try:
        return own[key]
    except (KeyError, IndexError, TypeError):
        return None


def _split(whole: torch.Tensor, own: Any, path: str) -> Any:
    sharding, mine = sharding_of(own, path)
    part = whole[_at(whole, sharding.region(mine))]
    return _as_dtensor(part, whole.shape, whole.stride(), own, own.placements)


def region_for(saved: SavedDTensor, own: Any, path: str) -> tuple[Region, Sequence[tuple[int, int] | None] | None]:
    """Returns the region of a saved DTensor that this rank needs in the place of its own tensor, and how it will be
    placed on the mesh of that; None: it is a plain tensor. Raises StateMismatchError if that cannot be known."""
    if not is_dtensor(own):
        if not isinstance(own, torch.Tensor):
            cure = "restore into an object that has one there: after its first step, or on as many ranks as saved it"
            raise StateMismatchError.of(f"a tensor at {path!r} to restore a DTensor into", own, cure)
        return tuple(map(range, saved.shape)), None
    sharding, mine = sharding_of(own, path)
    if own.shape != saved.shape:
        # State of a parameter in another shape, as a factored moment: split as it was, over this mesh.
        if len(sharding.mesh_shape) != len(saved.sharding.mesh_shape):
            expected = f"{path!r} of shape {tuple(own.shape)}, or a mesh of {len(saved.sharding.mesh_shape)} dimensions"
            raise StateMismatchError.of(expected, tuple(saved.shape), "restore over a mesh of as many dimensions")
        placements = saved.sharding.placements
        sharding = Sharding(tuple(saved.shape), sharding.mesh_shape, sharding.ranks, placements)
    return sharding.region(mine), sharding.placements


def placed(saved: SavedDTensor, own: Any, path: str, *, is_aligned: bool = False) -> Any:
    """Returns a saved DTensor as this rank has its own: as a DTensor on the same mesh, or as the whole tensor; aligned
    as PyTorch would allocate it, or where it was read."""
    region, placements = region_for(saved, own, path)
    part = saved.part(region, path)
    if is_aligned and part.data_ptr() % _ALIGNED_BYTES:
        part = part.clone()
    return part if placements is None else _as_dtensor(part, saved.shape, saved.stride, own, _placements(placements))


def whole(state: Any) -> Any:
    """Returns a state that was read, with all of each DTensor in its place."""
    return fitted(state, None, "", lambda saved, own, path: saved.whole())


def _as_dtensor(part: torch.Tensor, shape: torch.Size, stride: Sequence[int], own: Any, placements: Any) -> Any:
    from torch.distributed.tensor import DTensor

    local = part.to(own.to_local().device)
    return DTensor.from_local(local, own.device_mesh, placements, run_check=False, shape=shape, stride=tuple(stride))


def _placements(placed: Sequence[tuple[int, int] | None]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def one(dim: int, factor: int) -> Any:
        return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)

    return [Replicate() if each is None else one(*each) for each in placed]
