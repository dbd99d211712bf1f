"""Packs a buffer for its way: cuts it into chunks, gives each its stored form, hashes that, and lists all of it.

The chunks of the codec ``none`` are views of the buffer: packing copies nothing, it reads every byte once.

A codec that stores differences needs a *base*: a snapshot that has landed, and of which the packer keeps what its codec
compares with: the digests of its chunks, and its data if need be. Every so many saves one stands alone, a *keyframe*;
so does the first after anything went wrong. Of each chunk, in this order:

1. It is as it was in the base: its digest is stored (`_codecs.dedup`).
2. The cost model, if it is asked, says that compressing it takes longer than it saves: it stays as it is.
3. The codec stores the difference. One that is not exact is decoded at once and compared, tensor by tensor: one that is
   beyond the limit is stored exactly, until the next keyframe. The buffer is given what came out, and the manifest
   says by how much it is off. So the snapshot *is* what a reader will have, in own memory too, and the next difference
   starts from there.
4. Whatever is left stands alone, compressed if that makes it smaller.

Invariant: the buffer holds what any tier gives back, and is off from the state by no more than `Manifest.bounds` says.
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

from shade.checkpoint._codecs.base import CODECS, Delta, Piece, Span, Standalone, standing_alone
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, Bound, ChunkEntry, Manifest, TensorEntry
from shade.checkpoint._pacing.write_cost import CostModel
from shade.errors import ConfigError
from shade.types import Bytes

KEYFRAME_EVERY: Final = 8
"""Saves from one keyframe to the next. The more, the fewer full snapshots are written, the longer the way back."""
_MOST_BETWEEN: Final = 1024
ALWAYS: Final = "always"
IF_FASTER: Final = "if-faster"
"""Whether chunks are compressed, or asked about: see `_pacing.write_cost`."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class PackedShard:
    """A shard ready to be agreed on and stored."""

    manifest: Manifest
    chunks: Iterable[Bytes]
    """Stored form, in order; may be walked more than once."""
    base: str | None = None
    """Digest of the record of the snapshot that it builds on; None: it stands alone."""


@dataclass(frozen=True)
class Base:
    """A snapshot that has landed, as far as the next one is compared with it."""

    digest: str
    """Of its record."""
    entries: Mapping[str, TensorEntry]
    digests: Sequence[str]
    """Of its chunks, before any codec."""
    data: npt.NDArray[np.uint8] | None
    num_after: int
    """Saves since the keyframe."""


@dataclass
class _Chunks:
    """What becomes of a shard's chunks, as far as it is known."""

    stored: list[Bytes] = field(default_factory=list)
    entries: list[ChunkEntry] = field(default_factory=list)
    errors: dict[str, _Error] = field(default_factory=dict)
    """By tensor; only of those that are off."""


