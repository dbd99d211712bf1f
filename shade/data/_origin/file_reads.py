"""Reads small files, many in one call that needs no interpreter, and times each.

Opening, reading and closing a file from Python gives the interpreter's lock away four times. To get it back may take
5 ms each time while another thread computes, where the file itself takes 0.02 ms (decision 0042).
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shade._lazy import compiled, load_numba

_numba = load_numba()
_c = _numba.types
_open = _c.ExternalFunction("open", _c.int32(_c.uintp, _c.int32))
_read = _c.ExternalFunction("read", _c.intp(_c.int32, _c.uintp, _c.uintp))
_close = _c.ExternalFunction("close", _c.int32(_c.int32))
_clock = _c.ExternalFunction("clock_gettime", _c.int32(_c.int32, _c.uintp))
_errno = _c.ExternalFunction("__error" if sys.platform == "darwin" else "__errno_location", _c.CPointer(_c.int32)())
_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_INTERRUPTED = errno.EINTR
_CLOCK = time.CLOCK_MONOTONIC


def read_files(
    paths: Sequence[str], room_S: npt.NDArray[np.uint8], mean_seconds: float, decay: float, slow_seconds: float
) -> tuple[list[bytes | OSError], float]:
    """Reads files whole, one after the other, up to the first that makes the mean read slow or whose content does not
    fit into what is left of the room.

    Args:
        paths: Of the files.
        room_S: Memory to read into; each file needs a byte more than its length.
        mean_seconds: Decaying mean of the seconds that a read took so far.
        decay: Weight of that mean against a new read, in [0, 1].
        slow_seconds: A mean above this ends the call.

    Returns:
        Contents of the first files, or the error that reading one raised, and the mean after them. No content at all
        means that the first file does not fit or that a signal interrupted it; its reader in Python copes with both.
    """
    names = [os.fsencode(path) for path in paths]
    joined = b"\0".join(names) + b"\0"
    if joined.count(b"\0") != len(names):
        # As `open` does.
        raise ValueError("embedded null byte")
    length_N = np.fromiter(map(len, names), dtype=np.int64, count=len(names))
    end_N, error_N = np.zeros(len(names), dtype=np.int64), np.zeros(len(names), dtype=np.int32)
    # No wait for the interpreter is in these times, so none is taken for a wait for storage.
    num_read, mean_seconds = _read_files(
        np.frombuffer(joined, dtype=np.uint8),
        np.cumsum(length_N + 1) - length_N - 1,
        room_S,
        end_N,
        error_N,
        np.zeros(2, dtype=np.int64),
        (mean_seconds, decay, slow_seconds),
    )
    contents: list[bytes | OSError] = []
    start = 0
    for path, end, error in zip(paths, end_N[:num_read].tolist(), error_N.tolist(), strict=False):
        contents.append(OSError(error, os.strerror(error), path) if error else room_S[start:end].tobytes())
        start = end
    return contents, mean_seconds


@compiled
def _read_files(
    names: npt.NDArray[np.uint8],
    name_at_N: npt.NDArray[np.int64],
    room_S: npt.NDArray[np.uint8],
    end_N: npt.NDArray[np.int64],
    error_N: npt.NDArray[np.int32],
    time_2: npt.NDArray[np.int64],
    pace: tuple[float, float, float],
) -> Any:
    """Fills the ends of the contents in the room, and their errors; returns how many there are, and the mean."""
    mean, decay, slow = pace
    used = 0
    for number in range(len(name_at_N)):
        _clock(_CLOCK, time_2.ctypes.data)
        begun = time_2[0] + 1e-9 * time_2[1]
        length, error, fits = 0, 0, True
        descriptor = _open(names.ctypes.data + name_at_N[number], _FLAGS)
        if descriptor < 0:
            error = _numba.carray(_errno(), 1)[0]
        while descriptor >= 0:
            free = len(room_S) - used - length
            fits = free > 0
            count = _read(descriptor, room_S.ctypes.data + used + length, free) if fits else 0
            if count < 0:
                error = _numba.carray(_errno(), 1)[0]
            if count <= 0:
                _close(descriptor)
                break
            length += count
        if not fits or error == _INTERRUPTED:
            return number, mean
        error_N[number] = error
        if not error:
            used += length
            _clock(_CLOCK, time_2.ctypes.data)
            mean = decay * mean + (1 - decay) * (time_2[0] + 1e-9 * time_2[1] - begun)
        end_N[number] = used
        if mean > slow:
            return number + 1, mean
    return len(name_at_N), mean
