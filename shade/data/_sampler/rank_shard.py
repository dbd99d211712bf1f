"""Deals an epoch's global order to one rank.

Legend: N data set · K drawn in an epoch · G global batch · B this rank's part of it.
"""

from __future__ import annotations

import logging

import numpy as np

from shade.sampling.base import Draw
from shade.sampling.dealing import num_steps, rank_positions, rank_slice
from shade.types import Floats, Indices, Order

logger = logging.getLogger("shade.data")


class RankShard:
    """One rank's part of every global batch."""

    def __init__(self, rank: int, num_replicas: int, batch_size: int, drop_last: bool) -> None:
        self._rank, self.num_replicas, self._drop_last = rank, num_replicas, drop_last
        self.batch_size, self.global_batch = batch_size, batch_size * num_replicas

    def num_steps(self, num_drawn: int) -> int:
        """Returns the steps of an epoch that draws so many samples."""
        return num_steps(num_drawn, self.global_batch, drop_last=self._drop_last)

    def num_mine(self, num_drawn: int, first_step: int) -> int:
        """Returns how many samples this rank takes in an epoch from a step on."""
        return len(
            rank_positions(
                self._rank,
                num_drawn=num_drawn,
                global_batch=self.global_batch,
                world_size=self.num_replicas,
                drop_last=self._drop_last,
                cursor=min(first_step * self.global_batch, num_drawn),
            )
        )

    def epoch_order(self, drawn_K: Order) -> Order:
        """Returns the order that the ranks go through: the drawn one, with its last step cut off or padded."""
        stop = self._slice(self.num_steps(len(drawn_K)) - 1, self.num_replicas - 1, len(drawn_K)).stop
        return drawn_K[:stop] if stop <= len(drawn_K) else np.concatenate([drawn_K, drawn_K[: stop - len(drawn_K)]])

    def _slice(self, step: int, rank: int, num_drawn: int) -> range:
        return rank_slice(step, rank, num_drawn=num_drawn, global_batch=self.global_batch, world_size=self.num_replicas)

    def of(self, order_K: Order, num_drawn: int, step: int) -> tuple[Indices, slice]:
        """Returns one global batch of an `epoch_order`, and this rank's places in it by position."""
        start = step * self.global_batch
        mine = self._slice(step, self._rank, num_drawn)
        index_G = order_K[start : start + self.global_batch].astype(np.int64)
        return index_G, slice(mine.start - start, mine.stop - start)

    def weights(self, draw: Draw, num_samples: int) -> Floats | None:
        """Returns float32 (N,) weights by sample; None if all are 1."""
        order_K = draw.order_K
        last = self.num_steps(len(order_K)) - 1
        index_G, mine = self.of(self.epoch_order(order_K), len(order_K), last)
        # DDP averages ranks and not samples, so an unevenly shared last step is corrected for.
        balance = (mine.stop - mine.start) * self.num_replicas / len(index_G)
        if balance == 1.0:
            return draw.weight_N
        weight_N = np.ones(num_samples, np.float32) if draw.weight_N is None else draw.weight_N.copy()
        weight_N[index_G[mine]] *= balance
        return weight_N
