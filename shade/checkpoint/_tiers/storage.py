"""Stores snapshots in durable storage: a folder per step, a data file and a manifest per rank, the commit record last.

docs/format.md §2 has the names of the files. Every file appears complete or not at all (`Volume.write`), so only the
order matters: shards before the record; on removal, the record before the shards. There is one copy; damage is repaired
from another tier or not at all.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np
from typing_extensions import override

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Commit, Manifest, safetensors_header
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import CheckpointError, CorruptCheckpointError, StorageError, StorageFullError
from shade.storage.base import Volume
from shade.types import Bytes

_RECORD: Final = "commit.json"
_PLACE: Final = re.compile(r"step-(\d{10,})(?:\.\d+)?")
_SPARE_BYTES: Final = 2**20
"""Reserve for manifests, the record and the folders."""

logger = logging.getLogger("shade.checkpoint")


class StorageTier(Tier):
    """Stores the snapshots of one run in a volume.

    Args:
        volume: The volume; closed with the tier.
        run: The run id: one component of a path.
    """

    name: ClassVar[str] = "storage"
    is_durable: ClassVar[bool] = True

    def __init__(self, volume: Volume, run: str) -> None:
        self._volume = volume
        self._run = run

    @override
    def prepare(self, step: int, shard_bytes: Sequence[int]) -> str:
        # A snapshot of the same step stays until the new one is committed.
        location, names = self._free_location(step)
        free_bytes, needed_bytes = self._volume.free_bytes(), sum(shard_bytes) + _SPARE_BYTES
        if free_bytes is not None and free_bytes < needed_bytes:
            free_bytes += sum(self._volume.size_bytes(name) or 0 for name in names)
            if free_bytes < needed_bytes:
                raise StorageFullError(
                    f"expected room for {needed_bytes / 1e6:.1f} MB in {self._volume.url}, got "
                    f"{free_bytes / 1e6:.1f} MB free; free some space, keep fewer snapshots, or store elsewhere"
                )
        self._remove(location, names)
        return location

    def _free_location(self, step: int) -> tuple[str, Sequence[str]]:
        """Returns the first folder for a step without a record, readable or not, and the files in it."""
        first = f"{self._run}/step-{step:010d}"
        for number in itertools.count(1):
            location = first if number == 1 else f"{first}.{number}"
            if self._volume.size_bytes(f"{location}/{_RECORD}") is None:
                names = self._volume.list(f"{location}/")
                if f"{location}/{_RECORD}" not in names:
                    return location, names
        raise AssertionError("the numbers have no end")

    @override
    def put(self, location: str, shard: Shard) -> None:
        manifest = shard.manifest
        self._write_data(location, manifest, shard.chunks)
        self._volume.write(_manifest_name(location, manifest.rank), [manifest.to_bytes()])

    @override
    def commit(self, location: str, record: Commit) -> None:
        # Lists the files again: another process may have swept them meanwhile.
        names = self._volume.list(f"{location}/rank-")
        written = Counter(name.rpartition(".")[0] for name in names)
        missing = [rank for rank in range(record.world_size) if written[f"{location}/rank-{rank}"] < 2]
        if missing:
            raise StorageError(
                f"expected data and manifest of rank {missing[0]} in {location} of {self._volume.url} before its "
                f"commit, got {names!r}; check which other process writes or removes there, and save again"
            )
        self._volume.write(f"{location}/{_RECORD}", [record.to_bytes()])

    @override
    def held(self, known: Mapping[str, Commit] | None = None) -> Mapping[str, Commit]:
        # One listing; all records are fetched together, except those of places that are known.
        listed = [name for name in self._volume.list(f"{self._run}/step-") if name.endswith(f"/{_RECORD}")]
        there = {name.removesuffix(f"/{_RECORD}") for name in listed}
        found = {location: record for location, record in (known or {}).items() if location in there}
        names = [name for name in listed if name.removesuffix(f"/{_RECORD}") not in found]
        damaged: list[str] = []
        for name, content in zip(names, self._volume.read_many(names), strict=True):
            location = name.removesuffix(f"/{_RECORD}")
            if content is None:
                logger.warning("%s in %s cannot be read: this snapshot does not count", name, self._volume.url)
                damaged.append(location)
                continue
            try:
                found[location] = Commit.parse(content)
            except CorruptCheckpointError as error:
                logger.warning("%s in %s: %s: this snapshot does not count", name, self._volume.url, error)
                damaged.append(location)
        self.damaged = damaged
        return found

    @override
    def read_manifest(self, location: str, rank: int, copy: int = 0) -> bytes | None:
        return self._volume.read_many([_manifest_name(location, rank)])[0]

    @override
    def read_chunks(
        self, location: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0
    ) -> list[Bytes | None]:
        # Adjacent chunks are read in one range.
        name = _data_name(location, manifest)
        num_bytes = self._volume.size_bytes(name) or 0
        bounds = _chunk_bounds(manifest)
        found: dict[int, Bytes] = {}
        for run in _runs(number for number in sorted(set(numbers)) if bounds[number + 1] <= num_bytes):
            found.update(self._read_run(name, bounds, run))
        return [found.get(number) for number in numbers]

    @override
    def read_chunks_into(
        self,
        location: str,
        manifest: Manifest,
        numbers: Sequence[int],
        buffers: Sequence[memoryview],
        copy: int = 0,
    ) -> list[bool]:
        # Each chunk goes straight to its destination, without a copy where the volume can do so.
        name, bounds = _data_name(location, manifest), _chunk_bounds(manifest)
        found = []
        for number, buffer in zip(numbers, buffers, strict=True):
            try:
                self._volume.read_directly(name, bounds[number], buffer)
                found.append(True)
            except StorageError as error:
                logger.warning("%s", error)
                found.append(False)
        return found

    @override
    def has_whole_file(self, location: str, manifest: Manifest) -> bool:
        name, header = _data_name(location, manifest), _header(manifest)
        if self._volume.size_bytes(name) != len(header) + manifest.stored_bytes:
            return False
        return self._volume.read(name, 0, len(header)) == header

    @override
    def repair(self, location: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        # A correct file is not written again.
        if damaged or not self.has_whole_file(location, manifest):
            self._write_data(location, manifest, self._repaired_chunks(location, manifest, damaged))
        content = manifest.to_bytes()
        if self.read_manifest(location, manifest.rank) != content:
            self._volume.write(_manifest_name(location, manifest.rank), [content])

    @override
    def discard(self, location: str) -> None:
        self._remove(location, self._volume.list(f"{location}/"))

    def sweep(self, keep: Collection[str] = (), *, is_only_writer: bool = False) -> list[str]:
        """Removes folders without a record, remains of interrupted saves, except the locations in ``keep``; returns the
        removed ones. Folders newer than the newest snapshot stay, because another process may be writing them, unless
        ``is_only_writer`` says that none is: we hold the run's lock and no save has begun."""
        names = self._volume.list(f"{self._run}/step-")
        unfinished = self._volume.leftovers(f"{self._run}/step-")
        held = {name.removesuffix(f"/{_RECORD}") for name in names if name.endswith(f"/{_RECORD}")}
        newest = max(map(_step_of, held), default=-1)
        seen = {name.rpartition("/")[0] for name in (*names, *unfinished)}
        unfinished_locations = (location for location in seen - held - set(keep) if _step_of(location) >= 0)
        removed = []
        for location in sorted(each for each in unfinished_locations if is_only_writer or _step_of(each) < newest):
            # A writer that was suspended for long and lost its lock may have committed since the listing.
            if self._volume.size_bytes(f"{location}/{_RECORD}") is None:
                self._remove(location, [name for name in names if name.startswith(f"{location}/")])
                removed.append(location)
        if is_only_writer:
            self._volume.sweep(f"{self._run}/step-")  # and empty folders, which no listing shows
        return removed

    def time_write(self, num_bytes: int) -> float:
        """Writes a file of that length durably, removes it again, and returns the seconds of the write."""
        name = f"{self._run}/probe-{secrets.token_hex(8)}"
        content = bytes(num_bytes)
        try:
            begun = time.perf_counter()
            self._volume.write(name, [content])
            return time.perf_counter() - begun
        finally:
            self._volume.delete_many([name])

    def tidy(self, *, is_only_writer: bool = False) -> None:
        """Sweeps before a run's first save; an error of the storage is only logged."""
        try:
            for location in self.sweep(is_only_writer=is_only_writer):
                logger.info("removed %s: an interrupted save", location)
        except StorageError as error:
            logger.warning("remains of interrupted saves could not be removed: %s", error)

    @override
    def close(self) -> None:
        self._volume.close()

    def _remove(self, location: str, names: Sequence[str]) -> None:
        # The record first: from then on the folder does not count.
        self._volume.delete_many(sorted(names, key=lambda name: not name.endswith(f"/{_RECORD}")))
        self._volume.sweep(f"{location}/")

    def _write_data(self, location: str, manifest: Manifest, chunks: Iterable[Bytes]) -> None:
        name, header = _data_name(location, manifest), _header(manifest)
        written = self._volume.write(name, itertools.chain([header] if header else [], chunks))
        expected = len(header) + manifest.stored_bytes
        if written != expected:
            raise CheckpointError.of(f"{expected} bytes of chunks for {name}", written, "save again")

    def _read_run(self, name: str, bounds: Sequence[int], run: range) -> Mapping[int, Bytes]:
        """Reads adjacent chunks; if the range cannot be read, those that can be read one by one."""
        first = bounds[run.start]
        buffer = np.empty(bounds[run.stop] - first, dtype=np.uint8).data
        try:
            self._volume.read_into(name, first, buffer)
        except StorageError:
            if len(run) == 1:
                return {}
            pieces = (self._read_run(name, bounds, range(number, number + 1)) for number in run)
            return {number: chunk for piece in pieces for number, chunk in piece.items()}
        return {number: buffer[bounds[number] - first : bounds[number + 1] - first] for number in run}

    def _repaired_chunks(self, location: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> Iterator[Bytes]:
        """Yields the corrected chunks, or raises: the file stays, as what is unreadable now may not stay so."""
        for number, chunk in enumerate(manifest.chunks):
            right = damaged[number] if number in damaged else self.read_chunks(location, manifest, [number])[0]
            if right is None or digest_of(right) != chunk.digest:
                name = _data_name(location, manifest)
                raise CorruptCheckpointError(f"{name} is not written again: its chunk {number} is lost or unreadable")
            yield right


def _data_name(location: str, manifest: Manifest) -> str:
    kind = "safetensors" if manifest.codec == "none" else "chunks"
    return f"{location}/rank-{manifest.rank}.{kind}"


def _manifest_name(location: str, rank: int) -> str:
    return f"{location}/rank-{rank}.json"


def _header(manifest: Manifest) -> bytes:
    return safetensors_header(manifest) if manifest.codec == "none" else b""


def _chunk_bounds(manifest: Manifest) -> list[int]:
    """Returns where each chunk begins in the file, and where the last one ends."""
    lengths = (chunk.num_bytes for chunk in manifest.chunks)
    return list(itertools.accumulate(lengths, initial=len(_header(manifest))))


def _runs(numbers: Iterator[int]) -> Iterator[range]:
    """Groups ascending numbers into ranges of neighbours."""
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        yield range(members[0], members[-1] + 1)


def _step_of(location: str) -> int:
    """Returns the step of a location, or −1 for any other path."""
    match = _PLACE.fullmatch(location.rpartition("/")[2])
    return int(match[1]) if match else -1
