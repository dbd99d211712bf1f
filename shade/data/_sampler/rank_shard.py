"""Shares: how the global order of an epoch becomes one rank's batches, by position.

The arithmetic is that of `shade.sampling.shards`, with the numbers of one sampler filled in; and the memory of who was
dealt what, where that was not by position (`_sampler.cache_planner`).

Legend: N data set · K drawn in an epoch · G global batch · B this rank's part of it.

A draw as part of a checkpoint: its order as 32-bit numbers, its weights only where it drew, and a hash to tell by.

An order that was drawn is never drawn again after a resume, since it came from scores of a moment that is gone. So it
travels whole: eight bytes a drawn sample. The hash refuses an order that was damaged or mixed up on the way.

Legend: N data set · K drawn in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import xxhash

from shade.errors import ConfigError
from shade.sampling.base import Draw, Receipt
from shade.sampling.receipt import measure
from shade.sampling.shards import num_steps, rank_positions, rank_slice
from shade.types import Floats, Indices

DEALT_STEPS = 128
"""How many steps back one may ask who had what."""


class RankShard:
    """One rank's.

    Args:
        rank: This rank.
        num_replicas: W.
        batch_size: B.
        drop_last: Whether the tail that does not fill a global batch is left out.
    """

    def __init__(self, rank: int, num_replicas: int, batch_size: int, drop_last: bool) -> None:
        self._rank, self._num_replicas, self._drop_last = rank, num_replicas, drop_last
        self._global_batch = batch_size * num_replicas
        self._dealt: dict[int, Indices] = {}

    def num_steps(self, num_drawn: int) -> int:
        """Steps of an epoch that draws so many."""
        return num_steps(num_drawn, self._global_batch, drop_last=self._drop_last)

    def num_mine(self, num_drawn: int, first_step: int) -> int:
        """Samples that this rank takes in an epoch from a step on."""
        return len(
            rank_positions(
                self._rank,
                num_drawn=num_drawn,
                global_batch=self._global_batch,
                world_size=self._num_replicas,
                drop_last=self._drop_last,
                cursor=min(first_step * self._global_batch, num_drawn),
            )
        )

    def epoch_order(self, drawn_K: Indices) -> Indices:
        """Returns the order that the ranks go through: the drawn one, with its last step cut off or padded."""
        stop = self._slice(self.num_steps(len(drawn_K)) - 1, self._num_replicas - 1, len(drawn_K)).stop
        return drawn_K[:stop] if stop <= len(drawn_K) else np.concatenate([drawn_K, drawn_K[: stop - len(drawn_K)]])

    def _slice(self, step: int, rank: int, num_drawn: int) -> range:
        return rank_slice(
            step, rank, num_drawn=num_drawn, global_batch=self._global_batch, world_size=self._num_replicas
        )

    def of(self, order_K: Indices, num_drawn: int, step: int) -> tuple[Indices, slice]:
        """Returns one global batch of an `epoch_order`, and this rank's places in it by position."""
        start = step * self._global_batch
        mine = self._slice(step, self._rank, num_drawn)
        return order_K[start : start + self._global_batch], slice(mine.start - start, mine.stop - start)

    def begin(self) -> None:
        """Forgets what was dealt in the pass before."""
        self._dealt.clear()

    def remember(self, step: int, index_B: Indices) -> None:
        """Records what this rank was dealt at a step."""
        self._dealt[step] = index_B
        self._dealt.pop(step - DEALT_STEPS, None)

    def dealt(self, drawn_K: Indices, steps: Iterable[int]) -> list[Indices]:
        """Returns this rank's samples of some steps: as they were dealt, or by position if they are still to come."""
        order_K = self.epoch_order(drawn_K)
        dealt = []
        for step in steps:
            index_G, mine = self.of(order_K, len(drawn_K), step)
            dealt.append(self._dealt.get(step, index_G[mine]))
        return dealt

    def weights(self, draw: Draw, num_samples: int) -> Floats | None:
        """Weights by sample, corrected where the last step is shared unevenly: DDP averages ranks, not samples.

        Args:
            draw: Of the epoch.
            num_samples: N.

        Returns:
            float32 (N,), or None where all are 1.
        """
        order_K = draw.order_K
        last = self.num_steps(len(order_K)) - 1
        index_G, mine = self.of(self.epoch_order(order_K), len(order_K), last)
        balance = (mine.stop - mine.start) * self._num_replicas / len(index_G)
        if balance == 1.0:
            return draw.weight_N
        weight_N = np.ones(num_samples, np.float32) if draw.weight_N is None else draw.weight_N.copy()
        weight_N[index_G[mine]] *= balance
        return weight_N


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
