"""Deals an epoch's global order to one rank.

The arithmetic is `shade.sampling.shards`; the shard adds one sampler's numbers, and remembers what was dealt otherwise
than by position (`Locality`).

Legend: N data set · K drawn in an epoch · G global batch · B this rank's part of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from shade.errors import ConfigError
from shade.sampling.base import Draw
from shade.sampling.shards import num_steps, rank_positions, rank_slice
from shade.types import Floats, Indices, Order

logger = logging.getLogger("shade.data")

DEALT_STEPS = 128
"""How many steps back the shard remembers what was dealt."""


class RankShard:
    """One rank's part of every global batch."""

    def __init__(self, rank: int, num_replicas: int, batch_size: int, drop_last: bool) -> None:
        self._rank, self._num_replicas, self._drop_last = rank, num_replicas, drop_last
        self._global_batch = batch_size * num_replicas
        self._dealt: dict[int, Indices] = {}

    def num_steps(self, num_drawn: int) -> int:
        """Returns the steps of an epoch that draws so many samples."""
        return num_steps(num_drawn, self._global_batch, drop_last=self._drop_last)

    def num_mine(self, num_drawn: int, first_step: int) -> int:
        """Returns how many samples this rank takes in an epoch from a step on."""
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

    def epoch_order(self, drawn_K: Order) -> Order:
        """Returns the order that the ranks go through: the drawn one, with its last step cut off or padded."""
        stop = self._slice(self.num_steps(len(drawn_K)) - 1, self._num_replicas - 1, len(drawn_K)).stop
        return drawn_K[:stop] if stop <= len(drawn_K) else np.concatenate([drawn_K, drawn_K[: stop - len(drawn_K)]])

    def _slice(self, step: int, rank: int, num_drawn: int) -> range:
        return rank_slice(
            step, rank, num_drawn=num_drawn, global_batch=self._global_batch, world_size=self._num_replicas
        )

    def of(self, order_K: Order, num_drawn: int, step: int) -> tuple[Indices, slice]:
        """Returns one global batch of an `epoch_order`, and this rank's places in it by position."""
        start = step * self._global_batch
        mine = self._slice(step, self._rank, num_drawn)
        index_G = order_K[start : start + self._global_batch].astype(np.int64)
        return index_G, slice(mine.start - start, mine.stop - start)

    def begin(self) -> None:
        """Forgets what was dealt in the pass before."""
        self._dealt.clear()

    def remember(self, step: int, index_B: Indices) -> None:
        """Records what this rank was dealt at a step."""
        self._dealt[step] = index_B
        self._dealt.pop(step - DEALT_STEPS, None)

    def dealt(self, drawn_K: Order, steps: Iterable[int]) -> list[Indices]:
        """Returns this rank's samples of some steps: as they were dealt, or by position if they are still to come."""
        order_K = self.epoch_order(drawn_K)
        dealt = []
        for step in steps:
            index_G, mine = self.of(order_K, len(drawn_K), step)
            dealt.append(self._dealt.get(step, index_G[mine]))
        return dealt

    def place(self, index_B: Indices, num_done: int, drawn_K: Order, num_ahead: int) -> tuple[int, bool]:
        """Returns the step in which these samples were dealt, the nearest to ``num_done`` if there are several, and
        whether its last sample is among them.

        Raises ConfigError if they are not of one batch, or of none before step ``num_ahead``, which is still to come.
        """
        reported = set(index_B.tolist())
        for step in (num_done, num_done - 1, num_done + 1):
            dealt = self._dealt.get(step)
            if dealt is not None and reported.issubset(dealt.tolist()):
                return step, len(index_B) >= len(dealt) or dealt[-1] in reported
        steps = np.unique(np.flatnonzero(self.epoch_order(drawn_K) == index_B[0]) // self._global_batch)
        if not len(steps) or steps[0] >= num_ahead:
            raise ConfigError.of(
                "the indices that came with a batch of this epoch",
                f"sample {index_B[0]}, which was not {'handed out yet' if len(steps) else 'drawn'}",
                "report the last element of each sample of the ShadeDataset; a data set around it that reorders "
                "samples belongs inside, ShadeDataset(Reordered(data), cache=…)",
            )
        for step in steps[np.abs(steps - num_done).argsort(kind="stable")].tolist():
            (dealt,) = self.dealt(drawn_K, [step])
            if reported.issubset(dealt.tolist()):
                return step, len(index_B) >= len(dealt) or dealt[-1] in reported
            both = np.concatenate(self.dealt(drawn_K, [step, step + 1]))
            start = int(np.flatnonzero(both == index_B[0])[0])
            if np.array_equal(both[start : start + len(index_B)], index_B):
                raise ConfigError.of(
                    f"samples of one batch of {len(dealt)}",
                    "of two batches, which follow each other",
                    f"give loader and sampler one batch_size, {self._global_batch // self._num_replicas}",
                )
        raise ConfigError.of(
            "samples of one batch, as the sampler dealt it",
            f"samples {', '.join(map(str, index_B[:4].tolist()))} …, which are of several",
            "a data set around the ShadeDataset that reorders samples belongs inside, "
            "ShadeDataset(Reordered(data), cache=…)",
        )

    def weights(self, draw: Draw, num_samples: int) -> Floats | None:
        """Returns float32 (N,) weights by sample; None if all are 1.

        They correct for an unevenly shared last step, because DDP averages ranks and not samples.
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
