"""Captures what one rank saves of a DCP checkpoint, and packs it into a shard.

DTensors are saved as `Checkpointer` saves them: each rank its part, of replicas one. Which rank saves all else, DCP's
plan says. Data that lies in memory as it is stored is not copied: chunks are views of the live tensors, and only a
chunk that spans two allocations is joined in a buffer. Invariant: data that passes `PackedState.check` did not change
from the first read to the last, or 128 bits collided.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from shade.checkpoint._capture.flatten import escape, flatten, splits_in, unflatten
from shade.checkpoint._capture.layout import ShardLayout, TensorSpec, lay_out
from shade.checkpoint._capture.sharding import is_dtensor
from shade.checkpoint._codecs.base import standalone_codec
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, ChunkEntry, Manifest, TensorEntry
from shade.checkpoint._tiers.tier import Shard
from shade.errors import CheckpointError, ConfigError, CorruptCheckpointError, TornSnapshotError

_KIND: Final = "dcp"
_VERSION: Final = 2


def capture(
    planner: SavePlanner, plan: SavePlan, planned: Collection[str], blank: Manifest, rank: int
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Captures what a rank saves, without a copy: of the DTensors that it ``planned``, its parts; of all else what its
    final ``plan`` has. Returns the blank manifest with all but chunks, and the tensors by name. Raises ConfigError if a
    part cannot be saved, or the planner converts one."""
    if not isinstance(planner, DefaultSavePlanner):
        cure = "derive it from DefaultSavePlanner"
        raise ConfigError.of("a planner that has the state it saves", type(planner).__name__, cure)
    state = {name: value for name, value in planner.state_dict.items() if name in planned and is_dtensor(value)}
    locals_of = {name: value.to_local() for name, value in state.items()}
    for item in plan.items:
        name = item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            # In a tuple: many numbers would become one tensor.
            state[name] = (planner.lookup_object(item.index),)
        elif item.type is WriteItemType.TENSOR:
            state[name] = planner.resolve_data(item).detach()
        elif name not in locals_of:
            got = type(planner.state_dict.get(name)).__name__
            raise ConfigError.of(f"a DTensor or a whole tensor at {name!r}", got, "shard with fully_shard")
        elif _memory_of(planner.resolve_data(item)) != _memory_of(locals_of[name]):
            got, cure = f"another tensor from {type(planner).__name__}", "convert it before it is saved"
            raise ConfigError.of(f"a planner that saves {name!r} as it is", got, cure)
    first: dict[Any, str] = {}
    same = {
        path: first.setdefault((_memory_of(part), state[name]._spec), path)
        for name, part in locals_of.items()
        for path in [f"state/{escape(name)}"]
    }
    mappings = {name: path for name, path in planner.mappings.items() if name in state}
    root = {_KIND: _VERSION, "state": state, "planner_data": mappings}
    tree, tensors = flatten(root, rank=rank, is_own=lambda path: True, is_plain=True, same=same)
    for name, node in _pairs(_pairs(tree)["state"]).items():
        if name not in locals_of and splits_in(node):
            cure = "keep it in dicts and lists, which the planner flattens"
            raise ConfigError.of(f"no DTensor within the object {name!r}", type(state[name][0]).__name__, cure)
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, rank, 1)
    return replace(blank, num_bytes=layout.num_bytes, tensors=layout.entries, tree=tree), tensors


def _memory_of(tensor: Any) -> tuple[Any, ...]:
    # The storage itself, not its address: an empty part has none, and is tied on every rank or on none.
    at = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *at, tensor.dtype, tensor.shape, tensor.stride()


def is_dcp(tree: Any) -> bool:
    """Returns whether a tree belongs to a DCP checkpoint, of any layout."""
    try:
        return bool(tree["dict"][0][0] == _KIND)
    except (TypeError, KeyError, IndexError):
        return False


