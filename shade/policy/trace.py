"""A trace: which samples a run used, in which order, epoch by epoch. The simulator replays it.

One file a run, an ``.npz`` that numpy reads without this package: ``size_bytes`` (N,), ``global_batch``, and for each
epoch ``order_00000`` and perhaps ``score_00000``, the importance as that epoch began; ``score_after`` is that of the
run's end. An epoch is appended when it begins, so a killed run leaves what it had recorded; only a kill during the
append itself spoils the file.

Price: four bytes a sample an epoch on disk, four more with scores.

Legend: N data set · K accesses of one epoch.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError, DataError
from shade.trajectory import array_of
from shade.types import Floats, Order

_UNREAD = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
CURE = "record one with a run, or name the .npz file of another run"


@dataclass(frozen=True)
class Trace:
    """What a run used."""

    size_bytes_N: npt.NDArray[np.int64]
    """(N,) the space of each sample in the store."""
    orders: tuple[Order, ...]
    """One global order an epoch."""
    global_batch: int
    """Accesses a step, over all ranks."""
    scores: tuple[Floats | None, ...] = ()
    """Importance as each epoch began; empty if none was recorded."""
    score_after: Floats | None = None
    """Importance as the run ended: one more epoch would be drawn from it."""

    def __post_init__(self) -> None:
        num_samples = len(self.size_bytes_N)
        if self.global_batch < 1:
            raise ConfigError.of("a global batch ≥ 1", self.global_batch, "give batch size × ranks")
        if self.scores and len(self.scores) != len(self.orders):
            cure = "give one an epoch, or none at all"
            raise ConfigError.of(f"{len(self.orders)} score arrays", len(self.scores), cure)
        for epoch, order_K in enumerate(self.orders):
            if len(order_K) and not 0 <= int(order_K.min()) <= int(order_K.max()) < num_samples:
                raise ConfigError.of(
                    f"sample indices 0 … {num_samples - 1} in epoch {epoch}",
                    (int(order_K.min()), int(order_K.max())),
                    "the trace and the sizes belong to different data sets",
                )

    @property
    def num_samples(self) -> int:
        """Returns N."""
        return len(self.size_bytes_N)

    @property
    def num_epochs(self) -> int:
        """Returns the number of recorded epochs."""
        return len(self.orders)

    @property
    def data_set_bytes(self) -> int:
        """Returns the bytes of all samples together."""
        return int(self.size_bytes_N.sum())

    def score_of(self, epoch: int) -> Floats | None:
        """Returns the importance as an epoch began, if it was recorded."""
        return self.scores[epoch] if self.scores else None

    def save(self, path: str | Path) -> None:
        """Writes the file, replacing an old one."""
        with TraceRecorder(path, self.size_bytes_N, self.global_batch) as recorder:
            for epoch, order_K in enumerate(self.orders):
                recorder.begin_epoch(epoch, order_K, self.score_of(epoch))
            if self.score_after is not None:
                recorder.end_run(self.score_after)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads a file that `save` or a `TraceRecorder` wrote; raises DataError if it is missing, damaged or not a
        trace."""
        try:
            with zipfile.ZipFile(path) as file:
                # Python asks for as many bytes of the file as a member is said to have.
                if any(member.compress_size > Path(path).stat().st_size for member in file.infolist()):
                    raise ValueError("a member of more bytes than the file")
                arrays = {name.removesuffix(".npy"): array_of(file.read(name)) for name in file.namelist()}
                return cls._from_arrays(arrays)
        except FileNotFoundError:
            raise DataError.of("a trace file", str(path), f"there is no such file; {CURE}") from None
        except _UNREAD as error:
            raise DataError.of("a whole trace (.npz)", str(path), f"it does not read ({error}); {CURE}") from error

    @classmethod
    def _from_arrays(cls, arrays: dict[str, Any]) -> Trace:
        """Builds a trace from the members of a file."""
        epochs = sorted(name.removeprefix("order_") for name in arrays if name.startswith("order_"))
        scores = tuple(arrays.get(f"score_{epoch}") for epoch in epochs)
        return cls(
            arrays["size_bytes"].astype(np.int64),
            tuple(arrays[f"order_{epoch}"].astype(np.int64) for epoch in epochs),
            int(arrays["global_batch"]),
            scores if any(score_N is not None for score_N in scores) else (),
            arrays.get("score_after"),
        )


class TraceRecorder:
    """Writes a trace during the run.

    Args:
        path: The file; replaced if it is there.
        size_bytes_N: int64 (N,), the space of each sample in the store.
        global_batch: Batch size × ranks.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | Path, size_bytes_N: npt.NDArray[np.int64], global_batch: int) -> None:
        self.path = Path(path)
        self._recorded: set[int] = set()
        self._append({"size_bytes": size_bytes_N, "global_batch": np.int64(global_batch)}, mode="w")

    def begin_epoch(self, epoch: int, order_K: Order, score_N: Floats | None = None) -> None:
        """Appends an epoch: its whole order, and its scores if there are any. An epoch is recorded once."""
        if epoch in self._recorded:
            return
        self._recorded.add(epoch)
        arrays: dict[str, Any] = {f"order_{epoch:05d}": order_K.astype(np.int32)}
        if score_N is not None:
            arrays[f"score_{epoch:05d}"] = np.asarray(score_N, dtype=np.float32)
        self._append(arrays, mode="a")

    def end_run(self, score_N: Floats) -> None:
        """Appends the final importance; called once."""
        self._append({"score_after": np.asarray(score_N, dtype=np.float32)}, mode="a")

    def _append(self, arrays: dict[str, Any], mode: Any) -> None:
        """Adds members to the file."""
        with zipfile.ZipFile(self.path, mode) as file:
            for name, array in arrays.items():
                # np.savez cannot append; an .npz is a zip of .npy members.
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        """Does nothing: the file is complete after each epoch."""
