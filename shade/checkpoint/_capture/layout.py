"""Lays tensors end to end: which rank saves which, where each lies in its shard, which chunks hold it.

Replicated tensors are shared out whole, the largest first, each to the rank that has least (Graham's rule: no rank gets
more than 4/3 of the best possible, nor more than the mean and one tensor). Every rank computes the same plan from names
and shapes alone, without a word. A tensor named ``…@rank3`` is that rank's own and stays with it.

In a shard, wide items come before narrow ones and names ascend among equals, so that each tensor is aligned to its
items and there are no holes: the data of a valid safetensors file. Invariant: the entries of all ranks together hold
each name once, and those of one shard cover its bytes from 0 to the end.

Legend: W ranks.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, Manifest, TensorEntry
from shade.errors import ConfigError, CorruptCheckpointError, StateMismatchError

SPELLINGS: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""What a tensor's type is called in a safetensors file."""
_DTYPES: Final = {spelling: dtype for dtype, spelling in SPELLINGS.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What has to be known of a tensor to give it a place."""

    dtype: str
    """As in `SPELLINGS`."""
    shape: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of one of the tensors that `_capture.flatten.flatten` gave."""
        return cls(SPELLINGS[tensor.dtype], tuple(tensor.shape), tensor.numel() * tensor.itemsize)

    @property
    def item_bytes(self) -> int:
        """Width of one element."""
        return _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class ShardLayout:
    """Who saves what, as one rank sees it."""

    rank: int
    entries: Mapping[str, TensorEntry]
    """This rank's shard, in the order of its bytes."""
    num_bytes: int
    """Length of this rank's shard."""
    shared_bytes_W: tuple[int, ...]
    """Replicated bytes that each rank saves; what is a rank's own comes on top."""
    digest: str
    """Of what was shared out: ranks with the same digest have the same plan."""

    def chunk_spans(self, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
        """First byte and one past the last of every chunk of the shard."""
        return [(start, min(start + chunk_bytes, self.num_bytes)) for start in range(0, self.num_bytes, chunk_bytes)]


def own_name(name: str, rank: int) -> str:
    """The name of a rank's own tensor. No other name has an ``@`` in it."""
    return f"{name}@rank{rank}"


def lay_out(specs: Mapping[str, TensorSpec], rank: int, world_size: int) -> ShardLayout:
    """Shares the replicated tensors out, and lays this rank's shard.

    Args:
        specs: All tensors of this rank: the replicated ones, the same on every rank, and its own.
        rank: This rank.
        world_size: Ranks.

    Returns:
        The plan. The order of ``specs`` makes no difference.

    Raises:
        ConfigError: A tensor is another rank's own.
    """
    mine = [name for name in specs if "@" in name]
    for name in mine:
        if name.rpartition("@")[2] != f"rank{rank}":
            raise ConfigError.of(f"tensors of all ranks or of rank {rank}", name, "dismantle with this rank's number")
    shared = sorted((name for name in specs if "@" not in name), key=lambda name: (-specs[name].num_bytes, name))
    loads = [(0, number) for number in range(world_size)]
    for name in shared:
        load, least = loads[0]
        heapq.heapreplace(loads, (load + specs[name].num_bytes, least))
        if least == rank:
            mine.append(name)
    mine.sort(key=lambda name: (-specs[name].item_bytes, name))
    entries: dict[str, TensorEntry] = {}
    start = 0
    for name in mine:
        spec = specs[name]
        entries[name] = TensorEntry(spec.dtype, spec.shape, start, start + spec.num_bytes)
        start += spec.num_bytes
    told = json.dumps([world_size, [(name, specs[name].dtype, specs[name].shape) for name in shared]])
    shared_bytes_W = tuple(load for load, _ in sorted(loads, key=lambda each: each[1]))
    return ShardLayout(rank, entries, start, shared_bytes_W, digest_of(told.encode()))


def torch_dtype(spelling: str) -> torch.dtype:
    """The type that a safetensors file calls so.

    Args:
        spelling: As in `SPELLINGS`.

    Returns:
        The type.

    Raises:
        CorruptCheckpointError: There is none of that name.
    """
    try:
        return _DTYPES[spelling]
    except (KeyError, TypeError):
        raise CorruptCheckpointError(f"expected one of {', '.join(_DTYPES)}, got dtype {spelling!r}") from None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, of any type, shape and number of elements; nothing is copied."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def chunks_of(manifest: Manifest, names: Iterable[str]) -> list[int]:
    """The chunks that hold these tensors.

    Args:
        manifest: Of the shard.
        names: Tensors of it.

    Returns:
        Ascending, each once.

    Raises:
        StateMismatchError: The shard has no such tensor.
    """
    wanted: set[int] = set()
    for name in names:
        entry = _entry(manifest, name)
        if entry.start < entry.stop:
            wanted.update(range(entry.start // manifest.chunk_bytes, (entry.stop - 1) // manifest.chunk_bytes + 1))
    return sorted(wanted)


def _entry(manifest: Manifest, name: str) -> TensorEntry:
    entry = manifest.tensors.get(name)
    if entry is None:
        raise StateMismatchError.of(
            f"a tensor of the {len(manifest.tensors)} that rank {manifest.rank} saved", name, "ask another rank's shard"
        )
    return entry
