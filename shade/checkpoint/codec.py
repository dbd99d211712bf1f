"""What a chunk looks like when it is stored: as it is, or compressed without loss.

``zstd`` first gathers the bytes of equal rank: all first bytes of the items, then all second, … Signs and exponents of
neighbouring weights resemble each other, mantissas do not; mixed, they hide each other. One width serves a whole shard,
that of most of its bytes (`Manifest.item_bytes`); items of other widths come out right, only less small. It buys memory
in the cluster, not time: on a disk faster than about 0.25 GB/s a core it costs more than it saves.

Each chunk stands alone. Invariant: ``decode(encode(data)) == data``, and no stored bytes, whoever made them, make
`Codec.decode` ask for more than the chunk's length in memory, or return something of another length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError, CorruptCheckpointError
from shade.registry import Registry
from shade.types import Bytes

CODECS: Final[Registry[Codec]] = Registry("checkpoint codec")
_LEVEL: Final = 1


class Codec(ABC):
    """A way to store chunks. Threads may share one."""

    @abstractmethod
    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        """The stored form.

        Args:
            data: A chunk; may be returned itself.
            item_bytes: Width of most of its items, ≥ 1.

        Returns:
            Any number of bytes.
        """

    @abstractmethod
    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        """The chunk again.

        Args:
            stored: From `encode`.
            num_bytes: Length of the chunk.
            item_bytes: As it was given to `encode`.

        Returns:
            Exactly ``num_bytes`` bytes.

        Raises:
            CorruptCheckpointError: Not the stored form of a chunk of that length.
        """


@CODECS.register("none")
class Plain(Codec):
    """As it is: nothing is copied."""

    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        """See `Codec`."""
        return data

    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        """See `Codec`."""
        return _of_length(stored, num_bytes)


@CODECS.register("zstd")
class Zstandard(Codec):
    """Grouped by byte, then zstandard at its fastest level.

    Raises:
        ConfigError: The ``zstandard`` package is missing.
    """

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise ConfigError.of(
                "the zstandard package for codec 'zstd'", "none", "pip install 'shade[checkpoint]', or use codec 'none'"
            ) from None
        self._zstandard: Any = zstandard

    def encode(self, data: memoryview, item_bytes: int) -> Bytes:
        """See `Codec`."""
        grouped = _turn(np.frombuffer(data, dtype=np.uint8), len(data) // item_bytes, item_bytes)
        made: bytes = self._zstandard.ZstdCompressor(level=_LEVEL).compress(grouped)
        return made

    def decode(self, stored: Bytes, num_bytes: int, item_bytes: int) -> Bytes:
        """See `Codec`."""
        zstandard = self._zstandard
        try:
            told = zstandard.get_frame_parameters(stored).content_size
            if told != num_bytes:  # what it tells is allocated, whatever limit is given: look first
                raise CorruptCheckpointError(f"expected a chunk of {num_bytes} bytes, got one that tells {told}")
            plain = zstandard.ZstdDecompressor().decompress(stored, max_output_size=num_bytes, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            raise CorruptCheckpointError(f"a chunk of {len(stored)} bytes is not a zstandard frame: {error}") from error
        grouped = np.frombuffer(_of_length(plain, num_bytes), dtype=np.uint8)
        return _turn(grouped, item_bytes, num_bytes // item_bytes).data


def _turn(data: npt.NDArray[np.uint8], num_rows: int, num_columns: int) -> npt.NDArray[np.uint8]:
    """The transpose of a table that is stored row by row; what is left over at the end stays there."""
    turned = np.empty_like(data)
    length = num_rows * num_columns
    turned[:length].reshape(num_columns, num_rows)[:] = data[:length].reshape(num_rows, num_columns).T
    turned[length:] = data[length:]
    return turned


def _of_length(content: Bytes, num_bytes: int) -> Bytes:
    if len(content) != num_bytes:
        raise CorruptCheckpointError(f"expected a chunk of {num_bytes} bytes, got {len(content)}")
    return content
