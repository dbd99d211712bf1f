"""Encodes one bucket's message: a fixed header, indices and values, under one checksum.

::

    magic "SHDG" · version · flags · fields of `MessageHeader` · both lengths · xxh3-64 of all else │ indices │ values

The decoder allocates a few times the received bytes, whatever a header claims. The checksum guards against lines and
bugs, not against people: the transport decides who may join a group.

Ascending indices are encoded as gaps, in three streams one behind the other::

    codes    uint8  × K    the gap, if it is below 254; else 254: the next entry of `middle`, 255: the next of `wide`
    middle   uint16 × n    gaps below 65536
    wide     uint32 × m    all others

That is 1.15 bytes an index at one kept element in a hundred, 2.6 at one in a thousand, never more than 5 (escapes
among the codes: 1.31 and 4.1; the entropy is 1.02). The first gap counts from zero, later ones from one behind the
previous index. So whatever decodes is ascending and distinct.

Legend: D bucket · K kept.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from shade.errors import ConfigError, PayloadError, UnknownNameError
from shade.gradient._compress.compressor import Sparse
from shade.gradient._compress.quantiser import QUANTISERS, Octets, Quantiser
from shade.gradient._kernels.build import build
from shade.gradient._kernels.lines import Places
from shade.types import Bytes

MAGIC: Final = b"SHDG"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<4sHBxqqqQQdd16sqQQ")
_CHECKSUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM.size
_IS_FINITE: Final = 1
MIDDLE, WIDE = 254, 255
"""Codes of gaps that continue in the second and the third stream."""


@dataclass(frozen=True)
class MessageHeader:
    """The header of a message."""

    generation: int
    """Of the group; a message of an earlier generation is late."""
    step: int
    bucket: int
    """The bucket's index."""
    size: int
    """D."""
    count: int
    """K."""
    weight: float
    """Samples that the gradient is the mean of, ≥ 0."""
    quantiser: str
    """Registered name; at most 16 bytes."""
    is_finite: bool = True
    """False: the gradient held NaN or infinity, and the message holds no elements."""
    density_proposal: float = 0.0
    """Rank 0's, see `shade.types.Decision`; 0: none."""
    effective_step: int = 0
    """The first step of the proposal."""


def pack(header: MessageHeader, sparse: Sparse, quantiser: Quantiser) -> Octets:
    """Encodes a message; ``quantiser`` is the one that the header names."""
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
    flags = _IS_FINITE if header.is_finite else 0
    place = header.generation, header.step, header.bucket, header.size, header.count, header.weight
    proposal = header.density_proposal, name, header.effective_step
    fields = _FIELDS.pack(MAGIC, VERSION, flags, *place, *proposal, len(indices), len(values))
    data = np.empty(HEADER_BYTES + len(indices) + len(values), dtype=np.uint8)
    data[: _FIELDS.size] = np.frombuffer(fields, dtype=np.uint8)
    data[HEADER_BYTES : HEADER_BYTES + len(indices)] = indices
    data[HEADER_BYTES + len(indices) :] = values
    data[_FIELDS.size : HEADER_BYTES] = np.frombuffer(_CHECKSUM.pack(_digest(data)), dtype=np.uint8)
    return data


def unpack(data: Octets | Bytes, size: int | None = None) -> tuple[MessageHeader, Sparse]:
    """Decodes a message.

    Args:
        data: The whole message, and nothing more.
        size: D of the expected bucket; None: any.

    Returns:
        The header, and the bucket's chosen elements in new memory.

    Raises:
        PayloadError: The message is damaged, has another format or version, or is of another bucket.
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
    """Returns the header and the length of the indices, once everything but their content is checked."""
    cure = "check whether another program uses this group, or the network damages data"
    if octets.dtype != np.uint8 or octets.ndim != 1 or len(octets) < HEADER_BYTES:
        raise PayloadError.of(f"at least {HEADER_BYTES} bytes", octets.size * octets.itemsize, cure)
    magic, version, flags, *numbers = _FIELDS.unpack_from(octets.data)
    if magic != MAGIC:
        raise PayloadError.of(f"a message that begins with {MAGIC!r}", magic, cure)
    if version != VERSION:
        raise PayloadError.of(f"a message of version {VERSION}", version, "run one version of shade on every rank")
    generation, step, bucket, size, count, weight, density, name, effective_step, num_indices, num_values = numbers
    if len(octets) != HEADER_BYTES + num_indices + num_values:
        raise PayloadError.of(f"{HEADER_BYTES + num_indices + num_values} bytes, as the header says", len(octets), cure)
    # No number but the lengths is used before the checksum over all other bytes matches.
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
    state = xxhash.xxh3_64()
    state.update(data[: _FIELDS.size].data)
    state.update(data[HEADER_BYTES:].data)
    return state.intdigest()


def encode(indices_K: Places) -> Octets:
    """Encodes ascending, distinct indices in at most 5 · K bytes."""
    count = len(indices_K)
    codes_K, middle_K = np.empty(count, dtype=np.uint8), np.empty(count, dtype="<u2")
    wide_K = np.empty(count, dtype="<u4")
    num_middle, num_wide = build("index_loops").split(indices_K, codes_K, middle_K, wide_K)
    return np.concatenate([codes_K, middle_K[:num_middle].view(np.uint8), wide_K[:num_wide].view(np.uint8)])


def decode(data: Octets, count: int, size: int = 2**32) -> Places:
    """Decodes what `encode` returned. Allocates a few bytes for each received byte, whatever ``count`` claims.

    Args:
        data: uint8, the whole code.
        count: K.
        size: The limit that all indices are below.

    Returns:
        uint32 (K,), ascending, distinct.

    Raises:
        PayloadError: The length does not fit ``count`` indices, or an index is out of range.
    """
    # A code has at least a byte an index, so this bounds all that is allocated below.
    if not 0 <= count <= len(data):
        raise PayloadError.of(f"at least a byte for each of {count} indices", len(data), "sender and receiver differ")
    # The length follows from counting two values among the codes, so it is checked before decoding.
    codes_K = data[:count]
    num_middle, num_wide = int(np.count_nonzero(codes_K == MIDDLE)), int(np.count_nonzero(codes_K == WIDE))
    start = count + 2 * num_middle
    if len(data) != start + 4 * num_wide:
        raise PayloadError.of(
            f"{start + 4 * num_wide} bytes for these {count} indices", len(data), "sender and receiver differ"
        )
    middle, wide = data[count:start].copy().view("<u2"), data[start:].copy().view("<u4")
    indices_K = np.empty(count, dtype=np.uint32)
    after = int(build("index_loops").join(codes_K, middle, wide, indices_K))
    if after > size:
        raise PayloadError.of(f"indices below {size}", after - 1, "sender and receiver differ about the bucket")
    return indices_K
