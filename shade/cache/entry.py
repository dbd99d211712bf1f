"""What one sample looks like inside the store: a 16-byte header, then the origin's bytes, unchanged.

::

    0      2         3       4         8                 16
    ┌──────┬─────────┬───────┬─────────┬─────────────────┬──────────────┐
    │ "SH" │ version │ form  │ length  │ xxh3-64         │ payload …    │
    └──────┴─────────┴───────┴─────────┴─────────────────┴──────────────┘

The checksum is seeded with the sample index, so an entry that landed under another sample's key fails as surely as one
with a flipped bit. Costs 16 bytes and one xxh3 pass (memory speed) a hit; buys that a damaged or foreign store can make
training slower but never wrong. Invariant: `unseal` returns the very payload that was sealed for that index, or raises.
"""

from __future__ import annotations

import struct

import xxhash

from shade.errors import CorruptEntryError
from shade.types import Bytes, SampleIndex

FORMAT_ENCODED = 0
"""The payload is the origin's own bytes (a file)."""
FORMAT_ITEM = 1
"""The payload was made by an item codec: `shade.data._dataset.item_codec` or the user's ``encode``."""
FORMAT_PICTURE = 2
"""The payload is a decoded picture, see `shade.data._decode.cached_format`."""

_HEADER = struct.Struct("<2sBBIQ")
_MAGIC, _VERSION = b"SH", 1
HEADER_BYTES = _HEADER.size


def seal(index: SampleIndex, payload: Bytes, cached_format: int) -> bytes:
    """Puts the header in front.

    Args:
        index: The sample the payload belongs to.
        payload: Its bytes; at most 4 GiB - 1.
        form: One of the three above.

    Returns:
        The entry, ready for a store.
    """
    digest = xxhash.xxh3_64_intdigest(payload, seed=index)
    return b"".join((_HEADER.pack(_MAGIC, _VERSION, cached_format, len(payload), digest), payload))


def unseal(index: SampleIndex, entry: bytes, cached_format: int) -> memoryview:
    """Checks an entry and takes the header off, without copying the payload.

    Args:
        index: The sample it was asked for.
        entry: What the store returned.
        form: The form the caller can decode.

    Returns:
        A view of the payload.

    Raises:
        CorruptEntryError: Anything but the bytes that were sealed for this index in this form.
    """
    if len(entry) < HEADER_BYTES:
        raise CorruptEntryError(f"entry of sample {index} is {len(entry)} bytes, shorter than its header")
    magic, version, found_form, length, digest = _HEADER.unpack_from(entry)
    payload = memoryview(entry)[HEADER_BYTES:]
    if (magic, version, found_form, length) != (_MAGIC, _VERSION, cached_format, len(payload)):
        raise CorruptEntryError(f"entry of sample {index} has a header that does not describe it")
    if xxhash.xxh3_64_intdigest(payload, seed=index) != digest:
        raise CorruptEntryError(f"entry of sample {index} fails its checksum")
    return payload
