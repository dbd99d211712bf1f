"""Makes snapshots that build on others: each chunk in one of the ways in which one can.

The first chunk is as it was, the second has changed a little, the others are new. So a restore of the third of three
needs all three of them, in the right order, once each.
"""

from __future__ import annotations

import random
from dataclasses import replace

from shade.checkpoint._codecs.base import CODECS, Piece
from shade.checkpoint._codecs.delta import Delta
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import ChunkEntry, Manifest
from tests.simulation.torture.ledger import Saved, saved


def built_on(before: Saved | None, step: int, sequence: int, world_size: int) -> Saved:
    """A snapshot, the same for the same arguments.

    Args:
        before: What it builds on; None: it stands alone, ready to be built on.
        step: Its step.
        sequence: Its place among the saves of the run.
        world_size: Ranks.

    Returns:
        The snapshot, nowhere yet.
    """
    fresh = saved(step, sequence, world_size)
    if before is None:
        return _packed(fresh, fresh.data, None)
    data = tuple(_changed(old, new) for old, new in zip(before.data, fresh.data, strict=True))
    return replace(_packed(fresh, data, before), alone=_packed(fresh, data, None))


def _changed(old: bytes, new: bytes) -> bytes:
    chunk_bytes = len(new) // 3 + 1
    second = bytearray(old[chunk_bytes : 2 * chunk_bytes])
    dice = random.Random(new)
    for _ in range(5):
        second[dice.randrange(len(second))] ^= 1 + dice.randrange(255)
    return old[:chunk_bytes] + bytes(second) + new[2 * chunk_bytes :]


def _packed(fresh: Saved, data: tuple[bytes, ...], before: Saved | None) -> Saved:
    """The shards of some data, as `shade.checkpoint._save.packing` makes them."""
    manifests, stored = [], []
    for rank, whole in enumerate(data):
        chunk_bytes = len(whole) // 3 + 1
        draft = replace(fresh.manifests[rank], codec="xor-zstd", chunk_bytes=chunk_bytes, chunks=(), version=2)
        made = [_chunk(draft, whole, number, None if before is None else before.data[rank]) for number in range(3)]
        manifests.append(replace(draft, chunks=tuple(entry for entry, _ in made)))
        stored.append(tuple(content for _, content in made))
    record = replace(
        fresh.record,
        manifests=tuple(manifest.digest for manifest in manifests),
        base=None if before is None else before.record.digest,
        version=2,
    )
    return Saved(record, tuple(manifests), tuple(stored), data)


def _chunk(draft: Manifest, whole: bytes, number: int, old: bytes | None) -> tuple[ChunkEntry, bytes]:
    part = slice(number * draft.chunk_bytes, number * draft.chunk_bytes + draft.data_length(number))
    name = "none" if old is None else ("dedup", "xor-zstd", "none")[number]
    content = whole[part]
    if name != "none":
        assert old is not None
        codec = CODECS.get(name)()
        assert isinstance(codec, Delta)
        made = codec.encode(memoryview(whole[part]), memoryview(old[part]), Piece.of(draft, number))
        assert made is not None, "the chunk was made for it"
        content = bytes(made)
    return ChunkEntry(len(content), digest_of(content), name, digest_of(whole[part])), content
