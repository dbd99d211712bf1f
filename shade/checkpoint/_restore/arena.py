"""Fresh memory for a state that is read back: one mapping for a whole shard, in huge pages, without a copy per tensor.

A restart allocates everything anew, and page faults would cost more than the bytes do (1.4 GB/s against 10 here). Huge
pages are one fault for 512 small ones; and pages that nobody writes are never there, so a part of a shard can be read
at its own offset. What has been copied onwards (a module's parameters) is given back with `Arena.forget`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from shade.checkpoint._buffer.copy import copy_bytes
from shade.checkpoint._capture.flatten import torch_dtype
from shade.checkpoint._format.manifest import Manifest, TensorEntry

FILLING_THREADS: Final = 4
"""Page faults and disk requests both are faster in parallel."""

_PIECE_BYTES: Final = 16 * 2**20
"""Bytes that a thread copies at a time."""


class Arena:
    """Memory for one shard's data; its tensors keep it alive.

    Args:
        num_bytes: Length of the data.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]

    def copy_from(self, data: torch.Tensor, entries: Iterable[TensorEntry]) -> None:
        """Copies tensors from a whole shard's data (uint8) to their place."""
        target, source = self.tensor.data_ptr(), data.data_ptr()

        def take(piece: range) -> None:
            copy_bytes(target + piece.start, source + piece.start, len(piece))

        with ThreadPoolExecutor(FILLING_THREADS, thread_name_prefix="shade-restore") as pool:
            list(pool.map(take, _pieces(entries)))

    def chunk(self, manifest: Manifest, number: int) -> memoryview:
        """Returns the memory of a chunk, to be written."""
        start = number * manifest.chunk_bytes
        return memoryview(self._map)[start : min(start + manifest.chunk_bytes, manifest.num_bytes)]

    def tensors(self, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        """Returns views of the data, by name."""
        return views(self.tensor, entries)

    def forget(self, start: int, stop: int) -> None:
        """Releases the whole pages within a range; their content is lost."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _pieces(entries: Iterable[TensorEntry]) -> list[range]:
    """Joins neighbours, with the layout's gaps, and splits them into ranges that one thread copies at a time."""
    joined: list[range] = []
    for entry in sorted(entries, key=lambda entry: entry.start):
        if joined and entry.start - joined[-1].stop < mmap.PAGESIZE:
            joined[-1] = range(joined[-1].start, entry.stop)
        else:
            joined.append(range(entry.start, entry.stop))
    return [whole[first : first + _PIECE_BYTES] for whole in joined for first in range(0, len(whole), _PIECE_BYTES)]


def views(data: torch.Tensor, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Returns tensors, by name, that are views of a whole shard's data (uint8)."""
    found = {}
    for name, entry in entries.items():
        flat = data[entry.start : entry.stop]
        found[name] = flat.view(torch_dtype(entry.dtype)).view(entry.shape)
    return found
