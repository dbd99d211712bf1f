"""Manifest and commit record: what a snapshot consists of, and the word that makes it count.

A snapshot of W ranks is W shards. A shard is the rank's tensors laid end to end (the data of a safetensors file) and
cut into chunks of equal length, each hashed as it is stored; its *manifest* lists tensors and chunks. The *commit
record* lists the manifests' hashes and carries its own. It is written last, and is the same in every tier: a snapshot
whose record is not there, or does not match, does not exist. No pickle; JSON alone, in docs/format.md.

Both are read with suspicion: of every field type and range, of a shard that its tensors tile it without a gap and that
its chunks are as many and as long as they must be, and of the bytes that they are the canonical ones. Invariant: bytes
that pass `Manifest.parse(…, digest)` with the digest of a record that passed `Commit.parse` are the bytes that were
written by the rank, or 128 bits of xxh3 have collided; and what is parsed gives the same bytes again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import Any, Final

import xxhash

from shade.errors import CorruptCheckpointError
from shade.types import Bytes

FORMAT: Final = "shade-checkpoint"
VERSION: Final = 1
CHUNK_BYTES: Final = 4 * 2**20 - 4096
"""What is hashed, sent, stored and repaired at once. Between 1 and 8 MB the rates of hash, socket and disk are flat. A
page short of 4 MiB, because a server adds a few bytes and jemalloc would then give out 5 MiB (decision 0010)."""
ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Width of each type that a tensor can have, as safetensors spells them."""
_MAX_INT: Final = 2**63 - 1
_MAX_RANKS: Final = 2**20
_MAX_CHUNK_BYTES: Final = 2**30
_MAX_DIMENSIONS: Final = 64
_RUN: Final = re.compile(r"(?!\.{1,2}\Z)[^\x00-\x1f\x7f/\\]{1,128}")
_CODEC: Final = re.compile(r"[a-z0-9_-]{1,32}")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


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
            width = ITEM_BYTES[entry.dtype]
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
        fields = _parse(content, cls)
        tensors = _object(fields["tensors"], "tensors")
        entries = [(name, _tensor(name, entry)) for name, entry in tensors.items()]
        entries.sort(key=lambda each: (each[1].start, each[1].stop, -ITEM_BYTES[each[1].dtype], each[0]))
        fields["tensors"] = dict(entries)
        fields["chunks"] = tuple(map(_chunk, _list(fields["chunks"], "chunks")))
        manifest = cls(**fields)
        manifest._check()
        _is_canonical(manifest.to_bytes, content)
        return manifest

    def _check(self) -> None:
        _expect(self.run, type(self.run) is str and _RUN.fullmatch(self.run), "run")
        _count(self.step, "step")
        _count(self.world_size, "world_size", 1, _MAX_RANKS)
        _count(self.rank, "rank", 0, self.world_size - 1)
        _expect(self.codec, type(self.codec) is str and _CODEC.fullmatch(self.codec), "codec")
        _count(self.num_bytes, "num_bytes")
        _count(self.chunk_bytes, "chunk_bytes", 1, _MAX_CHUNK_BYTES)
        end = 0
        for name, entry in self.tensors.items():
            _expect(entry.start, entry.start == end, f"start of {name!r}, which leaves a hole or an overlap")
            end = entry.stop
        _expect(self.num_bytes, self.num_bytes == end, "num_bytes, which are not those of the tensors")
        num_chunks = -(-self.num_bytes // self.chunk_bytes)
        _expect(len(self.chunks), len(self.chunks) == num_chunks, "number of chunks")
        for number, chunk in enumerate(self.chunks):
            length = min(self.chunk_bytes, self.num_bytes - number * self.chunk_bytes)
            most = length if self.codec == "none" else 2 * length + 1024
            _count(chunk.num_bytes, f"num_bytes of chunk {number}", length if self.codec == "none" else 1, most)


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
        """Canonical JSON with its own digest in it; a metric that is no finite number is written as null."""
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        body = {"format": FORMAT, "version": VERSION, **asdict(self), "metrics": metrics}
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
        fields = _parse(content, cls, "digest")
        del fields["digest"]  # compared at the end, with all the rest
        fields["manifests"] = tuple(_digest(each, "manifests") for each in _list(fields["manifests"], "manifests"))
        fields["metrics"] = {
            name: math.nan if value is None else _number(value, "metrics")
            for name, value in _object(fields["metrics"], "metrics").items()
        }
        record = cls(**fields)
        _expect(record.run, type(record.run) is str and _RUN.fullmatch(record.run), "run")
        for name in ("step", "sequence", "num_bytes"):
            _count(fields[name], name)
        _count(record.world_size, "world_size", 1, _MAX_RANKS)
        _expect(len(record.manifests), len(record.manifests) == record.world_size, "number of manifests")
        _number(record.saved_at, "saved_at")
        _is_canonical(record.to_bytes, content)
        return record


def _canonical(body: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=default).encode()


def _parse(content: Bytes, kind: type, *others: str) -> dict[str, Any]:
    """The fields of a record of this version, and no others; their content is not looked at."""
    try:
        found = json.loads(bytes(content), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"a record of {len(content)} bytes that is not JSON: {error}") from error
    fields = _object(found, "JSON")
    version = (fields.pop("format", None), fields.pop("version", None))
    if version != (FORMAT, VERSION):
        raise CorruptCheckpointError(
            f"expected {FORMAT} version {VERSION}, got {version!r}; use the shade that wrote it"
        )
    expected = {each.name for each in dataclass_fields(kind)} | set(others)
    if fields.keys() != expected:
        raise CorruptCheckpointError(f"a record with fields {sorted(fields)} instead of {sorted(expected)}")
    return fields


def _is_canonical(make: Callable[[], bytes], content: Bytes) -> None:
    """Whether a record says the same again, its own digest included: no member twice, no space, nothing left out."""
    try:
        again = make()
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"a record that cannot be written: {error}") from error
    if again != content:
        raise CorruptCheckpointError(f"a record of {len(content)} bytes that does not match its digest or its form")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _expect(found: object, right: object, what: str) -> None:
    if not right:
        raise CorruptCheckpointError(f"a record with a wrong {what}: {repr(found)[:80]}")


