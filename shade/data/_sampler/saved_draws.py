"""An epoch's draw in a checkpoint, and in the memory that the ranks of a machine share.

After a resume an epoch is never drawn again, because it came from scores of a moment that is gone. So its whole order
is saved, with a hash that refuses a damaged or mixed-up order.

Legend: N data set · K drawn in an epoch.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from shade.errors import ConfigError
from shade.process import enter_folder, exclusive_lock, leave_folder, remove_unused, replacing
from shade.rank_group import RankGroup, agreed_name
from shade.sampling.base import Draw, Receipt, parts, picked
from shade.sampling.receipt import measure
from shade.types import Floats, Order

logger = logging.getLogger("shade.data")


_MEMORY = "/dev/shm"
_DRAW_BYTES = 8
"""Bytes a sample of a draw, at most: its place in the order, and its weight."""


class SharedDraws:
    """The draws of a large set, which one rank of a machine makes and the others map: a machine holds each once.

    A draw is a folder in ``/dev/shm``, named by what the draw follows from beside the settings: the epoch, the scores,
    the residents and the history of validation. Collective.

    Args:
        num_samples: N.
        group: The ranks of this job.
    """

    def __init__(self, num_samples: int, group: RankGroup) -> None:
        stem = f"{_MEMORY}/shade-{os.getuid()}-draws-"
        # Jobs that were killed leave their folders behind.
        for path in glob.glob(f"{glob.escape(stem)}*"):
            remove_unused(path)
        self._folder = f"{stem}{agreed_name(group)}"
        self._is_usable = self._has_room(2 * _DRAW_BYTES * num_samples)
        if self._is_usable:
            enter_folder(self._folder)
            weakref.finalize(self, leave_folder, self._folder, os.getpid())

    @staticmethod
    def _has_room(wanted_bytes: int) -> bool:
        free_bytes = shutil.disk_usage(_MEMORY).free if os.path.isdir(_MEMORY) else 0
        if free_bytes < wanted_bytes:
            logger.warning(
                "expected %d MiB of shared memory for two epochs' draws, got %d MiB free in %s; each rank keeps "
                "draws of its own; in a container: --shm-size",
                wanted_bytes >> 20,
                free_bytes >> 20,
                _MEMORY,
            )
        return free_bytes >= wanted_bytes

    def of(self, epoch: int, causes: Iterable[object], make: Callable[[], Draw]) -> Draw:
        """Returns a draw, which this rank makes if no other one has.

        Args:
            epoch: The epoch that is drawn.
            causes: What the draw follows from, the same on every rank: arrays, numbers, None.
            make: Draws.

        Returns:
            The draw, its arrays read-only.
        """
        if not self._is_usable:
            return make()
        digest = xxhash.xxh3_64()
        for cause in causes:
            digest.update(b"|")
            digest.update(cause.view(np.uint8).data if isinstance(cause, np.ndarray) else repr(cause).encode())
        place = Path(self._folder, f"{epoch}-{digest.hexdigest()}")
        # No rank waits for a certain other one, which might never draw: the first that wants a draw makes it.
        with exclusive_lock(f"{place}.lock"):
            with contextlib.suppress(FileNotFoundError):  # not drawn yet, or a rank that is ahead is removing it
                return self._mapped(epoch, place)
            draw = make()
            try:
                with replacing(place) as beside:
                    self._write(draw, beside)
                del draw
                return self._mapped(epoch, place)
            except OSError as error:
                logger.warning("%s takes no draw (%s); this rank keeps its own", place, error)
        return make()

    @staticmethod
    def _write(draw: Draw, folder: Path) -> None:
        folder.mkdir()
        np.save(folder / "order.npy", draw.order_K)
        if draw.weight_N is not None:
            np.save(folder / "weight.npy", draw.weight_N)
        described = {"has_weights": draw.weight_N is not None, "receipt": vars(draw.receipt)}
        (folder / "draw.json").write_text(json.dumps(described))

    @staticmethod
    def _mapped(epoch: int, folder: Path) -> Draw:
        described = json.loads((folder / "draw.json").read_text())
        order_K = np.asarray(np.load(folder / "order.npy", mmap_mode="r"))
        weight_N = np.asarray(np.load(folder / "weight.npy", mmap_mode="r")) if described["has_weights"] else None
        draw = Draw(epoch, order_K, weight_N, Receipt(**described["receipt"]))
        # The first rank that drops a draw removes the folder. What others have mapped stays, and a rank that finds none
        # makes it again, the same.
        weakref.finalize(draw, _forget, folder, os.getpid()).atexit = False
        return draw


def _forget(folder: Path, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


class SavedDraws:
    """Draws in the form of a checkpoint. All states that hold a tensor share it, so it must not be changed."""

    def __init__(self) -> None:
        # Each is made once, because a loader that keeps its place may ask at every step.
        self._made: list[tuple[Draw, dict[str, Any]]] = []

    def of(self, draw: Draw) -> dict[str, Any]:
        """Returns a draw as plain numbers and tensors, which `load_draw` takes."""
        for known, saved in self._made:
            if known is draw:
                return dict(saved)
        weight_K = None if draw.weight_N is None else torch.from_numpy(picked(draw.weight_N, draw.order_K))
        made = {
            "order": torch.from_numpy(draw.order_K.astype(np.int32)),
            "weight": weight_K,
            "hash": _digest(draw.order_K),
            "receipt": vars(draw.receipt).copy(),
        }
        self._made = [*self._made[-1:], (draw, made)]
        return dict(made)


def load_draw(epoch: int, saved: dict[str, Any], num_samples: int) -> Draw:
    """Restores a draw from `SavedDraws.of`. Raises ConfigError if the order does not match its hash."""
    order_K = saved["order"].numpy().astype(np.int32)
    if _digest(order_K) != saved["hash"]:
        raise ConfigError.of("an order that matches its hash", saved["hash"], "restore an older checkpoint")
    weight_N = None
    if saved["weight"] is not None:
        # Weights of samples that were not drawn are never used.
        weight_N = np.ones(num_samples, dtype=np.float32)
        for part in parts(len(order_K)):
            weight_N[order_K[part]] = saved["weight"].numpy()[part]
    return Draw(epoch, order_K, weight_N, Receipt(**saved["receipt"]))


def _digest(order_K: Order) -> str:
    """Returns the hash of an order, as 64-bit numbers."""
    digest = xxhash.xxh3_64()
    for part in parts(len(order_K)):
        digest.update(order_K[part].astype(np.int64).tobytes())
    return digest.hexdigest()


def draw_from(epoch: int, order_K: Order, weight_N: Floats | None, *, num_samples: int) -> Draw:
    """Makes a draw from another job's order and weights (None: all 1); without targets its receipt has no classes."""
    known_N = np.ones(num_samples, dtype=np.float32) if weight_N is None else weight_N
    return Draw(epoch, order_K, weight_N, measure(order_K, known_N))
