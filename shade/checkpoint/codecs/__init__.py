"""Codecs: how a chunk is stored: as it is, compressed, or as what differs from an earlier snapshot. One file each."""

from shade.checkpoint.codecs import dedup, excp, int8_delta, plain, topk_delta, xor_zstd, zstd
from shade.checkpoint.codecs.base import CODECS, Alone, Codec, Delta, standing_alone

__all__ = [
    "CODECS",
    "Alone",
    "Codec",
    "Delta",
    "dedup",
    "excp",
    "int8_delta",
    "plain",
    "standing_alone",
    "topk_delta",
    "xor_zstd",
    "zstd",
]
