"""Defines the manifest and the commit record: what a snapshot consists of, and what makes it exist.

A snapshot of W ranks is W shards, each cut into chunks of equal length that are hashed as they are stored. The shard's
*manifest* lists tensors and chunks. The *commit record* lists the digests of the manifests, is written last and is the
same in every tier: a snapshot whose record is missing or does not match does not exist. Both are JSON (docs/format.md).
A version 2 snapshot may build on another, its *base*.

Parsing checks every type and range, and that the bytes are the canonical ones. Invariant: bytes that pass
`Manifest.parse(…, digest)` with a digest from a parsed `Commit` are the bytes that the rank wrote, or 128 bits of xxh3
have collided.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import Any, Final

from shade.checkpoint._format.digest import (
    as_count,
    as_digest,
    as_list,
    as_number,
    as_object,
    canonical,
    check_canonical,
    digest_of,
    expect,
    parse_json,
)
from shade.errors import CorruptCheckpointError, NewerSnapshotError, StateMismatchError
from shade.types import Bytes

FORMAT: Final = "shade-checkpoint"
VERSION: Final = 2
"""The newest version that is read and written."""
CHUNK_BYTES: Final = 4 * 2**20 - 4096
"""The unit of hashing, transfer, storage and repair. Between 1 and 8 MB the rates of hash, socket and disk are flat. A
page short of 4 MiB: a server adds a few bytes, and jemalloc would then allocate 5 MiB (decision 0010)."""
ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Width of each tensor type, as safetensors spells it."""
MIN_LOSSY_ITEMS: Final = 1024
"""A float32 tensor with fewer items is always stored exactly: step counts, biases, norms."""
EXACT_CODECS: Final = frozenset({"none", "zstd", "dedup", "xor-zstd"})
"""Codecs that are exact; data of any other needs bounds."""
ALIGNMENT: Final = 4096
_HEADER_LENGTH: Final = struct.Struct("<Q")
_MAX_RANKS: Final = 2**20
_MAX_CHUNK_BYTES: Final = 2**30
_MAX_DIMENSIONS: Final = 64
_RUN: Final = re.compile(r"(?!\.{1,2}\Z)[^\x00-\x1f\x7f/\\]{1,128}")
_CODEC: Final = re.compile(r"[a-z0-9_-]{1,32}")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a shard."""

    dtype: str
    """As safetensors spells it: ``F32``, ``BF16``, ``I64`` …"""
    shape: tuple[int, ...]
    start: int
    """First byte in the shard's data, before any codec."""
    stop: int
    """One past the last."""

    @property
    def may_be_lossy(self) -> bool:
        """Whether a lossy codec may change it."""
        return self.dtype == "F32" and self.stop - self.start >= 4 * MIN_LOSSY_ITEMS


@dataclass(frozen=True)
class ChunkEntry:
    """One chunk of a shard, as it is stored."""

    num_bytes: int
    """Stored length; that of the data if the codec is ``none``."""
    digest: str
    """`digest_of` the stored bytes."""
    codec: str | None = None
    """Version 2: name of the chunk's codec."""
    plain: str | None = None
    """Version 2: `digest_of` the data before the codec."""


@dataclass(frozen=True)
class Bound:
    """The error of a tensor, as measured when it was saved: a restored tensor is at most this far off."""

    max_abs: float
    """Greatest absolute difference of an item."""
    relative: float
    """2-norm of the difference over the 2-norm of the tensor."""


