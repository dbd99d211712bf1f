"""Packs a buffer into chunks in stored form, with their digests, and makes the manifest that lists them.

A codec that stores differences needs a *base*: a committed snapshot, of which the packer keeps the digests and, if the
codec needs it, the data. Every so many saves one stands alone, a *keyframe*; so does the first save after a failure. A
chunk is stored as its digest where it equals the base's, as it is where compressing does not pay, as a difference, or
alone.

Invariant: the buffer holds what any tier gives back, and is off from the state by at most `Manifest.bounds` says.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shade.checkpoint._codecs.base import CODECS, Piece, Span, Standalone, standalone_codec
from shade.checkpoint._codecs.delta import Delta
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, Bound, ChunkEntry, Manifest, TensorEntry
from shade.checkpoint._pacing.write_cost import CostModel
from shade.errors import ConfigError
from shade.types import Bytes

KEYFRAME_EVERY: Final = 8
"""Saves from one keyframe to the next. More saves mean fewer full snapshots to write, and longer chains to restore."""
_MOST_BETWEEN: Final = 1024
ALWAYS: Final = "always"
IF_FASTER: Final = "if-faster"
"""Whether chunks are always compressed, or if a cost model says so: see `_pacing.write_cost`."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class PackedShard:
    """A shard ready to be agreed on and stored."""

    manifest: Manifest
    chunks: Iterable[Bytes]
    """Stored form, in order; may be iterated more than once. Empty where a streamed codec has sent them already."""
    base: str | None = None
    """Digest of the record of the snapshot that the shard builds on; None: it stands alone."""


@dataclass(frozen=True)
class Base:
    """What the packer keeps of a committed snapshot, to compare the next one with."""

    digest: str
    """Digest of its record."""
    entries: Mapping[str, TensorEntry]
    digests: Sequence[str]
    """Digests of its chunks, before any codec."""
    data: npt.NDArray[np.uint8] | None
    num_after: int
    """Saves since the keyframe."""


@dataclass
class _Chunks:
    """The chunks of a shard that are packed so far."""

    stored: list[Bytes] = field(default_factory=list)
    entries: list[ChunkEntry] = field(default_factory=list)
    errors: dict[str, _Error] = field(default_factory=dict)
    """Errors by tensor; only of tensors that are off."""

    def add(self, stored: Bytes, entry: ChunkEntry) -> None:
        """Adds the next chunk."""
        self.stored.append(stored)
        self.entries.append(entry)


