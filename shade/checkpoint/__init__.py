"""Snapshots in the cluster's memory, flushed behind the training, restored from the nearest survivor.

In reading order: `manifest` (what a snapshot is), `tier` (where one lies), `state` and `assembly` (a state tree as JSON
and tensors, and back), `layout`, `stage`, `_codecs`, `memory_tier`, `storage_tier`, `protocol` (how it comes to count),
`reader` (how it is read, verified and mended), `manager`.
"""

from shade.checkpoint import _codecs
from shade.checkpoint._codecs.base import CODECS

__all__ = ["CODECS", "codecs"]