@dataclass(frozen=True)
class Manifest:
    """One rank's shard."""

    run: str
    """The run id."""
    step: int
    """Optimizer steps done when the state was copied."""
    rank: int
    world_size: int
    codec: str
    """Name in `_codecs.base.CODECS`."""
    num_bytes: int
    """Length of the data, before any codec."""
    tensors: Mapping[str, TensorEntry]
    """By name, ascending and without gaps in `start`."""
    chunks: tuple[ChunkEntry, ...]
    """Chunk i holds the data from i × `chunk_bytes` on."""
    tree: Any
    """The state with each tensor replaced by its name: see `_capture.flatten`."""
    chunk_bytes: int = CHUNK_BYTES
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    """Version 2: bounds of the tensors that are not exact."""
    version: int = 1

    def data_length(self, number: int) -> int:
        """Returns the length of a chunk before any codec."""
        return min(self.chunk_bytes, self.num_bytes - number * self.chunk_bytes)

    def plain_digest(self, number: int) -> str | None:
        """Returns `digest_of` a chunk before any codec, or None if version 1 does not have it."""
        entry = self.chunks[number]
        return entry.digest if self.codec == "none" else entry.plain

    def chunk_codec(self, number: int) -> str:
        """Returns the name of a chunk's codec."""
        return self.chunks[number].codec or self.codec

    @property
    def stored_bytes(self) -> int:
        """Stored length of all chunks."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @cached_property
    def item_bytes(self) -> int:
        """Width of the items that make up most of the data; codecs group bytes by it."""
        held: dict[int, int] = {}
        for entry in self.tensors.values():
            width = ITEM_BYTES[entry.dtype]
            held[width] = held.get(width, 0) + entry.stop - entry.start
        return max(held, key=lambda width: (held[width], width), default=1)

    @cached_property
    def _order(self) -> tuple[list[int], list[str]]:
        """Starts and names of the tensors, ascending."""
        return [entry.start for entry in self.tensors.values()], list(self.tensors)

    def tensors_between(self, first: int, last: int) -> Iterator[tuple[str, TensorEntry]]:
        """Yields name and entry of the tensors that have bytes between ``first`` and ``last``, in order."""
        starts, names = self._order
        number = max(0, bisect_right(starts, first) - 1)
        while number and starts[number] == starts[number - 1]:  # behind empty tensors
            number -= 1
        while number < len(names) and starts[number] < last:
            entry = self.tensors[names[number]]
            if entry.start < entry.stop and entry.stop > first:
                yield names[number], entry
            number += 1

    def chunks_of(self, names: Iterable[str]) -> list[int]:
        """Returns the numbers of the chunks that hold some tensors, ascending, each once.

        Raises StateMismatchError if the shard has no such tensor.
        """
        spans = []
        for name in names:
            entry = self.tensors.get(name)
            if entry is None:
                expected = f"a tensor of the {len(self.tensors)} that rank {self.rank} saved"
                raise StateMismatchError.of(expected, name, "ask another rank's shard")
            spans.append(range(entry.start, entry.stop))
        return self.chunks_between(spans)

    def chunks_between(self, spans: Iterable[range]) -> list[int]:
        """Returns the numbers of the chunks that hold some bytes of the shard, ascending, each once."""
        wanted: set[int] = set()
        for span in spans:
            if span:
                wanted.update(range(span.start // self.chunk_bytes, (span.stop - 1) // self.chunk_bytes + 1))
        return sorted(wanted)

    @cached_property
    def _content(self) -> bytes:
        return canonical({"format": FORMAT, **_fields(self)}, default=_members)

    def to_bytes(self) -> bytes:
        """Returns canonical JSON: equal manifests give equal bytes."""
        return self._content

    @property
    def digest(self) -> str:
        """Digest that the commit record has of it."""
        return digest_of(self._content)

    @classmethod
    def parse(cls, content: Bytes, digest: str) -> Manifest:
        """Parses and checks a manifest.

        Raises CorruptCheckpointError if it is not the committed one, or its version is unknown.
        """
        if digest_of(content) != digest:
            raise CorruptCheckpointError(f"a manifest of {len(content)} bytes is not the one that was committed")
        fields = _parse(content, cls)
        is_version_2 = fields["version"] == 2
        tensors = as_object(fields["tensors"], "tensors")
        entries = [(name, _tensor(name, entry)) for name, entry in tensors.items()]
        entries.sort(key=lambda each: (each[1].start, each[1].stop, -ITEM_BYTES[each[1].dtype], each[0]))
        fields["tensors"] = dict(entries)
        fields["chunks"] = tuple(_chunk(each, is_version_2) for each in as_list(fields["chunks"], "chunks"))
        if is_version_2:
            bounds = as_object(fields["bounds"], "bounds")
            fields["bounds"] = {name: _bound(name, bound) for name, bound in bounds.items()}
        manifest = cls(**fields)
        manifest._check()
        check_canonical(manifest.to_bytes, content)
        return manifest

    def _check(self) -> None:
        expect(self.run, type(self.run) is str and _RUN.fullmatch(self.run), "run")
        as_count(self.step, "step")
        as_count(self.world_size, "world_size", 1, _MAX_RANKS)
        as_count(self.rank, "rank", 0, self.world_size - 1)
        expect(self.codec, type(self.codec) is str and _CODEC.fullmatch(self.codec), "codec")
        as_count(self.num_bytes, "num_bytes")
        as_count(self.chunk_bytes, "chunk_bytes", 1, _MAX_CHUNK_BYTES)
        end = 0
        for name, entry in self.tensors.items():
            expect(entry.start, entry.start == end, f"start of {name!r}, which leaves a hole or an overlap")
            end = entry.stop
        expect(self.num_bytes, self.num_bytes == end, "num_bytes, which are not those of the tensors")
        num_chunks = -(-self.num_bytes // self.chunk_bytes)
        expect(len(self.chunks), len(self.chunks) == num_chunks, "number of chunks")
        for number, chunk in enumerate(self.chunks):
            length, is_plain = self.data_length(number), self.chunk_codec(number) == "none"
            most = length if is_plain else 2 * length + 1024
            as_count(chunk.num_bytes, f"num_bytes of chunk {number}", length if is_plain else 1, most)
        self._check_bounds()

    def _check_bounds(self) -> None:
        """Checks that every inexact tensor has a bound, and every bound a tensor."""
        expect(self.version, self.version == 1 or self.codec != "none", "version for codec 'none'")
        unknown = sorted(self.bounds.keys() - self.tensors.keys())
        expect(unknown, not unknown, "bounds, of tensors that it does not have")
        for number, chunk in enumerate(self.chunks):
            if chunk.codec is not None and chunk.codec not in EXACT_CODECS:
                first = number * self.chunk_bytes
                for name, entry in self.tensors_between(first, first + self.data_length(number)):
                    is_bounded = name in self.bounds or not entry.may_be_lossy
                    expect(name, is_bounded, f"chunk {number}, which is not exact: a tensor in it has no bound")


@dataclass(frozen=True)
class Commit:
    """The commit record: it makes a snapshot exist."""

    run: str
    step: int
    sequence: int
    """Counts the saves of a run through all restarts; the record with the higher count is newer."""
    world_size: int
    manifests: tuple[str, ...]
    """Digest of each rank's manifest."""
    num_bytes: int
    """Bytes of data of all ranks together."""
    saved_at: float
    """Seconds since 1970, when the state was copied."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values that the caller passed: a validation loss to choose the best by."""
    base: str | None = None
    """Version 2: digest of the record of the base; None if the snapshot needs no other."""
    version: int = 1

    def to_bytes(self) -> bytes:
        """Returns canonical JSON that contains its own digest; a metric that is not finite is written as null."""
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        body = {"format": FORMAT, **_fields(self), "metrics": metrics}
        return canonical({**body, "digest": digest_of(canonical(body))})

    @property
    def digest(self) -> str:
        """Digest of the record: the same in every tier."""
        return digest_of(self.to_bytes())

    @classmethod
    def parse(cls, content: Bytes) -> Commit:
        """Parses and checks a record.

        Raises CorruptCheckpointError if it does not match its own digest, or its version is unknown.
        """
        fields = _parse(content, cls, "digest")
        del fields["digest"]  # check_canonical() compares it
        fields["manifests"] = tuple(as_digest(each, "manifests") for each in as_list(fields["manifests"], "manifests"))
        fields["metrics"] = {
            name: math.nan if value is None else as_number(value, "metrics")
            for name, value in as_object(fields["metrics"], "metrics").items()
        }
        record = cls(**fields)
        expect(record.run, type(record.run) is str and _RUN.fullmatch(record.run), "run")
        for name in ("step", "sequence", "num_bytes"):
            as_count(fields[name], name)
        as_count(record.world_size, "world_size", 1, _MAX_RANKS)
        expect(len(record.manifests), len(record.manifests) == record.world_size, "number of manifests")
        as_number(record.saved_at, "saved_at")
        expect(record.base, record.base is None or as_digest(record.base, "base"), "base")
        check_canonical(record.to_bytes, content)
        return record