class Packer:
    """Packs one rank's shards, one after the other. The options are those of `Checkpointer`; for ``if-faster``,
    ``time_write`` writes so many bytes to the first tier and returns the seconds that it took. Raises ConfigError if
    one is out of range."""

    def __init__(
        self,
        run: str,
        rank: int,
        world_size: int,
        codec: str,
        *,
        keyframe_every: int = KEYFRAME_EVERY,
        max_error: float | None = None,
        compress: str = ALWAYS,
        time_write: Callable[[int], float] | None = None,
    ) -> None:
        if compress not in (ALWAYS, IF_FASTER):
            raise ConfigError.of(f"compress to be {ALWAYS!r} or {IF_FASTER!r}", compress, "write one of these")
        if not 1 <= keyframe_every <= _MOST_BETWEEN:
            expected = f"1 to {_MOST_BETWEEN} saves from keyframe to keyframe"
            raise ConfigError.of(expected, keyframe_every, f"{KEYFRAME_EVERY} is usual")
        if max_error is not None and not (math.isfinite(max_error) and max_error >= 0):
            raise ConfigError.of("a relative error of 0 or more", max_error, "0.01 is a hundredth of a tensor's length")
        self._run, self._rank, self._world_size = run, rank, world_size
        self.codec = codec
        """Name of the codec."""
        self._coder = CODECS.get(codec)()
        self._alone: Standalone = standalone_codec(codec if isinstance(self._coder, Standalone) else self._delta.alone)
        self._keyframe_every = keyframe_every
        asks = compress == IF_FASTER and codec != "none"
        self._costs = CostModel(time_write) if asks and time_write is not None else None
        self._max_error = max_error
        self._base: Base | None = None
        self._beyond: set[str] = set()
        """Tensors that were beyond the error limit since the last keyframe."""
        self._room: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    @property
    def _delta(self) -> Delta:
        assert isinstance(self._coder, Delta)
        return self._coder

    @property
    def version(self) -> int:
        """The version of the manifests: that of chunks which each state their codec, or of chunks which need not."""
        return 2 if self.builds or self._costs is not None else 1

    @property
    def builds(self) -> bool:
        """Whether shards may build on earlier ones."""
        return isinstance(self._coder, Delta)

    @property
    def base(self) -> str | None:
        """Digest of the record that the next shard builds on; None: it stands alone."""
        is_due = self._base is not None and self._base.num_after + 1 >= self._keyframe_every
        return None if self._base is None or is_due else self._base.digest

    def forget(self) -> None:
        """Makes the next shard stand alone."""
        self._base = None

    def draft(self, step: int, num_bytes: int, entries: Mapping[str, TensorEntry], tree: Any) -> Manifest:
        """Returns the manifest of a shard, without its chunks."""
        return Manifest(
            run=self._run,
            step=step,
            rank=self._rank,
            world_size=self._world_size,
            codec=self.codec,
            num_bytes=num_bytes,
            tensors=entries,
            chunks=(),
            tree=tree,
            chunk_bytes=CHUNK_BYTES,
            version=self.version,
        )

    def pack(
        self, step: int, buffer: torch.Tensor, num_bytes: int, entries: Mapping[str, TensorEntry], tree: Any
    ) -> PackedShard:
        """Packs a shard, whose data lie in the first ``num_bytes`` of the buffer. The buffer must not be written to
        while the chunks are in use; a lossy codec writes its decoded values to it. ``tree`` is the skeleton of the
        state."""
        data, draft = _data_of(buffer, num_bytes), self.draft(step, num_bytes, entries, tree)
        if draft.version == 1:
            starts = range(0, num_bytes, draft.chunk_bytes)
            stored = [self._encode_alone(data[start : start + draft.chunk_bytes], draft.item_bytes) for start in starts]
            chunks = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in stored)
            return PackedShard(replace(draft, chunks=chunks), stored)
        base = self._base if self.base is not None else None
        if base is None:
            self._beyond.clear()
        made = self._compare(data, draft, base)
        bounds = {name: error.bound for name, error in made.errors.items()}
        manifest = replace(draft, chunks=tuple(made.entries), bounds=bounds)
        return PackedShard(manifest, made.stored, None if base is None else base.digest)

    def pack_chunk(self, chunk: memoryview, item_bytes: int, number: int, plain: str) -> tuple[Bytes, ChunkEntry]:
        """Packs one chunk of a shard, which needs no other, while the chunk before is written; ``plain`` is its digest.
        Returns its stored form and entry, which belongs into a manifest of `draft`."""
        if self.version == 2:
            return self._stand_alone(chunk, item_bytes, number, plain, overlaps=True)
        if self.codec == "none":
            return chunk, ChunkEntry(len(chunk), plain)
        stored = self._encode_alone(chunk, item_bytes)
        return stored, ChunkEntry(len(stored), digest_of(stored))

    def alone(self, packed: PackedShard, buffer: torch.Tensor) -> PackedShard:
        """Packs the shard packed last again without its base, for a tier that lacks the base."""
        self.forget()
        # A lossy codec has written its decoded values to the buffer by now, so the bounds stay the same.
        made = self._compare(_data_of(buffer, packed.manifest.num_bytes), packed.manifest, None)
        return PackedShard(replace(packed.manifest, chunks=tuple(made.entries)), made.stored)

    def committed(self, packed: PackedShard, digest: str, buffer: torch.Tensor) -> None:
        """Keeps the shard packed last as a base for the next one; called before its buffer is written to again."""
        if not isinstance(self._coder, Delta):
            return
        # The keyframe stays the base of all until the next one.
        if packed.base is not None and not self._coder.follows_previous:
            assert self._base is not None, "it was built on"
            self._base = replace(self._base, num_after=self._base.num_after + 1)
            return
        manifest = packed.manifest
        digests = [str(manifest.plain_digest(number)) for number in range(len(manifest.chunks))]
        after = 0 if packed.base is None or self._base is None else self._base.num_after + 1
        try:
            data = self._copied(buffer, manifest.num_bytes) if self._coder.needs_data else None
        except MemoryError:
            logger.warning(
                "no %.0f MB are left to compare with: the next snapshot stands alone", manifest.num_bytes / 1e6
            )
            self.forget()
            return
        self._base = Base(digest, dict(manifest.tensors), digests, data, after)

    def _copied(self, buffer: torch.Tensor, num_bytes: int) -> npt.NDArray[np.uint8]:
        if len(self._room) < num_bytes:
            # Frees the old memory first, so that both are never held.
            self._room = np.empty(0, np.uint8)
            self._room = np.empty(num_bytes, np.uint8)
        np.copyto(self._room[:num_bytes], buffer.numpy()[:num_bytes])
        return self._room[:num_bytes]

    # ── one chunk after the other ───────────────────────────────────────────────────────────────────────────────────

    def _compare(self, data: memoryview, draft: Manifest, base: Base | None) -> _Chunks:
        """Packs chunks as differences if there is a base of the same layout; else each chunk stands alone."""
        made = _Chunks()
        if base is not None and dict(base.entries) != dict(draft.tensors):
            base = None
        before = None if base is None or base.data is None else base.data.data
        if before is not None:
            self._delta.survey(data, before, draft.tensors, draft.tree)
        for number, start in enumerate(range(0, len(data), draft.chunk_bytes)):
            chunk = data[start : start + draft.chunk_bytes]
            plain = digest_of(chunk)
            # The cheapest way first: an equal chunk costs sixteen bytes, whatever the codec.
            if base is not None and base.digests[number] == plain:
                made.add(*_stored("dedup", bytes.fromhex(plain), plain))
            elif before is None or not self._differ(
                made, chunk, before[start : start + len(chunk)], draft, number, plain
            ):
                made.add(*self._stand_alone(chunk, draft.item_bytes, number, plain, overlaps=False))
        return made

    def _differ(
        self, made: _Chunks, chunk: memoryview, before: memoryview, draft: Manifest, number: int, plain: str
    ) -> bool:
        """Packs a chunk as its difference from the base's; returns False if that is not small or exact enough."""
        name = self.codec

        def encode(some: memoryview) -> Bytes | None:
            found = self._difference(some, before[: len(some)], draft, number)
            return None if found is None else found.stored

        if self._costs is not None and not self._costs.pays(name, number, chunk, encode):
            return False
        found = self._true_enough(chunk, before, draft, number)
        if self._costs is not None:
            self._costs.learn(name, number, chunk, None if found is None else found.stored)
        if found is None:
            return False
        for tensor, error in found.errors.items():
            made.errors[tensor] = made.errors.get(tensor, _Error()) + error
        if found.back is not None:
            # The buffer gets what a reader will have, so the next difference starts from there and no error adds up.
            np.copyto(np.frombuffer(chunk, np.uint8), np.frombuffer(found.back, np.uint8))
            plain = digest_of(found.back)
        made.add(*_stored(name, found.stored, plain))
        return True

    def _true_enough(self, chunk: memoryview, before: memoryview, draft: Manifest, number: int) -> _Difference | None:
        """Returns the difference, with tensors beyond the error limit stored exactly; None if it is not smaller."""
        limit = self._delta.limit if self._max_error is None else self._max_error
        while True:
            found = self._difference(chunk, before, draft, number)
            if found is None or len(found.stored) >= len(chunk):
                return None
            beyond = {name for name, error in found.errors.items() if not error.relative <= limit}
            if not beyond:
                return found
            # They stay exact until the next keyframe: a tensor at the limit would else switch at every save.
            self._beyond |= beyond

    def _difference(self, chunk: memoryview, before: memoryview, draft: Manifest, number: int) -> _Difference | None:
        """Returns the difference of a chunk, or of its first part, to the base's; None if the codec has none."""
        codec, piece = self._delta, Piece.of(draft, number).clipped(len(chunk))
        stored = codec.encode(chunk, before, piece, self._beyond)
        if stored is None:
            return None
        if codec.is_exact:
            return _Difference(stored, None, {})
        back = codec.decode(stored, before, piece)
        errors = {span.name: _Error.of(chunk, back, span) for span in piece.spans if span.may_be_lossy}
        return _Difference(stored, back, errors)

    def _encode_alone(self, chunk: memoryview, item_bytes: int) -> Bytes:
        return chunk if self.codec == "none" else self._alone.encode(chunk, item_bytes)

    def _stand_alone(
        self, chunk: memoryview, item_bytes: int, number: int, plain: str, *, overlaps: bool
    ) -> tuple[Bytes, ChunkEntry]:
        name = self.codec if isinstance(self._coder, Standalone) else self._delta.alone

        def encode(some: memoryview) -> Bytes:
            return self._alone.encode(some, item_bytes)

        if name != "none" and (self._costs is None or self._costs.pays(name, number, chunk, encode, overlaps=overlaps)):
            stored = encode(chunk)
            if self._costs is not None:
                self._costs.learn(name, number, chunk, stored, overlaps=overlaps)
            if len(stored) < len(chunk):
                return _stored(name, stored, plain)
        return _stored("none", chunk, plain)


