"""Packs one rank's part of a DCP checkpoint into a shard, and converts DCP's metadata to plain types.

A snapshot of W ranks is W + 1 shards: one per rank, with what DCP's plan gave it to write, and a last small one with
DCP's metadata (docs/format.md §6). Data that lies in memory as it is stored is not copied: chunks are views of the live
tensors, and only a chunk that spans two allocations is joined in a buffer. Invariants: data that passes
`PackedState.check` did not change from the first read to the last, or 128 bits collided;
``from_plain(to_plain(metadata)) == metadata``.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shade.checkpoint._capture.flatten import DTYPES, flatten
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.checkpoint._codecs.base import standalone_codec
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, ChunkEntry, Manifest, TensorEntry
from shade.checkpoint._tiers.tier import Shard
from shade.errors import ConfigError, CorruptCheckpointError, TornSnapshotError

KIND: Final = "dcp"
VERSION: Final = 1


@dataclass(frozen=True)
class Identity:
    """Identifies a shard: run, step, rank, number of shards."""

    run: str
    step: int
    rank: int
    num_shards: int


def tensor_key(index: MetadataIndex) -> str:
    """Returns the name of a tensor's piece at this offset in its rank's tree."""
    return f"{index.fqn}[{','.join(map(str, index.offset or ()))}]"


@dataclass(frozen=True)
class DCPParts:
    """The parts of a shard's tree: skeletons by name."""

    tensors: Mapping[str, Any]
    objects: Mapping[str, Any]
    plan: Any
    """DCP's metadata; None in a rank's shard."""


def is_dcp(tree: Any) -> bool:
    """Returns whether a tree belongs to a DCP checkpoint."""
    try:
        return bool(tree["dict"][0][0] == KIND)
    except (TypeError, KeyError, IndexError):
        return False


def parts_of(tree: Any) -> DCPParts:
    """Returns the parts of a manifest's tree, or raises CorruptCheckpointError if it is no DCP checkpoint."""
    if not is_dcp(tree):
        raise CorruptCheckpointError("expected a shard of a DCP checkpoint, got one of Checkpointer")
    found = _pairs(tree)
    empty: dict[str, Any] = {"dict": [[], []]}
    return DCPParts(_pairs(found.get("tensors", empty)), _pairs(found.get("objects", empty)), found.get("plan"))


def _pairs(node: Any) -> dict[str, Any]:
    try:
        names, values = node["dict"]
        return dict(zip(names, values, strict=True))
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(f"expected the tree of a DCP checkpoint, got an invalid one: {error}") from error


class PackedState:
    """A shard, ready for a tier.

    Args:
        identity: Identity of the shard.
        content: Trees by name, as `shard_content` returns them.
        codec: Name of the chunks' codec.
        buffer: Returns memory, uint8 (at least as long as requested,), for chunks that have to be joined.

    Raises:
        ConfigError: Something in it cannot be saved; the message has its path.
    """

    def __init__(
        self, identity: Identity, content: Mapping[str, Any], codec: str, buffer: Callable[[int], torch.Tensor]
    ) -> None:
        tree, tensors = flatten({KIND: VERSION, **content}, is_plain=True)
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
        self._live = {name: (tensor, tensor._version, tensor.data_ptr()) for name, tensor in tensors.items()}
        self._memory = _Memory(layout.entries, tensors)
        self._spans = layout.chunk_spans()
        split = [span for span in self._spans if not self._memory.is_whole(*span)]
        room = buffer(sum(stop - start for start, stop in split)).numpy().data if split else memoryview(b"")
        plain = []
        for start, stop in self._spans:
            if not self._memory.is_whole(start, stop):
                here, room = room[: stop - start], room[stop - start :]
                plain.append(self._memory.join(start, stop, here))
            else:
                plain.append(self._memory.view(start, stop))
        self._digests = [digest_of(chunk) for chunk in plain]
        draft = Manifest(
            run=identity.run,
            step=identity.step,
            rank=identity.rank,
            world_size=identity.num_shards,
            codec=codec,
            num_bytes=layout.num_bytes,
            tensors=layout.entries,
            chunks=(),
            tree=tree,
        )
        chosen = standalone_codec(codec)
        self._stored = [chosen.encode(chunk, draft.item_bytes) for chunk in plain]
        chunks = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in self._stored)
        self.manifest = replace(draft, chunks=chunks)

    @property
    def shard(self) -> Shard:
        """The argument of `Tier.put`."""
        return Shard(self.manifest, self._stored)

    def check(self) -> None:
        """Compares the data in memory with what was hashed.

        Raises TornSnapshotError if it has changed; what was stored may be a mixture.
        """
        for name, (tensor, version, address) in self._live.items():
            if (tensor._version, tensor.data_ptr()) != (version, address):
                raise _torn(name)
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for (start, stop), digest in zip(self._spans, self._digests, strict=True):
            is_whole = self._memory.is_whole(start, stop)
            again = (
                self._memory.view(start, stop) if is_whole else self._memory.join(start, stop, scratch[: stop - start])
            )
            if digest_of(again) != digest:
                entries = self.manifest.tensors.items()
                raise _torn(", ".join(name for name, entry in entries if entry.start < stop and start < entry.stop))


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

    def view(self, start: int, stop: int) -> memoryview:
        """Returns a view of contiguous bytes."""
        number = bisect_right(self._starts, start) - 1
        address = self._runs[number][0] + start - self._starts[number]
        array = (ctypes.c_ubyte * (stop - start)).from_address(address)
        return memoryview(array).cast("B")

    def join(self, start: int, stop: int, room: memoryview) -> memoryview:
        """Copies bytes that are not contiguous into ``room``, which has the same length."""
        first = start
        while first < stop:
            last = min(stop, self._runs[bisect_right(self._starts, first) - 1][1])
            room[first - start : last - start] = self.view(first, last)
            first = last
        return room


