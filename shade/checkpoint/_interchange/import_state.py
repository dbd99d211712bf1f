"""Makes a snapshot from a foreign state dict: one shard, written directly into a tier."""

from __future__ import annotations

import time
from typing import Any

import torch

from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of, lay_out
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, ChunkEntry, Commit, Manifest
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.types import Bytes


def import_state(state: dict[str, Any], tier: Tier, run: str, step: int) -> Commit:
    """Stores a state as the run's newest snapshot.

    Args:
        state: State dict by the names of attached objects.
        tier: Tier to write to.
        run: The run id.
        step: Optimizer steps that the state has done.

    Returns:
        The record.

    Raises:
        ConfigError: Something in the state cannot be saved.
        StoreError: The tier refused.
        StorageError: The tier refused.
    """
    tree, tensors = flatten(state)
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for name, entry in layout.entries.items():
        content = bytes_of(tensors[name].cpu().contiguous())
        buffer[entry.start : entry.stop] = content
    data = buffer.numpy().data
    chunks: list[Bytes] = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    entries = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in chunks)
    manifest = Manifest(run, step, 0, 1, "none", len(data), layout.entries, entries, tree)
    sequence = 1 + max((record.sequence for record in tier.held().values()), default=0)
    record = Commit(run, step, sequence, 1, (manifest.digest,), len(data), time.time())
    place = tier.prepare(step, [manifest.stored_bytes])
    try:
        tier.put(place, Shard(manifest, chunks))
        tier.commit(place, record)
    except BaseException:
        tier.discard(place)
        raise
    return record
