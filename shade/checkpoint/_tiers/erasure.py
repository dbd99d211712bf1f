"""Encodes k data pieces into r parity pieces, so that any k of the k + r restore the data.

`ErasureCode` is a systematic Cauchy code over GF(256): the data is stored unchanged, and parity row j is the sum of the
pieces, each multiplied by a constant; parity 0 is a plain XOR. `Stripe` applies the code to k chunks of a shard; the
missing chunks of the last stripe count as zeros. Decision 0010 has the figures, and the libraries that were slower.

Invariant: `Stripe.rebuild` returns only what verified pieces gave; from any k pieces `ErasureCode.rebuild` returns what
`encode` was given, byte for byte.

References:
    Blömer et al., ICSI TR-95-048, 1995; Plank and Xu, NCA 2006, §4 (scaling the matrix).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Manifest
from shade.checkpoint._tiers.slot_table import Slot, SlotLayout, SlotNames
from shade.errors import ConfigError
from shade.store.base import Store
from shade.types import Bytes

_POLYNOMIAL: Final = 0x11D
_BITS: Final = 8
_ALIGN_BYTES: Final = 64
"""Eight strips of whole 8-byte words."""
_BLOCK_WORDS: Final = 16384
"""Strips are XORed in blocks of 128 KiB: eight results and eight sources fit into the L2 cache of a core."""

Words: TypeAlias = npt.NDArray[np.uint64]


def _powers() -> tuple[list[int], list[int]]:
    """Returns the powers of the generator 2, repeated so that sums of logarithms need no modulo, and the logarithms."""
    powers, logarithms, value = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value = value << 1 ^ (_POLYNOMIAL if value & 0x80 else 0)
    return powers, logarithms


_POWERS, _LOGARITHMS = _powers()


def multiply(a: int, b: int) -> int:
    """Returns the product of two elements of GF(256)."""
    return _POWERS[_LOGARITHMS[a] + _LOGARITHMS[b]] if a and b else 0


def inverse(a: int) -> int:
    """Returns the multiplicative inverse of ``a``, which is not 0."""
    return _POWERS[255 - _LOGARITHMS[a]]


def _num_ones(constant: int) -> int:
    """Returns the number of strip XORs that a multiplication by the constant takes."""
    return sum(multiply(constant, 1 << bit).bit_count() for bit in range(_BITS))


def parity_rows(num_data: int, num_parity: int) -> list[list[int]]:
    """Returns r rows of k constants, none of them 0, the first row all ones: a Cauchy matrix, scaled so that the
    constants have few bits. k + r ≤ 256."""
    rows = [[inverse(num_data + row ^ column) for column in range(num_data)] for row in range(num_parity)]
    # Every square submatrix of a Cauchy matrix is invertible, and stays so when rows and columns are scaled.
    first = [inverse(constant) for constant in rows[0]]
    rows = [[multiply(constant, scale) for constant, scale in zip(row, first, strict=True)] for row in rows]
    scaled = rows[:1]
    for row in rows[1:]:
        choices = [[multiply(inverse(divisor), constant) for constant in row] for divisor in row]
        scaled.append(min(choices, key=lambda choice: sum(map(_num_ones, choice))))
    return scaled


def invert(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the inverse of a square matrix over GF(256), or raises ValueError."""
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((row for row in range(column, size) if rows[row][column]), None)
        if pivot is None:
            raise ValueError(f"expected an invertible matrix, got {matrix!r}")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = inverse(rows[column][column])
        rows[column] = [multiply(scale, value) for value in rows[column]]
        for row in range(size):
            factor = rows[row][column]
            if row != column and factor:
                rows[row] = [a ^ multiply(factor, b) for a, b in zip(rows[row], rows[column], strict=True)]
    return [row[size:] for row in rows]


def padded_bytes(num_bytes: int) -> int:
    """Returns the length of the parity of pieces of which the longest has ``num_bytes``."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class ErasureCode:
    """Encodes k data pieces into r parity pieces. Data pieces have the numbers 0 … k - 1, parity k … k + r - 1.

    Args:
        num_data: k, ≥ 1.
        num_parity: r, ≥ 1; k + r ≤ 256.

    Raises:
        ConfigError: k or r is out of range.
    """

    def __init__(self, num_data: int, num_parity: int) -> None:
        if num_data < 1 or num_parity < 1 or num_data + num_parity > 256:
            shown = f"({num_data}, {num_parity})"
            raise ConfigError.of("k ≥ 1 data and r ≥ 1 parity pieces, 256 at most together", shown, "try (4, 2)")
        self.num_data = num_data
        self.num_parity = num_parity
        self._rows = parity_rows(num_data, num_parity)

    def encode(self, data: Sequence[Bytes], parity: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Fills in r arrays of parity, each of the length that `padded_bytes` gives for the longest of k pieces at
        most; missing ones count as zeros."""
        words = [_as_words(piece, len(parity[0])) for piece in data]
        for row, total in zip(self._rows, parity, strict=True):
            _combine(row[: len(words)], words, total)

    def rebuild(self, wanted: int, pieces: Mapping[int, Bytes], length: int) -> npt.NDArray[np.uint8]:
        """Rebuilds one lost data piece, with its padding to the parity's ``length``, from exactly k others by number;
        empty bytes stand for one that `encode` was not given."""
        numbers = sorted(pieces)
        rows = [
            [int(number == column) for column in range(self.num_data)]
            if number < self.num_data
            else self._rows[number - self.num_data]
            for number in numbers
        ]
        constants = invert(rows)[wanted]
        used = [(constant, pieces[number]) for constant, number in zip(constants, numbers, strict=True)]
        used = [(constant, piece) for constant, piece in used if constant and len(piece)]
        total = np.empty(length, np.uint8)
        _combine([constant for constant, _ in used], [_as_words(piece, length) for _, piece in used], total)
        return total


