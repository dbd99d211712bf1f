"""Encodes the chunks of a shard: unchanged, compressed, or as a delta to another snapshot."""

from shade.checkpoint._codecs import exact, excp, lossy
from shade.checkpoint._codecs.base import CODECS, Codec, Standalone, standalone_codec
from shade.checkpoint._codecs.delta import Delta

__all__ = ["CODECS", "Codec", "Delta", "Standalone", "exact", "excp", "lossy", "standalone_codec"]
