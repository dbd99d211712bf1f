"""Makes small snapshots and carries them through a tier, as the protocol does, for tests of tiers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import ChunkEntry, Commit, Manifest, TensorEntry
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.types import Bytes

CHUNK = 30_000
"""Length of a chunk in these tests."""


@dataclass(frozen=True)
class Snapshot:
    """What was saved."""

    record: Commit
    manifests: tuple[Manifest, ...]
    data: tuple[tuple[bytes, ...], ...]
    """Chunks by rank."""

    def shard(self, rank: int) -> Shard:
        """One rank's, as a tier wants it."""
        return Shard(self.manifests[rank], iter(map(memoryview, self.data[rank])))


def make(
    run: str,
    step: int,
    *,
    sequence: int | None = None,
    shard_bytes: Sequence[int] = (200_000, 100_001),
    chunk: int = CHUNK,
) -> Snapshot:
    """A snapshot of random bytes, the same for the same arguments.

    Args:
        run: The run id.
        step: Its step.
        sequence: By default the step.
        shard_bytes: Of each rank.
        chunk: Length of a chunk.

    Returns:
        The snapshot, nowhere yet.
    """
    manifests, data = [], []
    for rank, num_bytes in enumerate(shard_bytes):
        content = random.Random(f"{run} {step} {rank}").randbytes(num_bytes)
        chunks = tuple(content[start : start + chunk] for start in range(0, num_bytes, chunk))
        entries = tuple(ChunkEntry(len(each), digest_of(each)) for each in chunks)
        tensors = {"x": TensorEntry("U8", (num_bytes,), 0, num_bytes)}
        manifests.append(Manifest(run, step, rank, len(shard_bytes), "none", num_bytes, tensors, entries, None, chunk))
        data.append(chunks)
    digests = tuple(digest_of(manifest.to_bytes()) for manifest in manifests)
    number = step if sequence is None else sequence
    record = Commit(run, step, number, len(shard_bytes), digests, sum(shard_bytes), 0.0)
    return Snapshot(record, tuple(manifests), tuple(data))


def save(tier: Tier, snapshot: Snapshot) -> str:
    """Puts and commits it.

    Args:
        tier: Where.
        snapshot: What.

    Returns:
        The place.
    """
    place = tier.prepare(snapshot.record.step, [manifest.stored_bytes for manifest in snapshot.manifests])
    for rank in range(snapshot.record.world_size):
        tier.put(place, snapshot.shard(rank))
    tier.commit(place, snapshot.record)
    return place


def damages(tier: Tier, place: str, snapshot: Snapshot) -> Iterator[tuple[int, int, int]]:
    """Every (copy, rank, chunk) that is not as it was saved; chunk -1 is the manifest.

    Args:
        tier: Where it was saved.
        place: In there.
        snapshot: What was saved.

    Yields:
        Nothing, where all is well.
    """
    for copy in range(tier.num_copies):
        for rank, (manifest, chunks) in enumerate(zip(snapshot.manifests, snapshot.data, strict=True)):
            if tier.read_manifest(place, rank, copy) != manifest.to_bytes():
                yield copy, rank, -1
            found = tier.read_chunks(place, manifest, range(len(chunks)), copy)
            for number, (content, right) in enumerate(zip(found, chunks, strict=True)):
                if content is None or bytes(content) != right:
                    yield copy, rank, number


def readable(tier: Tier, place: str, snapshot: Snapshot) -> bool:
    """Whether every byte is found right in some copy, as `shade.checkpoint._restore.reader` would."""
    for rank, (manifest, chunks) in enumerate(zip(snapshot.manifests, snapshot.data, strict=True)):
        if all(tier.read_manifest(place, rank, copy) != manifest.to_bytes() for copy in range(tier.num_copies)):
            return False
        right: dict[int, Bytes] = {}
        for copy in range(tier.num_copies):
            wanted = [number for number in range(len(chunks)) if number not in right]
            for number, content in zip(wanted, tier.read_chunks(place, manifest, wanted, copy), strict=True):
                if content is not None and bytes(content) == chunks[number]:
                    right[number] = content
        if len(right) < len(chunks):
            return False
    return True