def _as_words(piece: Bytes, length: int) -> Words:
    """Returns the piece as 8-byte words: a view, or a zero-padded copy if it is shorter than ``length``."""
    if len(piece) < length:
        padded = np.zeros(length, np.uint8)
        padded[: len(piece)] = np.frombuffer(piece, np.uint8)
        return padded.view(np.uint64)
    return np.frombuffer(piece, np.uint64)


def _combine(constants: Sequence[int], pieces: Sequence[Words], total: npt.NDArray[np.uint8]) -> None:
    """Writes the sum of the pieces, each multiplied by its constant, into ``total``."""
    words = total.view(np.uint64)
    strips = words.reshape(_BITS, -1)
    plain = [piece for constant, piece in zip(constants, pieces, strict=True) if constant == 1]
    if len(plain) > 1:
        np.bitwise_xor(plain[0], plain[1], out=words)
    else:
        words[:] = plain[0] if plain else 0
    for piece in plain[2:]:
        np.bitwise_xor(words, piece, out=words)
    steps = [
        # A piece is eight strips, and strip b holds bit b of every field element: multiplying is an 8 × 8 bit matrix,
        # that is XORs of whole strips, which numpy does at memory speed without holding the GIL.
        (bit, to, piece.reshape(_BITS, -1))
        for constant, piece in zip(constants, pieces, strict=True)
        if constant != 1
        for bit in range(_BITS)
        for to in range(_BITS)
        if multiply(constant, 1 << bit) >> to & 1
    ]
    for start in range(0, strips.shape[1] if steps else 0, _BLOCK_WORDS):
        part = slice(start, start + _BLOCK_WORDS)
        for bit, to, source in steps:
            np.bitwise_xor(strips[to, part], source[bit, part], out=strips[to, part])


_DIGEST_BYTES: Final = 16


def parity_of(layout: SlotLayout, chunks: Sequence[Bytes]) -> list[memoryview]:
    """Returns the r parity pieces of a stripe as they are stored, each followed by its digest."""
    length = padded_bytes(max(map(len, chunks)))
    stored = [np.empty(length + _DIGEST_BYTES, np.uint8) for _ in range(layout.num_parity)]
    parity = [each[:length] for each in stored]
    ErasureCode(layout.num_data, layout.num_parity).encode(chunks, parity)
    for each, content in zip(stored, parity, strict=True):
        each[length:] = np.frombuffer(bytes.fromhex(digest_of(content.data)), np.uint8)
    return [each.data for each in stored]


class Stripe:
    """One stripe of a shard: k chunks and their parity.

    Args:
        store: Store that holds the pieces.
        names: Keys of the run.
        slot: A slot with parity.
        manifest: The verified manifest of the shard.
        number: Number of the stripe in the shard, from 0.
        known: Verified chunks of the shard that are in memory already, by number.
    """

    def __init__(
        self,
        store: Store,
        names: SlotNames,
        slot: Slot,
        manifest: Manifest,
        number: int,
        known: Mapping[int, Bytes],
    ) -> None:
        self._store, self._names, self._slot, self._manifest, self._number = store, names, slot, manifest, number
        first = number * slot.layout.num_data
        self.numbers = range(first, min(first + slot.layout.num_data, len(manifest.chunks)))
        """Numbers of its chunks in the shard."""
        self._length = padded_bytes(max(manifest.chunks[n].num_bytes for n in self.numbers))
        self._chunks: dict[int, Bytes | None] = {n: known[n] for n in self.numbers if n in known}
        self._rows: dict[int, Bytes | None] = {}

    def data(self) -> list[Bytes] | None:
        """Returns all chunks of the stripe, or None if one is missing or damaged."""
        chunks = [self._chunk(number) for number in self.numbers]
        found = [chunk for chunk in chunks if chunk is not None]
        return found if len(found) == len(chunks) else None

    def rebuild(self, wanted: int, row: int) -> npt.NDArray[np.uint8] | None:
        """Rebuilds a chunk from the others and the parity, without reading the chunk itself. ``row`` is always used, so
        that a caller that asks for every row tries all of them. Returns None if that row or too many other pieces are
        damaged."""
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
            # A damaged piece would make the rebuilt one wrong, so a piece is used only after its digest was checked.
            is_intact = content is not None and digest_of(content) == entry.digest
            self._chunks[number] = content if is_intact else None
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