def shard_content(tensors: Mapping[str, torch.Tensor], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rank's shard content. Objects are wrapped in tuples: a long dict of numbers would become a tensor."""
    return {"tensors": dict(tensors), "objects": {name: (value,) for name, value in objects.items()}}


_LAYOUTS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_FORMATS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.memory_format)}
_PROPERTIES: Final = frozenset(field.name for field in fields(TensorProperties))
_META: Final = ("checkpoint_id", "save_id", "load_id")


def to_plain(metadata: Metadata) -> dict[str, Any]:
    """Converts a save planner's metadata, whose ``storage_data`` maps each `MetadataIndex` to the rank whose shard
    holds it, to plain types. Raises `ConfigError` if it has an entry of an unknown kind."""
    meta = metadata.storage_meta
    return {
        "entries": {name: _entry(name, entry) for name, entry in metadata.state_dict_metadata.items()},
        "planner_data": metadata.planner_data,
        "storage_data": [
            [index.fqn, None if index.offset is None else list(index.offset), index.index, rank]
            for index, rank in metadata.storage_data.items()
        ],
        "storage_meta": None
        if meta is None
        else {
            **{name: None if (value := getattr(meta, name)) is None else str(value) for name in _META},
            "modules": list(meta.modules),
        },
        "version": getattr(metadata, "version", None),
    }


def from_plain(content: Any) -> Metadata:
    """Returns the metadata that `to_plain` was given, or raises CorruptCheckpointError."""
    try:
        made = Metadata(
            state_dict_metadata={str(name): _made(entry) for name, entry in content["entries"].items()},
            planner_data=content["planner_data"],
            storage_data={
                MetadataIndex(fqn, None if offset is None else torch.Size(offset), index): int(rank)
                for fqn, offset, index, rank in content["storage_data"]
            },
            storage_meta=None if content["storage_meta"] is None else StorageMeta(**content["storage_meta"]),
        )
        if hasattr(made, "version"):
            made.version = content["version"]
        return made
    except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"expected the metadata of a DCP checkpoint, got an invalid one: {error}"
        ) from error


def _entry(name: str, entry: Any) -> Any:
    if isinstance(entry, BytesStorageMetadata):
        return None
    if not isinstance(entry, TensorStorageMetadata):
        raise ConfigError.of(f"a tensor or an object at {name!r}", type(entry).__name__, "use a planner of DCP's own")
    properties = entry.properties
    strides = getattr(properties, "strides", None)
    return {
        "dtype": str(properties.dtype).removeprefix("torch."),
        "layout": str(properties.layout),
        "requires_grad": properties.requires_grad,
        "memory_format": str(properties.memory_format),
        "pin_memory": properties.pin_memory,
        "strides": None if strides is None else list(strides),
        "size": list(entry.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
    }


def _made(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry is None:
        return BytesStorageMetadata()
    properties = {
        "dtype": DTYPES[entry["dtype"]],
        "layout": _LAYOUTS[entry["layout"]],
        "requires_grad": entry["requires_grad"],
        "memory_format": _FORMATS[entry["memory_format"]],
        "pin_memory": entry["pin_memory"],
        "strides": None if entry["strides"] is None else tuple(entry["strides"]),
    }
    return TensorStorageMetadata(
        properties=TensorProperties(**{name: value for name, value in properties.items() if name in _PROPERTIES}),
        size=torch.Size(entry["size"]),
        chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in entry["chunks"]],
    )
