"""Tiers in a dictionary, which note what is done to them and fail where a test says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import ChunkEntry, Commit, Manifest, TensorEntry
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.types import Bytes

CHUNK = 64


class Shelf(Tier):
    """A tier in a dictionary, which notes what is done to it and fails where it is told to."""

    name: ClassVar[str] = "shelf"

    def __init__(self) -> None:
        self.records: dict[str, Commit] = {}
        self.manifests: dict[tuple[str, int], bytes] = {}
        self.chunks: dict[tuple[str, int, int], bytes] = {}
        self.marks: dict[str, int] = {}
        self.noted: list[str] = []
        self.done: list[str] = []
        self.failing: dict[str, Exception] = {}

    def _do(self, what: str) -> None:
        self.done.append(what)
        error = self.failing.get(what.split()[0])
        if error is not None:
            raise error

    def is_complete(self) -> bool:
        return True

    def prepare(self, step: int, shard_bytes: Sequence[int]) -> str:
        self._do(f"prepare {step}")
        self.records.pop(str(step), None)
        return str(step)

    def put(self, place: str, shard: Shard) -> None:
        manifest = shard.manifest
        for number, content in enumerate(shard.chunks):
            self._do(f"write {place} {manifest.rank} {number}")
            self.chunks[place, manifest.rank, number] = bytes(content)
        self.manifests[place, manifest.rank] = manifest.to_bytes()

    def commit(self, place: str, record: Commit) -> None:
        self._do(f"commit {place}")
        self.records[place] = record

    def note_damage(self, place: str) -> None:
        self.noted.append(place)

    def held(self, known: Mapping[str, Commit] | None = None) -> Mapping[str, Commit]:
        self._do("held")
        return dict(self.records)

    def read_manifest(self, place: str, rank: int, copy: int = 0) -> bytes | None:
        return self.manifests.get((place, rank))

    def read_chunks(self, place: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0) -> list[Bytes | None]:
        self._do(f"read {place}")
        return [self.chunks.get((place, manifest.rank, number)) for number in numbers]

    def repair(self, place: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        raise AssertionError

    def discard(self, place: str) -> None:
        self._do(f"discard {place}")
        self.records.pop(place, None)

    def close(self) -> None:
        pass

    def dirty(self) -> list[tuple[str, Commit]]:
        self._do("dirty")
        found = [(place, self.records[place]) for place in self.marks if place in self.records]
        return sorted(found, key=lambda each: each[1].sequence)

    def is_dirty(self, place: str) -> bool:
        return place in self.marks

    def hold(self, place: str) -> None:
        self._do(f"hold {place}")

    def release_hold(self, place: str) -> None:
        self._do(f"release_hold {place}")

    def mark_clean(self, place: str, step: int) -> None:
        self._do(f"clean {place}")
        if self.marks.get(place) == step:
            del self.marks[place]

    def take(
        self, step: int, *, sequence: int | None = None, ranks: int = 2, chunks: int = 3, **metrics: float
    ) -> None:
        """Makes a snapshot, dirty."""
        place, digests = str(step), []
        for rank in range(ranks):
            contents = [bytes([step % 256, rank, number]) * CHUNK for number in range(chunks)]
            entries = tuple(ChunkEntry(len(content), digest_of(content)) for content in contents)
            length = sum(map(len, contents))
            tensors = {"data": TensorEntry("U8", (length,), 0, length)}
            manifest = Manifest("run", step, rank, ranks, "none", length, tensors, entries, None, len(contents[0]))
            self.manifests[place, rank] = manifest.to_bytes()
            self.chunks |= {(place, rank, number): content for number, content in enumerate(contents)}
            digests.append(manifest.digest)
        order = step if sequence is None else sequence
        self.records[place] = Commit("run", step, order, ranks, tuple(digests), 3 * CHUNK, 0.0, metrics)
        self.marks[place] = step


class Near(Shelf):
    """A tier that counts what is read from it, by chunk."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]
        self.read: list[int] = []

    def read_chunks(self, place: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0) -> list[Bytes | None]:
        self.read += numbers
        return super().read_chunks(place, manifest, numbers, copy)

    def repair(self, place: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        self.manifests[place, manifest.rank] = manifest.to_bytes()
        for number, content in damaged.items():
            self.chunks[place, manifest.rank, number] = bytes(content)
