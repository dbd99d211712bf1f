"""One bucket's message: a fixed header, the coded indices, the coded values, under one checksum.

::

    magic "SHDG" · version · flags · fields of `MessageHeader` · both lengths · xxh3-64 of all else │ indices │ values

Nothing that came is believed before the checksum over every other byte has been found right, and no length before it
fits the bytes that are there: what is allocated is a few times what came, whatever a header claims. A message that is
not for us is a `PayloadError` that says what was expected and what came; none decodes to something else in silence.

The checksum guards against lines and bugs, not against people: who may join a group is the transport's business.

Legend: D bucket · K kept.

Codes ascending indices in little more than a byte each: the gap to the one before, wider words for wide gaps.

Three streams, one behind the other::

    codes    uint8  × K    the gap, if it is below 254; else 254: the next word of `middle`, 255: the next of `wide`
    middle   uint16 × n    gaps below 65536
    wide     uint32 × m    all others

At one kept element in a hundred that makes 1.15 bytes an index, at one in a thousand 2.6, never more than 5. An escape
followed by four bytes in place takes 1.31 and 4.1; the entropy of such indices is 1.02. Streams rather than escapes in
place, because the length then follows from counting two values among the codes: it is checked before anything is
decoded, and numpy can do all of it without a loop. The first gap counts from zero, later ones from one behind the index
before, so whatever decodes is ascending and distinct.

Legend: K kept.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from shade.errors import ConfigError, PayloadError, UnknownNameError
from shade.gradient._compress.compressor import Sparse
from shade.gradient._compress.quantiser import QUANTISERS, Quantiser
from shade.gradient._kernels.choice import choose
from shade.types import Bytes

MAGIC: Final = b"SHDG"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<4sHBxqqqQQdd16sqQQ")
_CHECKSUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM.size
_IS_FINITE: Final = 1


@dataclass(frozen=True)
class MessageHeader:
    """What a message says of itself."""

    generation: int
    """Of the group; a message of an earlier one is late."""
    step: int
    bucket: int
    """Number of the bucket."""
    size: int
    """D."""
    count: int
    """K."""
    weight: float
    """Samples that the gradient is the mean of, ≥ 0."""
    quantiser: str
    """Registered name; at most 16 letters."""
    is_finite: bool = True
    """False: there was NaN or infinity, and nothing is here."""
    density_proposal: float = 0.0
    """Rank 0's, see `shade.types.Decision`; 0: none."""
    effective_step: int = 0
    """From which step on the proposal holds."""


def pack(header: MessageHeader, sparse: Sparse, quantiser: Quantiser) -> Octets:
    """Makes the message.

    Args:
        header: Fits ``sparse``.
        sparse: Values are coded by ``quantiser``.
        quantiser: That of the header's name.

    Returns:
        uint8, new memory.

    Raises:
        ConfigError: The header is of another bucket, or has a field that has no room.
    """
    if (header.size, header.count) != (sparse.size, sparse.count):
        raise ConfigError.of(
            f"a header of {sparse.count} in {sparse.size} elements",
            (header.count, header.size),
            "make it from the bucket",
        )
    name = header.quantiser.encode()
    if len(name) > 16:
        raise ConfigError.of(
            "a quantiser's name of at most 16 bytes", header.quantiser, "register it under a shorter one"
        )
    indices, values = encode(sparse.indices_K), quantiser.encode(sparse.values_K)
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        _IS_FINITE if header.is_finite else 0,
        header.generation,
        header.step,
        header.bucket,
        header.size,
        header.count,
        header.weight,
        header.density_proposal,
        name,
        header.effective_step,
        len(indices),
        len(values),
    )
    data = np.empty(HEADER_BYTES + len(indices) + len(values), dtype=np.uint8)
    data[: _FIELDS.size] = np.frombuffer(fields, dtype=np.uint8)
    data[HEADER_BYTES : HEADER_BYTES + len(indices)] = indices
    data[HEADER_BYTES + len(indices) :] = values
    data[_FIELDS.size : HEADER_BYTES] = np.frombuffer(_CHECKSUM.pack(_digest(data)), dtype=np.uint8)
    return data


def unpack(data: Octets | Bytes, size: int | None = None) -> tuple[MessageHeader, Sparse]:
    """Takes a message apart.

    Args:
        data: All of it, and nothing more.
        size: D of the bucket that it must be of; None: whatever it says.

    Returns:
        What it says of itself, and the bucket's chosen elements, in new memory.

    Raises:
        PayloadError: It is not whole, not ours, of another version, or of another bucket.
    """
    octets = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    header, num_index_bytes = _read_header(octets)
    if size is not None and header.size != size:
        cure = "give every rank the same model and bucket size"
        raise PayloadError.of(f"a bucket of {size} elements", header.size, cure)
    try:
        quantiser = QUANTISERS.get(header.quantiser)()
    except UnknownNameError as error:
        raise PayloadError(
            f"expected a quantiser that this rank knows, got: {error}; run one version everywhere"
        ) from None
    start = HEADER_BYTES + num_index_bytes
    num_value_bytes = len(octets) - start
    if header.count > num_index_bytes or quantiser.num_bytes(header.count) != num_value_bytes:
        got = f"{num_index_bytes} bytes of indices, {num_value_bytes} of values"
        raise PayloadError.of(f"indices and values of {header.count} elements", got, "run one version everywhere")
    indices_K = decode(octets[HEADER_BYTES:start], header.count, header.size)
    return header, Sparse(indices_K, quantiser.decode(octets[start:], header.count), header.size)


