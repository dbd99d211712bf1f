"""Knows what was saved, what was promised of it, and so what a restore may give and what it must.

Three words, as everywhere: *offered*, its record may have been written, so it may come back; *committed*, a rank was
told so: it must come back while the memory that it was told of is there; *durable*: it must come back whatever is gone
but the disk. Newer is as good: of what must come back the newest alone counts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import ChunkEntry, Commit, Manifest, TensorEntry

CHUNK_BYTES = 700
_SHARD_BYTES = 1500
RUN = "torture"


@dataclass(frozen=True)
class Saved:
    """One snapshot, with all its bytes."""

    record: Commit
    manifests: tuple[Manifest, ...]
    chunks: tuple[tuple[bytes, ...], ...]
    """Stored form, by rank."""
    data: tuple[bytes, ...]
    """By rank."""
    alone: Saved | None = None
    """Of one that builds on another: the same, standing alone."""

    @property
    def tensors(self) -> dict[str, bytes]:
        """What a restore of it holds, by name."""
        return {f"model/{rank}": data for rank, data in enumerate(self.data)}


def saved(
    step: int,
    sequence: int,
    world_size: int,
    run: str = RUN,
    *,
    shard_bytes: int = _SHARD_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> Saved:
    """A snapshot of random bytes, the same for the same arguments.

    Args:
        step: Its step.
        sequence: Its place among the saves of the run.
        world_size: Ranks; each has a shard of another length.
        run: The run id.
        shard_bytes: Of rank 0; each further rank has a little more.
        chunk_bytes: Length of a chunk.

    Returns:
        The snapshot, nowhere yet.
    """
    manifests, contents, whole = [], [], []
    for rank in range(world_size):
        name, length = f"model/{rank}", shard_bytes + 100 * rank
        data = random.Random(f"{run} {step} {sequence} {rank}").randbytes(length)
        chunks = tuple(data[start : start + chunk_bytes] for start in range(0, length, chunk_bytes))
        entries = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in chunks)
        tree = {"dict": [["model"], [{"dict": [["weight"], [{"tensor": name}]]}]]}
        tensors = {name: TensorEntry("U8", (length,), 0, length)}
        shard = Manifest(run, step, rank, world_size, "none", length, tensors, entries, tree, chunk_bytes)
        manifests.append(shard)
        contents.append(chunks)
        whole.append(data)
    digests = tuple(manifest.digest for manifest in manifests)
    num_bytes = sum(manifest.num_bytes for manifest in manifests)
    record = Commit(run, step, sequence, world_size, digests, num_bytes, float(sequence))
    return Saved(record, tuple(manifests), tuple(contents), tuple(whole))


@dataclass
class Ledger:
    """What is known of one run."""

    known: dict[str, Saved] = field(default_factory=dict)
    """By digest of the record."""
    offered: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    durable: set[str] = field(default_factory=set)

    def copy(self) -> Ledger:
        """The same, apart."""
        return Ledger(dict(self.known), set(self.offered), set(self.committed), set(self.durable))

    def add(self, one: Saved) -> Saved:
        """Notes that it is being saved."""
        self.known[one.record.digest] = one
        if one.alone is not None:
            self.known[one.alone.record.digest] = one.alone
        return one

    def floor(self, *, memory_is_there: bool) -> int:
        """The least that a restore must give.

        Args:
            memory_is_there: Whether what was committed in memory counts.

        Returns:
            A sequence; −1 where nothing was promised.
        """
        promised = self.durable | self.committed if memory_is_there else self.durable
        return max((self.known[digest].record.sequence for digest in promised), default=-1)

    def objection(self, record: Commit, tensors: dict[str, bytes], floor: int) -> str | None:
        """What is wrong with a restore.

        Args:
            record: Of the snapshot that it says it has restored.
            tensors: What it gave.
            floor: The sequence that it must reach.

        Returns:
            The complaint; None where there is nothing to complain of.
        """
        if record.digest not in self.offered:
            return f"restored step {record.step} (save {record.sequence}), which never was committed"
        if tensors != self.known[record.digest].tensors:
            return f"restored step {record.step} (save {record.sequence}) with wrong bytes, silently"
        if record.sequence < floor:
            return f"restored save {record.sequence}, although save {floor} had been promised"
        return None