class Packer:
    """Packs one rank's shards, one after the other.

    Args:
        run: The run id.
        rank: This rank.
        world_size: Ranks.
        codec: Name of the codec of the chunks.
        keyframe_every: Saves from one that stands alone to the next, for a codec that stores differences.
        max_error: Greatest relative error of a tensor's part in a chunk, for a codec that is not exact; None: its own.
        compress: ``always``, or ``if-faster``: what a cost model says is compressed.
        time_write: Writes so many bytes to where snapshots go first and gives the seconds that it took: for that model.

    Raises:
        ConfigError: Something of this cannot be.
    """

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
        self._run, self._rank, self._world_size, self._codec_name = run, rank, world_size, codec
        self._codec = CODECS.get(codec)()
        self._alone: Standalone = standing_alone(codec if isinstance(self._codec, Standalone) else self._delta.alone)
        self._keyframe_every = keyframe_every
        asks = compress == IF_FASTER and codec != "none"
        self._costs = CostModel(time_write) if asks and time_write is not None else None
        self._max_error = max_error
        self._base: Base | None = None
        self._beyond: set[str] = set()
        """Tensors that were beyond the limit since the last keyframe."""
        self._room: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    @property
    def _delta(self) -> Delta:
        assert isinstance(self._codec, Delta)
        return self._codec

    @property
    def builds(self) -> bool:
        """Whether shards may build on earlier ones."""
        return isinstance(self._codec, Delta)

    @property
    def base(self) -> str | None:
        """Digest of the record that the next shard would build on; None: it will stand alone."""
        is_due = self._base is not None and self._base.num_after + 1 >= self._keyframe_every
        return None if self._base is None or is_due else self._base.digest

    def forget(self) -> None:
        """The next shard stands alone."""
        self._base = None

    def pack(
        self, step: int, buffer: torch.Tensor, num_bytes: int, entries: Mapping[str, TensorEntry], tree: Any
    ) -> PackedShard:
        """Hashes the chunks, in their stored form, and makes the manifest.

        Args:
            step: Of the snapshot.
            buffer: uint8, the data in its first ``num_bytes``; must not be written to while the chunks are in use. A
                codec that is not exact writes to it what will come back.
            num_bytes: Length of the data.
            entries: The shard's tensors.
            tree: The skeleton of the state.

        Returns:
            The shard.
        """
        data = _data_of(buffer, num_bytes)
        draft = Manifest(
            run=self._run,
            step=step,
            rank=self._rank,
            world_size=self._world_size,
            codec=self._codec_name,
            num_bytes=num_bytes,
            tensors=entries,
            chunks=(),
            tree=tree,
            chunk_bytes=CHUNK_BYTES,
        )
        if isinstance(self._codec, Standalone) and self._costs is None:
            starts = range(0, num_bytes, draft.chunk_bytes)
            stored = [self._alone.encode(data[start : start + draft.chunk_bytes], draft.item_bytes) for start in starts]
            chunks = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in stored)
            return PackedShard(replace(draft, chunks=chunks), stored)
        base = self._base if self.base is not None else None
        if base is None:
            self._beyond.clear()
        made = self._compare(data, draft, base)
        bounds = {name: error.bound for name, error in made.errors.items()}
        manifest = replace(draft, chunks=tuple(made.entries), bounds=bounds, version=2)
        return PackedShard(manifest, made.stored, None if base is None else base.digest)

    def alone(self, packed: PackedShard, buffer: torch.Tensor) -> PackedShard:
        """The same snapshot without its base, for a place that does not have that.

        Args:
            packed: It, just packed: where it is off, the buffer is by now, and what comes back of this one.
            buffer: What it was packed from.

        Returns:
            The shard; its bounds are the same.
        """
        self.forget()
        made = self._compare(_data_of(buffer, packed.manifest.num_bytes), packed.manifest, None)
        return PackedShard(replace(packed.manifest, chunks=tuple(made.entries)), made.stored)

    def committed(self, packed: PackedShard, digest: str, buffer: torch.Tensor) -> None:
        """What was packed last has landed: the next one may build on it. Before the buffer is written to again.

        Args:
            packed: It.
            digest: Of its record.
            buffer: What it was packed from.
        """
        if not isinstance(self._codec, Delta):
            return
        if packed.base is not None and not self._codec.follows_previous:
            assert self._base is not None, "it was built on"
            self._base = replace(self._base, num_after=self._base.num_after + 1)
            return
        manifest = packed.manifest
        digests = [str(manifest.plain_digest(number)) for number in range(len(manifest.chunks))]
        after = 0 if packed.base is None or self._base is None else self._base.num_after + 1
        try:
            data = self._copied(buffer, manifest.num_bytes) if self._codec.needs_data else None
        except MemoryError:
            logger.warning(
                "no %.0f MB are left to compare with: the next snapshot stands alone", manifest.num_bytes / 1e6
            )
            self.forget()
            return
        self._base = Base(digest, dict(manifest.tensors), digests, data, after)

    def _copied(self, buffer: torch.Tensor, num_bytes: int) -> npt.NDArray[np.uint8]:
        if len(self._room) < num_bytes:
            self._room = np.empty(0, np.uint8)  # first give back what there is
            self._room = np.empty(num_bytes, np.uint8)
        np.copyto(self._room[:num_bytes], buffer.numpy()[:num_bytes])
        return self._room[:num_bytes]

    # ── one chunk after the other ───────────────────────────────────────────────────────────────────────────────────

    def _compare(self, data: memoryview, draft: Manifest, base: Base | None) -> _Chunks:
        """Stores chunks as differences, where there is a base of the same layout; else each stands alone."""
        made = _Chunks()
        if base is not None and dict(base.entries) != dict(draft.tensors):
            base = None
        before = None if base is None or base.data is None else base.data.data
        if before is not None:
            self._delta.survey(data, before, draft.tensors, draft.tree)
        for number, start in enumerate(range(0, len(data), draft.chunk_bytes)):
            chunk = data[start : start + draft.chunk_bytes]
            plain = digest_of(chunk)
            if base is not None and base.digests[number] == plain:
                self._add(made, "dedup", bytes.fromhex(plain), plain)
            elif before is None or not self._differ(
                made, chunk, before[start : start + len(chunk)], draft, number, plain
            ):
                self._stand_alone(made, chunk, draft.item_bytes, number, plain)
        return made

    def _add(self, made: _Chunks, codec: str, stored: Bytes, plain: str) -> None:
        made.stored.append(stored)
        made.entries.append(ChunkEntry(len(stored), plain if codec == "none" else digest_of(stored), codec, plain))

    def _differ(
        self, made: _Chunks, chunk: memoryview, before: memoryview, draft: Manifest, number: int, plain: str
    ) -> bool:
        """Stores a chunk as its difference from the base's; whether that is small and true enough."""
        name = self._codec_name

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
            np.copyto(np.frombuffer(chunk, np.uint8), np.frombuffer(found.back, np.uint8))
            plain = digest_of(found.back)
        self._add(made, name, found.stored, plain)
        return True

    def _true_enough(self, chunk: memoryview, before: memoryview, draft: Manifest, number: int) -> _Difference | None:
        """The difference, tensors that it would leave too far off stored exactly; None where it is not smaller."""
        limit = self._delta.limit if self._max_error is None else self._max_error
        while True:
            found = self._difference(chunk, before, draft, number)
            if found is None or len(found.stored) >= len(chunk):
                return None
            beyond = {name for name, error in found.errors.items() if not error.relative <= limit}
            if not beyond:
                return found
            self._beyond |= beyond

    def _difference(self, chunk: memoryview, before: memoryview, draft: Manifest, number: int) -> _Difference | None:
        """Of a chunk, or the first part of one, from the base's; None where there is none."""
        codec, piece = self._delta, Piece.of(draft, number).clipped(len(chunk))
        stored = codec.encode(chunk, before, piece, self._beyond)
        if stored is None:
            return None
        if codec.is_exact:
            return _Difference(stored, None, {})
        back = codec.decode(stored, before, piece)
        errors = {span.name: _Error.of(chunk, back, span) for span in piece.spans if span.may_be_rough}
        return _Difference(stored, back, errors)

    def _stand_alone(self, made: _Chunks, chunk: memoryview, item_bytes: int, number: int, plain: str) -> None:
        name = self._codec_name if isinstance(self._codec, Standalone) else self._delta.alone

        def encode(some: memoryview) -> Bytes:
            return self._alone.encode(some, item_bytes)

        if name != "none" and (self._costs is None or self._costs.pays(name, number, chunk, encode)):
            stored = encode(chunk)
            if self._costs is not None:
                self._costs.learn(name, number, chunk, stored)
            if len(stored) < len(chunk):
                self._add(made, name, stored, plain)
                return
        self._add(made, "none", chunk, plain)


