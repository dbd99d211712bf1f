"""DCP's Metadata as plain types, and back: what `torch.distributed.checkpoint` itself keeps as a pickle.

Dicts, lists, strings and numbers, so that `shade.checkpoint.state` makes JSON of them. Fields that a version of PyTorch
does not know (2.8 has no strides) are passed over when read. What the planner adds, names by path as a rule, may be
whatever `shade.checkpoint.state.dismantle` takes. Invariant: ``from_plain(to_plain(metadata)) == metadata``.
"""

from __future__ import annotations

from dataclasses import fields
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

from shade.checkpoint.state import DTYPES
from shade.errors import ConfigError, CorruptCheckpointError

_LAYOUTS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_FORMATS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.memory_format)}
_PROPERTIES: Final = frozenset(field.name for field in fields(TensorProperties))
_META: Final = ("checkpoint_id", "save_id", "load_id")


def to_plain(metadata: Metadata) -> dict[str, Any]:
    """Metadata whose ``storage_data`` says which rank's shard holds each item.

    Args:
        metadata: From a save planner; ``storage_data`` is a dict from `MetadataIndex` to rank.

    Returns:
        Plain types.

    Raises:
        ConfigError: It has a kind of entry that DCP did not have when this was written.
    """
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
    """The metadata again.

    Args:
        content: From `to_plain`.

    Returns:
        The metadata.

    Raises:
        CorruptCheckpointError: It is none.
    """
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
            f"expected the metadata of a DCP checkpoint, got some that fails: {error}"
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
