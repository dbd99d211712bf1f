"""What a tier is: a place where committed snapshots lie. Own memory, cluster memory, durable storage: one interface.

A snapshot goes into a tier in four steps, and into every tier in the same ones:

1. `Tier.prepare`, on one rank: chooses a *place* (a slot, a directory), makes what lay there cease to exist, and says
   no if there is no room. All ranks are told the place.
2. `Tier.put`, on every rank: writes its shard: chunks, then manifest. Nobody can see it yet.
3. The ranks vote. One that failed: `Tier.discard`.
4. `Tier.commit`, on one rank (on each, where a tier belongs to a machine): writes the record. Now it exists.

Reading trusts nothing: a tier gives bytes as it finds them, and `_restore.reader` compares them with the
record, goes to another copy or tier, and gives the tier back what it had lost.
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
    """Stored form, in order, as many as the manifest lists; perhaps made as they are asked for, so taken once."""


class Tier(ABC):
    """A place for snapshots of one run.

    Raises:
        StoreError: By any method of a tier in a store.
        StorageError: By any method of a tier in durable storage.
    """

    name: ClassVar[str]
    """``own memory``, ``cluster memory`` or ``storage``: as it is printed."""
    every_rank_commits: ClassVar[bool] = False
    """True where the record has to be written on each machine, and so by each rank."""
    is_durable: ClassVar[bool] = False
    """True where what is committed outlives all machines."""
    holds_plain: ClassVar[bool] = False
    """True where chunks of a snapshot of version 2 are given as they were before any codec, and in no other form."""
    damaged: Sequence[str] = ()
    """Places whose record `held` could not read, the last time: there was a snapshot, and perhaps it is the newest."""
    num_copies: int = 1
    """How many times a chunk can be asked for before it is lost here; a reconstruction counts as a copy."""

    @abstractmethod
    def prepare(self, step: int, shard_bytes: Sequence[int]) -> str:
        """Makes room; what lay at the place ceases to exist first. Called by rank 0, never twice at once.

        Args:
            step: Of the snapshot to come.
            shard_bytes: Stored length of each rank's shard.

        Returns:
            The place.

        Raises:
            StoreFullError: No room in a store: nothing was changed that anyone could miss.
            StorageFullError: The same of storage.
        """

    @abstractmethod
    def put(self, place: str, shard: Shard) -> None:
        """Writes one rank's shard; whoever looks for snapshots does not see it before `commit`."""

    @abstractmethod
    def commit(self, place: str, record: Commit) -> None:
        """Makes the snapshot exist. Every rank has returned from `put` before; when it returns, it stays."""

    @abstractmethod
    def held(self) -> Mapping[str, Commit]:
        """What exists: each place with its record. Places without one, or with a damaged one, are left out."""

    @abstractmethod
    def read_manifest(self, place: str, rank: int, copy: int = 0) -> bytes | None:
        """What is found under a manifest's name.

        Args:
            place: From `held`.
            rank: Whose.
            copy: Below `num_copies`.

        Returns:
            The bytes, unverified; None where there are none, or the part of the tier that has them is down.
        """

    @abstractmethod
    def read_chunks(self, place: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0) -> list[Bytes | None]:
        """What is found under chunks' names.

        Args:
            place: From `held`.
            manifest: Verified.
            numbers: Which chunks. Ask for a few dozen at once: they are fetched together, and all held in memory.
            copy: Below `num_copies`.

        Returns:
            The bytes, unverified, in the order of ``numbers``; None where there are none.
        """

    def in_place(self, place: str, manifest: Manifest) -> memoryview | None:
        """A shard's data where it lies, for as long as this rank begins no save.

        Args:
            place: From `held`.
            manifest: Verified.

        Returns:
            Writable, unverified, in one piece, not encoded; None where there is no such thing, as in most tiers.
        """
        return None

    def read_chunks_into(
        self,
        place: str,
        manifest: Manifest,
        numbers: Sequence[int],
        buffers: Sequence[memoryview],
        copy: int = 0,
    ) -> list[bool]:
        """As `read_chunks`, into the caller's memory; tiers that can do so without a copy on the way override it.

        Args:
            place: From `held`.
            manifest: Verified.
            numbers: Which chunks.
            buffers: One for each, of the chunk's stored length.
            copy: Below `num_copies`.

        Returns:
            Where the buffer holds what was found, unverified; where it does not, it holds nothing of meaning.
        """
        found = []
        for buffer, content in zip(buffers, self.read_chunks(place, manifest, numbers, copy), strict=True):
            fits = content is not None and len(content) == len(buffer)
            if content is not None and fits:
                np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(content, np.uint8))  # lets other threads run
            found.append(fits)
        return found

    @abstractmethod
    def repair(self, place: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        """Writes verified chunks over what is damaged or missing in any copy.

        Args:
            place: From `held`.
            manifest: Whose they are; written again itself.
            damaged: Right bytes by chunk number; may be empty.
        """

    @abstractmethod
    def discard(self, place: str) -> None:
        """Removes whatever lies there, the record first. Nothing there is no error."""

    @abstractmethod
    def close(self) -> None:
        """Frees connections and mappings; what is committed stays. Safe to call twice."""
