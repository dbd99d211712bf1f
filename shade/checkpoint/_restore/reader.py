"""Reads snapshots from all tiers, verifies every byte, repairs what it can, and decodes chunks.

A snapshot has the same record digest in every tier. So a chunk may come from any tier, nearest first, and from any copy
in it; `Reader.repair` writes back what one has lost. `ShardDecoder` decodes the chunks of a shard, down to the
keyframe; threads of `ChunkReads` read while the caller plans. Invariant: no byte leaves `Reader` unverified.

Invariant: the decoded data of a version 2 snapshot has the digest that was computed when it was saved. For version 1
this holds of the stored form, which its codec decodes in one way only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

from typing_extensions import Self

from shade.checkpoint._codecs.base import CODECS, Codec, Piece, Standalone, standalone_codec
from shade.checkpoint._codecs.delta import Delta
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._tiers.tier import Tier
from shade.errors import CorruptCheckpointError, NewerSnapshotError, StorageError, StoreError
from shade.types import Bytes

BATCH: Final = 16
"""Chunks requested at once: 64 MiB in memory, enough to keep the connection of every node busy."""
_PART: Final = 4
"""Chunks that a thread reads at once."""
_THREADS: Final = 4
"""Threads that read, or hash what is read in place: page faults and disk requests are faster in parallel."""
UNREAD_SAVES: Final = 10**6
"""Upper bound of the saves that are newer than the newest readable record, where a record or a tier cannot be read."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class SnapshotSource:
    """One location that holds a snapshot."""

    tier: Tier
    location: str

    def __str__(self) -> str:
        return f"{self.tier.name}, {self.location}"


