"""Fresh memory for a state that is read back: one mapping for a whole shard, in huge pages, without a copy per tensor.

A restart allocates everything anew, and page faults would cost more than the bytes do (1.4 GB/s against 10 here). Huge
pages are one fault for 512 small ones; and pages that nobody writes are never there, so a part of a shard can be read
at its own offset. What has been copied onwards (a module's parameters) is given back with `Arena.forget`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping

import torch

from shade.checkpoint.layout import torch_dtype
from shade.checkpoint.manifest import Manifest, TensorEntry


class Arena:
    """Room for one shard's data; its tensors keep it alive.

    Args:
        num_bytes: Length of the data.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]

    def chunk(self, manifest: Manifest, number: int) -> memoryview:
        """Where a chunk's data belongs, to be written."""
        start = number * manifest.chunk_bytes
        return memoryview(self._map)[start : min(start + manifest.chunk_bytes, manifest.num_bytes)]

    def tensors(self, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        """Views of the data, by name."""
        found = {}
        for name, entry in entries.items():
            flat = self.tensor[entry.start : entry.stop]
            found[name] = flat.view(torch_dtype(entry.dtype)).view(entry.shape)
        return found

    def forget(self, start: int, stop: int) -> None:
        """Gives the whole pages within a range back; their content is gone."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
