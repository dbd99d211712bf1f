"""An entry: what one sample looks like in the store. A 16-byte header, then the origin's bytes, unchanged.

::

    0      2         3       4         8                 16
    ┌──────┬─────────┬───────┬─────────┬─────────────────┬──────────────┐
    │ "SH" │ version │ form  │ length  │ xxh3-64         │ payload …    │
    └──────┴─────────┴───────┴─────────┴─────────────────┴──────────────┘

``form`` is the cached format, one of the constants below. The checksum is seeded with the sample index, so an entry
under another sample's key fails as surely as one with a flipped bit. A damaged or foreign store can make training
slower but never wrong. Price: 16 bytes and one xxh3 pass (memory speed) a hit. Invariant: `unseal` returns the payload
that was sealed for that index, or raises.
"""

from __future__ import annotations

import struct

import xxhash

from shade.errors import CorruptEntryError
from shade.types import Bytes, SampleIndex

FORMAT_ENCODED = 0
"""The payload is the origin's own bytes (a file)."""
FORMAT_ITEM = 1
"""The payload comes from an item codec: `shade.data._source.item_codec` or the user's ``encode``."""
FORMAT_PICTURE = 2
"""The payload is a decoded picture, as `shade.data._decode.cached_format` packs it."""

_HEADER = struct.Struct("<2sBBIQ")
_MAGIC, _VERSION = b"SH", 1
HEADER_BYTES = _HEADER.size


def seal(index: SampleIndex, payload: Bytes, cached_format: int) -> bytes:
    """Returns the entry for a payload of at most 4 GiB - 1."""
    digest = xxhash.xxh3_64_intdigest(payload, seed=index)
    return b"".join((_HEADER.pack(_MAGIC, _VERSION, cached_format, len(payload), digest), payload))


def unseal(index: SampleIndex, entry: bytes, cached_format: int, *, is_checked: bool = False) -> memoryview:
    """Returns a view of an entry's payload, after checking it.

    Args:
        index: The sample's index.
        entry: What the store has under the sample's key.
        cached_format: The format in which the sample is expected.
        is_checked: Whether the store has compared these bytes with a checksum of its own, seeded with the key; then
            they are not read again.

    Returns:
        The payload.

    Raises:
        CorruptEntryError: The bytes are not those that were sealed for this index in this format.
    """
    if len(entry) < HEADER_BYTES:
        raise CorruptEntryError(f"entry of sample {index} is {len(entry)} bytes, shorter than its header")
    magic, version, found_form, length, digest = _HEADER.unpack_from(entry)
    payload = memoryview(entry)[HEADER_BYTES:]
    if (magic, version, found_form, length) != (_MAGIC, _VERSION, cached_format, len(payload)):
        raise CorruptEntryError(f"entry of sample {index} has a header that does not describe it")
    if not is_checked and xxhash.xxh3_64_intdigest(payload, seed=index) != digest:
        raise CorruptEntryError(f"entry of sample {index} fails its checksum")
    return payload