def _data_of(buffer: torch.Tensor, num_bytes: int) -> memoryview:
    return memoryview(buffer.numpy().data)[:num_bytes]


@dataclass(frozen=True)
class _Difference:
    """A chunk, as its difference from the base's."""

    stored: Bytes
    back: Bytes | None
    """What comes back of it; None of an exact codec: the chunk itself."""
    errors: Mapping[str, _Error]
    """By tensor; none of an exact codec's."""


@dataclass(frozen=True)
class _Error:
    """How far a tensor's parts are off, taken together."""

    max_abs: float = 0.0
    squared: float = 0.0
    """Sum of the squared differences."""
    norm_squared: float = 0.0
    """Of what was to be saved."""

    @classmethod
    def of(cls, chunk: memoryview, back: Bytes, span: Span) -> _Error:
        """Compares a tensor's part in a chunk with what came back of it.

        Args:
            chunk: What was to be saved.
            back: What would be restored.
            span: The part.

        Returns:
            Its error; without limit where a number is none.
        """
        part = slice(span.start, span.stop)
        if span.start % 4 or span.stop % 4:  # cut by the chunk's edge: such parts are exact
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
        """Length of the difference over that of the tensor."""
        if not self.squared:
            return 0.0
        return math.sqrt(self.squared / self.norm_squared) if self.norm_squared else math.inf

    @property
    def bound(self) -> Bound:
        """As the manifest has it."""
        return Bound(self.max_abs, self.relative)
