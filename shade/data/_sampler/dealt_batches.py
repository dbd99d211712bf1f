"""Remembers what one rank was dealt in a pass, and finds the step that a report's samples are of.

Legend: K drawn in an epoch · B this rank's part of a global batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from shade.data._sampler.rank_shard import RankShard
from shade.errors import ConfigError
from shade.types import Indices, Order

REMEMBERED_STEPS = 128
"""Steps back for which the dealt samples are remembered."""
LOOK_AHEAD_STEPS = 64
"""Later steps that `DealtBatches.check_order` compares a batch with."""
_INSIDE = (
    "a data set around the ShadeDataset that reorders samples belongs inside, ShadeDataset(Reordered(data), cache=…)"
)


class DealtBatches:
    """One rank's batches of one pass.

    Args:
        shard: This rank's part of every global batch.
        order_K: The order that the ranks go through (`RankShard.epoch_order`).
        num_drawn: Samples of the draw that it was made of.
    """

    def __init__(self, shard: RankShard, order_K: Order, num_drawn: int) -> None:
        self._shard, self._order_K, self._num_drawn = shard, order_K, num_drawn
        self.batch_size = shard.batch_size
        self._dealt: dict[int, Indices] = {}

    def remember(self, step: int, index_B: Indices) -> None:
        """Records what this rank was dealt at a step."""
        # Dealing by position (`RankShard`) could be computed again; dealing by what each host keeps (`Locality`) could
        # not. Older steps have no losses on their way.
        self._dealt[step] = index_B
        self._dealt.pop(step - REMEMBERED_STEPS, None)

    def of(self, steps: Iterable[int]) -> list[Indices]:
        """Returns this rank's samples of some steps: as they were dealt, or by position if they are still to come."""
        dealt = []
        for step in steps:
            index_G, mine = self._shard.of(self._order_K, self._num_drawn, step)
            dealt.append(self._dealt.get(step, index_G[mine]))
        return dealt

    def step_of(self, index_B: Indices, near: int, before: int) -> tuple[int, bool]:
        """Finds the step in which samples were dealt.

        Args:
            index_B: The samples.
            near: The step that is chosen if there are several: this one, or the nearest to it.
            before: First step that is still to come.

        Returns:
            The step, and whether its last sample is among them.

        Raises:
            ConfigError: They are not of one batch, or of none that was dealt.
        """
        reported = set(index_B.tolist())
        # Most reports are of these steps, which need no search through the order.
        for step in (near, near - 1, near + 1):
            dealt = self._dealt.get(step)
            if dealt is not None and reported.issubset(dealt.tolist()):
                return step, len(index_B) >= len(dealt) or dealt[-1] in reported
        global_batch = self._shard.global_batch
        steps = np.unique(np.flatnonzero(self._order_K == index_B[0]) // global_batch)
        if not len(steps) or steps[0] >= before:
            raise ConfigError.of(
                "the indices that came with a batch of this epoch",
                f"sample {index_B[0]}, which was not {'handed out yet' if len(steps) else 'drawn'}",
                f"report the last element of each sample of the ShadeDataset; {_INSIDE}",
            )
        for step in steps[np.abs(steps - near).argsort(kind="stable")].tolist():
            (dealt,) = self.of([step])
            if reported.issubset(dealt.tolist()):
                return step, len(index_B) >= len(dealt) or dealt[-1] in reported
            both = np.concatenate(self.of([step, step + 1]))
            start = int(np.flatnonzero(both == index_B[0])[0])
            if np.array_equal(both[start : start + len(index_B)], index_B):
                raise ConfigError.of(
                    f"samples of one batch of {len(dealt)}",
                    "of two batches, which follow each other",
                    f"give loader and sampler one batch_size, {self.batch_size}",
                )
        raise ConfigError.of(
            "samples of one batch, as the sampler dealt it",
            f"samples {', '.join(map(str, index_B[:4].tolist()))} …, which are of several",
            _INSIDE,
        )

    def check_order(self, indices: torch.Tensor, step: int) -> None:
        """Checks that the batch that is reported is the one that was handed out at this step.

        Args:
            indices: int64 (B,), of the reported batch, on any device.
            step: The step of this report.

        Raises:
            ConfigError: It is this rank's batch of a later step.
        """
        if self._shard.num_replicas == 1:
            return
        first = int(indices[0])
        last = min(self._shard.num_steps(self._num_drawn), step + LOOK_AHEAD_STEPS)
        for later, index_B in enumerate(self.of(range(step, last)), step):
            if first in index_B:
                if later == step:
                    return
                # Something between the sampler and the loop deals the batches out to ranks a second time: this rank
                # would train on every W-th of its own batches, and no rank on the rest of the data.
                raise ConfigError.of(
                    f"the losses of the batch that was handed out at step {step} of the epoch",
                    f"those of step {later}'s",
                    "report every batch on every rank; if you do, something shards a second time what the sampler "
                    "dealt to ranks: leave the loader out of accelerator.prepare(…), or switch off whatever else "
                    "shards it",
                )
