"""Records the loss of every sample in every epoch, one small file an epoch, for the quality report.

A folder in the run directory: ``00003.npy`` holds epoch 3, float16 (N,), NaN where the sample was not used;
``samples.json.gz`` names the samples and their targets, so that a reader needs neither the data set nor the training
script. Two bytes a sample and epoch on disk, four a sample in memory.

Invariant: a file is whole or not there; an epoch that was interrupted and resumed has the losses of both its parts.

Legend: N data set.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import re
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.errors import DataError
from shade.process import replacing
from shade.types import Floats

LOSSES = "losses"
"""Name of the folder of losses in the run directory."""
_SAMPLES = "samples.json.gz"
_LARGEST = 65504.0
MOST_EMPTY = 1 << 20
"""Items without a byte, of which there may be any number in nothing."""
_CURE = "name the folder of a run whose script reports its losses (sampler.report)"


@dataclass(frozen=True)
class Samples:
    """Names and targets of the samples."""

    names: tuple[str, ...] = ()
    """Paths by sample index; empty if samples have none."""
    targets: tuple[int, ...] = ()
    """Classes by sample index; empty if targets are no classes."""


@dataclass(frozen=True)
class Trajectory:
    """The losses of a run; reads an epoch when it is iterated over."""

    folder: Path
    epochs: tuple[int, ...]
    """Recorded epochs, ascending."""
    num_samples: int
    samples: Samples = field(default_factory=Samples)

    def losses(self) -> Iterator[Floats]:
        """Yields float32 (N,) for each epoch; NaN where the sample was not used."""
        for epoch in self.epochs:
            yield _read(self.folder / _file(epoch)).astype(np.float32)

    @classmethod
    def load(cls, folder: Path) -> Trajectory:
        """Reads what a `LossRecorder` wrote; raises `DataError` without losses, or with losses of different data
        sets."""
        epochs = sorted(int(path.stem) for path in folder.glob("*.npy") if re.fullmatch(r"\d{5,}", path.stem))
        if not epochs:
            raise DataError.of("the losses of an epoch", str(folder), _CURE)
        lengths = {len(_read(folder / _file(epoch))) for epoch in epochs}
        samples = _read_samples(folder / _SAMPLES)
        lengths |= {len(each) for each in (samples.names, samples.targets) if each}
        if len(lengths) > 1:
            raise DataError.of("losses and names of one data set", f"{sorted(lengths)} samples", _CURE)
        return cls(folder, tuple(epochs), lengths.pop(), samples)


class LossRecorder:
    """Writes the folder during the run.

    Args:
        folder: Made when there is something to write.
        samples: Called once, when the first epoch is written.
    """

    def __init__(self, folder: Path, samples: Callable[[], Samples]) -> None:
        self._folder, self._samples = folder, samples

    def end_epoch(self, epoch: int, loss_N: Floats) -> None:
        """Writes an epoch's float32 (N,) losses, NaN where none was reported; an epoch without any loss is left out.

        Keeps losses of the epoch's earlier part for samples without a new one. Raises `OSError` if it cannot write.
        """
        if np.isnan(loss_N).all():
            return
        self._folder.mkdir(exist_ok=True)
        if not (self._folder / _SAMPLES).exists():
            _write_samples(self._folder / _SAMPLES, self._samples())
        half_N = np.clip(loss_N, -_LARGEST, _LARGEST).astype(np.float16)
        path = self._folder / _file(epoch)
        with contextlib.suppress(DataError):
            before_N = _read(path)
            if before_N.shape == half_N.shape:
                half_N = np.where(np.isnan(half_N), before_N, half_N)
        with replacing(path) as beside, beside.open("wb") as file:
            np.save(file, half_N, allow_pickle=False)


def _file(epoch: int) -> str:
    return f"{epoch:05d}.npy"


def _read(path: Path) -> npt.NDArray[np.float16]:
    try:
        found = array_of(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError.of("the losses of an epoch", str(path), f"it does not read ({error}); remove it") from error
    if found.dtype != np.float16 or found.ndim != 1:
        raise DataError.of("the losses of an epoch", str(path), "it holds something else; remove it")
    return found


def array_of(content: bytes) -> npt.NDArray[Any]:
    """Returns what ``np.load`` does of an ``.npy`` file, or raises ValueError; allocates at most what is there."""
    file = io.BytesIO(content)
    # NumPy itself allocates what the header states, and raises what Python's parser does.
    try:
        is_first = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        if dtype.hasobject:  # NumPy would follow what the file says as pointers
            raise ValueError("it holds Python objects; save numbers, or text of one length")
        if not dtype.itemsize and math.prod(shape) > MOST_EMPTY:
            raise ValueError(f"{math.prod(shape)} items of type {dtype.str}")
        return np.ndarray(shape, dtype, content, file.tell(), order="F" if is_fortran else "C").copy("K")
    except (ArithmeticError, LookupError, RecursionError, SyntaxError, TypeError, tokenize.TokenError) as error:
        raise ValueError(f"it is no array that was saved: {error}") from error


def _write_samples(path: Path, samples: Samples) -> None:
    with replacing(path) as beside, gzip.open(beside, "wt", encoding="utf-8", compresslevel=3) as file:
        json.dump({"names": samples.names, "targets": samples.targets}, file)


def _read_samples(path: Path) -> Samples:
    """Returns the samples; empty if the file is missing or damaged, so that samples go by their index."""
    with contextlib.suppress(OSError, ValueError, EOFError, KeyError, TypeError, RecursionError, zlib.error):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
        names, targets = (_sequence(found[name]) for name in ("names", "targets"))
        return Samples(tuple(map(str, names)), tuple(map(int, targets)))
    return Samples()


def _sequence(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("a list was written")
    return value
