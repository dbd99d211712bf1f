"""Encodes the chunks of a shard: unchanged, compressed, or as a delta to an earlier snapshot. One module per codec."""

from shade.checkpoint._codecs import dedup, excp, int8_delta, plain, topk_delta, xor_zstd, zstd
from shade.checkpoint._codecs.base import CODECS, Codec, Delta, Standalone, standalone_codec

__all__ = [
    "CODECS",
    "Codec",
    "Delta",
    "Standalone",
    "dedup",
    "excp",
    "int8_delta",
    "plain",
    "standalone_codec",
    "topk_delta",
    "xor_zstd",
    "zstd",
]
