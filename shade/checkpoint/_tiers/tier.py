"""Defines a tier: what holds committed snapshots. Shared memory, cluster memory and storage are tiers.

A snapshot enters every tier in the same four steps:

1. `Tier.prepare`, on one rank: chooses a *location* (a slot, a folder), and raises if there is no room.
2. `Tier.put`, on every rank: writes its shard, chunks first, then the manifest. It is not visible yet.
3. The ranks vote. If one failed: `Tier.discard`.
4. `Tier.commit`, on one rank (on each, if the tier belongs to a machine): writes the record. Now the snapshot exists.

A tier returns bytes unverified; `_restore.reader` verifies them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shade.checkpoint._format.manifest import Commit, Manifest
from shade.types import Bytes


@dataclass(frozen=True)
class Shard:
    """One rank's part of a snapshot, ready to be stored."""

    manifest: Manifest
    chunks: Iterable[Bytes]
    """Stored form, in order, as many as the manifest lists. May be generated on demand, so iterate once."""


class Tier(ABC):
    """A location for the snapshots of one run.

    Raises:
        StoreError: Any method of a tier in a store may raise it.
        StorageError: Any method of a tier in durable storage may raise it.
    """

    name: ClassVar[str]
    """``shared memory``, ``cluster memory`` or ``storage``: as it is printed and recorded."""
    every_rank_commits: ClassVar[bool] = False
    """True if the record has to be written on each machine, and so by each rank."""
    is_durable: ClassVar[bool] = False
    """True if a committed snapshot outlives all machines."""
    holds_plain: ClassVar[bool] = False
    """True if chunks of a version 2 snapshot are returned as they were before any codec, and in no other form."""
    damaged: Sequence[str] = ()
    """Places whose record the last `held` could not read: a snapshot was there, perhaps the newest."""
    num_copies: int = 1
    """How many times a chunk can be requested before it is lost here; a reconstruction counts as a copy."""

    @abstractmethod
    def prepare(self, step: int, shard_bytes: Sequence[int]) -> str:
        """Makes room for shards of these stored lengths and returns their location, where nothing lies any more.

        Called by rank 0, never twice at once. Raises `StoreFullError` or `StorageFullError` if there is no room;
        nothing was lost."""

    @abstractmethod
    def put(self, location: str, shard: Shard) -> None:
        """Writes one rank's shard; it is invisible until `commit`."""

    @abstractmethod
    def commit(self, location: str, record: Commit) -> None:
        """Makes the snapshot exist; every rank has returned from `put` before. It is persistent on return."""

    @abstractmethod
    def held(self, known: Mapping[str, Commit] | None = None) -> Mapping[str, Commit]:
        """Returns each location that holds a snapshot with its record; missing or damaged records are left out. Records
        that are ``known``, since only the caller writes here, need not be read."""

    @abstractmethod
    def read_manifest(self, location: str, rank: int, copy: int = 0) -> bytes | None:
        """Returns the unverified bytes of a manifest, or None if they are missing or their server is down. ``copy`` is
        below `num_copies`."""

    @abstractmethod
    def read_chunks(
        self, location: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0
    ) -> list[Bytes | None]:
        """Returns the unverified bytes of chunks in the order of ``numbers``, None for missing ones. Ask for a few
        dozen at once, as all are fetched together and held in memory. ``copy`` is below `num_copies`."""

    def has_whole_file(self, location: str, manifest: Manifest) -> bool:
        """Returns whether what encloses a shard's chunks is as it was written: the header and the length of a file.
        True in tiers without files."""
        return True

    def in_place(self, location: str, manifest: Manifest) -> memoryview | None:
        """Returns a shard's data where it lies, valid until this rank begins a save: writable, unverified, contiguous,
        not encoded. Returns None in tiers that cannot map it, which are most."""
        return None

    def read_chunks_into(
        self,
        location: str,
        manifest: Manifest,
        numbers: Sequence[int],
        buffers: Sequence[memoryview],
        copy: int = 0,
    ) -> list[bool]:
        """Reads chunks into the caller's buffers, one per chunk, of its stored length: for chunks that no other process
        reads. Tiers that can do so without a copy override it. Returns whether each buffer holds the unverified chunk;
        otherwise its content is undefined."""
        found = []
        for buffer, content in zip(buffers, self.read_chunks(location, manifest, numbers, copy), strict=True):
            fits = content is not None and len(content) == len(buffer)
            if content is not None and fits:
                np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(content, np.uint8))  # releases the GIL
            found.append(fits)
        return found

    @abstractmethod
    def repair(self, location: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        """Overwrites damaged or missing chunks in every copy, and writes the manifest again. ``damaged`` are verified
        chunks by number, and may be empty."""

    @abstractmethod
    def discard(self, location: str) -> None:
        """Removes what lies at a location, the record first. An empty location is no error."""

    @abstractmethod
    def close(self) -> None:
        """Closes connections and mappings; committed snapshots stay. Safe to call twice."""
