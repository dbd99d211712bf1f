"""Zstandard frames of arrays whose bytes are grouped: what most codecs end with.

Grouped: all first bytes of the items, then all second, … Signs and exponents of neighbouring weights resemble each
other, mantissas do not; mixed, they hide each other. What a frame says of its length is looked at before anything is
allocated.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError, CorruptCheckpointError
from shade.types import Bytes

_LEVEL: Final = 1


class Frames:
    """Makes and opens frames.

    Args:
        codec: Whose, for the message.

    Raises:
        ConfigError: The ``zstandard`` package is missing.
    """

    def __init__(self, codec: str) -> None:
        try:
            import zstandard
        except ImportError:
            cure = "pip install 'shade[checkpoint]', or use codec 'none'"
            raise ConfigError.of(f"the zstandard package for codec {codec!r}", "none", cure) from None
        self._zstandard: Any = zstandard

    def pack(self, data: npt.NDArray[np.uint8], item_bytes: int = 1) -> bytes:
        """One frame.

        Args:
            data: Flat.
            item_bytes: Width of its items, ≥ 1; what is left over at the end stays there.

        Returns:
            The frame.
        """
        grouped = data if item_bytes == 1 else turn(data, len(data) // item_bytes, item_bytes)
        made: bytes = self._zstandard.ZstdCompressor(level=_LEVEL).compress(grouped)
        return made

    def unpack(self, stored: Bytes, least: int, most: int, item_bytes: int = 1) -> npt.NDArray[np.uint8]:
        """What is in a frame.

        Args:
            stored: The frame.
            least: Bytes that it must hold.
            most: Bytes that it may hold.
            item_bytes: As it was packed with.

        Returns:
            Flat; perhaps read-only.

        Raises:
            CorruptCheckpointError: It is no frame, or one of another length.
        """
        zstandard = self._zstandard
        try:
            told = zstandard.get_frame_parameters(stored).content_size
            if not least <= told <= most:  # what it tells is allocated, whatever limit is given: look first
                raise CorruptCheckpointError(f"expected a chunk of {least} to {most} bytes, got one that tells {told}")
            plain = zstandard.ZstdDecompressor().decompress(stored, max_output_size=told, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            raise CorruptCheckpointError(f"a chunk of {len(stored)} bytes is not a zstandard frame: {error}") from error
        if len(plain) != told:
            raise CorruptCheckpointError(f"expected a chunk of {told} bytes, got {len(plain)}")
        grouped = np.frombuffer(plain, dtype=np.uint8)
        return grouped if item_bytes == 1 else turn(grouped, item_bytes, told // item_bytes)


def turn(data: npt.NDArray[np.uint8], num_rows: int, num_columns: int) -> npt.NDArray[np.uint8]:
    """The transpose of a table that is stored row by row; what is left over at the end stays there."""
    turned = np.empty_like(data)
    length = num_rows * num_columns
    turned[:length].reshape(num_columns, num_rows)[:] = data[:length].reshape(num_rows, num_columns).T
    turned[length:] = data[length:]
    return turned
