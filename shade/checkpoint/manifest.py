"""Manifest and commit record: what a snapshot consists of, and the word that makes it count.

A snapshot of W ranks is W shards. A shard is the rank's tensors laid end to end (the data of a safetensors file) and
cut into chunks of equal length, each hashed as it is stored; its *manifest* lists tensors and chunks. The *commit
record* lists the manifests' hashes and carries its own. It is written last, and is the same in every tier: a snapshot
whose record is not there, or does not match, does not exist. No pickle; JSON alone, in docs/format.md.

Invariant: bytes that pass `Manifest.parse(…, digest)` with the digest of a record that passed `Commit.parse` are the
bytes that were written by the rank, or 128 bits of xxh3 have collided.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

import xxhash

from shade.errors import CorruptCheckpointError
from shade.types import Bytes

FORMAT: Final = "shade-checkpoint"
VERSION: Final = 1
CHUNK_BYTES: Final = 4 * 2**20
"""What is hashed, sent, stored and repaired at once. Between 1 and 8 MB the rates of hash, socket and disk are flat."""


def digest_of(content: Bytes) -> str:
    """xxh3, 128 bits, in hex: against rot and tearing, not against an enemy."""
    return xxhash.xxh3_128_hexdigest(content)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a shard."""

    dtype: str
    """As safetensors spells it: ``F32``, ``BF16``, ``I64`` …"""
    shape: tuple[int, ...]
    start: int
    """First byte in the shard's data, as it is before any codec."""
    stop: int
    """One past the last."""


@dataclass(frozen=True)
class ChunkEntry:
    """One chunk of a shard, as it is stored."""

    num_bytes: int
    """Stored length; that of the data where the codec is ``none``."""
    digest: str
    """`digest_of` the stored bytes."""


@dataclass(frozen=True)
class Manifest:
    """One rank's shard."""

    run: str
    """The run id."""
    step: int
    """Optimizer steps done when it was taken."""
    rank: int
    world_size: int
    codec: str
    """Name in `shade.checkpoint.codec.CODECS`."""
    num_bytes: int
    """Length of the data, before any codec."""
    tensors: Mapping[str, TensorEntry]
    """By name, ascending and without gaps in `start`."""
    chunks: tuple[ChunkEntry, ...]
    """Chunk i holds the data from i × `chunk_bytes` on."""
    tree: Any
    """The state with each tensor replaced by its name: see `shade.checkpoint.state`."""
    chunk_bytes: int = CHUNK_BYTES

    @property
    def stored_bytes(self) -> int:
        """Length of all chunks as they are stored."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def item_bytes(self) -> int:
        """Width of the items that make up most of the data: what a codec groups bytes by."""
        held: dict[int, int] = {}
        for entry in self.tensors.values():
            items = math.prod(entry.shape)
            width = (entry.stop - entry.start) // items if items else 1
            held[width] = held.get(width, 0) + entry.stop - entry.start
        return max(held, key=lambda width: (held[width], width), default=1)

    @cached_property
    def _content(self) -> bytes:
        return _canonical({"format": FORMAT, "version": VERSION, **vars(self)}, default=vars)

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal manifests give equal bytes."""
        return self._content

    @property
    def digest(self) -> str:
        """What the commit record says of it."""
        return digest_of(self._content)

    @classmethod
    def parse(cls, content: Bytes, digest: str) -> Manifest:
        """Reads one.

        Args:
            content: What `to_bytes` gave.
            digest: What the commit record says of it.

        Returns:
            The manifest.

        Raises:
            CorruptCheckpointError: It is not the one that was committed, or is of another version.
        """
        if digest_of(content) != digest:
            raise CorruptCheckpointError(f"a manifest of {len(content)} bytes is not the one that was committed")
        fields = _parse(content)
        try:
            fields["tensors"] = {
                name: TensorEntry(**entry | {"shape": tuple(entry["shape"])})
                for name, entry in fields["tensors"].items()
            }
            fields["chunks"] = tuple(ChunkEntry(**chunk) for chunk in fields["chunks"])
            return cls(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"a manifest of an unknown form: {error}") from error


@dataclass(frozen=True)
class Commit:
    """A whole snapshot: the record that makes it exist."""

    run: str
    step: int
    sequence: int
    """Counts the saves of a run through all its restarts; of two records the higher is the newer."""
    world_size: int
    manifests: tuple[str, ...]
    """Digest of each rank's manifest."""
    num_bytes: int
    """Data of all ranks together."""
    saved_at: float
    """Seconds since 1970, at the moment the state was taken."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the caller said of it: a validation loss to keep the best by."""

    def to_bytes(self) -> bytes:
        """Canonical JSON with its own digest in it."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return _canonical({**body, "digest": digest_of(_canonical(body))})

    @property
    def digest(self) -> str:
        """Of the record: the same snapshot has the same in every tier."""
        return digest_of(self.to_bytes())

    @classmethod
    def parse(cls, content: Bytes) -> Commit:
        """Reads one.

        Args:
            content: What `to_bytes` gave.

        Returns:
            The record.

        Raises:
            CorruptCheckpointError: It does not match its own digest, or is of another version.
        """
        try:
            body = json.loads(bytes(content))
            digest = body.pop("digest")
            matches = digest_of(_canonical(body)) == digest
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptCheckpointError(f"a commit record that is none: {error}") from error
        if not matches:
            raise CorruptCheckpointError(f"a commit record of {len(content)} bytes does not match its digest")
        fields = _parse(content)
        del fields["digest"]
        fields["manifests"] = tuple(fields["manifests"])
        return cls(**fields)


def _canonical(body: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=default).encode()


def _parse(content: Bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(bytes(content))
    found = (fields.pop("format", None), fields.pop("version", None))
    if found != (FORMAT, VERSION):
        raise CorruptCheckpointError(f"expected {FORMAT} version {VERSION}, got {found!r}; use the shade that wrote it")
    return fields
