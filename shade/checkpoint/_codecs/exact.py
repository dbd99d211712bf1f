"""Codecs that restore every chunk bit for bit: unchanged, by digest, compressed, or as a compressed difference."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import numpy as np
from typing_extensions import override

from shade.checkpoint._codecs.base import CODECS, Piece, Standalone, check_length
from shade.checkpoint._codecs.delta import Delta
from shade.checkpoint._codecs.zstd_frames import Frames
from shade.checkpoint._format.digest import digest_of
from shade.errors import CorruptCheckpointError
from shade.types import Bytes


@CODECS.register("none")
class Plain(Standalone):
    """``none``: stores a chunk unchanged, without a copy; the file in storage is one that safetensors reads."""

    @override
    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        return data

    @override
    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        return check_length(stored, num_bytes)


@CODECS.register("dedup")
class Dedup(Delta):
    """``dedup``: stores the digest of a chunk that equals the base's, and any other chunk unchanged. Exact.

    A digest takes 16 bytes. So frozen layers and unused embeddings cost almost nothing, and the rest costs what it
    does with ``none``. The base's digests are enough: none of its data is kept in memory. Every other `Delta`
    treats unchanged chunks in the same way.
    """

    needs_data: ClassVar[bool] = False

    @override
    def encode(
        self, data: memoryview, base: memoryview, piece: Piece, exact: Collection[str] = frozenset()
    ) -> Bytes | None:
        digest = digest_of(data)
        return bytes.fromhex(digest) if digest == digest_of(base) else None

    @override
    def decode(self, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        if bytes.fromhex(digest_of(base)) != bytes(stored):
            raise CorruptCheckpointError(f"expected a base with digest {bytes(stored).hex()}, got {digest_of(base)}")
        return base


@CODECS.register("zstd")
class Zstandard(Standalone):
    """``zstd``: bytes grouped by item, compressed by zstandard at its fastest level. Exact.

    One item width serves a whole shard, that of most of its bytes (`Manifest.item_bytes`); other items are stored
    correctly but larger. It saves room. Whether it saves time depends on the storage, which ``compress="if-faster"``
    measures.
    """

    def __init__(self) -> None:
        self._frames = Frames("zstd")

    @override
    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        return self._frames.pack(np.frombuffer(data, dtype=np.uint8), item_bytes)

    @override
    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        return self._frames.unpack(stored, num_bytes, num_bytes, item_bytes).data


@CODECS.register("xor-zstd")
class XorZstandard(Delta):
    """``xor-zstd``: the XOR with the newest keyframe, grouped by byte, compressed by zstandard. Exact.

    Weights move little between two snapshots: sign, exponent and upper mantissa stay, and are zero in the XOR;
    `benchmarks/bench_codecs.py` measures the effect. The base is the keyframe, not the previous snapshot, so a
    snapshot needs only one other, and any between may be lost or removed. Cost: a copy of the keyframe in this
    process's memory.
    """

    alone: ClassVar[str] = "zstd"

    def __init__(self) -> None:
        self._frames = Frames("xor-zstd")

    @override
    def encode(
        self, data: memoryview, base: memoryview, piece: Piece, exact: Collection[str] = frozenset()
    ) -> Bytes | None:
        different = np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8)
        return self._frames.pack(different, piece.item_bytes)

    @override
    def decode(self, stored: Bytes, base: Bytes, piece: Piece) -> Bytes:
        different = self._frames.unpack(stored, len(base), len(base), piece.item_bytes)
        return (different ^ np.frombuffer(base, np.uint8)).data
