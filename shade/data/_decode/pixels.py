"""The types of decoding: a part of a picture, pixels, and a decoder's signature, which all decoders share."""

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
    """Decoded pixels, perhaps more than were asked for. The next call may use their memory again."""

    source_S: npt.NDArray[np.uint8]
    """RGB, row after row."""
    pitch: int
    """Bytes from row to row."""
    top: int
    """The first row's number in the picture."""
    left: int
    """The first column's number in the picture."""

    @classmethod
    def of(cls, picture_HWC: npt.NDArray[np.uint8]) -> Pixels:
        """Returns a whole picture."""
        whole = np.ascontiguousarray(picture_HWC)
        return cls(whole.reshape(-1), 3 * whole.shape[1], 0, 0)

    def cut(self, box: Box) -> npt.NDArray[np.uint8]:
        """Returns a view (height, width, 3) of a part of the picture that was decoded, in the picture's coordinates."""
        rows = self.source_S[: len(self.source_S) // self.pitch * self.pitch].reshape(-1, self.pitch)
        first = 3 * (box.left - self.left)
        part = rows[box.top - self.top :][: box.height, first : first + 3 * box.width]
        return part.reshape(part.shape[0], -1, 3)


DecodeWindow = Callable[[Bytes, Box, int], Pixels]
"""Decodes a file: the wanted part, in the coordinates of the (reduced) picture, and the factor of the reduction. Raises
ValueError if the library refuses the file."""
