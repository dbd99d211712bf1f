"""Captures what one rank saves of a DCP checkpoint, and packs it into a shard.

DTensors are saved as `Checkpointer` saves them: each rank its part, of replicas one. Which rank saves all else, DCP's
plan says. Data that lies in memory as it is stored is not copied: chunks are views of the live tensors, and only a
chunk that spans two allocations is joined in a buffer. Invariant: data that passes `PackedState.check` did not change
from the first read to the last, or 128 bits collided.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from shade.checkpoint._buffer.tensor_copy import Fingerprints
from shade.checkpoint._capture.flatten import escape, flatten, splits_in, unflatten
from shade.checkpoint._capture.layout import ShardLayout, TensorSpec, lay_out
from shade.checkpoint._capture.sharding import is_dtensor
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import ChunkEntry, Manifest
from shade.checkpoint._save.packing import Packer
from shade.checkpoint._tiers.tier import Shard
from shade.errors import CheckpointError, ConfigError, CorruptCheckpointError, TornSnapshotError
from shade.types import Bytes

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
        self._fingerprints, self._names = Fingerprints(tensors), list(tensors)
        self._tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._spans = ShardLayout(draft.tensors, draft.num_bytes).chunk_spans()
        self._pieces = [_pieces(draft, self._tensors, *span) for span in self._spans]
        split = sum(sum(map(len, pieces)) for pieces in self._pieces if len(pieces) > 1)
        room = buffer(split).numpy().data if split else memoryview(b"")
        packer = Packer(draft.run, draft.rank, draft.world_size, draft.codec)
        self._digests, self._stored, entries = list[str](), list[Bytes](), list[ChunkEntry]()
        for number, pieces in enumerate(self._pieces):
            chunk = pieces[0]
            if len(pieces) > 1:
                chunk, room = _joined(pieces, room)
            self._digests.append(digest_of(chunk))
            stored, entry = packer.pack_chunk(chunk, draft.item_bytes, number, self._digests[-1])
            self._stored.append(stored)
            entries.append(entry)
        self.manifest = replace(draft, chunks=tuple(entries))

    @property
    def shard(self) -> Shard:
        """The argument of `Tier.put`."""
        return Shard(self.manifest, self._stored)

    def check(self) -> None:
        """Raises TornSnapshotError if the data in memory is not what was hashed; what was stored may be a mixture."""
        torn = (
            ", ".join(name for name, _ in self.manifest.tensors_between(*span))
            for span, pieces, digest in zip(self._spans, self._pieces, self._digests, strict=True)
            if digest_of(*pieces) != digest
        )
        changed = self._fingerprints.first_changed(self._names) or next(torn, None)
        if changed is not None:
            raise TornSnapshotError(
                f"expected {changed!r} not to change while it was saved, got a change; nothing was saved: save between "
                "two steps, or stage it with async_save"
            )


def _pieces(manifest: Manifest, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> list[memoryview]:
    """Returns bytes of a shard where they lie, in contiguous tensors on the host; neighbours in memory are one piece.
    A view does not keep its tensor alive."""
    ranges: list[tuple[int, int]] = []
    for name, entry in manifest.tensors_between(start, stop):
        begin = tensors[name].data_ptr() - entry.start + max(start, entry.start)
        end = begin + min(stop, entry.stop) - max(start, entry.start)
        if ranges and ranges[-1][1] == begin:
            begin = ranges.pop()[0]
        ranges.append((begin, end))
    return [memoryview((ctypes.c_ubyte * (end - begin)).from_address(begin)).cast("B") for begin, end in ranges]


def _joined(pieces: Sequence[memoryview], room: memoryview) -> tuple[memoryview, memoryview]:
    """Copies pieces into memory, one after the other; returns them, and the rest of it."""
    end = 0
    for piece in pieces:
        room[end : end + len(piece)] = piece
        end += len(piece)
    return room[:end], room[end:]
