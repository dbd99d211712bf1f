"""Reads the pieces of one stripe, k chunks and their parity, and makes a lost chunk of the others.

A piece counts only if it is right: of two rotten chunks one would make the other wrong. A chunk's digest is in the
manifest; parity, which no manifest knows, has its own behind it. The last stripe of a shard may be short; the chunks
that it lacks are zeros. Invariant: what `rebuild` returns was made of right pieces alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shade.checkpoint.digest import digest_of
from shade.checkpoint.erasure import ErasureCode, padded_bytes
from shade.checkpoint.manifest import Manifest
from shade.checkpoint.slots import Layout, Names, Slot
from shade.store.base import Store
from shade.types import Bytes

_DIGEST_BYTES: Final = 16


def parity_of(layout: Layout, chunks: Sequence[Bytes]) -> list[memoryview]:
    """The parity of a stripe, as it is stored.

    Args:
        layout: With parity.
        chunks: k, or the fewer that the last stripe has.

    Returns:
        r pieces, each with its digest behind it.
    """
    length = padded_bytes(max(map(len, chunks)))
    stored = [np.empty(length + _DIGEST_BYTES, np.uint8) for _ in range(layout.num_parity)]
    parity = [each[:length] for each in stored]
    ErasureCode(layout.num_data, layout.num_parity).encode(chunks, parity)
    for each, content in zip(stored, parity, strict=True):
        each[length:] = np.frombuffer(bytes.fromhex(digest_of(content.data)), np.uint8)
    return [each.data for each in stored]


class Stripe:
    """One stripe of a shard.

    Args:
        store: Where it is.
        names: Of the run's keys.
        slot: With parity.
        manifest: Verified.
        number: Counted from 0 in the shard.
        known: Chunks that are at hand and right, by number; of the whole shard.
    """

    def __init__(
        self,
        store: Store,
        names: Names,
        slot: Slot,
        manifest: Manifest,
        number: int,
        known: Mapping[int, Bytes],
    ) -> None:
        self._store, self._names, self._slot, self._manifest, self._number = store, names, slot, manifest, number
        first = number * slot.layout.num_data
        self.numbers = range(first, min(first + slot.layout.num_data, len(manifest.chunks)))
        """Its chunks, by number in the shard."""
        self._length = padded_bytes(max(manifest.chunks[n].num_bytes for n in self.numbers))
        self._chunks: dict[int, Bytes | None] = {n: known[n] for n in self.numbers if n in known}
        self._rows: dict[int, Bytes | None] = {}

    def data(self) -> list[Bytes] | None:
        """All its chunks; None where one is missing or wrong."""
        chunks = [self._chunk(number) for number in self.numbers]
        found = [chunk for chunk in chunks if chunk is not None]
        return found if len(found) == len(chunks) else None

    def rebuild(self, wanted: int, row: int) -> npt.NDArray[np.uint8] | None:
        """Makes a chunk of the others and the parity, without looking at itself.

        Args:
            wanted: Its number in the shard.
            row: Of the parity that is used in any case, so that who asks for each row in turn has tried them all.

        Returns:
            The chunk; None where too few pieces are right, or that row is not.
        """
        layout, first = self._slot.layout, self.numbers[0]
        if self._parity(row) is None:
            return None
        pieces: dict[int, Bytes] = dict.fromkeys(range(len(self.numbers), layout.num_data), b"")
        for number in self.numbers:
            chunk = self._chunk(number) if number != wanted else None
            if chunk is not None:
                pieces[number - first] = chunk
        for each in (row, *(other for other in range(layout.num_parity) if other != row)):
            parity = self._parity(each) if len(pieces) < layout.num_data else None
            if parity is not None:
                pieces[layout.num_data + each] = parity
        if len(pieces) < layout.num_data:
            return None
        code = ErasureCode(layout.num_data, layout.num_parity)
        return code.rebuild(wanted - first, pieces, self._length)[: self._manifest.chunks[wanted].num_bytes]

    def _chunk(self, number: int) -> Bytes | None:
        if number not in self._chunks:
            entry = self._manifest.chunks[number]
            content = self._read(self._names.chunk(self._slot, self._manifest.rank, number), entry.num_bytes)
            is_right = content is not None and digest_of(content) == entry.digest
            self._chunks[number] = content if is_right else None
        return self._chunks[number]

    def _parity(self, row: int) -> Bytes | None:
        if row not in self._rows:
            key = self._names.parity(self._slot, self._manifest.rank, self._number, row)
            content = self._read(key, self._length + _DIGEST_BYTES)
            parity, digest = (content[: self._length], content[self._length :]) if content is not None else (b"", b"")
            self._rows[row] = parity if content is not None and digest_of(parity) == bytes(digest).hex() else None
        return self._rows[row]

    def _read(self, key: str, num_bytes: int) -> memoryview | None:
        buffer = np.empty(num_bytes, np.uint8).data
        return buffer if self._store.get_many_into({key: buffer})[0] else None
