"""A sharded snapshot as one state, in one process: for exports, which know nothing of ranks.

Costs the size of the whole state in memory. Nested as DCP's planner says it was; dicts come back with string keys, as
DCP has them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from shade.checkpoint.dcp_reader import ShadeReader
from shade.checkpoint.dcp_shard import is_dcp
from shade.checkpoint.reader import Reader, Snapshot
from shade.errors import CorruptCheckpointError, ShadeError


def is_sharded(reader: Reader, snapshot: Snapshot) -> bool:
    """Whether a snapshot was saved through DCP.

    Args:
        reader: The tiers.
        snapshot: Which.

    Returns:
        The answer.

    Raises:
        CorruptCheckpointError: Its last manifest is lost in every copy.
    """
    return is_dcp(reader.manifest(snapshot, snapshot.record.world_size - 1).tree)


def whole_state(reader: ShadeReader) -> dict[str, Any]:
    """All of a snapshot.

    Args:
        reader: Says which.

    Returns:
        The state.

    Raises:
        CheckpointError: There is no such snapshot.
        CorruptCheckpointError: Something of it is right in no copy.
    """
    metadata = reader.read_metadata()
    wanted: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else entry
        for name, entry in metadata.state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        ((reason, _),) = error.failures.values()
        if isinstance(reason, ShadeError):
            raise reason from error
        raise CorruptCheckpointError(f"DCP cannot read it: {reason}") from error
    return unflatten_state_dict(wanted, metadata.planner_data) if metadata.planner_data else wanted
