"""Makes chunks again what they were before any codec: out of their stored form and, where they need it, of their base.

A chunk that is a difference needs the same chunk of the base, which may be a difference itself, and so on to one that
stands alone: at the latest in the keyframe. Each step on the way is compared with the digest that the shard's manifest
has of it, so that a base that is another one, or a difference that is missing or added twice, is found where it
happens. Own memory, where there is any, has the data as it is: nothing is built.

Invariant: what leaves this module of a snapshot of version 2 has the digest that was computed when it was saved. Of
version 1 that holds of the stored form, from which a codec makes one thing only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from shade.checkpoint.codecs.base import CODECS, Alone, Codec, Delta, Piece, standing_alone
from shade.checkpoint.digest import digest_of
from shade.checkpoint.manifest import Manifest
from shade.checkpoint.reader import BATCH, Reader, Snapshot
from shade.errors import CorruptCheckpointError
from shade.types import Bytes


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
        if isinstance(codec, Alone):
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