def _stored(codec: str, stored: Bytes, plain: str) -> tuple[Bytes, ChunkEntry]:
    """Returns a chunk of version 2 with its entry."""
    return stored, ChunkEntry(len(stored), plain if codec == "none" else digest_of(stored), codec, plain)


def _data_of(buffer: torch.Tensor, num_bytes: int) -> memoryview:
    return memoryview(buffer.numpy().data)[:num_bytes]


@dataclass(frozen=True)
class _Difference:
    """A chunk's difference to the base's."""

    stored: Bytes
    back: Bytes | None
    """The decoded chunk; None with an exact codec, which decodes to the chunk itself."""
    errors: Mapping[str, _Error]
    """Errors by tensor; empty with an exact codec."""


@dataclass(frozen=True)
class _Error:
    """How far the parts of a tensor are off, taken together."""

    max_abs: float = 0.0
    squared: float = 0.0
    """Sum of the squared differences."""
    norm_squared: float = 0.0
    """Sum of the squares of the tensor that was to be saved."""

    @classmethod
    def of(cls, chunk: memoryview, back: Bytes, span: Span) -> _Error:
        """Compares a tensor's part in a chunk with the decoded chunk; infinite where a number is not finite."""
        part = slice(span.start, span.stop)
        # Cut by the chunk's edge: such parts are exact.
        if span.start % 4 or span.stop % 4:
            return cls(0.0 if bytes(chunk[part]) == bytes(back[part]) else math.inf, 0.0, 1.0)
        saved = np.frombuffer(chunk[part], np.float32).astype(np.float64)
        off = saved - np.frombuffer(back[part], np.float32)
        if not np.isfinite(off).all():
            return cls(math.inf, math.inf, 1.0)
        return cls(float(np.abs(off).max(initial=0.0)), float(off @ off), float(saved @ saved))

    def __add__(self, other: _Error) -> _Error:
        return _Error(
            max(self.max_abs, other.max_abs), self.squared + other.squared, self.norm_squared + other.norm_squared
        )

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the tensor."""
        if not self.squared:
            return 0.0
        return math.sqrt(self.squared / self.norm_squared) if self.norm_squared else math.inf

    @property
    def bound(self) -> Bound:
        """The error as the manifest states it."""
        return Bound(self.max_abs, self.relative)