def _object(found: Any, what: str) -> dict[str, Any]:
    _expect(found, type(found) is dict, what)
    made: dict[str, Any] = found
    return made


def _list(found: Any, what: str) -> list[Any]:
    _expect(found, type(found) is list, what)
    made: list[Any] = found
    return made


def _count(found: Any, what: str, least: int = 0, most: int = _MAX_INT) -> int:
    _expect(found, type(found) is int and least <= found <= most, what)
    return int(found)


def _number(found: Any, what: str) -> float:
    _expect(found, type(found) is float or (type(found) is int and abs(found) <= _MAX_INT), what)
    made: float = found
    return made


def _digest(found: Any, what: str) -> str:
    _expect(found, type(found) is str and _DIGEST.fullmatch(found), what)
    return str(found)


def _tensor(name: str, found: Any) -> TensorEntry:
    entry = _object(found, f"tensor {name!r}")
    _expect(name, name != "__metadata__", "name of a tensor")
    _expect(sorted(entry), entry.keys() == {"dtype", "shape", "start", "stop"}, f"tensor {name!r}")
    width = ITEM_BYTES.get(entry["dtype"]) if type(entry["dtype"]) is str else None
    _expect(entry["dtype"], width, f"dtype of {name!r}")
    assert width is not None
    shape = _list(entry["shape"], f"shape of {name!r}")
    _expect(len(shape), len(shape) <= _MAX_DIMENSIONS, f"shape of {name!r}")
    sizes = tuple(_count(size, f"shape of {name!r}") for size in shape)
    start, stop = _count(entry["start"], f"start of {name!r}"), _count(entry["stop"], f"stop of {name!r}")
    _expect((start, stop), stop - start == math.prod(sizes) * width, f"length of {name!r}")
    _expect(start, start % width == 0, f"alignment of {name!r}")
    return TensorEntry(entry["dtype"], sizes, start, stop)


def _chunk(found: Any) -> ChunkEntry:
    entry = _object(found, "chunk")
    _expect(sorted(entry), entry.keys() == {"num_bytes", "digest"}, "chunk")
    return ChunkEntry(_count(entry["num_bytes"], "length of a chunk"), _digest(entry["digest"], "digest of a chunk"))