def _read_header(octets: Octets) -> tuple[MessageHeader, int]:
    """The header and the length of the indices, once everything but their content is known to be right."""
    cure = "see whether something else talks on this group, or a line damages what it carries"
    if octets.dtype != np.uint8 or octets.ndim != 1 or len(octets) < HEADER_BYTES:
        raise PayloadError.of(f"at least {HEADER_BYTES} bytes", octets.size * octets.itemsize, cure)
    magic, version, flags, *numbers = _FIELDS.unpack_from(octets.data)
    if magic != MAGIC:
        raise PayloadError.of(f"a message that begins with {MAGIC!r}", magic, cure)
    if version != VERSION:
        raise PayloadError.of(f"a message of version {VERSION}", version, "run one version of shade on every rank")
    generation, step, bucket, size, count, weight, density, name, effective_step, num_indices, num_values = numbers
    if len(octets) != HEADER_BYTES + num_indices + num_values:
        raise PayloadError.of(f"{HEADER_BYTES + num_indices + num_values} bytes, as it says", len(octets), cure)
    (sent,) = _CHECKSUM.unpack_from(octets.data, _FIELDS.size)
    found = _digest(octets)
    if sent != found:
        raise PayloadError(f"expected checksum {sent:016x}, got {found:016x}; {cure}")
    if size >= 2**32 or count > size or flags > _IS_FINITE:
        raise PayloadError.of("count ≤ size < 2**32", (count, size, flags), "run one version everywhere")
    if not (math.isfinite(weight) and weight >= 0 and math.isfinite(density)):
        raise PayloadError.of("a finite weight ≥ 0 and a finite density", (weight, density), "see the sender's log")
    quantiser = name.rstrip(b"\0").decode("ascii", "replace")
    header = MessageHeader(
        generation, step, bucket, size, count, weight, quantiser, bool(flags & _IS_FINITE), density, effective_step
    )
    return header, num_indices


def _digest(data: Octets) -> int:
    """Over all but the checksum's own place."""
    state = xxhash.xxh3_64()
    state.update(data[: _FIELDS.size].data)
    state.update(data[HEADER_BYTES:].data)
    return state.intdigest()


Octets = npt.NDArray[np.uint8]
Places = npt.NDArray[np.uint32]

MIDDLE, WIDE = 254, 255


class IndexArrays:
    """The two loops in numpy; see `_kernels.index_loops`."""

    @staticmethod
    def split(indices_K: Places, codes_K: Octets, middle_K: npt.NDArray[np.uint16], wide_K: Places) -> tuple[int, int]:
        """Writes the gaps to three streams."""
        gaps_K = np.empty(len(indices_K), dtype=np.uint32)
        gaps_K[:1] = indices_K[:1]
        np.subtract(indices_K[1:], indices_K[:-1], out=gaps_K[1:])
        gaps_K[1:] -= 1
        np.minimum(gaps_K, MIDDLE, out=codes_K, casting="unsafe")
        escaped = gaps_K[gaps_K >= MIDDLE]
        codes_K[gaps_K >= 2**16] = WIDE
        middle, wide = escaped[escaped < 2**16], escaped[escaped >= 2**16]
        middle_K[: len(middle)] = middle
        wide_K[: len(wide)] = wide
        return len(middle), len(wide)

    @staticmethod
    def join(codes_K: Octets, middle: npt.NDArray[np.uint16], wide: Places, indices_K: Places) -> int:
        """Adds the gaps up."""
        gaps_K = codes_K.astype(np.uint64)
        gaps_K[codes_K == MIDDLE] = middle
        gaps_K[codes_K == WIDE] = wide
        after_K = np.cumsum(gaps_K + np.uint64(1))
        indices_K[:] = (after_K - np.uint64(1)).astype(np.uint32)
        return int(after_K[-1]) if len(after_K) else 0


@functools.cache
def loops() -> Any:
    """Those in use."""
    return choose("shade.gradient._kernels.index_loops", IndexArrays)


def encode(indices_K: Places) -> Octets:
    """Codes indices.

    Args:
        indices_K: uint32, ascending, each once.

    Returns:
        uint8, at most 5 · K long.
    """
    count = len(indices_K)
    codes_K, middle_K = np.empty(count, dtype=np.uint8), np.empty(count, dtype="<u2")
    wide_K = np.empty(count, dtype="<u4")
    num_middle, num_wide = loops().split(indices_K, codes_K, middle_K, wide_K)
    return np.concatenate([codes_K, middle_K[:num_middle].view(np.uint8), wide_K[:num_wide].view(np.uint8)])


def decode(data: Octets, count: int, size: int = 2**32) -> Places:
    """Takes what `encode` gave. Allocates a few bytes for each byte that came, whatever ``count`` claims.

    Args:
        data: uint8, all of it.
        count: K.
        size: All indices are below.

    Returns:
        uint32 (K,), ascending, each once.

    Raises:
        PayloadError: Another number of bytes than so many indices take, or an index out of range.
    """
    if not 0 <= count <= len(data):
        raise PayloadError.of(f"at least a byte for each of {count} indices", len(data), "sender and receiver differ")
    codes_K = data[:count]
    num_middle, num_wide = int(np.count_nonzero(codes_K == MIDDLE)), int(np.count_nonzero(codes_K == WIDE))
    start = count + 2 * num_middle
    if len(data) != start + 4 * num_wide:
        raise PayloadError.of(
            f"{start + 4 * num_wide} bytes for these {count} indices", len(data), "sender and receiver differ"
        )
    middle, wide = data[count:start].copy().view("<u2"), data[start:].copy().view("<u4")
    indices_K = np.empty(count, dtype=np.uint32)
    after = int(loops().join(codes_K, middle, wide, indices_K))
    if after > size:
        raise PayloadError.of(f"indices below {size}", after - 1, "sender and receiver differ about the bucket")
    return indices_K