def safetensors_header(manifest: Manifest) -> bytes:
    """Returns the header that makes a shard's file a safetensors file, for a shard with the codec ``none``.

    Eight bytes of length (little endian), JSON, and spaces up to a multiple of 4096, so that the data behind it can be
    written and mapped page by page. It depends on the manifest alone: the position of a chunk is known without the
    file, and a damaged header hides nothing and is written again by a repair.

    Args:
        manifest: Its tensors become entries; run, step and rank go into the metadata, as text.

    Returns:
        A multiple of `ALIGNMENT` bytes; tensor offsets in it count from its end.
    """
    metadata = {
        "format": "pt",
        "written_by": f"{FORMAT} {manifest.version}",
        "run": manifest.run,
        "step": str(manifest.step),
        "rank": str(manifest.rank),
        "world_size": str(manifest.world_size),
    }
    return header_of(manifest.tensors, metadata, ALIGNMENT)


def header_of(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], alignment: int) -> bytes:
    """Returns the header of a safetensors file: a multiple of so many bytes."""
    listed: dict[str, object] = {"__metadata__": metadata}
    for name, entry in entries.items():
        listed[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.start, entry.stop]}
    body = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-(_HEADER_LENGTH.size + len(body)) % alignment)
    return _HEADER_LENGTH.pack(len(body)) + body


