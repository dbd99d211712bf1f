"""Lays tensors end to end: which rank saves which tensor, and where each tensor lies in its shard.

Alike tensors of data-parallel ranks are shared out whole, the largest first, each to the rank with the fewest bytes so
far (Graham's rule: no rank gets more than 4/3 of the best possible). Every rank computes the same layout from names and
shapes alone. A tensor named ``…@rank3`` is that rank's own. In a shard, wide items come before narrow ones, small
tensors after large ones among equals, and then names ascend; so there are no holes. Invariant: the entries of all ranks
together hold each name once, and those of one shard cover its bytes from 0 to the end.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from shade.checkpoint._capture.flatten import SPELLINGS, torch_dtype
from shade.checkpoint._format.manifest import CHUNK_BYTES, TensorEntry
from shade.errors import ConfigError

SMALL_BYTES: Final = CHUNK_BYTES // 64
"""Longest tensor that lies with others of its kind; to read one elsewhere is to read a chunk, 64 times its bytes."""


@dataclass(frozen=True)
class TensorSpec:
    """What a layout needs to know of a tensor."""

    dtype: str
    """A value of `SPELLINGS`."""
    shape: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Returns the spec of one of the tensors that `flatten` gave."""
        return _spec(tensor.dtype, tensor.shape)

    @property
    def item_bytes(self) -> int:
        """Width of one element."""
        return torch_dtype(self.dtype).itemsize


@functools.lru_cache(maxsize=4096)
def _spec(dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    """Returns a spec; every save asks for that of every tensor."""
    return TensorSpec(SPELLINGS[dtype], tuple(shape), shape.numel() * dtype.itemsize)


@dataclass(frozen=True)
class ShardLayout:
    """Where each tensor lies in one rank's shard."""

    entries: Mapping[str, TensorEntry]
    """By tensor name, in the order of the bytes."""
    num_bytes: int
    """Length of the shard."""

    def chunk_spans(self, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
        """Returns the first byte and the end of every chunk of the shard."""
        return [(start, min(start + chunk_bytes, self.num_bytes)) for start in range(0, self.num_bytes, chunk_bytes)]


def lay_out(specs: Mapping[str, TensorSpec], rank: int, world_size: int) -> ShardLayout:
    """Shares the replicated tensors out, and lays out this rank's shard. ``specs`` are all tensors of this rank, in any
    order: the replicated ones, the same on every rank, and its own. Raises `ConfigError` if one is another rank's
    own."""
    mine = [name for name in specs if "@" in name]
    for name in mine:
        if name.rpartition("@")[2] != f"rank{rank}":
            raise ConfigError.of(f"tensors of all ranks or of rank {rank}", name, "flatten with this rank's number")
    shared = sorted((name for name in specs if "@" not in name), key=lambda name: (-specs[name].num_bytes, name))
    loads = [(0, number) for number in range(world_size)]
    for name in shared:
        load, least = loads[0]
        heapq.heapreplace(loads, (load + specs[name].num_bytes, least))
        if least == rank:
            mine.append(name)
    mine.sort(key=lambda name: (-specs[name].item_bytes, specs[name].num_bytes <= SMALL_BYTES, name))
    entries: dict[str, TensorEntry] = {}
    start = 0
    for name in mine:
        spec = specs[name]
        entries[name] = TensorEntry(spec.dtype, spec.shape, start, start + spec.num_bytes)
        start += spec.num_bytes
    return ShardLayout(entries, start)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor as uint8, of any type, shape and number of elements, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
