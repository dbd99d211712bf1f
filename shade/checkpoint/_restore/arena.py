"""Provides the memory that a shard is read into, and the tensors in it."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from shade.checkpoint._buffer.copy_and_compare import copy_bytes
from shade.checkpoint._capture.flatten import torch_dtype
from shade.checkpoint._format.manifest import Manifest, TensorEntry

_THREADS: Final = 4
"""Threads that copy: page faults are faster in parallel."""
_PIECE_BYTES: Final = 16 * 2**20
"""Bytes that a thread copies at a time."""


def map_memory(num_bytes: int) -> mmap.mmap:
    """Returns new memory, in huge pages where the kernel has them; pages that are never written cost nothing."""
    mapped = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


class Arena:
    """Memory for one shard's data; its tensors keep it alive.

    Args:
        num_bytes: Length of the data.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = map_memory(num_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]

    def copy_from(self, data: torch.Tensor, entries: Iterable[TensorEntry]) -> None:
        """Copies tensors from a whole shard's data (uint8) to their place."""
        target, source = self.tensor.data_ptr(), data.data_ptr()

        def take(piece: range) -> None:
            copy_bytes(target + piece.start, source + piece.start, len(piece))

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shade-restore") as pool:
            list(pool.map(take, _pieces(entries)))

    def chunks(self, manifest: Manifest, numbers: Iterable[int]) -> dict[int, memoryview]:
        """Returns the memory of chunks, to be written, by number."""
        here, length = memoryview(self._map), manifest.chunk_bytes
        return {number: here[number * length : number * length + manifest.data_length(number)] for number in numbers}

    def tensors(self, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        """Returns tensors in this memory, by name; each has a storage of its own."""
        return tensors_at(self._map, entries)

    def release_pages(self, start: int, stop: int) -> None:
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


def tensors_at(data: mmap.mmap | memoryview, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Returns tensors, by name, in the memory of a whole shard; each has a storage of its own."""
    found = {}
    for name, entry in entries.items():
        dtype, count = torch_dtype(entry.dtype), math.prod(entry.shape)
        flat = (
            torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start)
            if count
            else torch.empty(0, dtype=dtype)
        )
        found[name] = flat.view(entry.shape)
    return found
