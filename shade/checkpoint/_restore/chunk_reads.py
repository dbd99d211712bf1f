"""Reads chunks of a snapshot into arenas by threads, while the caller plans, sends or loads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from typing_extensions import Self

from shade.checkpoint._format.manifest import Manifest
from shade.checkpoint._restore.arena import Arena
from shade.checkpoint._restore.reader import Reader, ShardDecoder, Snapshot

_PART: Final = 4
"""Chunks that a thread reads at once."""
_THREADS: Final = 4
"""Threads that read: page faults and disk requests are both faster in parallel."""


class ChunkReads:
    """Verified, decoded chunks on their way into memory; without a codec straight from the tier.

    Leaving it as a context manager ends its threads, and drops what they have not begun.

    Args:
        reader: The tiers.
        snapshot: The snapshot.
    """

    def __init__(self, reader: Reader, snapshot: Snapshot) -> None:
        self._reader, self._snapshot = reader, snapshot
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shade-restore")
        self._decoders: dict[int, ShardDecoder] = {}
        self._begun: dict[tuple[int, int], Future[None]] = {}

    def begin(self, manifest: Manifest, arena: Arena, numbers: Sequence[int], shared: Collection[int] = ()) -> None:
        """Begins to read chunks of a shard, but those that were begun before. Other processes of this machine read the
        ``shared`` ones too: the page cache gives them to all."""
        new = [number for number in numbers if (manifest.rank, number) not in self._begun]
        for first in range(0, len(new), _PART):
            part = new[first : first + _PART]
            reading = self._pool.submit(self._read, manifest, arena, part, shared)
            self._begun.update(dict.fromkeys(((manifest.rank, number) for number in part), reading))

    def finish(self, manifest: Manifest, numbers: Sequence[int]) -> None:
        """Waits for chunks that were begun. Raises CorruptCheckpointError if one is lost in every copy; the content of
        all of them is undefined then."""
        reads = list(dict.fromkeys(self._begun[manifest.rank, number] for number in numbers))
        wait(reads)
        for reading in reads:
            reading.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _read(self, manifest: Manifest, arena: Arena, numbers: Sequence[int], shared: Collection[int]) -> None:
        buffers = arena.chunks(manifest, numbers)
        alone = [number for number in numbers if manifest.codec == "none" and number not in shared]
        others = [number for number in numbers if number not in alone]
        if alone:
            self._reader.fill(self._snapshot, manifest, alone, [buffers[number] for number in alone])
        if others:
            decoder = self._decoders.setdefault(manifest.rank, ShardDecoder(self._reader, self._snapshot, manifest))
            for number, data in decoder.chunks(others).items():
                buffers[number][:] = data


def fill(
    reader: Reader,
    snapshot: Snapshot,
    manifest: Manifest,
    arena: Arena,
    numbers: Sequence[int],
    shared: Collection[int] = (),
) -> None:
    """Reads chunks of one shard, as `ChunkReads` does, and waits for them."""
    with ChunkReads(reader, snapshot) as reads:
        reads.begin(manifest, arena, numbers, shared)
        reads.finish(manifest, numbers)
