"""Packs arrays into zstandard frames with their bytes grouped: the last stage of most codecs.

Grouped means all first bytes of the items, then all second ones, and so on. Signs and exponents of neighbouring weights
resemble each other, mantissas do not; mixed, neither compresses well. The length that a frame states is checked before
anything is allocated.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError, CorruptCheckpointError
from shade.installation import install_hint
from shade.types import Bytes

_LEVEL: Final = 1


class Frames:
    """Packs and unpacks frames; raises ConfigError, with the codec's name, if the ``zstandard`` package is missing."""

    def __init__(self, codec: str) -> None:
        try:
            import zstandard
        except ImportError:
            cure = f"{install_hint('checkpoint')}, or use codec 'none'"
            raise ConfigError.of(f"the zstandard package for codec {codec!r}", "none", cure) from None
        self._zstandard: Any = zstandard

    def pack(self, data: npt.NDArray[np.uint8], item_bytes: int = 1) -> bytes:
        """Returns a frame of flat data, grouped by ``item_bytes``; a shorter rest stays at the end."""
        grouped = data if item_bytes == 1 else transpose(data, len(data) // item_bytes, item_bytes)
        made: bytes = self._zstandard.ZstdCompressor(level=_LEVEL).compress(grouped)
        return made

    def unpack(self, stored: Bytes, least: int, most: int, item_bytes: int = 1) -> npt.NDArray[np.uint8]:
        """Returns the data of a frame; raises CorruptCheckpointError if it is none, or its length is out of range."""
        zstandard = self._zstandard
        try:
            length = zstandard.get_frame_parameters(stored).content_size
            if not least <= length <= most:  # zstandard allocates what the frame states, whatever max_output_size is
                raise CorruptCheckpointError(f"expected a chunk of {least} to {most} bytes, got one of {length}")
            plain = zstandard.ZstdDecompressor().decompress(stored, max_output_size=length, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            raise CorruptCheckpointError(f"a chunk of {len(stored)} bytes is not a zstandard frame: {error}") from error
        if len(plain) != length:
            raise CorruptCheckpointError(f"expected a chunk of {length} bytes, got {len(plain)}")
        grouped = np.frombuffer(plain, dtype=np.uint8)
        return grouped if item_bytes == 1 else transpose(grouped, item_bytes, length // item_bytes)


def transpose(data: npt.NDArray[np.uint8], num_rows: int, num_columns: int) -> npt.NDArray[np.uint8]:
    """Returns the transpose of a table that is stored row by row; a shorter rest stays at the end."""
    turned = np.empty_like(data)
    length = num_rows * num_columns
    turned[:length].reshape(num_columns, num_rows)[:] = data[:length].reshape(num_rows, num_columns).T
    turned[length:] = data[length:]
    return turned
