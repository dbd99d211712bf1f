"""Counts what a process reads of files in storage, by the way in which it reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from shade.storage.directory import DirectoryVolume

WAYS = ("read_into", "read_directly")


@contextlib.contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    """Gives the bytes read so far, by the name of the volume's method."""
    read = dict.fromkeys(WAYS, 0)

    def counting(way: str, before: Callable[..., None]) -> Callable[..., None]:
        def reading(volume: DirectoryVolume, name: str, start: int, buffer: memoryview) -> None:
            read[way] += len(buffer)
            before(volume, name, start, buffer)

        return reading

    with pytest.MonkeyPatch.context() as patch:
        for way in WAYS:
            patch.setattr(DirectoryVolume, way, counting(way, getattr(DirectoryVolume, way)))
        yield read
