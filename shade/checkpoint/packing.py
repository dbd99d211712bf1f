"""Packs a buffer for its way: cuts it into chunks, gives each its stored form, hashes that, and lists all of it.

The chunks of the codec ``none`` are views of the buffer: packing copies nothing, it reads every byte once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shade.checkpoint.codec import CODECS, Codec
from shade.checkpoint.manifest import CHUNK_BYTES, ChunkEntry, Manifest, TensorEntry, digest_of
from shade.types import Bytes


@dataclass(frozen=True)
class Packed:
    """A shard ready to be agreed on and stored."""

    manifest: Manifest
    chunks: Iterable[Bytes]
    """Stored form, in order; may be walked more than once."""


class Packer:
    """Packs one rank's shards.

    Args:
        run: The run id.
        rank: This rank.
        world_size: Ranks.
        codec: Name of the codec of the chunks.
    """

    def __init__(self, run: str, rank: int, world_size: int, codec: str) -> None:
        self._run, self._rank, self._world_size, self._codec_name = run, rank, world_size, codec
        self._codec: Codec = CODECS.get(codec)()

    def pack(
        self, step: int, buffer: torch.Tensor, num_bytes: int, entries: Mapping[str, TensorEntry], tree: Any
    ) -> Packed:
        """Hashes the chunks, in their stored form, and makes the manifest.

        Args:
            step: Of the snapshot.
            buffer: uint8, the data in its first ``num_bytes``; must not be written to while the chunks are in use.
            num_bytes: Length of the data.
            entries: The shard's tensors.
            tree: The skeleton of the state.

        Returns:
            The shard.
        """
        data = memoryview(buffer.numpy().data)[:num_bytes]
        plain = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        draft = Manifest(
            run=self._run,
            step=step,
            rank=self._rank,
            world_size=self._world_size,
            codec=self._codec_name,
            num_bytes=num_bytes,
            tensors=entries,
            chunks=(),
            tree=tree,
        )
        stored = [self._codec.encode(chunk, draft.item_bytes) for chunk in plain]
        chunks = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in stored)
        return Packed(replace(draft, chunks=chunks), stored)
