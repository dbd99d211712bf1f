"""Reads snapshots out of all tiers at once, believes nothing, and mends what it can.

A snapshot is the same in every tier, down to the record's digest. So a chunk can come from any of them, nearest first,
and from any copy within one; what counts is that it has the digest that the manifest says, whose own digest the record
says. Whatever is missing or wrong in one place is asked of the next; what then turns up is given back to the places
that had lost it (`mend`). Invariant: no byte leaves this module that does not match its digest.

Makes chunks again what they were before any codec: out of their stored form and, where they need it, of their base.

A chunk that is a difference needs the same chunk of the base, which may be a difference itself, and so on to one that
stands alone: at the latest in the keyframe. Each step on the way is compared with the digest that the shard's manifest
has of it, so that a base that is another one, or a difference that is missing or added twice, is found where it
happens. Own memory, where there is any, has the data as it is: nothing is built.

Invariant: what leaves this module of a snapshot of version 2 has the digest that was computed when it was saved. Of
version 1 that holds of the stored form, from which a codec makes one thing only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

from shade.checkpoint._codecs.base import CODECS, Codec, Delta, Piece, Standalone, standing_alone
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._tiers.tier import Tier
from shade.errors import CorruptCheckpointError, StorageError, StoreError
from shade.types import Bytes

BATCH: Final = 16
"""Chunks asked for at once: 64 MiB in memory, enough to keep every node's connection busy."""
_THREADS: Final = 4
"""Hash what is read in place."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class SnapshotSource:
    """One place where a snapshot lies."""

    tier: Tier
    place: str

    def __str__(self) -> str:
        return f"{self.tier.name}, {self.place}"


@dataclass(frozen=True)
class Snapshot:
    """A committed snapshot and the places it lies in, nearest first."""

    record: Commit
    sources: tuple[SnapshotSource, ...]
    base: Snapshot | None = None
    """What it builds on, if that is in some tier."""

    @property
    def tiers(self) -> list[str]:
        """Their names."""
        return [source.tier.name for source in self.sources]


@dataclass
class Damage:
    """What was wrong in one place."""

    source: SnapshotSource
    manifests: set[int] = field(default_factory=set)
    """Ranks whose manifest was missing or wrong."""
    chunks: dict[int, set[int]] = field(default_factory=dict)
    """By rank: chunks missing or wrong in some copy."""

    def __bool__(self) -> bool:
        return bool(self.manifests or self.chunks)

    def __str__(self) -> str:
        parts = [f"manifest of rank {rank}" for rank in sorted(self.manifests)]
        parts += [f"{len(numbers)} chunks of rank {rank}" for rank, numbers in sorted(self.chunks.items())]
        return f"{self.source}: {', '.join(parts) or 'sound'}"


class Reader:
    """All tiers of a run, as one.

    Args:
        tiers: Nearest first.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        self.unreachable: dict[str, str] = {}
        """Why a tier could not be asked, by its name; as `snapshots` found it last."""
        self.damaged: list[str] = []
        """Places with a record that cannot be read; likewise."""

    def snapshots(self) -> list[Snapshot]:
        """Every snapshot that exists in some tier.

        Returns:
            Newest first. Tiers that do not answer are left out, and noted in `unreachable`.
        """
        self.unreachable.clear()
        self.damaged.clear()
        records: dict[str, Commit] = {}
        places: dict[str, list[SnapshotSource]] = {}
        for tier in self.tiers:
            try:
                held = tier.held()
            except (StoreError, StorageError) as error:
                self.unreachable[tier.name] = str(error)
                logger.warning("%s cannot be read: %s", tier.name, error)
                continue
            self.damaged += [f"{tier.name}, {place}" for place in tier.damaged]
            for place, record in held.items():
                records[record.digest] = record
                places.setdefault(record.digest, []).append(SnapshotSource(tier, place))
        linked: dict[str, Snapshot] = {}
        for digest, record in sorted(records.items(), key=lambda each: (each[1].sequence, each[1].step)):
            base = None if record.base is None else linked.get(record.base)  # older, so it is there already
            linked[digest] = Snapshot(record, tuple(places[digest]), base)
        return list(reversed(linked.values()))

    def manifest(self, snapshot: Snapshot, rank: int) -> Manifest:
        """One rank's manifest, from the first place that has it right.

        Args:
            snapshot: Which.
            rank: Whose, below the snapshot's world size.

        Returns:
            The manifest as it was committed.

        Raises:
            CorruptCheckpointError: No place has it.
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
        """Verified chunks of one shard, in stored form.

        Args:
            snapshot: Which.
            manifest: Of the shard.
            numbers: Which chunks, by default all.

        Yields:
            Number and bytes, in the order of ``numbers``. A view into own memory is good until the next snapshot.

        Raises:
            CorruptCheckpointError: A chunk is right in no place.
        """
        wanted = list(range(len(manifest.chunks)) if numbers is None else numbers)
        for first in range(0, len(wanted), BATCH):
            batch = wanted[first : first + BATCH]
            found = self._batch(snapshot, manifest, batch)
            yield from ((number, found[number]) for number in batch)

    def plain_chunks(self, snapshot: Snapshot, manifest: Manifest, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Verified chunks as they were before any codec, from where they lie like that.

        Args:
            snapshot: Which.
            manifest: Of the shard, of version 2.
            numbers: Which chunks.

        Returns:
            Those that are there. A view into own memory is good until the next snapshot.
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

        Args:
            snapshot: Which.
            manifest: Of the shard.
            numbers: Which chunks.
            buffers: One for each, of its stored length.

        Raises:
            CorruptCheckpointError: A chunk is right in no place; the buffers hold nothing of meaning.
        """
        into = dict(zip(numbers, buffers, strict=True))

        def ask(source: SnapshotSource, missing: Sequence[int], copy: int) -> Sequence[Bytes | None]:
            here = [into[number] for number in missing]
            try:
                found = source.tier.read_chunks_into(source.place, manifest, missing, here, copy)
            except (StoreError, StorageError) as error:
                logger.warning("%s: %s", source, error)
                return [None] * len(missing)
            return [buffer if is_there else None for buffer, is_there in zip(here, found, strict=True)]

        for first in range(0, len(numbers), BATCH):
            _collect(snapshot, manifest, numbers[first : first + BATCH], ask)

    def in_place(self, snapshot: Snapshot, manifest: Manifest, numbers: Sequence[int]) -> memoryview | None:
        """A shard's data where it lies, if a tier shows it and it is sound.

        Args:
            snapshot: Which.
            manifest: Of the shard, with digests of what is not encoded.
            numbers: Chunks that must be sound.

        Returns:
            The shard, verified in those chunks, good until this rank begins a save; None: it has to be read.
        """

        def are_right(data: memoryview, some: Sequence[int]) -> bool:
            lie = {number: data[number * manifest.chunk_bytes :][: manifest.data_length(number)] for number in some}
            return all(digest_of(content) == manifest.plain_digest(number) for number, content in lie.items())

        parts = [numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shade-verify") as pool:
            for source in snapshot.sources:
                data = source.tier.in_place(source.place, manifest)
                if data is not None and all(pool.map(partial(are_right, data), parts)):
                    return data
        return None

    def _batch(self, snapshot: Snapshot, manifest: Manifest, batch: Sequence[int]) -> dict[int, Bytes]:
        return _collect(
            snapshot, manifest, batch, lambda source, missing, copy: _chunks_at(source, manifest, missing, copy)
        )

    def examine(self, snapshot: Snapshot, advance: Callable[[int], None] = lambda num_bytes: None) -> list[Damage]:
        """Reads every byte in every copy of every place.

        Args:
            snapshot: Which.
            advance: Told how many bytes have just been read.

        Returns:
            One entry a place, those without damage included.

        Raises:
            CorruptCheckpointError: A manifest is right nowhere, so that nothing can be compared.
        """
        report = []
        manifests = [self.manifest(snapshot, rank) for rank in range(snapshot.record.world_size)]
        for source in snapshot.sources:
            damage = Damage(source)
            for rank, manifest in enumerate(manifests):
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

    def mend(self, snapshot: Snapshot, report: Sequence[Damage]) -> int:
        """Gives every place back what it has lost, from the places that have it.

        Args:
            snapshot: Which.
            report: From `examine`.

        Returns:
            Chunks written.

        Raises:
            CorruptCheckpointError: Something is right nowhere; all else was mended.
        """
        lost: CorruptCheckpointError | None = None
        mended = 0
        for damage in filter(None, report):
            for rank in sorted(damage.manifests | set(damage.chunks)):
                manifest = self.manifest(snapshot, rank)
                right: dict[int, Bytes] = {}
                for number in sorted(damage.chunks.get(rank, ())):
                    try:
                        right |= self._batch(snapshot, manifest, [number])
                    except CorruptCheckpointError as error:
                        lost = error
                damage.source.tier.repair(damage.source.place, manifest, right)
                mended += len(right)
        if lost is not None:
            raise lost
        return mended


def _collect(
    snapshot: Snapshot,
    manifest: Manifest,
    batch: Sequence[int],
    ask: Callable[[SnapshotSource, Sequence[int], int], Sequence[Bytes | None]],
) -> dict[int, Bytes]:
    """Asks place after place, copy after copy, for what is still missing.

    Args:
        snapshot: Which.
        manifest: Of the shard.
        batch: Chunk numbers.
        ask: Gets chunks, unverified, from one copy in one place.

    Returns:
        All of the batch, verified.

    Raises:
        CorruptCheckpointError: One is right nowhere.
    """
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
    """Whether these bytes are the chunk that was committed."""
    entry = manifest.chunks[number]
    return content is not None and len(content) == entry.num_bytes and digest_of(content) == entry.digest


def is_sound_at(source: SnapshotSource, manifest: Manifest, number: int, content: Bytes | None) -> bool:
    """Whether these bytes are the chunk as it lies in that place."""
    if not source.tier.holds_plain or manifest.version == 1:
        return is_sound(manifest, number, content)
    return content is not None and digest_of(content) == manifest.plain_digest(number)


def _manifest_at(source: SnapshotSource, rank: int, copy: int) -> bytes | None:
    try:
        return source.tier.read_manifest(source.place, rank, copy)
    except (StoreError, StorageError) as error:
        logger.warning("%s: %s", source, error)
        return None


def _chunks_at(source: SnapshotSource, manifest: Manifest, numbers: Sequence[int], copy: int) -> Sequence[Bytes | None]:
    try:
        return source.tier.read_chunks(source.place, manifest, numbers, copy)
    except (StoreError, StorageError) as error:
        logger.warning("%s: %s", source, error)
        return [None] * len(numbers)


class Rebuilt:
    """One shard's data.

    Args:
        reader: The tiers.
        snapshot: Which; with what it builds on.
        manifest: Of the shard.
    """

    def __init__(self, reader: Reader, snapshot: Snapshot, manifest: Manifest) -> None:
        self._reader, self._snapshot, self._manifest = reader, snapshot, manifest

    def chunks(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Some chunks; threads may share this object.

        Args:
            numbers: Which; ask for a few dozen at once.

        Returns:
            Their data. A view into own memory is good until the next snapshot.

        Raises:
            CorruptCheckpointError: One is right in no place, or what it builds on is lost.
        """
        manifest = self._manifest
        if manifest.version == 1:
            codec = standing_alone(manifest.codec)
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
                raise self._wrong(number, "its base has no such chunk")
            data = codec.decode(stored, base, Piece.of(manifest, number))
        if not is_right(manifest, number, data):
            raise self._wrong(number, "what it builds on is not what it was saved against")
        return data

    def _wrong(self, number: int, why: str) -> CorruptCheckpointError:
        manifest = self._manifest
        return CorruptCheckpointError(
            f"step {manifest.step}: chunk {number} of rank {manifest.rank} cannot be built again: {why}"
        )

    def _codec(self, number: int) -> Codec:
        return self._codecs[self._manifest.chunk_codec(number)]

    @cached_property
    def _codecs(self) -> dict[str, Codec]:
        names = {self._manifest.chunk_codec(number) for number in range(len(self._manifest.chunks))}
        return {name: CODECS.get(name)() for name in names}

    @cached_property
    def _base(self) -> Rebuilt:
        base, rank = self._snapshot.base, self._manifest.rank
        if base is None or rank >= base.record.world_size:
            told = f"the snapshot that it builds on ({self._snapshot.record.base}) is in no place"
            raise CorruptCheckpointError(f"step {self._manifest.step}: {told}")
        return Rebuilt(self._reader, base, self._reader.manifest(base, rank))


def is_right(manifest: Manifest, number: int, data: Bytes) -> bool:
    """Whether these bytes are what the chunk was before any codec."""
    return digest_of(data) == manifest.plain_digest(number)


def check(reader: Reader, snapshot: Snapshot) -> None:
    """Builds all of a snapshot again, if it builds on another one: what is whole in itself may still lack its base.

    Args:
        reader: The tiers.
        snapshot: Which.

    Raises:
        CorruptCheckpointError: Something cannot be built.
    """
    if snapshot.record.base is None:
        return
    for rank in range(snapshot.record.world_size):
        manifest = reader.manifest(snapshot, rank)
        shard = Rebuilt(reader, snapshot, manifest)
        for first in range(0, len(manifest.chunks), BATCH):
            shard.chunks(range(first, min(first + BATCH, len(manifest.chunks))))