def state_of(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the skeletons of what a rank's tree has, by name, and DCP's paths of the names. Raises CheckpointError if
    it has another layout, or CorruptCheckpointError if it is damaged."""
    try:
        root = _pairs(tree)
        if root.get(_KIND) != _VERSION:
            got, cure = f"layout {root.get(_KIND)}", "load it with the shade that saved it, and save it again"
            raise CheckpointError.of(f"a DCP checkpoint in layout {_VERSION}", got, cure)
        return _pairs(root["state"]), unflatten(root["planner_data"], {})
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(f"expected the tree of a DCP checkpoint, got an invalid one: {error}") from error


def _pairs(node: Any) -> dict[str, Any]:
    names, nodes = node["dict"]
    return dict(zip(unflatten(names, {}), nodes, strict=True))


class PackedState:
    """A shard, ready for a tier; ``buffer`` gives memory, uint8 (at least as long as requested,), for joined chunks."""

    def __init__(
        self, draft: Manifest, tensors: Mapping[str, torch.Tensor], buffer: Callable[[int], torch.Tensor]
    ) -> None:
        self._live = {name: (tensor, tensor._version, tensor.data_ptr()) for name, tensor in tensors.items()}
        self._memory = _Memory(draft.tensors, tensors)
        self._spans = ShardLayout(draft.tensors, draft.num_bytes).chunk_spans()
        split = sum(stop - start for start, stop in self._spans if not self._memory.is_whole(start, stop))
        room = buffer(split).numpy().data if split else memoryview(b"")
        plain = []
        for start, stop in self._spans:
            plain.append(self._memory.data(start, stop, room))
            room = room if self._memory.is_whole(start, stop) else room[stop - start :]
        self._digests = [digest_of(chunk) for chunk in plain]
        codec = standalone_codec(draft.codec)
        self._stored = [codec.encode(chunk, draft.item_bytes) for chunk in plain]
        chunks = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in self._stored)
        self.manifest = replace(draft, chunks=chunks)

    @property
    def shard(self) -> Shard:
        """The argument of `Tier.put`."""
        return Shard(self.manifest, self._stored)

    def check(self) -> None:
        """Raises TornSnapshotError if the data in memory is not what was hashed; what was stored may be a mixture."""
        for name, (tensor, version, address) in self._live.items():
            if (tensor._version, tensor.data_ptr()) != (version, address):
                raise _torn(name)
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for (start, stop), digest in zip(self._spans, self._digests, strict=True):
            if digest_of(self._memory.data(start, stop, scratch)) != digest:
                raise _torn(", ".join(name for name, _ in self.manifest.tensors_between(start, stop)))


def _torn(names: str) -> TornSnapshotError:
    return TornSnapshotError(
        f"expected {names!r} not to change while it was saved, got a change; nothing was saved: save between two "
        "steps, or stage it with async_save"
    )


class _Memory:
    """A shard's bytes in the allocations that hold them; neighbours in memory are one range."""

    def __init__(self, entries: Mapping[str, TensorEntry], tensors: Mapping[str, torch.Tensor]) -> None:
        self._alive: list[torch.Tensor] = []
        self._starts: list[int] = []
        self._runs: list[tuple[int, int]] = []
        end = -1
        for name, entry in entries.items():
            if entry.start == entry.stop:
                continue
            tensor = tensors[name].detach()
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                tensor = tensor.cpu().contiguous()
            self._alive.append(tensor)
            address = tensor.data_ptr()
            if address == end:
                self._runs[-1] = (self._runs[-1][0], entry.stop)
            else:
                self._starts.append(entry.start)
                self._runs.append((address, entry.stop))
            end = address + entry.stop - entry.start

    def is_whole(self, start: int, stop: int) -> bool:
        """Returns whether these bytes of the shard are contiguous in memory."""
        return stop <= self._runs[bisect_right(self._starts, start) - 1][1]

    def _view(self, start: int, stop: int) -> memoryview:
        number = bisect_right(self._starts, start) - 1
        address = self._runs[number][0] + start - self._starts[number]
        array = (ctypes.c_ubyte * (stop - start)).from_address(address)
        return memoryview(array).cast("B")

    def data(self, start: int, stop: int, room: memoryview) -> memoryview:
        """Returns a view of bytes if they are contiguous, or copies them into ``room``, which takes as many."""
        if self.is_whole(start, stop):
            return self._view(start, stop)
        first = start
        while first < stop:
            last = min(stop, self._runs[bisect_right(self._starts, first) - 1][1])
            room[first - start : last - start] = self._view(first, last)
            first = last
        return room[: stop - start]