_VERSION_2_FIELDS: Final[Mapping[type, frozenset[str]]] = {Manifest: frozenset({"bounds"}), Commit: frozenset({"base"})}
"""Members that version 1 does not have."""


def _fields(record: Manifest | Commit) -> dict[str, Any]:
    """Returns the members of a record in its version."""
    names = {each.name for each in dataclass_fields(record)}
    names -= _VERSION_2_FIELDS[type(record)] if record.version == 1 else set()
    return {name: getattr(record, name) for name in names}


def _members(entry: Any) -> dict[str, Any]:
    """Returns the members of an entry; a field that the version does not have is None."""
    return {name: value for name, value in vars(entry).items() if value is not None}


def _parse(content: Bytes, kind: type, *others: str) -> dict[str, Any]:
    """Returns the unchecked fields of a record of a known version, if they are the expected ones."""
    fields = as_object(parse_json(content), "JSON")
    name, version = fields.pop("format", None), fields.get("version")
    if name != FORMAT or type(version) is not int or not 1 <= version <= VERSION:
        said = f"expected {FORMAT} version 1 to {VERSION}, got {(name, version)!r}; use the shade that wrote it"
        is_newer = name == FORMAT and type(version) is int and version > VERSION
        # Only what is as it was written: a damaged record is no reason to stop.
        body = {"format": name, **{key: value for key, value in fields.items() if key != "digest"}}
        with contextlib.suppress(ValueError, RecursionError):  # what cannot be written was not
            if is_newer and fields.get("digest") == digest_of(canonical(body)):
                raise NewerSnapshotError(said)
        raise CorruptCheckpointError(said)
    expected = {each.name for each in dataclass_fields(kind)} | set(others)
    expected -= _VERSION_2_FIELDS[kind] if version == 1 else set()
    if fields.keys() != expected:
        raise CorruptCheckpointError(f"a record with fields {sorted(fields)} instead of {sorted(expected)}")
    return fields


def _tensor(name: str, found: Any) -> TensorEntry:
    entry = as_object(found, f"tensor {name!r}")
    expect(name, name != "__metadata__", "name of a tensor")
    expect(sorted(entry), entry.keys() == {"dtype", "shape", "start", "stop"}, f"tensor {name!r}")
    width = ITEM_BYTES.get(entry["dtype"]) if type(entry["dtype"]) is str else None
    expect(entry["dtype"], width, f"dtype of {name!r}")
    assert width is not None
    shape = as_list(entry["shape"], f"shape of {name!r}")
    expect(len(shape), len(shape) <= _MAX_DIMENSIONS, f"shape of {name!r}")
    sizes = tuple(as_count(size, f"shape of {name!r}") for size in shape)
    start, stop = as_count(entry["start"], f"start of {name!r}"), as_count(entry["stop"], f"stop of {name!r}")
    expect((start, stop), stop - start == math.prod(sizes) * width, f"length of {name!r}")
    expect(start, start % width == 0, f"alignment of {name!r}")
    return TensorEntry(entry["dtype"], sizes, start, stop)


def _chunk(found: Any, is_version_2: bool) -> ChunkEntry:
    entry = as_object(found, "chunk")
    known = {"num_bytes", "digest"} | ({"codec", "plain"} if is_version_2 else set())
    expect(sorted(entry), entry.keys() == known, "chunk")
    made = ChunkEntry(
        as_count(entry["num_bytes"], "length of a chunk"), as_digest(entry["digest"], "digest of a chunk")
    )
    if not is_version_2:
        return made
    codec = entry["codec"]
    expect(codec, type(codec) is str and _CODEC.fullmatch(codec), "codec of a chunk")
    return ChunkEntry(made.num_bytes, made.digest, codec, as_digest(entry["plain"], "digest of a chunk"))


def _bound(name: str, found: Any) -> Bound:
    entry = as_object(found, f"bound of {name!r}")
    expect(sorted(entry), entry.keys() == {"max_abs", "relative"}, f"bound of {name!r}")
    sizes = [as_number(entry[key], f"bound of {name!r}") for key in ("max_abs", "relative")]
    expect(sizes, all(math.isfinite(each) and each >= 0 for each in sizes), f"bound of {name!r}")
    return Bound(*sizes)