@dataclass(frozen=True)
class Snapshot:
    """A committed snapshot and its locations, nearest first."""

    record: Commit
    sources: tuple[SnapshotSource, ...]
    base: Snapshot | None = None
    """Its base, if a tier holds it."""

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers that hold it."""
        return [source.tier.name for source in self.sources]


@dataclass
class Damage:
    """What is missing or wrong in one location."""

    source: SnapshotSource
    manifests: set[int] = field(default_factory=set)
    """Ranks whose manifest is missing or wrong."""
    chunks: dict[int, set[int]] = field(default_factory=dict)
    """By rank: chunks that are missing or wrong in a copy."""

    files: set[int] = field(default_factory=set)
    """Ranks whose file has another header or length than was written."""

    def __bool__(self) -> bool:
        return bool(self.manifests or self.chunks or self.files)

    def __str__(self) -> str:
        parts = [f"manifest of rank {rank}" for rank in sorted(self.manifests)]
        parts += [f"header or length of the file of rank {rank}" for rank in sorted(self.files)]
        parts += [f"{len(numbers)} chunks of rank {rank}" for rank, numbers in sorted(self.chunks.items())]
        return f"{self.source}: {', '.join(parts) or 'sound'}"


class Reader:
    """Reads from all tiers of a run, nearest first.

    Args:
        tiers: The tiers, nearest first.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        self.unreachable: dict[str, str] = {}
        """By tier name: why the last `snapshots` could not read it; one that a later version has written is one."""
        self.damaged: list[str] = []
        """Places whose record the last `snapshots` could not read."""

    def snapshots(self) -> list[Snapshot]:
        """Returns every snapshot that a tier holds, newest first.

        Returns:
            The snapshots. Tiers that do not answer are left out and listed in `unreachable`.
        """
        self.unreachable.clear()
        self.damaged.clear()
        records: dict[str, Commit] = {}
        locations: dict[str, list[SnapshotSource]] = {}
        for tier in self.tiers:
            try:
                held = tier.held()
            except (StoreError, StorageError, NewerSnapshotError) as error:
                self.unreachable[tier.name] = str(error)
                logger.warning("%s cannot be read: %s", tier.name, error)
                continue
            self.damaged += [f"{tier.name}, {location}" for location in tier.damaged]
            for location, record in held.items():
                records[record.digest] = record
                locations.setdefault(record.digest, []).append(SnapshotSource(tier, location))
        linked: dict[str, Snapshot] = {}
        for digest, record in sorted(records.items(), key=lambda each: (each[1].sequence, each[1].step)):
            base = None if record.base is None else linked.get(record.base)  # older, so it is there already
            linked[digest] = Snapshot(record, tuple(locations[digest]), base)
        return list(reversed(linked.values()))

    def newest_sequence(self) -> int:
        """Returns a number that no snapshot's sequence exceeds, be its record readable or not; 0 without snapshots."""
        newest = max((snapshot.record.sequence for snapshot in self.snapshots()), default=0)
        return newest + UNREAD_SAVES * bool(self.damaged or self.unreachable)

    def manifest(self, snapshot: Snapshot, rank: int) -> Manifest:
        """Returns one rank's manifest, from the first location that has it intact.

        Raises CorruptCheckpointError if it is lost in every copy.
        """
        digest = snapshot.record.manifests[rank]
        for source in snapshot.sources:
            for copy in range(source.tier.num_copies):
                content = _manifest_at(source, rank, copy)
                if content is not None and digest_of(content) == digest:
                    return Manifest.parse(content, digest)
        raise CorruptCheckpointError(
            f"step {snapshot.record.step}: the manifest of rank {rank} is lost or damaged in every copy "
            f"({'; '.join(map(str, snapshot.sources))})"
        )

    def chunks(
        self, snapshot: Snapshot, manifest: Manifest, numbers: Iterable[int] | None = None
    ) -> Iterator[tuple[int, Bytes]]:
        """Yields number and bytes of verified chunks of one shard, in stored form, all by default. A view of shared
        memory is valid until the next save. Raises CorruptCheckpointError if a chunk is lost in every copy."""
        wanted = list(range(len(manifest.chunks)) if numbers is None else numbers)
        for first in range(0, len(wanted), BATCH):
            batch = wanted[first : first + BATCH]
            found = self._batch(snapshot, manifest, batch)
            yield from ((number, found[number]) for number in batch)

    def plain_chunks(self, snapshot: Snapshot, manifest: Manifest, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Returns the verified chunks that some tier holds unencoded.

        Args:
            snapshot: The snapshot.
            manifest: The shard's manifest, of version 2.
            numbers: Chunk numbers.

        Returns:
            The chunks that are there, by number. A view of shared memory is valid until the next save.
        """
        found: dict[int, Bytes] = {}
        for source in snapshot.sources:
            missing = [number for number in numbers if number not in found]
            if source.tier.holds_plain and missing:
                for number, content in zip(missing, _chunks_at(source, manifest, missing, 0), strict=True):
                    if content is not None and is_sound_at(source, manifest, number, content):
                        found[number] = content
        return found

    def fill(
        self, snapshot: Snapshot, manifest: Manifest, numbers: Sequence[int], buffers: Sequence[memoryview]
    ) -> None:
        """Reads verified chunks, in stored form, into the caller's memory.

        Raises CorruptCheckpointError if a chunk is lost in every copy; the content of the buffers is undefined.
        """
        into = dict(zip(numbers, buffers, strict=True))

        def ask(source: SnapshotSource, missing: Sequence[int], copy: int) -> Sequence[Bytes | None]:
            here = [into[number] for number in missing]
            try:
                found = source.tier.read_chunks_into(source.location, manifest, missing, here, copy)
            except (StoreError, StorageError) as error:
                logger.warning("%s: %s", source, error)
                return [None] * len(missing)
            return [buffer if is_there else None for buffer, is_there in zip(here, found, strict=True)]

        for first in range(0, len(numbers), BATCH):
            _collect(snapshot, manifest, numbers[first : first + BATCH], ask)

    def in_place(self, snapshot: Snapshot, manifest: Manifest, numbers: Sequence[int]) -> memoryview | None:
        """Returns a shard's data where it lies, if a tier can map it and the chunks are intact.

        Args:
            snapshot: The snapshot.
            manifest: The shard's manifest, with digests of the undecoded data.
            numbers: Chunks that must be intact.

        Returns:
            The shard, valid until this rank begins a save; None if it has to be read.
        """

        def are_intact(data: memoryview, some: Sequence[int]) -> bool:
            lie = {number: data[number * manifest.chunk_bytes :][: manifest.data_length(number)] for number in some}
            return all(digest_of(content) == manifest.plain_digest(number) for number, content in lie.items())

        parts = [numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shade-verify") as pool:
            for source in snapshot.sources:
                data = source.tier.in_place(source.location, manifest)
                if data is not None and all(pool.map(partial(are_intact, data), parts)):
                    return data
        return None

    def _batch(self, snapshot: Snapshot, manifest: Manifest, batch: Sequence[int]) -> dict[int, Bytes]:
        return _collect(
            snapshot, manifest, batch, lambda source, missing, copy: _chunks_at(source, manifest, missing, copy)
        )

    def examine(self, snapshot: Snapshot, advance: Callable[[int], None] = lambda num_bytes: None) -> list[Damage]:
        """Reads every byte in every copy of every location; returns an entry for each, intact ones included.
        ``advance`` is called with the bytes just read. Raises CorruptCheckpointError if a manifest is lost in every
        copy, so that nothing can be compared."""
        report = []
        manifests = [self.manifest(snapshot, rank) for rank in range(snapshot.record.world_size)]
        for source in snapshot.sources:
            damage = Damage(source)
            for rank, manifest in enumerate(manifests):
                if not _has_whole_file(source, manifest):
                    damage.files.add(rank)
                for copy in range(source.tier.num_copies):
                    content = _manifest_at(source, rank, copy)
                    if content is None or digest_of(content) != manifest.digest:
                        damage.manifests.add(rank)
                    for first in range(0, len(manifest.chunks), BATCH):
                        numbers = list(range(first, min(first + BATCH, len(manifest.chunks))))
                        contents = _chunks_at(source, manifest, numbers, copy)
                        found = zip(numbers, contents, strict=True)
                        bad = {n for n, content in found if not is_sound_at(source, manifest, n, content)}
                        if bad:
                            damage.chunks.setdefault(rank, set()).update(bad)
                        advance(sum(manifest.chunks[number].num_bytes for number in numbers))
            report.append(damage)
        return report

    def repair(self, snapshot: Snapshot, report: Sequence[Damage]) -> int:
        """Writes what each location has lost, from the locations that have it.

        Raises CorruptCheckpointError if something is lost in every copy; everything else was repaired.
        """
        lost: CorruptCheckpointError | None = None
        repaired = 0
        for damage in filter(None, report):
            for rank in sorted(damage.manifests | damage.files | set(damage.chunks)):
                manifest = self.manifest(snapshot, rank)
                intact: dict[int, Bytes] = {}
                for number in sorted(damage.chunks.get(rank, ())):
                    try:
                        intact |= self._batch(snapshot, manifest, [number])
                    except CorruptCheckpointError as error:
                        lost = error
                try:
                    damage.source.tier.repair(damage.source.location, manifest, intact)
                    repaired += len(intact)
                except CorruptCheckpointError as error:
                    lost = lost or error
        if lost is not None:
            raise lost
        return repaired


def _collect(
    snapshot: Snapshot,
    manifest: Manifest,
    batch: Sequence[int],
    ask: Callable[[SnapshotSource, Sequence[int], int], Sequence[Bytes | None]],
) -> dict[int, Bytes]:
    """Reads what is missing from location after location, copy after copy, and returns the verified batch, by chunk
    number. ``ask`` returns unverified chunks from one copy in one location. Raises CorruptCheckpointError if a chunk
    is lost in every copy."""
    found: dict[int, Bytes] = {}
    for source in snapshot.sources:
        if source.tier.holds_plain and manifest.version > 1:
            continue
        for copy in range(source.tier.num_copies):
            missing = [number for number in batch if number not in found]
            if not missing:
                return found
            for number, content in zip(missing, ask(source, missing, copy), strict=True):
                if content is not None and is_sound(manifest, number, content):
                    found[number] = content
    lost = [number for number in batch if number not in found]
    if lost:
        raise CorruptCheckpointError(
            f"step {manifest.step}: chunk {lost[0]} of rank {manifest.rank} is lost or damaged in every copy "
            f"({'; '.join(map(str, snapshot.sources))})"
        )
    return found


def is_sound(manifest: Manifest, number: int, content: Bytes | None) -> bool:
    """Returns whether the bytes are the stored form of a chunk."""
    entry = manifest.chunks[number]
    return content is not None and len(content) == entry.num_bytes and digest_of(content) == entry.digest


def is_sound_at(source: SnapshotSource, manifest: Manifest, number: int, content: Bytes | None) -> bool:
    """Returns whether the bytes are a chunk in the form in which that location holds it."""
    if not source.tier.holds_plain or manifest.version == 1:
        return is_sound(manifest, number, content)
    return content is not None and digest_of(content) == manifest.plain_digest(number)


def _manifest_at(source: SnapshotSource, rank: int, copy: int) -> bytes | None:
    try:
        return source.tier.read_manifest(source.location, rank, copy)
    except (StoreError, StorageError) as error:
        logger.warning("%s: %s", source, error)
        return None


def _has_whole_file(source: SnapshotSource, manifest: Manifest) -> bool:
    try:
        return source.tier.has_whole_file(source.location, manifest)
    except (StoreError, StorageError) as error:
        logger.warning("%s: %s", source, error)
        return False


def _chunks_at(source: SnapshotSource, manifest: Manifest, numbers: Sequence[int], copy: int) -> Sequence[Bytes | None]:
    try:
        return source.tier.read_chunks(source.location, manifest, numbers, copy)
    except (StoreError, StorageError) as error:
        logger.warning("%s: %s", source, error)
        return [None] * len(numbers)


class ShardDecoder:
    """Decodes the chunks of one shard.

    Args:
        reader: The tiers.
        snapshot: The snapshot, with its base.
        manifest: The shard's manifest.
    """

    def __init__(self, reader: Reader, snapshot: Snapshot, manifest: Manifest) -> None:
        self._reader, self._snapshot, self._manifest = reader, snapshot, manifest

    def chunks(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Returns decoded chunks by number, a few dozen at once; threads may share this object. A view of shared
        memory is valid until the next save. Raises CorruptCheckpointError if a chunk, or one of its bases, is lost
        in every copy."""
        manifest = self._manifest
        if manifest.version == 1:
            codec = standalone_codec(manifest.codec)
            return {
                number: codec.decode(stored, manifest.data_length(number), manifest.item_bytes)
                for number, stored in self._reader.chunks(self._snapshot, manifest, numbers)
            }
        found = self._reader.plain_chunks(self._snapshot, manifest, numbers)
        missing = [number for number in numbers if number not in found]
        stored = dict(self._reader.chunks(self._snapshot, manifest, missing))
        building = [number for number in missing if isinstance(self._codec(number), Delta)]
        bases = self._base.chunks(building) if building else {}
        for number in missing:
            found[number] = self._build(number, stored[number], bases.get(number))
        return found

    def _build(self, number: int, stored: Bytes, base: Bytes | None) -> Bytes:
        manifest, codec = self._manifest, self._codec(number)
        length = manifest.data_length(number)
        if isinstance(codec, Standalone):
            data = codec.decode(stored, length, manifest.item_bytes)
        else:
            assert isinstance(codec, Delta)
            if base is None or len(base) != length:
                raise self._undecodable(number, "its base does not have this chunk")
            data = codec.decode(stored, base, Piece.of(manifest, number))
        if not matches_data_digest(manifest, number, data):
            raise self._undecodable(number, "its base is not the one that it was encoded against")
        return data

    def _undecodable(self, number: int, why: str) -> CorruptCheckpointError:
        manifest = self._manifest
        return CorruptCheckpointError(
            f"step {manifest.step}: chunk {number} of rank {manifest.rank} cannot be decoded: {why}"
        )

    def _codec(self, number: int) -> Codec:
        return self._codecs[self._manifest.chunk_codec(number)]

    @cached_property
    def _codecs(self) -> dict[str, Codec]:
        names = {self._manifest.chunk_codec(number) for number in range(len(self._manifest.chunks))}
        return {name: CODECS.get(name)() for name in names}

    @cached_property
    def _base(self) -> ShardDecoder:
        base, rank = self._snapshot.base, self._manifest.rank
        if base is None or rank >= base.record.world_size:
            reason = f"its base ({self._snapshot.record.base}) is in no tier"
            raise CorruptCheckpointError(f"step {self._manifest.step}: {reason}")
        return ShardDecoder(self._reader, base, self._reader.manifest(base, rank))


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

    def begin(self, manifest: Manifest, buffers: Mapping[int, memoryview], shared: Collection[int] = ()) -> None:
        """Begins to read chunks of a shard into the caller's memory, by number, but those that were begun before. Other
        processes of this machine read the ``shared`` ones too: the page cache gives them to all."""
        new = [number for number in buffers if (manifest.rank, number) not in self._begun]
        for first in range(0, len(new), _PART):
            part = {number: buffers[number] for number in new[first : first + _PART]}
            reading = self._pool.submit(self._read, manifest, part, shared)
            self._begun.update(dict.fromkeys(((manifest.rank, number) for number in part), reading))

    def finish(self, manifest: Manifest, numbers: Sequence[int]) -> None:
        """Waits for chunks that were begun. Raises CorruptCheckpointError if one is lost in every copy; the content of
        all of them is undefined then."""
        _finish(self._begun[manifest.rank, number] for number in numbers)

    def finish_all(self) -> None:
        """Waits for all that was begun; raises as `finish`."""
        _finish(self._begun.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _read(self, manifest: Manifest, buffers: Mapping[int, memoryview], shared: Collection[int]) -> None:
        alone = [number for number in buffers if manifest.codec == "none" and number not in shared]
        others = [number for number in buffers if number not in alone]
        if alone:
            self._reader.fill(self._snapshot, manifest, alone, [buffers[number] for number in alone])
        if others:
            decoder = self._decoders.setdefault(manifest.rank, ShardDecoder(self._reader, self._snapshot, manifest))
            for number, data in decoder.chunks(others).items():
                buffers[number][:] = data


def _finish(reads: Iterable[Future[None]]) -> None:
    parts = list(dict.fromkeys(reads))
    wait(parts)
    for part in parts:
        part.result()


def matches_data_digest(manifest: Manifest, number: int, data: Bytes) -> bool:
    """Returns whether the bytes are a chunk's data before any codec."""
    return digest_of(data) == manifest.plain_digest(number)


def check_decodable(reader: Reader, snapshot: Snapshot) -> None:
    """Decodes a snapshot that has a base completely; raises CorruptCheckpointError if a chunk cannot be decoded."""
    # An intact snapshot is still lost without its base.
    if snapshot.record.base is None:
        return
    for rank in range(snapshot.record.world_size):
        manifest = reader.manifest(snapshot, rank)
        shard = ShardDecoder(reader, snapshot, manifest)
        for first in range(0, len(manifest.chunks), BATCH):
            shard.chunks(range(first, min(first + BATCH, len(manifest.chunks))))
