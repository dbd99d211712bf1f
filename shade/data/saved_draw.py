"""A draw as part of a checkpoint: its order as 32-bit numbers, its weights only where it drew, and a hash to tell by.

An order that was drawn is never drawn again after a resume, since it came from scores of a moment that is gone. So it
travels whole: eight bytes a drawn sample. The hash refuses an order that was damaged or mixed up on the way.

Legend: N data set · K drawn in an epoch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash

from shade.errors import ConfigError
from shade.sampling.base import Draw, Receipt
from shade.sampling.receipt import measure
from shade.types import Floats, Indices


class SavedDraws:
    """Draws in the form of a checkpoint, each made once: a loader that keeps its place may ask at every step.

    The tensors are shared by all states that hold them, and are not to be changed.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Draw, dict[str, Any]]] = []

    def of(self, draw: Draw) -> dict[str, Any]:
        """Plain numbers and tensors.

        Args:
            draw: Of any mode.

        Returns:
            What `load_draw` takes.
        """
        for known, saved in self._made:
            if known is draw:
                return dict(saved)
        weight_K = None if draw.weight_N is None else torch.from_numpy(draw.weight_N[draw.order_K])
        made = {
            "order": torch.from_numpy(draw.order_K.astype(np.int32)),
            "weight": weight_K,
            "hash": _digest(draw.order_K),
            "receipt": vars(draw.receipt).copy(),
        }
        self._made = [*self._made[-1:], (draw, made)]
        return dict(made)


def load_draw(epoch: int, saved: dict[str, Any], num_samples: int) -> Draw:
    """The draw again; weights of samples that were not drawn are 1, and nobody asks for them.

    Args:
        epoch: Whose draw it is.
        saved: From `SavedDraws.of`.
        num_samples: N.

    Returns:
        The draw.

    Raises:
        ConfigError: The order does not match its hash.
    """
    order_K = saved["order"].numpy().astype(np.int64)
    if _digest(order_K) != saved["hash"]:
        raise ConfigError.of("an order that matches its hash", saved["hash"], "restore an older checkpoint")
    weight_N = None
    if saved["weight"] is not None:
        weight_N = np.ones(num_samples, dtype=np.float32)
        weight_N[order_K] = saved["weight"].numpy()
    return Draw(epoch, order_K, weight_N, Receipt(**saved["receipt"]))


def _digest(order_K: Indices) -> str:
    """What tells one order from another."""
    return xxhash.xxh3_64_hexdigest(order_K.tobytes())


def draw_from(epoch: int, order_K: Indices, weight_N: Floats | None, *, num_samples: int) -> Draw:
    """A draw that another job made, from its order and weights; without targets its receipt is silent on classes.

    Args:
        epoch: Whose draw it is.
        order_K: Its order.
        weight_N: Weight of every sample; None: all 1.
        num_samples: N.

    Returns:
        The draw.
    """
    known_N = np.ones(num_samples, dtype=np.float32) if weight_N is None else weight_N
    return Draw(epoch, order_K, weight_N, measure(order_K, known_N))
