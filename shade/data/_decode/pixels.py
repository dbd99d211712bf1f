"""The words of decoding: a part of a picture, pixels, and a way from a file to them.

Apart from the ways themselves, so that `_decode.jpeg` may choose among them and each may be read alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shade.types import Bytes


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Pixels(NamedTuple):
    """Decoded pixels, perhaps more than were asked for. They may lie in memory that the next call uses again."""

    source_S: npt.NDArray[np.uint8]
    """RGB, row after row."""
    pitch: int
    """Bytes from row to row."""
    top: int
    """Row of the picture that comes first."""
    left: int
    """Column of the picture that comes first."""

    @classmethod
    def of(cls, picture_HWC: npt.NDArray[np.uint8]) -> Pixels:
        """A whole picture."""
        whole = np.ascontiguousarray(picture_HWC)
        return cls(whole.reshape(-1), 3 * whole.shape[1], 0, 0)

    def cut(self, box: Box) -> npt.NDArray[np.uint8]:
        """A part of the picture.

        Args:
            box: In the picture's coordinates; all of it was decoded.

        Returns:
            A view (height, width, 3).
        """
        rows = self.source_S[: len(self.source_S) // self.pitch * self.pitch].reshape(-1, self.pitch)
        first = 3 * (box.left - self.left)
        part = rows[box.top - self.top :][: box.height, first : first + 3 * box.width]
        return part.reshape(part.shape[0], -1, 3)


DecodeWindow = Callable[[Bytes, Box, int], Pixels]
"""Decodes a file: what of it is wanted, in the coordinates of the (reduced) picture, and by how much it is reduced.
Raises ValueError where the library objects to the file."""
